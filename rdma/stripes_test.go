package rdma

import (
	"fmt"
	"math"
	"reflect"
	"testing"

	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/seed"
)

func pairsOf(lengths ...uint64) []kv.Pair {
	out := make([]kv.Pair, len(lengths))
	for i, n := range lengths {
		out[i].Length = n
	}
	return out
}

func TestSplit(t *testing.T) {
	big := pairsOf(1 << 20)
	for _, c := range []struct {
		name    string
		pairs   []kv.Pair
		weights []float64
		least   uint64
		want    []stripeRange // lengths, and where they begin
	}{
		{"nothing", nil, []float64{1, 1}, 4096, []stripeRange{{}}},
		{"only empty pairs", pairsOf(0, 0), []float64{1, 1}, 4096, []stripeRange{{}}},
		{"no weights", pairsOf(10), nil, 4, []stripeRange{{length: 10}}},
		{"shorter than the least", pairsOf(10, 20), []float64{1, 2}, 4096, []stripeRange{{length: 30, stripe: 1}}},
		{"halves", big, []float64{1, 1}, 4096, []stripeRange{{length: 1 << 19}, {skip: 1 << 19, length: 1 << 19, stripe: 1}}},
		{"one to three", big, []float64{1, 3}, 4096, []stripeRange{{length: 1 << 18}, {skip: 1 << 18, length: 3 << 18, stripe: 1}}},
		{"a third is cut at a page", big, []float64{1, 2}, 4096, []stripeRange{{length: 85 * 4096}, {skip: 85 * 4096, length: 171 * 4096, stripe: 1}}},
		{"between pairs", pairsOf(100, 100, 0, 100, 100), []float64{1, 1}, 1, []stripeRange{{length: 200}, {first: 3, length: 200, stripe: 1}}},
		{"nearest end of a short pair", pairsOf(100, 300, 400), []float64{1, 2}, 1, []stripeRange{{length: 400}, {first: 2, length: 400, stripe: 1}}},
		{"a page from the pair's start", pairsOf(1000, 9000), []float64{1, 1}, 1, []stripeRange{{length: 5096}, {first: 1, skip: 4096, length: 4904, stripe: 1}}},
		{"no page within the least", pairsOf(6000), []float64{1, 1}, 3000, []stripeRange{{length: 3000}, {skip: 3000, length: 3000, stripe: 1}}},
		{"too light for a stripe", big, []float64{1, 1000, 1000}, 4096, []stripeRange{{length: 1 << 19, stripe: 1}, {skip: 1 << 19, length: 1 << 19, stripe: 2}}},
		{"room for two of three", pairsOf(10000), []float64{2, 1, 2}, 4096, []stripeRange{{length: 4096}, {skip: 4096, length: 5904, stripe: 2}}},
		{"weights that are none", big, []float64{math.NaN(), math.Inf(1), -1, 0, 1, 1}, 1, []stripeRange{{length: 1 << 19, stripe: 4}, {skip: 1 << 19, length: 1 << 19, stripe: 5}}},
		{"all are none", big, []float64{0, math.NaN()}, 1, []stripeRange{{length: 1 << 19}, {skip: 1 << 19, length: 1 << 19, stripe: 1}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			for i := range c.want {
				c.want[i].pairs = c.pairs
			}
			if got := split(c.pairs, c.weights, c.least); !reflect.DeepEqual(got, c.want) {
				t.Errorf("got  %v\nwant %v", got, c.want)
			}
		})
	}
	if n := len(split(pairsOf(1<<30), make([]float64, 1000), 1)); n != maxStripes {
		t.Errorf("%d stripes for 1000 lanes, want %d", n, maxStripes)
	}
}

// checkStripes: they follow each other without a gap, one lane each, in order, and
// none is too short.
func checkStripes(t *testing.T, stripes []stripeRange, pairs []kv.Pair, weights []float64, least uint64) {
	t.Helper()
	total := pairBytes(pairs)
	if len(stripes) == 0 || len(stripes) > min(max(len(weights), 1), maxStripes) {
		t.Fatalf("%d stripes for %d weights", len(stripes), len(weights))
	}
	at, lane := uint64(0), -1
	for _, p := range stripes {
		if from := pairBytes(pairs[:p.first]) + p.skip; from != at || (p.first < len(pairs) && p.skip >= max(pairs[p.first].Length, 1)) {
			t.Fatalf("a stripe begins at %d, the one before ends at %d: %+v", from, at, stripes)
		}
		if p.length < least && total >= least && len(stripes) > 0 {
			t.Fatalf("a stripe of %d bytes, at least %d: %+v", p.length, least, stripes)
		}
		if p.stripe <= lane || p.stripe >= max(len(weights), 1) {
			t.Fatalf("lane %d after %d", p.stripe, lane)
		}
		at, lane = at+p.length, p.stripe
	}
	if at != total {
		t.Fatalf("the stripes end at %d of %d bytes", at, total)
	}
}

// Shares differ from the weights by less than the alignment of a cut, as long as
// none is near the least.
func TestSplitShares(t *testing.T) {
	rnd := seed.Rand(t)
	for range 200 {
		pairs := make([]kv.Pair, 1+rnd.IntN(200))
		for i := range pairs {
			pairs[i].Length = uint64(rnd.IntN(40)) * 1000
		}
		weights := make([]float64, 1+rnd.IntN(8))
		sum := 0.0
		for i := range weights {
			weights[i] = 1 + rnd.Float64()
			sum += weights[i]
		}
		const least = 8192
		stripes := split(pairs, weights, least)
		checkStripes(t, stripes, pairs, weights, least)
		total := float64(pairBytes(pairs))
		if total < 2*8*2*least {
			continue
		}
		for _, p := range stripes {
			if want := total * weights[p.stripe] / sum; math.Abs(float64(p.length)-want) > 2*cutAlign {
				t.Fatalf("lane %d gets %d bytes, its share is %.0f of %.0f", p.stripe, p.length, want, total)
			}
		}
	}
}

func BenchmarkSplit(b *testing.B) {
	pairs, _, _ := benchmarkSetup(b, 20000, 4096)
	b.ReportAllocs()
	for b.Loop() {
		split(pairs, []float64{1, 1, 1, 1}, 256<<10)
	}
}

func (p stripeRange) String() string {
	return fmt.Sprintf("{pair %d, skip %d, %d bytes, stripe %d}", p.first, p.skip, p.length, p.stripe)
}
