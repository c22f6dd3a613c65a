// A peer's message, or the time, may end thousands of offers. A step ends Options.Ends of them at most, or the shares of one transfer
// more. Then the machine wants Yield, and the user tells it Resume, so that the engine's calls get in between. If a moment fails, or does
// not pass in time, one step ends all halves that wait for it, since the engine itself has had them wait.

package half

import (
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
)

// enough says whether this step has ended as many offers as it may.
func (h *Set) enough() bool {
	return h.ends >= fault.Pick("ends-in-one-step", h.opt.Ends, 1<<30)
}

// yield has the user tell Resume.
func (h *Set) yield() {
	if !h.yielded {
		h.yielded = true
		h.Act(core.Yield{})
	}
}

// StepResume ends the offers that earlier steps have left. In transitions it counts as the event that has ended them.
func (h *Set) StepResume(now time.Time) {
	h.yielded = false
	h.noticePause(now) // before anything counts as late: a process that was stopped may resume before its first tick
	for _, rest := range []struct {
		of string
		do func(time.Time)
	}{{"LoadMessage", h.trimEarly}, {"Tick", h.tickOffers}, {"ProbeReplied", h.endGone}} {
		undo := h.Because(rest.of)
		rest.do(now)
		undo()
	}
}
