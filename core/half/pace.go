package half

import (
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
)

// What a peer says, or the time, may bring thousands of offers to their ends. A step ends Options.Ends of them, or the shares of one
// transfer more. Then it wants to Yield, and is told Resume, so that its user can let the engine's calls in between. A moment that fails, or
// does not pass in time, ends all that wait for it in one step: the engine itself has had them wait.

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

// StepResume goes on with what earlier steps have left. To the halves it is what brought that about.
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
