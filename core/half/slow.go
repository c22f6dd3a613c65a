package half

import (
	"fmt"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
)

// tickLoads ends loads that have kept the engine's blocks for too long. A P that lives, says that it works, and sends a byte now
// and then must not keep D's blocks for ever. And a driver of D's that does not answer must not keep P's blocks for ever: P hears of
// the end at once. D's engine gets its blocks when the fence has returned.
func (h *Set) tickLoads(now time.Time) {
	for ld := range turns(h, now, h.loads.byID, func(ld *load) bool { return h.slow(now, ld) || h.stuck(now, ld) }) {
		guard, reason := whenLate, fmt.Sprintf("prefill agent %s has not sent it within %v (load_timeout_s); the load is %s", ld.peer, h.opt.Load, ld.state)
		if !h.slow(now, ld) {
			guard, reason = whenHeld, fmt.Sprintf("the decode agent's memory was not ready within %v (moment_timeout_s): "+
				"its driver does not answer, most likely; the load is %s", h.opt.MomentTimeout, ld.state)
		}
		h.endLoad(now, ld, guard, Ending{core.Failed, reason}, true)
	}
}

func (h *Set) slow(now time.Time, ld *load) bool {
	return (ld.state == loadAwaiting || ld.state.armed()) && !now.Before(ld.endBy) && !fault.On("waits-for-slow")
}

func (h *Set) stuck(now time.Time, ld *load) bool {
	held := ld.state == loadExpecting || ld.state == loadRestarting
	return held && now.Sub(ld.held) >= h.opt.MomentTimeout && !fault.On("held-for-ever")
}
