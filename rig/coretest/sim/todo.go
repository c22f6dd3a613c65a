// An agent's goroutines perform the machine's actions late, each in its order.

package sim

import (
	"time"

	"github.com/kvconn/kvconn/core"
)

// todo is what a goroutine has to perform.
type todo struct {
	list    []core.Action
	working bool
}

// todoOf is the one whose action this is.
func (n *node) todoOf(act core.Action) *todo {
	if core.OfMemory(act) {
		return &n.memory
	}
	return &n.control
}

// queued are the actions that wait.
func (n *node) queued() int { return len(n.memory.list) + len(n.control.list) }

// work performs the first action that waits.
func (a *agent) work(q *todo) {
	a.perform(q.list[0])
	if q.list = q.list[1:]; len(q.list) == 0 {
		q.working = false
		return
	}
	wait := a.w.delay() / 16
	if q == &a.memory {
		wait *= 4
	}
	a.after(a.before(q, wait), func() { a.work(q) })
}

// before is how long an agent takes before it performs the next action. Before an action of core.OfMemory the memory is looked at: a
// driver that an engine keeps busy may answer after longer than a lease, and one that stands not for longer than a load may be held.
func (a *agent) before(q *todo, wait time.Duration) time.Duration {
	w := a.w
	if q != &a.memory {
		return wait
	}
	switch x := w.looking.Float64(); {
	case w.plan.kind && x < 0.1:
		w.faults["slow-look"]++
		return time.Duration(w.looking.Int64N(int64(2 * w.plan.opt.Lease)))
	case x < w.plan.lost:
		w.faults["stuck-look"]++
		a.checkHeld()
		return w.plan.opt.MomentTimeout + time.Second
	}
	return wait
}

// checkHeld: a load that the agent's own driver holds up ends when it has been held for long enough, so that P hears of it.
func (a *agent) checkHeld() {
	w, until := a.w, a.w.now+a.w.plan.opt.MomentTimeout+time.Second
	a.host.disturbed = max(a.host.disturbed, until) // the agent fences nothing meanwhile, so nothing ends as soon as else
	for _, act := range a.memory.list {
		e, ok := act.(core.Expect)
		if !ok || a.m.StateOf(core.SideLoad, e.ID) != "expecting" {
			continue
		}
		w.after(w.plan.opt.MomentTimeout+3*core.TickInterval, func() {
			if !a.dead && !a.closing && !a.host.stopped && a.host.disturbed == until && a.m.StateOf(core.SideLoad, e.ID) == "expecting" {
				w.fault(e.ID, "%s: the driver does not answer, and the load of %q keeps P's blocks", a.id, e.ID)
			}
		})
	}
}
