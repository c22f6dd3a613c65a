// P's half of the modelled transport: it gives frames to idle streams and tells the end once.

package sim

import (
	"github.com/kvconn/kvconn/core"
)

func (a *agent) write(v core.Write, token uint64) {
	if v.Extends {
		if wr := a.writes[v.ID]; wr != nil && wr.err == nil && !a.shut {
			if len(wr.positions) == 0 { // a second request may have the id, and its offer end a partial one that had no blocks
				wr.token = token
			}
			a.give(wr, v)
		}
		return
	}
	switch {
	case a.shut:
		a.written(v.ID, errShut)
		return
	case a.writes[v.ID] != nil:
		a.w.fault(v.ID, "%s: the transport is asked to write %q twice", a.id, v.ID)
		return
	}
	wr := &write{v: v, token: token, by: a, drips: a.w.hostility.Float64() < a.w.plan.drips}
	if wr.drips {
		a.w.faults["drip"]++
	}
	n := v.Match.Bytes(v.Dst) / cellBytes
	if wr.src, wr.dst = make([]place, n), make([]place, n); n == 0 {
		a.w.fault(v.ID, "%s: %q is planned into no places", a.id, v.ID)
	}
	a.writes[v.ID] = wr
	a.give(wr, v)
	a.notThere(wr)
	if l := a.in[v.Peer]; l != nil && l.p == a {
		a.begin(wr, l)
		return
	}
	a.after(connectTimeout, func() {
		if wr.link == nil {
			a.endWrite(wr, errNotYet)
		}
	})
}

// give adds what has become ready to a write.
func (a *agent) give(wr *write, v core.Write) {
	pairs, extents, err := a.planned(v)
	if err != nil {
		a.w.fault(v.ID, "%s: %q is not planned: %v", a.id, v.ID, err)
		return
	}
	for _, e := range extents {
		pos := int(e.Position / cellBytes)
		for _, p := range pairs[:e.Pairs] {
			src, dst := places(nil, p.SrcRegion, p.SrcOffset, p.Length), places(nil, p.DstRegion, p.DstOffset, p.Length)
			for i := range src {
				wr.src[pos], wr.dst[pos] = src[i], dst[i]
				wr.positions = append(wr.positions, pos)
				pos++
			}
		}
		pairs = pairs[e.Pairs:]
	}
	if v.End == nil && len(wr.positions) != len(wr.src) {
		a.w.fault(v.ID, "%s: %q has %d places, %d of them are given", a.id, v.ID, len(wr.src), len(wr.positions))
	}
	if l := wr.link; l != nil && l.gen == wr.gen && l.p == a {
		l.enqueue(wr)
		l.pump()
	}
}

func (l *link) enqueue(wr *write) {
	if !wr.queued && wr.next < len(wr.positions) {
		wr.queued = true
		l.queue = append(l.queue, wr)
	}
}

func (a *agent) streamsCame(l *link) {
	for _, wr := range a.writing() {
		if wr.link == nil && wr.v.Peer == l.d.id && wr.err == nil {
			a.begin(wr, l)
		}
	}
}

func (a *agent) begin(wr *write, l *link) {
	wr.link, wr.gen = l, l.gen
	l.enqueue(wr)
	l.pump()
}

// pump gives idle streams their next frames; it runs in P's process.
func (l *link) pump() {
	for n := range l.streams {
		s := &l.streams[n]
		for !s.busy && len(l.queue) > 0 {
			wr := l.queue[0]
			l.queue, wr.queued = l.queue[1:], false
			if wr.err != nil || wr.drips && wr.next > 0 {
				continue
			}
			blocks := len(wr.v.Dst.Blocks[0])
			upTo := min(wr.next+(len(wr.src)+blocks-1)/blocks, len(wr.positions))
			f := &frame{wr: wr, link: l, gen: l.gen, n: n, at: wr.positions[wr.next:upTo], grant: string(wr.v.Grant)}
			wr.next = upTo
			l.enqueue(wr)
			wr.frames++
			s.busy = true
			p := l.p
			p.after(l.w.delay()/8, func() { p.leave(f) })
		}
	}
}

// leave reads a frame's bytes from the blocks into the socket, when it has room.
func (a *agent) leave(f *frame) {
	l, wr := f.link, f.wr
	if l.gen != f.gen || l.p != a || a.shut {
		wr.frames--
		a.settle(wr)
		return
	}
	s := &l.streams[f.n]
	if s.inflight >= window {
		s.parked = f
		a.after(stallTimeout, func() {
			if l.gen == f.gen && l.streams[f.n].parked == f {
				l.breaks()
			}
		})
		return
	}
	for _, pos := range f.at {
		if a.w.plan.pulls {
			break
		}
		at := wr.src[pos]
		a.checkRead(wr, at)
		if b := &a.host.mem[a.host.block(at)]; b.owner != wr.token {
			a.w.fault(wr.v.ID, "%s: block %d is read for %q, whose offer has token %d, but belongs to token %d", a.id, a.host.block(at), wr.v.ID, wr.token, b.owner)
		}
		f.holds = append(f.holds, a.host.cells[at.region][at.cell])
	}
	s.busy = false
	s.inflight++
	s.last = max(s.last, a.w.now+a.w.delay())
	a.w.after(s.last-a.w.now, f.arrive)
	wr.frames--
	a.settle(wr)
	l.pump()
}

// kick lets parked frames go on: there is room again.
func (l *link) kick(gen int) {
	if l.gen != gen || l.p == nil {
		return
	}
	for n := range l.streams {
		if f := l.streams[n].parked; f != nil && l.streams[n].inflight < window {
			l.streams[n].parked = nil
			l.p.leave(f)
		}
	}
}

func (a *agent) acked(wr *write) {
	if wr.err == nil && wr.next == len(wr.positions) && len(wr.positions) == len(wr.src) {
		wr.acked = true
		a.settle(wr)
	}
}

func (a *agent) nacked(wr *write) { a.endWrite(wr, core.ErrNotExpected) }

func (a *agent) stopWrite(id core.TransferID) {
	if wr := a.writes[id]; wr != nil {
		a.endWrite(wr, errStop)
	}
}

// endWrite gives a transfer up; it is told when no stream reads its blocks.
func (a *agent) endWrite(wr *write, err error) {
	if a.w.plan.pulls {
		a.halt(wr, err)
		return
	}
	if wr.err == nil {
		wr.err = err
	}
	a.settle(wr)
}

func (a *agent) settle(wr *write) {
	if wr.err == nil && !wr.acked || wr.frames > 0 || a.writes[wr.v.ID] != wr || a.w.plan.pulls && !wr.quiet {
		return
	}
	delete(a.writes, wr.v.ID)
	a.written(wr.v.ID, wr.err)
}

func (a *agent) written(id core.TransferID, err error) {
	a.event(core.Written{ID: id, Stats: core.TransferStats{Segments: 1}, Err: err},
		"written %s%s", id, failure(err))
}

// shutTransport is the transport's Close: nothing lands and nothing is told.
func (a *agent) shutTransport() {
	a.shut = true
	clear(a.armed)
	clear(a.byGrant)
	clear(a.writes)
}
