// What a write is given is cut into ranges in proportion to weights, one for each stripe.

package rdma

import (
	"cmp"
	"math"
	"slices"

	defect "github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/kv"
)

// maxStripes is the most stripes of a transfer: an immediate has 6 bits for the index.
const maxStripes = 64

// cutAlign divides the position at which a range begins within a pair: so pages, and packets of any MTU,
// stay whole.
const cutAlign = 4096

// stripeRange is a contiguous range of the bytes that a write is given at a time. One stripe of the write
// carries it. It is a range of pairs, or of a plan.
type stripeRange struct {
	pairs    []kv.Pair // all pairs that were given together, shared by their ranges
	first    int       // the pair that holds the range's first byte
	skip     uint64    // bytes of that pair before it
	plan     kv.Plan   // in place of the pairs
	position uint64    // of the range's first byte in the plan
	length   uint64
	stripe   int // index of the weight that it was cut for
}

// pairBytes is how many bytes pairs have together. Pairs of real memory do not add up to 2^64.
func pairBytes(pairs []kv.Pair) uint64 {
	var n uint64
	for i := range pairs {
		n += pairs[i].Length
	}
	return n
}

// split cuts pairs into ranges whose lengths are proportional to weights, in
// the order of the weights, each byte in exactly one. Stripes that would get less than
// least bytes get no range, the lightest first. If all pairs together have less than
// least bytes, they are one range. A weight that is no positive number gets no
// range. If no weight is a positive number, all count the same.
func split(pairs []kv.Pair, weights []float64, least uint64) []stripeRange {
	least = max(least, 1)
	total := pairBytes(pairs)
	stripes := share(weights, total, least)
	out := make([]stripeRange, len(stripes))
	sum, upTo := 0.0, 0.0
	for _, p := range stripes {
		sum += p.weight
	}
	var (
		pair  int    // where the next range begins
		start uint64 // position of that pair's first byte
		from  uint64 // position of the range's first byte
	)
	for i, p := range stripes {
		upTo += p.weight
		out[i] = stripeRange{pairs: pairs, first: pair, skip: from - start, length: total - from, stripe: p.index}
		rest := uint64(len(stripes) - 1 - i)
		if rest == 0 {
			break
		}
		// As near to its share as least allows, for this range and for the others.
		lo, hi := from+least, total-rest*least
		want := min(max(uint64(float64(total)*(upTo/sum)), lo), hi)
		for want-start >= pairs[pair].Length {
			start += pairs[pair].Length
			pair++
		}
		to := cutNear(want, start, pairs[pair].Length, lo, hi)
		out[i].length = to - from
		from = to
		if from-start == pairs[pair].Length {
			start = from
			pair++
		}
	}
	return out
}

// splitPlan is split of a plan. A range that goes over a gap of the plan is one on each
// side of it. No piece is asked for: what it costs goes by the plan's extents.
func splitPlan(p kv.Plan, weights []float64, least uint64) (out []stripeRange) {
	extents := p.Extents()
	runs := make([]kv.Pair, len(extents))
	for i := range extents {
		runs[i].Length = extents[i].Bytes
	}
	for _, s := range split(runs, weights, least) {
		for i, skip := s.first, s.skip; s.length > 0; i, skip = i+1, 0 {
			n := min(extents[i].Bytes-skip, s.length)
			out = append(out, stripeRange{plan: p, position: extents[i].Position + defect.Pick("rdma-plan-skip", skip, 0), length: n, stripe: s.stripe})
			s.length -= n
		}
	}
	return out
}

// cutNear is the position nearest to want, between lo and hi, that is aligned from the
// start of its pair or is an end of the pair. A position below want comes before one
// above it. If there is none, cutNear is want itself.
func cutNear(want, start, length, lo, hi uint64) uint64 {
	down := want - (want-start)%cutAlign
	up := start + min(want-start+cutAlign-1-(want-start+cutAlign-1)%cutAlign, length)
	switch canDown, canUp := down >= lo, up <= hi; {
	case canDown && (!canUp || want-down <= up-want):
		return down
	case canUp:
		return up
	}
	return want
}

type weighted struct {
	index  int
	weight float64
}

// share picks the weights that get a stripe, in their order: at least one, at most
// maxStripes, and none whose share of total is less than least bytes.
func share(weights []float64, total, least uint64) []weighted {
	lanes := make([]weighted, 0, len(weights))
	for i, w := range weights {
		if w > 0 && w <= math.MaxFloat64/maxStripes {
			lanes = append(lanes, weighted{i, w})
		}
	}
	if len(lanes) == 0 {
		for i := range max(len(weights), 1) {
			lanes = append(lanes, weighted{i, 1})
		}
	}
	slices.SortStableFunc(lanes, func(a, b weighted) int { return cmp.Compare(b.weight, a.weight) })
	lanes = lanes[:max(1, min(uint64(len(lanes)), maxStripes, total/least))]
	sum := 0.0
	for _, l := range lanes {
		sum += l.weight
	}
	for n := len(lanes); n > 1; n-- {
		light := lanes[n-1].weight
		if float64(total)*(light/sum) >= float64(least) {
			break
		}
		sum -= light
		lanes = lanes[:n-1]
	}
	slices.SortFunc(lanes, func(a, b weighted) int { return cmp.Compare(a.index, b.index) })
	return lanes
}
