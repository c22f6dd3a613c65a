// How P spreads what it writes over its lanes.

package rdma

import (
	"fmt"
	"math"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rdma/internal/verbs"
)

// begin cuts a write into as many stripes as suit its size and gives them to lanes. It
// waits for the write's first bytes, since there may be more lanes by then.
func (cn *conn) begin(w *write) {
	if cn.t.forgotten() != nil {
		return // it waits for the lanes to the new memory
	}
	if !w.known {
		g, err := checkGrant(w.op.Grant, cn.remote.secret, w.op.ID)
		switch {
		case err != nil:
		case g.bytes != w.bytes:
			err = fmt.Errorf("rdma: transfer %q has %d bytes here, %d at decode agent %s", w.op.ID.Name(), w.bytes, g.bytes, cn.peer)
		case !cn.grants.alive(g.seq):
			err = errRevoked(w)
		case cn.bySeq[g.seq] != nil:
			err = fmt.Errorf("rdma: transfer %q has the grant of a transfer that is being written", w.op.ID.Name())
		}
		if err != nil {
			cn.fail(w, err)
			return
		}
		w.grant, w.known = g, true
		cn.bySeq[g.seq] = w
	}
	if w.given == 0 && w.bytes > 0 {
		return
	}
	first := writePart{pairs: w.op.Pairs}
	if len(w.plans) > 0 {
		first.plan = w.plans[0]
	}
	stripes := share(cn.choose(cn.lanes, w.bytes, cn.memoryOf(&first), time.Now()), w.bytes, minStripe)
	w.left = len(stripes)
	w.jobs = make([]*job, len(stripes))
	shares := make([]float64, len(stripes))
	for i, p := range stripes {
		m := mark{slot: w.grant.slot, generation: w.grant.generation, index: uint8(i), total: uint8(len(stripes))}
		w.jobs[i] = &job{w: w, index: i, cursor: cursor{imm: m.encode()}, lane: cn.lanes[p.index]}
		shares[i] = p.weight
	}
	list := split(w.op.Pairs, shares, minStripe)
	for _, p := range w.plans {
		list = append(list, splitPlan(p, shares, minStripe)...)
	}
	w.plans = nil
	cn.deal(w, list)
}

// writePart is what a write is given at a time: pairs, or a plan in their place.
type writePart struct {
	pairs []kv.Pair
	plan  kv.Plan
	bytes uint64
	runs  int // on this side; of a plan, at most
}

func writePartOf(op *core.WriteOp) writePart {
	if op.Plan != nil {
		return writePart{plan: op.Plan, bytes: op.Payload(), runs: op.Plan.Pieces()}
	}
	return writePart{pairs: op.Pairs, bytes: op.Payload(), runs: sourceRuns(op.Pairs)}
}

func (g *writePart) split(weights []float64) []stripeRange {
	if g.plan != nil {
		return splitPlan(g.plan, weights, minStripe)
	}
	return split(g.pairs, weights, minStripe)
}

// give takes more bytes of a write. It spreads them over the write's stripes, as a
// transfer of that size is spread over the stripes' lanes.
func (cn *conn) give(w *write, g *writePart) {
	switch {
	case w.over || w.cause != nil || g.bytes == 0:
		return
	case g.bytes > w.bytes-w.given:
		cn.fail(w, errTooMuch(w, w.given+g.bytes))
		return
	}
	w.given += g.bytes
	w.runs += g.runs
	if w.jobs == nil {
		w.keep(g)
		if len(cn.lanes) > 0 {
			cn.begin(w)
		}
		return
	}
	lanes := make([]*lane, len(w.jobs))
	for i, j := range w.jobs {
		lanes[i] = j.lane
	}
	cn.deal(w, g.split(cn.choose(lanes, g.bytes, cn.memoryOf(g), time.Now())))
}

// keep holds what is given before the write begins.
func (w *write) keep(g *writePart) {
	w.op.Pairs = append(w.op.Pairs, g.pairs...)
	if g.plan != nil {
		w.plans = append(w.plans, g.plan)
	}
}

// deal gives ranges to a write's stripes, and posts them.
func (cn *conn) deal(w *write, list []stripeRange) {
	w.deal(list)
	for _, j := range w.jobs {
		j.enqueue()
	}
	for _, j := range w.jobs {
		if j.lane != nil { // else the lane broke, perhaps at a post
			cn.pump(j.lane)
		}
	}
}

func (w *write) deal(list []stripeRange) {
	for _, s := range list {
		if c := &w.jobs[s.stripe].cursor; s.length > 0 {
			c.ranges = append(c.ranges, s)
		}
	}
	for _, j := range w.jobs {
		j.cursor.whole = w.given == w.bytes
	}
}

// minStripe is the least size of a stripe that is worth a lane of its own.
const minStripe = 256 << 10

// stripeFrom has the sizes from which on a transfer takes several paths.
var stripeFrom = stripeSizes{near: 2 * minStripe, far: 16 << 20}

// choose returns the weight of each lane for so many bytes. The weights of the paths follow their
// speeds, and the lanes of one path have equal weights. A small transfer takes the lane that
// carries least. A nil lane is one that broke; its weight is 0.
func (cn *conn) choose(lanes []*lane, bytes uint64, memory kv.Memory, now time.Time) (weights []float64) {
	var paths []candidate
	index := map[*path]int{}
	count := map[*path]int{}
	for _, l := range lanes {
		if l == nil {
			continue
		}
		if _, seen := index[l.path]; !seen {
			index[l.path] = len(paths)
			paths = append(paths, candidate{path: l.path, near: l.port.distanceTo(memory)})
		}
		count[l.path]++
	}
	sizes := stripeFrom
	gpu, onGPU := memory.Device()
	if onGPU {
		sizes.far = math.MaxUint64
	}
	byPath := choosePaths(paths, bytes, sizes, now)
	if onGPU && bytes < sizes.near {
		if i := turn(paths, cn.t.memory.number[gpu], bytes, now); i >= 0 {
			clear(byPath)
			byPath[i] = 1
		}
	}
	if byPath == nil { // all paths are paused, but lanes are open: all paths get the same weight
		byPath = make([]float64, len(paths))
		for i := range byPath {
			byPath[i] = 1
		}
	}
	weights = make([]float64, len(lanes))
	best := -1
	for i, l := range lanes {
		switch {
		case l == nil || byPath[index[l.path]] == 0:
		case bytes >= stripeFrom.near:
			weights[i] = byPath[index[l.path]] / float64(count[l.path])
		case best < 0 || l.load() < lanes[best].load():
			best = i
		}
	}
	if best >= 0 {
		weights[best] = 1
	}
	return weights
}

// load compares how much lanes have to do.
func (l *lane) load() int { return l.queue.requests + len(l.jobs)*maxChain }

// add begins a write. Without a lane the write waits for one.
func (cn *conn) add(w *write) {
	cn.update(func(cn *conn) {
		w.began, w.waits = time.Now(), cn.t.forgotten() != nil
		cn.used = w.began
		cn.writes[w] = struct{}{}
		if cn.state == stateEnded {
			cn.fail(w, cn.ended)
			return
		}
		if len(cn.lanes) > 0 {
			cn.begin(w)
		}
	})
}

func (cn *conn) assign(j *job, l *lane) {
	j.lane, j.lost, j.filled, j.queued = l, false, false, false
	j.enqueue()
}

// enqueue makes a job's lane post the bytes that the job has.
func (j *job) enqueue() {
	if j.lane != nil && !j.queued && j.cursor.ready() {
		j.lane.jobs = append(j.lane.jobs, j)
		j.queued = true
	}
}

// pump posts chains while there is room, one for each job in turn, so that a small
// transfer does not wait for a large one.
func (cn *conn) pump(l *lane) {
	if l.path == nil || l.broken {
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
		if !j.w.told { // D times the transfer from here on, and knows that bytes may come
			m := mark{slot: j.w.grant.slot, generation: j.w.grant.generation, index: beginIndex, total: 1}
			cn.chain[0] = verbs.Write{Imm: m.encode(), Flags: verbs.WithImm}
			n = 1
		}
		limit := l.port.dev.limit
		limit.maxBytes = bytes
		k, pieces, carried, done, err := j.cursor.fill(cn.chain[n:min(room, maxChain)], cn.pieces[:], cn.window[:], l.port.dev.memory.Load().local, l.keys, limit)
		if err != nil {
			cn.fail(j.w, fmt.Errorf("rdma: transfer %q: %w", j.w.op.ID.Name(), err))
			continue
		}
		n += k
		j.w.told = true
		// If nothing is left to post, nothing may follow for minutes: the last write asks for a
		// completion.
		l.queue.posting(j, cn.chain[:n], cn.pieces[:pieces], !j.cursor.ready())
		l.path.begin(time.Now(), carried)
		cn.watchLanes()
		j.flight += n
		j.w.flight += n
		cn.t.posted(cn.chain[:n])
		if _, err := l.qp.Post(cn.chain[:n], cn.pieces[:pieces]); err != nil {
			j.filled = done // a part of the chain may be on its way, perhaps with the mark
			cn.breakLane(l, fmt.Errorf("rdma: %s: %w", l.port.name, err))
			return
		}
		l.jobs = l.jobs[1:]
		j.filled, j.queued = done, false
		j.enqueue()
	}
}

// landed is called when requests of a job have completed: their bytes are at D.
func (cn *conn) landed(j *job, requests int) {
	j.flight -= requests
	j.w.flight -= requests
	if j.flight == 0 && !j.cursor.ready() {
		j.breaks, j.denied = 0, 0
	}
	if j.filled && j.flight == 0 {
		cn.finish(j)
		return
	}
	cn.settle(j.w)
}

// finish is called when all bytes of a job and its mark are at D.
func (cn *conn) finish(j *job) {
	if !j.done {
		j.done, j.lost = true, false
		j.w.left--
	}
	cn.settle(j.w)
}

// fail gives up a write. The write ends when no request reads its blocks any more.
func (cn *conn) fail(w *write, cause error) {
	if w.cause == nil && !w.over {
		w.cause = cause
	}
	cn.settle(w)
}

// settle ends a write that has nothing more to do. Its outcome waits while a lane that
// broke may still read its blocks.
func (cn *conn) settle(w *write) {
	if w.over || w.flight > 0 || w.cause == nil && (w.left > 0 || w.jobs == nil) {
		return
	}
	w.over = true
	delete(cn.writes, w)
	cn.used = time.Now()
	if w.known {
		delete(cn.bySeq, w.grant.seq)
		cn.killGrant(w.grant.seq)
		switch {
		case !w.drained:
		case len(cn.lost) > 0: // as in drain
			cn.held = append(cn.held, w.grant.seq)
		default:
			cn.drained = append(cn.drained, w.grant.seq)
		}
	}
	if w.reads == 0 {
		cn.outcomes = append(cn.outcomes, w)
	}
}
