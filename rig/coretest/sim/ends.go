package sim

import (
	"strings"

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
	return func(actions []core.Action) {
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
