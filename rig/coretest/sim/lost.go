// What an engine does that hears of a lost claim, and what must follow.

package sim

import (
	"slices"
	"time"

	"github.com/kvconn/kvconn/core"
)

// hearLost is what an engine does when it hears that a claim came to nothing. It
// drops the request, with a cancel or without, or asks for it all the same.
func (a *agent) hearLost(r core.Report) {
	w := a.w
	a.lost[r.ID] = r
	if w.reused[r.ID] {
		return // it may be about another request, which goes on
	}
	switch w.hearing.IntN(4) {
	case 0:
		w.faults["lost-loaded"]++
	case 1:
		w.faults["lost-cancelled"]++
		a.aborted[r.ID] = true
		a.dropWaiting(r.ID)
		a.after(w.hearingTakes(), func() {
			if !a.closing {
				a.cancel(r.ID)
			}
		})
	default:
		w.faults["lost-dropped"]++
		a.aborted[r.ID] = true
		a.dropWaiting(r.ID)
	}
}

// hearingTakes is how long a report lies before the engine does something about it.
func (w *world) hearingTakes() time.Duration {
	return time.Duration(w.hearing.IntN(50)) * time.Millisecond
}

// checkLost: if a transfer is loaded though its claim was reported, it ends as the claim
// did, as far as there is room to remember it.
func (a *agent) checkLost(h *half, r core.Report) {
	if lost := h.lost; a.w.plan.opt.MaxTransfers >= 64 && lost.Code != core.OK && len(h.blocks) > 0 && !a.w.reused[r.ID] && !a.w.shared[r.ID] && (r.Code != lost.Code || r.Reason != lost.Reason) {
		a.w.fault(r.ID, "%s: the load of %q ended with %v (%s), its claim with %v (%s)", a.id, r.ID, r.Code, r.Reason, lost.Code, lost.Reason)
	}
}

// checkHeard: where nothing is in the way, P's word that it has given up what it had
// said to keep is the engine's end of it.
func (a *agent) checkHeard(part core.TransferID, p core.AgentID) {
	if _, waits := a.ledger.claims[base(part)]; waits && a.w.plan.calm && a.w.plan.opt.ReportClaims && a.claims[part] == p && !a.w.reused[base(part)] {
		a.w.fault(base(part), "%s: %s has given %q up, and the engine that has claimed it was not told", a.id, p, part)
	}
}

// expectLost: if an agent that is gone had answered claims, the engines that made these
// claims hear in time.
func (w *world) expectLost(p *agent) {
	for _, d := range w.all {
		if d.dead || d == p || !w.plan.opt.ReportClaims {
			continue
		}
		var parts []core.TransferID
		for part, id := range d.claims {
			if id == p.id && !w.reused[base(part)] {
				parts = append(parts, part)
			}
		}
		slices.SortFunc(parts, compare)
		since := w.now
		for _, part := range parts {
			token, waits := d.ledger.claims[base(part)]
			if !waits {
				continue
			}
			w.after(w.patience(), func() {
				if now, still := d.ledger.claims[base(part)]; still && now == token && d.claims[part] == p.id && !d.dead && !d.host.stopped && d.host.disturbed <= since {
					w.fault(base(part), "%s: %v after %s has gone, which had answered it, the engine was not told that its claim of %q is lost", d.id, w.now-since, p.id, part)
				}
			})
		}
	}
}

// checkUntold: the claims that may be reported are those that the engine waits for.
func (a *agent) checkUntold() {
	if n := a.m.Untold(); n != len(a.ledger.claims) {
		a.w.fault(a.someID(), "%s: %d claims may be reported, the engine has made %d", a.id, n, len(a.ledger.claims))
	}
}
