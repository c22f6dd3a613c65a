// With Options.ReportClaims, if a load of a claim could only fail, the engine gets a Report of
// SideClaim for the claim, one for all parts. Then the machine forgets the claim. So an engine
// that queues a request until it has blocks hears earlier that its P is gone. If a LoadRequest
// follows all the same, it ends as the claim did.

package machine

import (
	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/core/half"
	"github.com/kvconn/kvconn/internal/invariants"
)

// wasLost says whether the newest claim of an id was reported.
func (m *Machine) wasLost(id core.TransferID) bool { return m.lost.Get(id).Code != core.OK }

// loadOfLost reports a load whose claim was lost, with the end of the claim, and says whether it has
// reported one. A load without blocks never fails.
func (m *Machine) loadOfLost(r *core.LoadRequest) bool {
	lost := m.lost.Get(r.ID)
	if lost.Code == core.OK || lost.From != r.From {
		return false
	}
	lost.Side, lost.Token, lost.Blocks, lost.Elapsed = core.SideLoad, r.Token, r.Count(), 0
	if lost.Blocks == 0 {
		lost.Code, lost.Reason = core.OK, half.NothingToLoad
	}
	m.halves.Act(lost)
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
	m.lost.Check("lost claims")
	for id := range m.halves.IDs(core.SideClaim) {
		invariants.Must(!m.wasLost(nameOf(id)), "claim %q was reported as lost and is under way", id)
	}
}
