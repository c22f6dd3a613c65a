package core

// Sizes of a Machine's maps, for tests: at the end only ended may hold anything.
func (m *Machine) Sizes() (loads, offers, early, peers, ended int) {
	return len(m.loads), len(m.offers), m.early, len(m.peers), len(m.ended.byID)
}

// StateOf names the state of a half, or "-".
func (m *Machine) StateOf(s Side, id TransferID) string {
	if s == SideLoad {
		if ld := m.loads[id]; ld != nil {
			return [...]string{"resolving", "expecting", "requesting", "waiting", "fencing"}[ld.state]
		}
	} else if of := m.offers[id]; of != nil {
		return [...]string{"early", "prefill", "ready", "sending", "stopping"}[of.state]
	}
	return "-"
}
