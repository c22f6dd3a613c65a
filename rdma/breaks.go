package rdma

import (
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
)

// What P does when a lane breaks: it reads on until it is quiet, D says what has
// arrived, and the rest goes by others.

// stallLooks in a row without a completion, while something is under way, end a lane.
// They are counted: the time in which this process was stopped is one look.
const stallLooks = 5

// watchLanes looks at the lanes until nothing is under way; lk.mu is held.
func (lk *link) watchLanes() {
	if lk.looks == nil && lk.state != stateEnded {
		lk.looks = time.AfterFunc(lk.t.cfg.StallTimeout/(stallLooks-1), func() { lk.update((*link).look) })
	}
}

// look ends lanes that complete nothing: a queue pair itself may try for ever, where D
// takes no marks.
func (lk *link) look() {
	lk.looks = nil
	for _, l := range slices.Clone(lk.lanes) {
		switch {
		case l.queue.idle():
			l.looks = 0
		case l.looks+1 < stallLooks:
			l.looks++
			lk.watchLanes()
		default:
			lk.breakLane(l, fmt.Errorf("rdma: queue pair %d on %s has completed nothing within %v (stall_timeout_s)", l.qp.Number(), l.port.name, lk.t.cfg.StallTimeout))
		}
	}
}

// breakLane gives a lane up, and its rail for a while.
func (lk *link) breakLane(l *lane, cause error) {
	if !lk.remove(l) {
		return
	}
	lk.t.log.Warn("rdma lane broke", zap.String("peer", string(lk.peer)), zap.Uint32("lane", l.id), zap.Error(cause))
	lk.broke = cause
	l.rail.fail(time.Now(), cause)
	lk.flush(l)
}

// flush: what was on a lane waits until D has said what arrived. The lane may read it
// until it is quiet.
func (lk *link) flush(l *lane) {
	now := time.Now()
	lk.lost = append(lk.lost, l.id)
	for {
		b, ok := l.queue.flush()
		if !ok {
			break
		}
		l.rail.lose(now, b.Bytes)
		b.Owner.flight -= b.Requests
		b.Owner.w.flight -= b.Requests
		b.Owner.w.reads += b.Requests
		l.reads[b.Owner.w] += b.Requests
	}
	if l.isDead() {
		lk.quiet(l)
	}
	for w := range lk.writes {
		for _, j := range w.jobs {
			if j.lane == l && !j.done {
				j.lane, j.lost = nil, true
				j.breaks++
				w.told = false
			}
		}
		lk.settle(w)
	}
}

// quiet: a lane that broke reads nothing any more. Its last request has come back, or
// its queue pair is destroyed.
func (lk *link) quiet(l *lane) {
	for w, n := range l.reads {
		if w.reads -= n; w.over && w.reads == 0 {
			lk.outcomes = append(lk.outcomes, w)
		}
	}
	clear(l.reads)
}

// remove takes a lane away: it sends nothing any more.
func (lk *link) remove(l *lane) bool {
	i := slices.Index(lk.lanes, l)
	if i < 0 {
		return false
	}
	lk.lanes = append(lk.lanes[:i:i], lk.lanes[i+1:]...)
	l.broken = true
	if len(lk.lanes) == 0 {
		lk.on(eventBare)
	}
	l.drop(func() { lk.update(func(lk *link) { lk.quiet(l) }) })
	return true
}

func (l *lane) isDead() bool {
	select {
	case <-l.dead:
		return true
	default:
		return false
	}
}

// arrived takes D's word on what had come by the lanes that broke; it has ended
// them. The rest is written again.
func (lk *link) arrived(lanes []uint32, seqs []uint64, rep *reply) error {
	if len(rep.Arrived) != len(seqs) {
		return fmt.Errorf("agent %s answers for %d transfers, it was asked for %d", lk.peer, len(rep.Arrived), len(seqs))
	}
	lk.confirmed(lanes)
	for i, seq := range seqs {
		if w := lk.bySeq[seq]; w != nil {
			for _, j := range w.jobs {
				if j.lost && j.filled && rep.Arrived[i]>>j.index&1 == 1 {
					lk.finish(j)
				}
			}
		}
	}
	lk.told(rep) // last: what has arrived is alive no more either
	return nil
}

// maxBreaks is how many lanes may break under a part before its transfer is given
// up: what no lane carries (a path that swallows large packets, a key that D does
// not know any more) must end. One that carried all it was given has counted nothing.
const maxBreaks = 8

// again gives jobs without a lane to those that there are, once D has ended the
// lanes that they were on.
func (lk *link) again() {
	if len(lk.lanes) == 0 || len(lk.lost) > 0 {
		return
	}
	n := 0
	for w := range lk.writes {
		if len(lk.lanes) == 0 { // the last one broke as something was posted
			return
		}
		if w.jobs == nil {
			lk.begin(w)
			continue
		}
		for _, j := range w.jobs {
			if j.lost && j.breaks >= maxBreaks {
				lk.fail(w, fmt.Errorf("rdma: transfer %q: %d queue pairs broke under a part of it, the last: %w: %w", string(w.op.ID), j.breaks, lk.broke, core.ErrConnectionLost))
			}
			if j.lost && w.cause == nil {
				j.cursor.rewind()
				lk.assign(j, lk.lanes[n%len(lk.lanes)])
				n++
			}
		}
	}
	for _, l := range append([]*lane(nil), lk.lanes...) {
		lk.pump(l)
	}
}

// lose ends the way to D, as far as it is known here; D may come back.
func (lk *link) lose(cause error) {
	for _, l := range append([]*lane(nil), lk.lanes...) {
		lk.remove(l)
		lk.flush(l)
	}
	lk.there = nil
	for w := range lk.writes {
		lk.fail(w, cause)
	}
	if lk.on(eventLost) == stateBare {
		lk.fell = cause
	}
	lk.tasks &^= makeLanes
}

// kill: a grant is used up, or revoked.
func (lk *link) kill(seq uint64) {
	if seq >= lk.grants.below {
		lk.grants.dead[seq] = true
	}
	if len(lk.grants.dead) > maxDead {
		lk.tasks |= askGrants
	}
}

// drain takes D's word that grants are dead, and says which of their transfers
// may still have something on its way. Of these tellDrained will tell.
func (lk *link) drain(m *signal) (pending []uint64) {
	for _, seq := range m.Seqs {
		lk.kill(seq)
		w := lk.bySeq[seq]
		switch {
		case len(lk.lost) > 0: // what they have sent may land as long as D has not ended them
			lk.held = append(lk.held, seq)
			pending = append(pending, seq)
		case w != nil && w.flight > 0:
			w.drained = true
			pending = append(pending, seq)
		}
		if w != nil {
			lk.fail(w, errRevoked(w))
		}
	}
	lk.grants.drop(m.Below)
	return pending
}

// confirmed: D has ended its side of lanes that broke. Some may have been confirmed
// before, by a word of D that crossed the answer.
func (lk *link) confirmed(lanes []uint32) {
	var rest []uint32
	for _, id := range lk.lost {
		if !slices.Contains(lanes, id) {
			rest = append(rest, id)
		}
	}
	if lk.lost = rest; len(rest) == 0 {
		lk.drained = append(lk.drained, lk.held...)
		lk.held = nil
	}
}

// tellDrained tells D of transfers of which nothing is on its way any more.
func (lk *link) tellDrained() {
	for {
		lk.mu.Lock()
		s := &signal{Kind: signalDrained, Ticket: lk.ticket, Seqs: lk.drained}
		lk.drained = nil
		if len(s.Seqs) == 0 {
			lk.tells = false
			lk.mu.Unlock()
			return
		}
		lk.mu.Unlock()
		if _, err := lk.t.ask(lk.peer, s, drainBound); err != nil {
			lk.t.log.Debug("rdma: a peer does not hear that writes have ended", zap.String("peer", string(lk.peer)), zap.Error(err))
		}
	}
}

// told takes D's word of which grants are alive. A D without lanes revokes without
// a word: what waits to be written again learns it by this. What is under way may have
// arrived since, and a grant is dead then too; so may what was lost, until D says.
func (lk *link) told(rep *reply) {
	lk.grants.told(rep.Next, rep.Live)
	if len(lk.lost) > 0 {
		return
	}
	for seq, w := range lk.bySeq {
		if !lk.grants.alive(seq) && (w.jobs == nil || w.isLost()) {
			lk.fail(w, errRevoked(w))
		}
	}
}

func errRevoked(w *write) error {
	return fmt.Errorf("rdma: transfer %q was revoked: %w", string(w.op.ID), core.ErrNotExpected)
}
