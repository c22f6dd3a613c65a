package tcp

import (
	"slices"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
)

// sendRanges is what a write has been given so far, at once or bit by bit, anywhere in the
// transfer's linear order.
type sendRanges struct {
	ranges []sendRange // by position
	one    [1]sendRange
	bytes  uint64
	runs   int
	layout *kv.Layout
	window sendRange // the runs of its plan that are sent now
}

// sendRange is a part of a transfer without gaps. The next range may begin where this one ends.
type sendRange struct {
	position, end uint64
	runs          []run
	plan          kv.Plan // in place of the runs
	// next is the index of a run, and begins is that run's position. So bytes that are read in order need no search.
	next   int
	begins uint64
}

// sendRangesOf appends the sender's half of a plan to out.
func sendRangesOf(out []sendRange, l *kv.Layout, op *core.WriteOp) []sendRange {
	if op.Plan != nil {
		for _, e := range op.Plan.Extents() {
			out = append(out, sendRange{position: e.Position, end: e.Position + e.Bytes, plan: op.Plan})
		}
		return out
	}
	runs, pairs := make([]run, 0, len(op.Pairs)), op.Pairs
	whole := [1]kv.Extent{{Pairs: len(pairs)}}
	at := op.At
	if at == nil {
		at = whole[:]
	}
	first := 0 // the index of the first run of the last range
	for _, e := range at {
		n := len(out)
		if n == 0 || out[n-1].end != e.Position {
			out = append(out, sendRange{position: e.Position, end: e.Position, begins: e.Position})
			first, n = len(runs), n+1
		}
		s := &out[n-1]
		var bytes uint64
		runs, bytes = sourceRuns(runs, first, l, pairs[:e.Pairs])
		s.end, s.runs = s.end+bytes, runs[first:len(runs):len(runs)]
		pairs = pairs[e.Pairs:]
	}
	return out
}

// add takes one more range; false if bytes of it were given before.
func (g *sendRanges) add(s *sendRange) bool {
	if s.position == s.end {
		return true
	}
	if g.ranges == nil {
		g.ranges = g.one[:0]
	}
	i, _ := g.find(s.position)
	if i < len(g.ranges) && g.ranges[i].position < s.end {
		return false
	}
	g.bytes += s.end - s.position
	g.runs += len(s.runs)
	if i > 0 && g.ranges[i-1].end == s.position && g.ranges[i-1].plan == nil && s.plan == nil {
		left := &g.ranges[i-1]
		left.end, left.runs = s.end, append(left.runs, s.runs...)
		return true
	}
	g.ranges = slices.Insert(g.ranges, i, *s)
	return true
}

// find is the index of the range with a position, or of the next one.
func (g *sendRanges) find(position uint64) (i int, found bool) {
	i, _ = slices.BinarySearchFunc(g.ranges, position, func(s sendRange, p uint64) int {
		if s.end <= p {
			return -1
		}
		return 1
	})
	return i, i < len(g.ranges) && g.ranges[i].position <= position
}

// fill puts the places of bytes into v: from a position on, at most limit bytes, and at most as many places as v has
// room for. It returns how many bytes these are. The caller asks only for bytes that have been given.
func (g *sendRanges) fill(v []iovec, position, limit uint64) (_ []iovec, total uint64) {
	i, _ := g.find(position)
	for total < limit && len(v) < cap(v) {
		s := &g.ranges[i]
		at := position + total
		if at == s.end {
			i++
			continue
		}
		if s.plan != nil {
			s = g.cut(s.plan, at)
		}
		cur := s.seek(at)
		var n uint64
		v, n = cur.fill(v, limit-total)
		total += n
	}
	return v, total
}

// cut is the window of a plan that has the byte at a position.
func (g *sendRanges) cut(plan kv.Plan, at uint64) *sendRange {
	w := &g.window
	if w.plan == plan && at >= w.position && at < w.end {
		return w
	}
	pieces := takePieces()
	defer pieces.give()
	pairs := plan.Pairs(pieces.pairs[:0], at, ^uint64(0))
	if w.runs == nil {
		w.runs = make([]run, 0, min(plan.Pieces(), maxVector))
	}
	runs, bytes := sourceRuns(w.runs[:0], 0, g.layout, pairs)
	*w = sendRange{position: at, end: at + bytes, runs: runs, plan: plan, begins: at}
	g.runs += len(runs)
	return w
}

// seek is the cursor at a position before the end.
func (s *sendRange) seek(position uint64) cursor {
	if position < s.begins {
		s.next, s.begins = 0, s.position
	}
	for position-s.begins >= s.runs[s.next].len {
		s.begins += s.runs[s.next].len
		s.next++
	}
	return cursor{runs: s.runs[s.next:], off: position - s.begins}
}
