package rdma

import (
	"slices"
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rdma/internal/verbs"
	"github.com/kvconn/kvconn/rig/coretest"
	"github.com/kvconn/kvconn/rig/seed"
)

// Whatever is given when, and whatever lanes break: each stripe's mark follows all of its
// bytes and comes when all stripes have been given all, and each byte is in one stripe.
func TestDealRandom(t *testing.T) {
	rnd := seed.Rand(t)
	for range 50 {
		n := 100 + 7*rnd.IntN(50) + 1
		table := chunkTable(t, n)
		w := &write{bytes: uint64(n) * chunk}
		jobs := 1 + rnd.IntN(6)
		var window [4]kv.Pair          // of all stripes
		written := make([][]int, jobs) // of each stripe: how often each page
		marked := make([]bool, jobs)
		for i := range jobs {
			w.jobs = append(w.jobs, &job{w: w, index: i, cursor: cursor{imm: uint32(i)}})
			written[i] = make([]int, n*chunk/cutAlign)
		}
		fill := func(i int) {
			c := &w.jobs[i].cursor
			writes, pieces := make([]verbs.Write, 1+rnd.IntN(maxChain)), make([]verbs.SGE, 64)
			nw, np, _, done, err := c.fill(writes, pieces, window[:1+rnd.IntN(len(window))], table, table, writeLimits{4, maxWrite, 1 + uint64(rnd.IntN(4<<20))})
			if err != nil {
				t.Fatal(err)
			}
			used := 0
			for k := range writes[:nw] {
				at := writes[k].RemoteAddr - 1<<40
				for _, p := range pieces[used:][:writes[k].Pieces] {
					for from := p.Addr - 1<<40; from < p.Addr-1<<40+uint64(p.Length); from, at = from+cutAlign, at+cutAlign {
						if want := uint64(landing(int(from/chunk), n))*chunk + from%chunk; at != want {
							t.Fatalf("byte %d is written to %d, want %d", from, at, want)
						}
						written[i][from/cutAlign]++
					}
				}
				used += int(writes[k].Pieces)
				if marks := writes[k].Flags&verbs.WithImm != 0; marks != (done && k == nw-1) || marks && writes[k].Imm != uint32(i) {
					t.Fatalf("write %d of %d, done %v: %+v", k, nw, done, writes[k])
				}
			}
			if used != np || done && w.given < w.bytes {
				t.Fatalf("%d pieces of %d; done %v with %d of %d bytes given", used, np, done, w.given, w.bytes)
			}
			marked[i] = marked[i] || done
		}
		for given := 0; given < n; {
			switch i := rnd.IntN(jobs); rnd.IntN(6) {
			case 0, 1:
				to := min(given+1+rnd.IntN(60), n)
				weights := make([]float64, jobs)
				for k := range weights {
					weights[k] = float64(rnd.IntN(3))
				}
				w.given += uint64(to-given) * chunk
				g := writePart{pairs: chunks(given, to, n)}
				if rnd.IntN(2) == 0 {
					g.plan = coretest.Planned(core.WriteOp{Pairs: g.pairs, At: []kv.Extent{{Position: uint64(given) * chunk, Pairs: to - given}}}).Plan
				}
				w.deal(g.split(weights))
				given = to
			case 2:
				w.jobs[i].cursor.rewind()
				clear(written[i])
				marked[i] = false
			default:
				if w.jobs[i].cursor.ready() {
					fill(i)
				}
			}
		}
		for i := range jobs {
			for w.jobs[i].cursor.ready() {
				fill(i)
			}
		}
		for page := range written[0] {
			times := 0
			for i := range written {
				times += written[i][page]
			}
			if times != 1 {
				t.Fatalf("page %d is written %d times", page, times)
			}
		}
		if slices.Contains(marked, false) {
			t.Fatalf("stripes with a mark: %v", marked)
		}
	}
}
