package rdma

import (
	"fmt"
	"time"

	"github.com/kvconn/kvconn/core"
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
	byRail, err := chooseRails(rails, bytes, stripe, now)
	if err != nil { // all are paused, and yet there are lanes: they are as good as others
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
