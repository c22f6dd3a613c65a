package rdma

import (
	"fmt"
	"time"

	"github.com/kvconn/kvconn/rdma/internal/verbs"
)

// How P posts what it writes, and how a write ends.

// add begins a write, or has it wait for a lane.
func (lk *link) add(w *write) {
	lk.update(func(lk *link) {
		w.began = time.Now()
		lk.used = w.began
		lk.writes[w] = struct{}{}
		if lk.state == stateEnded {
			lk.fail(w, lk.ended)
			return
		}
		if len(lk.lanes) > 0 {
			lk.begin(w)
		}
	})
}

func (lk *link) assign(j *job, l *lane) {
	j.lane, j.lost, j.filled, j.queued = l, false, false, false
	j.enqueue()
}

// enqueue has a job's lane post what there is of it.
func (j *job) enqueue() {
	if j.lane != nil && !j.queued && j.cursor.ready() {
		j.lane.jobs = append(j.lane.jobs, j)
		j.queued = true
	}
}

// pump posts what there is room for, a chain for each job in turn, so that a
// small transfer does not stand behind a large one.
func (lk *link) pump(l *lane) {
	if l.rail == nil || l.broken {
		return
	}
	for len(l.jobs) > 0 {
		j := l.jobs[0]
		if j.w.cause != nil || j.lane != l {
			l.jobs = l.jobs[1:]
			continue
		}
		room, bytes := l.queue.room()
		if room < 2 || bytes == 0 {
			return
		}
		n := 0
		if !j.w.told { // the time from here on is the transfer's, and D knows that bytes may come
			m := mark{slot: j.w.grant.slot, generation: j.w.grant.generation, index: beginIndex, total: 1}
			lk.chain[0] = verbs.Write{Imm: m.encode(), Flags: verbs.WithImm}
			n = 1
		}
		limit := l.port.dev.limit
		limit.maxBytes = bytes
		k, pieces, carried, done, err := j.cursor.fill(lk.chain[n:min(room, maxChain)], lk.pieces[:], l.port.dev.memory.Load().local, l.keys, limit)
		if err != nil {
			lk.fail(j.w, fmt.Errorf("rdma: transfer %q: %w", string(j.w.op.ID), err))
			continue
		}
		n += k
		j.w.told = true
		// Nothing may follow for minutes: then a completion must tell of these.
		l.queue.posting(j, lk.chain[:n], lk.pieces[:pieces], !j.cursor.ready())
		l.rail.begin(time.Now(), carried)
		lk.watchLanes()
		j.flight += n
		j.w.flight += n
		lk.t.posted(lk.chain[:n])
		if _, err := l.qp.Post(lk.chain[:n], lk.pieces[:pieces]); err != nil {
			j.filled = done // some of it may be on its way, the mark too
			lk.breakLane(l, fmt.Errorf("rdma: %s: %w", l.port.name, err))
			return
		}
		l.jobs = l.jobs[1:]
		j.filled, j.queued = done, false
		j.enqueue()
	}
}

// landed: requests of a job have completed, so their bytes are at D.
func (lk *link) landed(j *job, requests int) {
	j.flight -= requests
	j.w.flight -= requests
	if j.flight == 0 && !j.cursor.ready() {
		j.breaks = 0
	}
	if j.filled && j.flight == 0 {
		lk.finish(j)
		return
	}
	lk.settle(j.w)
}

// finish: a job's bytes and its mark are at D.
func (lk *link) finish(j *job) {
	if !j.done {
		j.done, j.lost = true, false
		j.w.left--
	}
	lk.settle(j.w)
}

// fail gives a write up. It ends when no request reads its blocks any more.
func (lk *link) fail(w *write, cause error) {
	if w.cause == nil && !w.over {
		w.cause = cause
	}
	lk.settle(w)
}

// settle ends a write that has nothing more to do. Its outcome waits for lanes that
// broke, which may still read its blocks.
func (lk *link) settle(w *write) {
	if w.over || w.flight > 0 || w.cause == nil && (w.left > 0 || w.jobs == nil) {
		return
	}
	w.over = true
	delete(lk.writes, w)
	lk.used = time.Now()
	if w.known {
		delete(lk.bySeq, w.grant.seq)
		lk.kill(w.grant.seq)
		switch {
		case !w.drained:
		case len(lk.lost) > 0: // as in drain
			lk.held = append(lk.held, w.grant.seq)
		default:
			lk.drained = append(lk.drained, w.grant.seq)
		}
	}
	if w.reads == 0 {
		lk.outcomes = append(lk.outcomes, w)
	}
}
