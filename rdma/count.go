package rdma

import (
	"math/bits"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/rdma/internal/verbs"
)

// How D counts what has landed.

// received handles the completions of a lane's receives and pings.
func (src *source) received(l *lane, list []verbs.Completion) {
	for _, e := range src.count(l, list) {
		e.tell(nil)
	}
}

// count returns the expects that are complete, fenced and to be told.
func (src *source) count(l *lane, list []verbs.Completion) (done []*expect) {
	landed := 0
	var cause error
	src.mu.Lock()
	defer src.mu.Unlock()
	for i := range list {
		c := &list[i]
		switch {
		case c.Status != verbs.Success:
			cause = l.failure(c)
			if c.ID == receiveID {
				l.posted--
			}
		case c.Opcode == verbs.OpReceiveImm:
			landed++
			if e := src.landed(decodeMark(c.Imm)); e != nil {
				done = append(done, e)
			}
		default:
			l.pinging = false
		}
	}
	l.posted -= landed
	if cause == nil && !l.retired {
		cause = l.refill(landed)
	}
	if cause != nil && !l.retired {
		src.r.t.log.Warn("rdma lane broke", zap.String("peer", string(src.peer)), zap.Uint32("lane", l.id), zap.Error(cause))
		src.broken = append(src.broken, l.id)
		src.retire(l)
		src.greet()
	}
	for _, e := range done {
		src.whole[src.wholes%maxWhole] = e.grant.seq
		src.wholes++
		src.fenced(e)
	}
	if l.retired && l.posted <= 0 {
		src.laid(l)
	}
	return done
}

// landed counts a mark; the expect that it completes is taken. src.mu is held.
func (src *source) landed(m mark) *expect {
	r := src.r
	if int(m.slot) >= len(r.slots) {
		return nil
	}
	r.mu.Lock()
	e, generation := r.slots[m.slot].e, r.slots[m.slot].generation
	r.mu.Unlock()
	if e == nil || e.src != src || generation != m.generation {
		return nil
	}
	if e.begun.IsZero() {
		e.begun = time.Now()
	}
	if m.begins() || m.index >= m.total {
		return nil
	}
	e.parts |= 1 << m.index
	if bits.OnesCount64(e.parts) < int(m.total) || !r.take(e) {
		return nil
	}
	return e
}
