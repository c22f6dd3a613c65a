package core

import "github.com/kvconn/kvconn/internal/fault"

// With Options.ReportClaims the engine gets a Report of SideClaim, one for all parts, of a
// claim whose load could only fail. The claim is then forgotten. So an engine that queues
// a request until it has blocks hears before that its P is gone. If a LoadRequest follows all the
// same, it ends as the claim did.

func (m *Machine) reportLost(r Report) {
	m.count.ClaimsLost++
	if !fault.On("lost-forgotten") {
		m.lost.put(r.ID, r)
	}
	m.act(r)
}

// wasLost says whether the newest claim of an id was reported.
func (m *Machine) wasLost(id TransferID) bool { return m.lost.byID[id].Code != OK }

// forgetLost forgets what an earlier claim of the same id came to.
func (m *Machine) forgetLost(id TransferID) {
	if m.wasLost(id) {
		m.lost.put(id, Report{})
	}
}

// loadOfLost reports a load whose claim was lost, as the claim ended, and says whether it
// did. A load that only lets go never fails.
func (m *Machine) loadOfLost(r *LoadRequest) bool {
	lost := m.lost.byID[r.ID]
	if lost.Code == OK || lost.From != r.From {
		return false
	}
	lost.Side, lost.Token, lost.Blocks, lost.Elapsed = SideLoad, r.Token, r.Count(), 0
	if lost.Blocks == 0 {
		lost.Code, lost.Reason = OK, nothingToLoad
	}
	m.act(lost)
	return true
}

// Untold is how many Reports of claims may still come without a further call of the
// engine: with Options.ReportClaims, one for each claim that has not ended.
func (m *Machine) Untold() int {
	if !m.opt.ReportClaims {
		return 0
	}
	return m.namedClaims()
}

// checkLost checks the reported claims; only in builds with the tag "invariants".
func (m *Machine) checkLost() {
	for id, c := range m.claims.byID {
		must(!m.opt.ReportClaims || c.state != claimVoid, "claim %q is lost (%v) and not reported", id, c.end.code)
	}
	for id := range m.lost.byID {
		must(!m.wasLost(id) || !m.claimed(id), "claim %q was reported as lost and is under way", id)
	}
}
