// In some worlds bytes go as in package local. P's frames say where they lie, and D copies them out of
// P's memory, which takes a while and goes on when either process is stopped. When D has copied
// all, it asks P whether P has kept the blocks. P invalidates the page of a write that it gives up: no
// copy begins then. P's half ends when D says that no copy is under way, or after stopGrace. In half of
// these worlds D reads the page behind each copy. If it was invalid, D throws the copy away, and waits for what P
// says. If it was valid behind all copies, D reports the transfer without asking P.

package sim

import (
	"slices"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
)

// stopGrace is how long P waits for D's word on a write that it has given up, slowCopy how long a copy
// is under way at most.
const (
	stopGrace = 100 * time.Millisecond // less than local's, so that it is often over too soon
	slowCopy  = 1500 * time.Millisecond
)

// pulled is what a write of such a world knows more.
type pulled struct {
	invalidated bool // the validity page
	kept        bool // P has said that it has kept the blocks
	quiet       bool // D copies nothing any more, or P waits for it no longer
	late        bool // a copy may still be under way: nobody believes it
}

// pulling is what an Expect of such a world knows more.
type pulling struct {
	flying int    // copies under way
	over   bool   // no copy begins any more
	gone   bool   // it is being revoked, or is lost
	then   func() // when none is
}

// pull begins a copy of what a frame names.
func (a *agent) pull(f *frame) {
	w, e, wr := a.w, a.byGrant[f.grant], f.wr
	if e == nil || e.peer != f.link.peer {
		a.landed(f, nil)
		return
	}
	if e.over || wr.invalidated && !fault.On("pull-page-left-valid") {
		a.room(f)
		return
	}
	p := wr.by
	if p.writes[wr.v.ID] != wr && !p.dead && !p.shut {
		w.fault(wr.v.ID, "%s: a copy of %q begins after %s has ended its write", a.id, wr.v.ID, p.id)
	}
	e.flying++
	w.faults["pulls"]++
	w.after(a.copyTakes(wr, e.flying == 1 && e.got+len(f.at) == len(e.dst)), func() {
		e.flying--
		if !a.dead && !a.shut && !p.dead && !p.shut { // P's Close waits for D
			a.copy(p, f)
		}
		ends := func() { a.copied(f, e) }
		if a.host.stopped && !a.dead { // its worker may run on before those who read what has come meanwhile
			a.host.pending = slices.Insert(a.host.pending, 0, func() { a.run(ends) })
			return
		}
		a.run(ends)
	})
}

// copyTakes is how long a copy is under way. In some worlds it is now and then longer than P waits for
// D's word, mostly if it is the last of a transfer. Meanwhile P's engine may cancel the transfer, and D's process be stopped, so that D
// hears of it when the copy is there.
func (a *agent) copyTakes(wr *write, last bool) time.Duration {
	w := a.w
	often := w.plan.slowCopies
	if !last {
		often /= 6
	}
	if w.pulling.Float64() >= often {
		return w.delay() / 2
	}
	w.faults["slow-copy"]++
	takes := 2*stopGrace + time.Duration(w.pulling.Int64N(int64(slowCopy-2*stopGrace)))
	if id := base(wr.v.ID); !a.host.stopped && !w.reused[id] && w.pulling.IntN(2) == 0 {
		w.faults["stopped-in-copy"]++
		w.acted(w.now + takes)
		a.host.stop()
		w.after(takes+time.Millisecond, a.host.cont)
		wr.by.after(0, func() {
			if !wr.by.closing {
				wr.by.aborted[id] = true
				wr.by.cancel(id)
			}
		})
	}
	return takes
}

// copy reads and writes, and looks at the page, whether the processes run or not.
func (a *agent) copy(p *agent, f *frame) {
	wr := f.wr
	for _, pos := range f.at {
		at := wr.src[pos]
		if b := &p.host.mem[p.host.block(at)]; b.owner != wr.token && !wr.late {
			a.w.fault(wr.v.ID, "%s: block %d of %s is copied for %q, whose offer has token %d, but belongs to token %d", a.id, p.host.block(at), p.id, wr.v.ID, wr.token, b.owner)
		}
		if !wr.late {
			p.checkRead(wr, at)
		}
		holds := p.host.cells[at.region][at.cell]
		if p.host.mem[p.host.block(at)].owner != wr.token {
			holds = content{} // whatever comes next
		}
		f.holds = append(f.holds, holds)
	}
	a.land(f)
	f.proved = a.w.plan.proves && !wr.invalidated || fault.On("pull-unlooked")
}

// copied takes the end of a copy.
func (a *agent) copied(f *frame, e *arm) {
	a.room(f)
	proves := a.w.plan.proves
	if !e.over && (f.proved || !proves) {
		e.got += len(f.at)
	}
	if e.got == len(e.dst) && f.wr.late {
		a.w.faults["copied-too-late"]++
	}
	switch l := f.link; {
	case e.over && e.flying == 0 && e.then != nil:
		then := e.then
		e.then = nil
		then()
	case e.over || a.armed[e.id] != e:
	case proves && f.proved && e.got == len(e.dst): // P may have stopped, or ended, since
		a.received(e, nil)
		l.back(f.gen, func(p *agent) { p.taken(f.wr) })
	case proves && !f.proved && !f.wr.by.dead && !f.wr.by.shut:
	case f.wr.by.dead || f.wr.by.shut:
		l.breaks()
	case a.w.chance(a.w.plan.errors):
		a.when(e, func() { a.received(e, errBroken) })
		l.back(f.gen, func(p *agent) { p.nacked(f.wr) })
	case e.got == len(e.dst) && !proves && fault.On("pull-unasked"):
		a.received(e, nil)
		l.back(f.gen, func(p *agent) { p.keeps(f, e); p.taken(f.wr) })
	case e.got == len(e.dst) && !proves:
		l.back(f.gen, func(p *agent) { p.keeps(f, e) })
	}
}

// when does something about a transfer as soon as no copy of it is under way. No other begins.
func (a *agent) when(e *arm, then func()) {
	e.over = true
	if e.flying == 0 {
		then()
		return
	}
	if before := e.then; before != nil {
		e.then = func() { before(); then() }
		return
	}
	e.then = then
}

// room lets P's stream go on.
func (a *agent) room(f *frame) {
	l := f.link
	if l.gen == f.gen && l.p != nil {
		l.streams[f.n].inflight--
		l.p.run(func() { l.kick(f.gen) })
	}
}

// keeps answers D that has copied all. If P has given the write up, it has said so.
func (a *agent) keeps(f *frame, e *arm) {
	wr, l := f.wr, f.link
	if (wr.err != nil || a.writes[wr.v.ID] != wr) && !fault.On("pull-always-kept") {
		return
	}
	wr.kept = true
	d := l.d
	a.w.after(a.w.delay(), func() {
		if l.gen != f.gen {
			return
		}
		d.run(func() {
			if d.armed[e.id] != e || e.gone {
				l.back(f.gen, func(p *agent) { p.nacked(wr) })
				return
			}
			d.received(e, nil)
			l.back(f.gen, func(p *agent) { p.taken(wr) })
		})
	})
}

// taken: D has reported the transfer. Its word may cross P's stop. A D that has read the page is believed if P had told it of all.
func (a *agent) taken(wr *write) {
	told := wr.next == len(wr.positions) && len(wr.positions) == len(wr.src)
	if wr.kept || a.w.plan.proves && told {
		wr.err, wr.acked, wr.quiet = nil, true, true
		a.settle(wr)
	}
}

// halt gives a write up: err is why, if nothing was before.
func (a *agent) halt(wr *write, err error) {
	first := !wr.invalidated
	wr.invalidated = true
	if wr.err == nil {
		wr.err = err
	}
	l, gen := wr.link, wr.gen
	switch {
	case err != errStop:
		wr.late = true // D has said that it copies nothing, or nothing that it says is believed
		wr.quiet = true
	case l == nil || wr.next == 0, fault.On("pull-not-awaited"):
		wr.quiet = true
	case first:
		a.w.after(a.w.delay(), func() {
			if l.gen != gen {
				return
			}
			d := l.d
			d.run(func() {
				over := func() { l.back(gen, func(p *agent) { wr.quiet = true; p.settle(wr) }) }
				e := d.armed[wr.v.ID]
				if e == nil || e.grant != string(wr.v.Grant) {
					over()
					return
				}
				d.when(e, over)
			})
		})
		a.after(stopGrace, func() {
			if !wr.quiet {
				wr.quiet, wr.late = true, true
				a.settle(wr)
			}
		})
	}
	a.settle(wr)
}

// fence is revoke where D copies: it waits for the copies that are under way.
func (a *agent) fence(id core.TransferID, then func()) {
	e := a.armed[id]
	if e == nil || !a.w.plan.pulls {
		a.revoke(id)
		then()
		return
	}
	if fault.On("pull-unfenced") {
		delete(a.armed, id)
		a.after(20*time.Millisecond, func() { delete(a.byGrant, e.grant) })
		then()
		return
	}
	e.gone = true
	a.when(e, func() {
		a.revoke(id)
		then()
	})
}
