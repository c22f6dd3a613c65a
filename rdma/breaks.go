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

// watchLanes looks at the lanes until nothing is under way; cn.mu is held.
func (cn *conn) watchLanes() {
	if cn.looks == nil && cn.state != stateEnded {
		cn.looks = time.AfterFunc(cn.t.cfg.StallTimeout/(stallLooks-1), func() { cn.update((*conn).look) })
	}
}

// look ends lanes that complete nothing: a queue pair itself may try for ever, where D
// takes no marks.
func (cn *conn) look() {
	cn.looks = nil
	for _, l := range slices.Clone(cn.lanes) {
		switch {
		case l.queue.idle():
			l.looks = 0
		case l.looks+1 < stallLooks:
			l.looks++
			cn.watchLanes()
		default:
			cn.breakLane(l, fmt.Errorf("rdma: queue pair %d on %s has completed nothing within %v (stall_timeout_s)", l.qp.Number(), l.port.name, cn.t.cfg.StallTimeout))
		}
	}
}

// breakLane gives a lane up, and its path for a while.
func (cn *conn) breakLane(l *lane, cause error) {
	if !cn.remove(l) {
		return
	}
	cn.t.log.Warn("rdma lane broke", zap.String("peer", string(cn.peer)), zap.Uint32("lane", l.id), zap.Error(cause))
	cn.broke = cause
	l.path.fail(time.Now(), cause)
	cn.flush(l)
}

// flush: what was on a lane waits until D has said what arrived. The lane may read it
// until it is quiet.
func (cn *conn) flush(l *lane) {
	now := time.Now()
	cn.lost = append(cn.lost, l.id)
	for {
		b, ok := l.queue.flush()
		if !ok {
			break
		}
		l.path.lose(now, b.Bytes)
		b.Owner.flight -= b.Requests
		b.Owner.w.flight -= b.Requests
		b.Owner.w.reads += b.Requests
		l.reads[b.Owner.w] += b.Requests
	}
	if l.isDead() {
		cn.quiet(l)
	}
	for w := range cn.writes {
		for _, j := range w.jobs {
			if j.lane == l && !j.done {
				j.lane, j.lost = nil, true
				j.breaks++
				w.told = false
			}
		}
		cn.settle(w)
	}
}

// quiet: a lane that broke reads nothing any more. Its last request has come back, or
// its queue pair is destroyed.
func (cn *conn) quiet(l *lane) {
	for w, n := range l.reads {
		if w.reads -= n; w.over && w.reads == 0 {
			cn.outcomes = append(cn.outcomes, w)
		}
	}
	clear(l.reads)
}

// remove takes a lane away: it sends nothing any more.
func (cn *conn) remove(l *lane) bool {
	i := slices.Index(cn.lanes, l)
	if i < 0 {
		return false
	}
	cn.lanes = append(cn.lanes[:i:i], cn.lanes[i+1:]...)
	l.broken = true
	if len(cn.lanes) == 0 {
		cn.on(eventBare)
	}
	l.drop(func() { cn.update(func(cn *conn) { cn.quiet(l) }) })
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
func (cn *conn) arrived(lanes []uint32, seqs []uint64, rep *reply) error {
	if len(rep.Arrived) != len(seqs) {
		return fmt.Errorf("agent %s answers for %d transfers, it was asked for %d", cn.peer, len(rep.Arrived), len(seqs))
	}
	cn.confirmed(lanes)
	for i, seq := range seqs {
		if w := cn.bySeq[seq]; w != nil {
			for _, j := range w.jobs {
				if j.lost && j.filled && rep.Arrived[i]>>j.index&1 == 1 {
					cn.finish(j)
				}
			}
		}
	}
	cn.told(rep) // last: what has arrived is alive no more either
	return nil
}

// maxBreaks is how many lanes may break under a stripe before its transfer is given
// up: what no lane carries (a path that swallows large packets, a key that D does
// not know any more) must end. One that carried all it was given has counted nothing.
const maxBreaks = 8

// again gives jobs without a lane to those that there are, once D has ended the
// lanes that they were on.
func (cn *conn) again() {
	if len(cn.lanes) == 0 || len(cn.lost) > 0 {
		return
	}
	n := 0
	for w := range cn.writes {
		if len(cn.lanes) == 0 { // the last one broke as something was posted
			return
		}
		if w.jobs == nil {
			cn.begin(w)
			continue
		}
		for _, j := range w.jobs {
			if j.lost && j.breaks >= maxBreaks {
				cn.fail(w, fmt.Errorf("rdma: transfer %q: %d queue pairs broke under a stripe of it, the last: %w: %w", string(w.op.ID), j.breaks, cn.broke, core.ErrConnectionLost))
			}
			if j.lost && w.cause == nil {
				j.cursor.rewind()
				cn.assign(j, cn.lanes[n%len(cn.lanes)])
				n++
			}
		}
	}
	for _, l := range append([]*lane(nil), cn.lanes...) {
		cn.pump(l)
	}
}

// lose ends the way to D, as far as it is known here; D may come back.
func (cn *conn) lose(cause error) {
	for _, l := range append([]*lane(nil), cn.lanes...) {
		cn.remove(l)
		cn.flush(l)
	}
	cn.there = nil
	for w := range cn.writes {
		cn.fail(w, cause)
	}
	if cn.on(eventLost) == stateBare {
		cn.fell = cause
	}
	cn.tasks &^= makeLanes
}

// kill: a grant is used up, or revoked.
func (cn *conn) kill(seq uint64) {
	if seq >= cn.grants.below {
		cn.grants.dead[seq] = true
	}
	if len(cn.grants.dead) > maxDead {
		cn.tasks |= askGrants
	}
}

// drain takes D's word that grants are dead, and says which of their transfers
// may still have something on its way. Of these tellDrained will tell.
func (cn *conn) drain(m *signal) (pending []uint64) {
	for _, seq := range m.Seqs {
		cn.kill(seq)
		w := cn.bySeq[seq]
		switch {
		case len(cn.lost) > 0: // what they have sent may land as long as D has not ended them
			cn.held = append(cn.held, seq)
			pending = append(pending, seq)
		case w != nil && w.flight > 0:
			w.drained = true
			pending = append(pending, seq)
		}
		if w != nil {
			cn.fail(w, errRevoked(w))
		}
	}
	cn.grants.drop(m.Below)
	return pending
}

// confirmed: D has ended its side of lanes that broke. Some may have been confirmed
// before, by a word of D that crossed the answer.
func (cn *conn) confirmed(lanes []uint32) {
	var rest []uint32
	for _, id := range cn.lost {
		if !slices.Contains(lanes, id) {
			rest = append(rest, id)
		}
	}
	if cn.lost = rest; len(rest) == 0 {
		cn.drained = append(cn.drained, cn.held...)
		cn.held = nil
	}
}

// tellDrained tells D of transfers of which nothing is on its way any more.
func (cn *conn) tellDrained() {
	for {
		cn.mu.Lock()
		s := &signal{Kind: signalDrained, Ticket: cn.ticket, Seqs: cn.drained}
		cn.drained = nil
		if len(s.Seqs) == 0 {
			cn.tells = false
			cn.mu.Unlock()
			return
		}
		cn.mu.Unlock()
		if _, err := cn.t.ask(cn.peer, s, drainBound); err != nil {
			cn.t.log.Debug("rdma: a peer does not hear that writes have ended", zap.String("peer", string(cn.peer)), zap.Error(err))
		}
	}
}

// told takes D's word of which grants are alive. A D without lanes revokes without
// a word: what waits to be written again learns it by this. What is under way may have
// arrived since, and a grant is dead then too; so may what was lost, until D says.
func (cn *conn) told(rep *reply) {
	cn.grants.told(rep.Next, rep.Live)
	if len(cn.lost) > 0 {
		return
	}
	for seq, w := range cn.bySeq {
		if !cn.grants.alive(seq) && (w.jobs == nil || w.isLost()) {
			cn.fail(w, errRevoked(w))
		}
	}
}

func errRevoked(w *write) error {
	return fmt.Errorf("rdma: transfer %q was revoked: %w", string(w.op.ID), core.ErrNotExpected)
}
