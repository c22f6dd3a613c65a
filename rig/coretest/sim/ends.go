// How many halves a step ends, and which, is checked at each step.

package sim

import (
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/kvconn/kvconn/core"
)

// mostShares is more than a transfer has here.
const mostShares = 8

// watchEnds looks at what a step ends, and returns the look that follows it: of what peers say, and the time, a step ends a bounded
// number of offers. A moment that does not pass in time ends all that wait for it. Nobody is told that a claim has given way: its D asks again.
func (a *agent) watchEnds(e core.Event) func(actions []core.Action) {
	bounded := false
	switch v := e.(type) {
	case core.LoadMessage:
		a.loaded[base(v.ID)] = true
		bounded = true
	case core.RenewMessage, core.FinishMessage, core.ProbeReplied, core.Tick, core.Resume:
		bounded = true
	}
	before, byMoments := a.m.Sizes().Offers, a.w.byMoments
	came := a.watchEarly(e)
	return func(actions []core.Action) {
		came(actions)
		if n := before - a.m.Sizes().Offers - (a.w.byMoments - byMoments); bounded && n > a.w.plan.opt.Ends+mostShares {
			a.w.fault("", "%s: a step of %T ends %d offers, at most %d and the shares of one transfer are allowed", a.id, e, n, a.w.plan.opt.Ends)
		}
		for _, act := range actions {
			if v, ok := act.(core.SendFinish); ok && v.Code == core.Refused && strings.Contains(v.Reason, "no room for so many") && !a.loaded[base(v.ID)] {
				a.w.fault(v.ID, "%s: %s is told that its claim of %q has failed, since there is no room for it now", a.id, v.Peer, v.ID)
			}
		}
	}
}

// watchEarly looks at early claims and loads that end because P's engine has not named their transfer. Those that have waited for longest
// must end first, together with all shares of their transfer. What has waited when the clock jumped, or when the process was stopped, has no
// such order.
func (a *agent) watchEarly(e core.Event) func(actions []core.Action) {
	w, early := a.w, func(id core.TransferID) bool { return a.m.StateOf(core.SideOffer, id) == "early" }
	var named []core.TransferID
	switch v := e.(type) {
	case core.LoadMessage:
		named = []core.TransferID{v.ID}
	case core.RenewMessage:
		named = v.Claims
	case core.Tick, core.Resume:
		maps.DeleteFunc(a.early, func(id core.TransferID, _ time.Duration) bool { return !early(id) })
	}
	if a.m.Sizes().Early+len(named) > w.plan.opt.MaxTransfers {
		clear(a.early) // some give way, nobody hears which, and come anew perhaps
	}
	named = slices.DeleteFunc(slices.Clone(named), early)
	return func(actions []core.Action) {
		for _, id := range named {
			if delete(a.early, id); early(id) {
				a.early[id] = w.now
			}
		}
		for _, act := range actions {
			if v, ok := act.(core.SendFinish); ok && v.Code == core.NotOffered && strings.HasPrefix(v.Reason, "the prefill engine has not named") {
				a.checkReaped(base(v.ID))
			}
		}
	}
}

func (a *agent) checkReaped(id core.TransferID) {
	since := a.w.now
	for part, came := range a.early {
		if base(part) == id {
			since = min(since, came)
			delete(a.early, part)
		}
	}
	if since <= a.host.disturbed || since == a.w.now { // it has no order, or is a share of one that was looked at
		return
	}
	if since < a.reaped {
		a.w.fault(id, "%s: %q, which came at %v, ends after one that came at %v", a.id, id, since, a.reaped)
	}
	a.reaped = max(a.reaped, since)
}
