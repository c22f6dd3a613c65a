package rdma

import (
	"fmt"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rdma/internal/verbs"
)

// How P spreads what it writes over its lanes.

// begin cuts a write into parts, as many as suit the bytes that it has in all, and gives
// them to lanes: when its first bytes come, since there may be more lanes by then.
func (lk *link) begin(w *write) {
	if !w.known {
		g, err := checkGrant(w.op.Grant, lk.there.secret, w.op.ID)
		switch {
		case err != nil:
		case g.bytes != w.bytes:
			err = fmt.Errorf("rdma: transfer %q has %d bytes here, %d at decode agent %s", string(w.op.ID), w.bytes, g.bytes, lk.peer)
		case !lk.grants.alive(g.seq):
			err = errRevoked(w)
		case lk.bySeq[g.seq] != nil:
			err = fmt.Errorf("rdma: transfer %q has the grant of one that is being written", string(w.op.ID))
		}
		if err != nil {
			lk.fail(w, err)
			return
		}
		w.grant, w.known = g, true
		lk.bySeq[g.seq] = w
	}
	if w.given == 0 && w.bytes > 0 {
		return
	}
	parts := share(lk.choose(lk.lanes, w.bytes, time.Now()), w.bytes, minPart)
	w.left = len(parts)
	w.jobs = make([]*job, len(parts))
	shares := make([]float64, len(parts))
	for i, p := range parts {
		m := mark{slot: w.grant.slot, generation: w.grant.generation, index: uint8(i), total: uint8(len(parts))}
		w.jobs[i] = &job{w: w, index: i, cursor: cursor{imm: m.encode()}, lane: lk.lanes[p.index]}
		shares[i] = p.weight
	}
	lk.deal(w, w.op.Pairs, shares)
}

// give takes more of a write: it goes to the parts as a transfer of that size would go
// to their lanes.
func (lk *link) give(w *write, pairs []core.Pair, bytes uint64, runs int) {
	switch {
	case w.over || w.cause != nil || bytes == 0:
		return
	case bytes > w.bytes-w.given:
		lk.fail(w, errTooMuch(w, w.given+bytes))
		return
	}
	w.given += bytes
	w.runs += runs
	if w.jobs == nil {
		w.op.Pairs = append(w.op.Pairs, pairs...)
		if len(lk.lanes) > 0 {
			lk.begin(w)
		}
		return
	}
	lanes := make([]*lane, len(w.jobs))
	for i, j := range w.jobs {
		lanes[i] = j.lane
	}
	lk.deal(w, pairs, lk.choose(lanes, bytes, time.Now()))
}

// deal spreads what was given over a write's parts, by weight, and posts it.
func (lk *link) deal(w *write, pairs []core.Pair, weights []float64) {
	w.deal(pairs, weights)
	for _, j := range w.jobs {
		j.enqueue()
	}
	for _, j := range w.jobs {
		if j.lane != nil { // else it broke, as something was posted perhaps
			lk.pump(j.lane)
		}
	}
}

func (w *write) deal(pairs []core.Pair, weights []float64) {
	for _, s := range split(pairs, weights, minPart) {
		if c := &w.jobs[s.part].cursor; s.length > 0 {
			c.given = append(c.given, s)
		}
	}
	for _, j := range w.jobs {
		j.cursor.whole = w.given == w.bytes
	}
}

// minPart is the least that is worth a lane of its own.
const minPart = 256 << 10

// stripe says from which size on a transfer takes several rails.
var stripe = striping{near: 2 * minPart, far: 16 << 20}

// choose spreads bytes over lanes: by the speed of their rails, and on each rail
// evenly. A small transfer takes the lane that carries least. Where the list has nil,
// for a lane that broke, the weight is 0.
func (lk *link) choose(lanes []*lane, bytes uint64, now time.Time) (weights []float64) {
	var rails []candidate
	index := map[*rail]int{}
	count := map[*rail]int{}
	for _, l := range lanes {
		if l == nil {
			continue
		}
		if _, seen := index[l.rail]; !seen {
			index[l.rail] = len(rails)
			rails = append(rails, candidate{rail: l.rail, near: l.port.near})
		}
		count[l.rail]++
	}
	byRail := chooseRails(rails, bytes, stripe, now)
	if byRail == nil { // all are paused, and yet there are lanes: they are as good as others
		byRail = make([]float64, len(rails))
		for i := range byRail {
			byRail[i] = 1
		}
	}
	weights = make([]float64, len(lanes))
	best := -1
	for i, l := range lanes {
		switch {
		case l == nil || byRail[index[l.rail]] == 0:
		case bytes >= stripe.near:
			weights[i] = byRail[index[l.rail]] / float64(count[l.rail])
		case best < 0 || l.load() < lanes[best].load():
			best = i
		}
	}
	if best >= 0 {
		weights[best] = 1
	}
	return weights
}

// load is a measure of what a lane has to do.
func (l *lane) load() int { return l.queue.requests + len(l.jobs)*maxChain }

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
