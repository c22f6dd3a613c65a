// A device does an engine's work late. Until then no block of that work may be read or written.

package sim

import (
	"errors"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
)

// device is a model of what the engine's work runs on: streams whose work is done in their
// own order, late, and in no order between two of them. The engine calls its agent when the
// work is queued, and says from which moment on it is done.
type device struct {
	streams [2]struct {
		newest *moment
		done   time.Duration // its newest work
	}
	moments map[core.Moment]*moment
}

// moment is what a stream has queued up to then.
type moment struct {
	id      core.Moment
	passed  bool
	failed  error
	awaited bool     // the machine has asked for it
	work    []func() // what the device does until then
}

// latest is how late work is done, where nothing is wrong with the device.
const latest = 800 * time.Millisecond

func (d *device) init() { d.moments = map[core.Moment]*moment{} }

// momentOf queues work and says from which moment on it is done. It is done at once, and there is
// no moment, where the engine works on the processor.
func (a *agent) momentOf(work func()) *moment {
	w := a.w
	if !w.plan.devices || w.timing.Float64() < 0.3 {
		work()
		return nil
	}
	w.faults["moment"]++
	s := &a.streams[w.timing.IntN(len(a.streams))]
	if mo := s.newest; mo != nil && !mo.passed && mo.failed == nil && w.timing.Float64() < 0.2 {
		w.faults["moment-shared"]++
		mo.work = append(mo.work, work)
		return mo
	}
	late := time.Duration(w.timing.Int64N(int64(30 * time.Millisecond)))
	if w.timing.Float64() < 0.2 {
		late = time.Duration(w.timing.Int64N(int64(latest)))
	}
	if w.plan.kind && w.timing.Float64() < 0.1 { // longer than any lease
		w.faults["moment-late"]++
		late = w.plan.opt.Lease + time.Duration(w.timing.Int64N(int64(2*time.Second)))
	}
	mo := &moment{id: core.Moment(1 + w.timing.Uint64N(1<<40)), work: []func(){work}}
	a.moments[mo.id] = mo
	s.newest = mo
	var failed error
	switch x := w.timing.Float64(); {
	case x < w.plan.lost:
		w.faults["moment-failed"]++
		failed = errors.New("device 0 is lost")
	case x < 2*w.plan.lost: // it never passes, and nobody says so
		w.faults["moment-stuck"]++
		return mo
	}
	s.done = max(s.done, w.now+late)
	a.after(s.done-w.now, func() { a.passes(mo, failed) })
	return mo
}

// passes does the work of a moment, and tells the machine if it has asked for the moment.
func (a *agent) passes(mo *moment, failed error) {
	if mo.failed = failed; failed == nil {
		mo.passed = true
		for _, work := range mo.work {
			work()
		}
	}
	mo.work = nil
	if mo.awaited {
		a.after(a.w.delay()/8, func() { a.tellMoment(mo) })
	}
}

// await is what node does with an Await.
func (a *agent) await(v core.Await) {
	mo := a.moments[v.Moment]
	switch {
	case mo == nil:
		a.w.fault("", "%s: moment %d is awaited, and there is none", a.id, v.Moment)
	case mo.passed || mo.failed != nil:
		a.tellMoment(mo)
	default:
		mo.awaited = true
	}
}

func (a *agent) tellMoment(mo *moment) {
	if mo.failed != nil {
		a.event(core.MomentFailed{Moment: mo.id, Err: mo.failed}, "failed %d%s", mo.id, failure(mo.failed))
		return
	}
	a.event(core.MomentPassed{Moment: mo.id}, "passed %d", mo.id)
}

// number is how the machine is told of a moment.
func (mo *moment) number() core.Moment {
	if mo == nil {
		return 0
	}
	return mo.id
}

// said is how a transcript has it.
func (mo *moment) said() string {
	if mo == nil {
		return ""
	}
	return optional("after", list([]core.Moment{mo.id}))
}

// pending says whether the work up to the moment is not done.
func (mo *moment) pending() bool { return mo != nil && !mo.passed }

// checkRead: no block is read before the moment from which on it holds what was offered.
func (a *agent) checkRead(wr *write, at place) {
	if b := a.host.block(at); a.host.mem[b].writes[at.region].pending() {
		a.w.fault(wr.v.ID, "%s: region %d of block %d is read for %q before moment %d, from which on it holds it", a.id, at.region, b, wr.v.ID, a.host.mem[b].writes[at.region].id)
	}
}

// checkWritten: no block is written before the moment from which on the engine does not use
// what the block held.
func (a *agent) checkWritten(e *arm, at place) {
	if b := a.host.block(at); a.host.mem[b].reads.pending() {
		a.w.fault(e.id, "%s: block %d is written by %q before moment %d, until which the engine reads it", a.id, b, e.id, a.host.mem[b].reads.id)
	}
}

// compute has a block hold its part of a prompt, in one region.
func (h *host) compute(id core.TransferID, b kv.BlockID, i, region int) {
	h.each(b, func(layer, t int, head uint64, c *content) {
		if layer == h.layers[region] {
			*c = content{id, layer, i*h.size() + t, head, h.number}
		}
	})
}

// allRegions are the indices of what the host has registered.
func (h *host) allRegions() []uint32 {
	all := make([]uint32, len(h.layers))
	for i := range all {
		all[i] = uint32(i)
	}
	return all
}

// late is how much longer something may take because it waits for a moment.
func (w *world) late() time.Duration {
	if w.plan.devices {
		return latest + reach
	}
	return 0
}
