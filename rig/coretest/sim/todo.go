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

// work performs the first action that waits. Before an action of core.OfMemory the memory is looked at, which takes its time: a driver
// that an engine keeps busy may answer after longer than a lease.
func (a *agent) work(q *todo) {
	a.perform(q.list[0])
	if q.list = q.list[1:]; len(q.list) == 0 {
		q.working = false
		return
	}
	wait := a.w.delay() / 16
	if q == &a.memory {
		if wait *= 4; a.w.plan.kind && a.w.looking.Float64() < 0.1 {
			a.w.faults["slow-look"]++
			wait = time.Duration(a.w.looking.Int64N(int64(2 * a.w.plan.opt.Lease)))
		}
	}
	a.after(wait, func() { a.work(q) })
}
