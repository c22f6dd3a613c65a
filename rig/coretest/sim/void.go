// What is stale changes nothing, what comes twice is done once, and each agent that is found hears of an abort.

package sim

import (
	"slices"

	"github.com/kvconn/kvconn/core"
)

// checkStale: an answer to an earlier load of the id is void.
func (a *agent) checkStale(id core.TransferID, seq uint64, feed func()) {
	if a.asked[id] == seq {
		feed()
		return
	}
	n, sizes := a.queued(), a.m.Sizes()
	if feed(); a.queued() > n || a.m.Sizes() != sizes {
		a.w.fault(id, "%s: an answer to load %d of %q, which load %d has replaced, counts", a.id, seq, id, a.asked[id])
	}
}

// checkAnew: D hears by a message and by the answer to a renewal, each perhaps twice, that
// P has withdrawn what it sent for a load. D begins anew once.
func (a *agent) checkAnew(v core.SendRenew, answers []core.Answer) (after func()) {
	n := len(a.memory.list)
	return func() {
		for i, id := range v.Loads {
			if i >= len(answers) || answers[i].Status != core.StatusRestart ||
				!slices.Contains(a.memory.list[n:], core.Action(core.Revoke{ID: id})) {
				continue
			}
			if which := answers[i].Reason; a.anew[which] {
				a.w.fault(id, "%s: %q begins anew for a load that was replaced already", a.id, id)
			} else {
				a.anew[which] = true
			}
		}
	}
}

// checkTold: if a half was aborted while it was looked up, each agent that is found is
// told.
func (a *agent) checkTold(r core.Resolve, found map[core.TransferID]core.AgentID) (after func()) {
	if a.dropped[r.ID] != r.Seq {
		return func() {}
	}
	n := len(a.control.list)
	return func() {
		a.w.faults["abort-found"]++
		for id, peer := range found {
			if !slices.ContainsFunc(a.control.list[n:], func(act core.Action) bool {
				v, ok := act.(core.SendFinish)
				return ok && v.ID == id && v.Peer == peer
			}) {
				a.w.fault(r.ID, "%s: %s is not told that %q was cancelled before it was found", a.id, peer, id)
			}
		}
	}
}
