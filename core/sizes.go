package core

import "time"

// Counters count what a machine has done since New, as far as its reports do not tell it.
type Counters struct {
	Offered      uint64 // accepted Offers
	Loaded       uint64 // accepted Loads
	Claimed      uint64 // accepted Claims
	ClaimsLost   uint64 // of them, those that were reported since they could not succeed any more
	ExpiredEarly uint64 // claims and loads whose request P's engine never named
	Retries      uint64 // loads and claims that were begun again, most with P looked up anew
	Partial      uint64 // writes that began before the engine had all of the blocks
	Withdrawn    uint64 // of them, those whose blocks the engine withdrew
}

// Counters returns them.
func (m *Machine) Counters() Counters { return m.count }

// Sizes are the numbers of what a machine holds now, for statistics and tests. When
// nothing is under way only Ended is not 0, and it is bounded.
type Sizes struct {
	Loads   int // D's halves, claims among them
	Claims  int
	Kept    int // claims that P has answered and keeps
	Waiting int // loads that P has and whose bytes are awaited
	Peers   int // P agents that are renewed
	Offers  int // P's halves, early ones among them
	Early   int // claims and loads that P's engine has not named
	Probes  int // D agents that are asked whether they live
	FanIns  int // claims and loads of several parts
	FanOuts int // offers of several parts
	Moments int // moments that halves wait for
	Ended   int // transfers whose end is remembered, lost claims among them
}

// Sizes counts them; it walks over all loads.
func (m *Machine) Sizes() Sizes {
	s := Sizes{
		Loads: len(m.loads.byID) + len(m.claims.byID) + len(m.farewells.byID), Claims: len(m.claims.byID), Peers: len(m.peers),
		Offers: len(m.offers), Early: m.early, Probes: len(m.probes),
		FanIns: m.fans.in(), FanOuts: len(m.fans.offers), Moments: len(m.moments), Ended: m.ended.len() + len(m.lost.byID),
	}
	for _, c := range m.claims.byID {
		if c.state == claimKept {
			s.Kept++
		}
	}
	for _, ld := range m.loads.byID {
		if ld.state == loadWaiting {
			s.Waiting++
		}
	}
	return s
}

// OldestWait is how long the oldest half has waited of those whose report is owed to the
// engine.
func (m *Machine) OldestWait(now time.Time) time.Duration {
	oldest := now
	for _, ld := range m.loads.byID {
		if ld.started.Before(oldest) {
			oldest = ld.started
		}
	}
	for _, of := range m.offers {
		if !of.offered.IsZero() && of.offered.Before(oldest) {
			oldest = of.offered
		}
	}
	return now.Sub(oldest)
}

// PeerOf is the agent at the other end of a half, or of a part of one; "" if there is no such
// half, or if the agent is not known.
func (m *Machine) PeerOf(s Side, id TransferID) AgentID {
	if s == SideOffer {
		if of := m.offers[id]; of != nil {
			return of.peer
		}
		return ""
	}
	if ld := m.loads.get(id); ld != nil {
		return ld.peer
	}
	if c := m.claims.get(id); c != nil {
		return c.peer
	}
	return ""
}

// StateOf names the state of a half, or of a part of one; "-" if there is none.
func (m *Machine) StateOf(s Side, id TransferID) string {
	if s == SideOffer {
		if of := m.offers[id]; of != nil {
			return of.state.String()
		}
		return "-"
	}
	if ld := m.loads.get(id); ld != nil {
		return ld.state.String()
	}
	if c := m.claims.get(id); c != nil {
		return c.state.String()
	}
	if m.farewells.get(id) != nil {
		return "farewell"
	}
	return "-"
}
