// When a lane of P breaks, P waits until the lane reads nothing any more, D says which
// stripes have arrived, and other lanes write the rest. This file also keeps which grants are dead.

package rdma

import (
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
)

// stallLooks is how many looks in a row end a lane that has requests under way and
// completes none. Looks are counted because this process may have been stopped for a
// long time, which is one look.
const stallLooks = 5

// watchLanes looks at the lanes until nothing is under way; cn.mu is held.
func (cn *conn) watchLanes() {
	if cn.looks == nil && cn.state != stateEnded {
		cn.looks = time.AfterFunc(cn.t.cfg.StallTimeout/(stallLooks-1), func() { cn.update((*conn).look) })
	}
}

// look ends lanes that complete nothing. If D takes no marks, the queue pair itself may
// try for ever.
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

// breakLane gives up a lane, and pauses its path.
func (cn *conn) breakLane(l *lane, cause error) {
	if !cn.remove(l) {
		return
	}
	cn.t.log.Warn("rdma lane broke", zap.String("peer", string(cn.peer)), zap.Uint32("lane", l.id), zap.Error(cause))
	cn.broke = cause
	l.path.fail(time.Now(), cause)
	cn.flush(l)
}

// flush makes the stripes of a lane that broke wait until D has said which arrived. The
// lane may still read their blocks until quiet is called.
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

// quiet is called when a lane that broke reads nothing any more: its last request has
// come back, or its queue pair is destroyed.
func (cn *conn) quiet(l *lane) {
	for w, n := range l.reads {
		if w.reads -= n; w.over && w.reads == 0 {
			cn.outcomes = append(cn.outcomes, w)
		}
	}
	clear(l.reads)
}

// remove stops a lane and takes it out of the list; false if it is not there.
func (cn *conn) remove(l *lane) bool {
	i := slices.Index(cn.lanes, l)
	if i < 0 {
		return false
	}
	cn.lanes = append(cn.lanes[:i:i], cn.lanes[i+1:]...)
	l.broken = true
	if len(cn.lanes) == 0 {
		cn.on(eventNoLanes)
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

// arrived takes D's answer about lanes that broke: D has ended them, and says which
// stripes had arrived. P writes the other stripes again.
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
	cn.grantsReceived(rep) // last, since the grant of a transfer that has arrived is dead too
	return nil
}

// maxBreaks is how many lanes may break under a stripe before its transfer is given
// up. No lane may ever carry it: a path may swallow large packets, or D may not know a
// key any more. The count starts anew when a lane has carried all that it was given.
const maxBreaks = 8

// again deals the stripes without a lane over the lanes that are open, once D has ended
// the lanes that broke; cn.mu is held.
func (cn *conn) again() {
	if len(cn.lanes) == 0 || len(cn.lost) > 0 {
		return
	}
	n := 0
	for w := range cn.writes {
		if len(cn.lanes) == 0 { // the last lane broke at a post
			return
		}
		if w.jobs == nil {
			cn.begin(w)
			continue
		}
		for _, j := range w.jobs {
			if j.lost && j.breaks >= maxBreaks {
				cn.fail(w, fmt.Errorf("rdma: transfer %q: %d queue pairs broke under a stripe of it, the last: %w: %w", w.op.ID.Name(), j.breaks, cn.broke, core.ErrConnectionLost))
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

// disconnect closes all lanes and fails all writes. D may connect again.
func (cn *conn) disconnect(cause error) {
	for _, l := range append([]*lane(nil), cn.lanes...) {
		cn.remove(l)
		cn.flush(l)
	}
	cn.remote = nil
	for w := range cn.writes {
		cn.fail(w, cause)
	}
	if cn.on(eventLost) == stateNoLanes {
		cn.downCause = cause
	}
	cn.tasks &^= makeLanes
}

// killGrant remembers that a grant is used up or revoked.
func (cn *conn) killGrant(seq uint64) {
	if seq >= cn.grants.below {
		cn.grants.dead[seq] = true
	}
	if len(cn.grants.dead) > maxDead {
		cn.tasks |= askGrants
	}
}

// drain handles D's signal that grants are dead. It returns those grants that may still have
// bytes on their way; tellDrained tells D when they have none.
func (cn *conn) drain(m *signal) (pending []uint64) {
	for _, seq := range m.Seqs {
		cn.killGrant(seq)
		w := cn.bySeq[seq]
		switch {
		case len(cn.lost) > 0: // bytes of the lost lanes may land until D has ended them
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

// confirmed is called when D has ended its side of lanes that broke. Another message
// of D may have confirmed some of them before.
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

// tellDrained tells D of the grants that have no bytes on their way any more.
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

// grantsReceived handles D's list of the grants that are alive. A D without lanes revokes without
// telling P, so P learns here that grants of stripes which wait for a lane are dead. But a grant is also
// dead once its transfer has arrived. So grantsReceived ends no stripes that are under way, and no lost
// stripes before D has said whether they have arrived.
func (cn *conn) grantsReceived(rep *reply) {
	cn.grants.update(rep.Next, rep.Live)
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
	return fmt.Errorf("rdma: transfer %q was revoked: %w", w.op.ID.Name(), core.ErrNotExpected)
}
