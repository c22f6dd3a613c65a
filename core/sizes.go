package core

// Held counts what a Machine holds, for statistics and tests. When nothing is
// under way all are 0.
type Held struct {
	Loads, Offers int
	Early         int // of the offers, those that no call of the engine backs
	Peers         int // prefill agents that loads wait for
}

// Held is taken under the lock that the Machine's other calls are made under.
func (m *Machine) Held() Held {
	return Held{Loads: len(m.loads), Offers: len(m.offers), Early: m.early, Peers: len(m.peers)}
}
