// An engine sleeps and wakes with other memory at its blocks' addresses.

package sim

import (
	"fmt"
	"slices"
	"time"

	"github.com/kvconn/kvconn/core"
)

// planSleep has an engine sleep and wake: other memory lies at the addresses of its blocks then. What its
// transfers' blocks held is gone, and nothing of before may come into the new memory.
func (w *world) planSleep() {
	h := w.hosts[w.sleeping.IntN(len(w.hosts))]
	w.after(time.Duration(w.sleeping.Int64N(int64(2*act))), func() { h.run((*agent).sleep) })
}

// sleep does what node does with it: what was begun ends, and no block is given until it has.
func (a *agent) sleep() {
	if a.asleep {
		return
	}
	w, since := a.w, a.w.now
	w.faults["sleep"]++
	w.note("%s has other memory", a.id)
	w.acted(w.now)
	a.asleep = true
	inUse := a.m.InUse()
	slices.Sort(inUse)
	inUse = slices.Compact(inUse)
	for _, list := range []map[uint64]*half{a.loads, a.offers} {
		for token, h := range list {
			if len(h.blocks) == 0 || !slices.Contains(inUse, h.id) {
				continue
			}
			a.remapped[token] = true
			a.after(ends+w.late(), func() {
				if list[token] == h && a.host.disturbed <= since && !a.closing {
					w.fault(h.id, "%s: %v after its memory became another %q has not ended", a.id, ends, h.id)
				}
			})
		}
	}
	for _, id := range inUse {
		why := fmt.Sprintf("region k of %s was mapped anew", a.id)
		a.event(core.Remapped{ID: id, Reason: why}, "remapped %s%s", id, optional("why", why))
	}
	a.wake()
}

// ends is how long a transport takes at most to end what it was told to end.
const ends = 2*stallTimeout + 2*time.Second

// wake gives the new memory to the transport, when nothing of before may read or write it.
func (a *agent) wake() {
	if a.closing {
		return
	}
	if len(a.m.InUse()) > 0 {
		a.after(20*time.Millisecond, a.wake)
		return
	}
	for id := range a.armed {
		a.w.fault(base(id), "%s: the transport still expects %q in the new memory", a.id, id)
	}
	for id := range a.writes {
		a.w.fault(base(id), "%s: the transport still reads the new memory for %q", a.id, id)
	}
	a.asleep = false
	a.serveWaiting()
}

// checkRemapped: a transfer that has lost its memory is not told as one that this engine has cancelled.
func (a *agent) checkRemapped(r core.Report) {
	if a.remapped[r.Token] && r.Code == core.Cancelled && !a.cancelled[r.ID] {
		a.w.fault(r.ID, "%s: the %v of %q has lost its memory, and is told as cancelled", a.id, r.Side, r.ID)
	}
}

// mostElsewhere is how often one offer may be written to one part: once, and each time that D may begin anew.
const mostElsewhere = 5

// notThere has the way of a write not be there, before or after its first bytes.
func (a *agent) notThere(wr *write) {
	w := a.w
	if w.sleeping.Float64() >= w.plan.elsewhere {
		return
	}
	w.faults["elsewhere"]++
	of := partOf{wr.token, wr.v.ID}
	if a.elsewhere[of]++; a.elsewhere[of] > mostElsewhere {
		w.fault(wr.v.ID, "%s: %q is begun for the %dth time, though its way was never there", a.id, wr.v.ID, a.elsewhere[of])
	}
	if w.plan.elsewhere == 1 { // and it never will be
		a.endWrite(wr, errElsewhere)
		return
	}
	a.after(time.Duration(w.sleeping.Int64N(int64(40*time.Millisecond))), func() {
		if a.writes[wr.v.ID] == wr {
			a.endWrite(wr, errElsewhere)
		}
	})
}

var errElsewhere = fmt.Errorf("%w: its cards have no memory", core.ErrOtherWay)
