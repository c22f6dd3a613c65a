package core

// StateOf names the state of a half, or "-".
func (m *Machine) StateOf(s Side, id TransferID) string {
	if s == SideLoad {
		if ld := m.loads[id]; ld != nil {
			return ld.state.String()
		}
	} else if of := m.offers[id]; of != nil {
		return of.state.String()
	}
	return "-"
}
