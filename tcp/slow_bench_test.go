package tcp

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
)

// writes is one transfer of all of d's blocks from p, whose decode agent it is by that name. It says how long the bytes took.
func writes(b *testing.B, p, d *agent, name core.AgentID, id core.TransferID) (took time.Duration, err error) {
	grant := d.expect(b, id, "p", allBlocks(testBlocks))
	pairs, err := p.layout.Plan(allBlocks(testBlocks), p.layout.Shapes(), allBlocks(testBlocks))
	if err != nil {
		return 0, err
	}
	began := time.Now()
	p.Write(core.WriteOp{ID: id, Peer: name, Grant: grant[:], Pairs: pairs})
	outcome := p.sink.Wait("written", id, 1)
	return time.Since(began), outcome.Err
}

// BenchmarkBesideSlowReaders is transfers to one decode agent, in turn by a prefill agent that has no other and by one that
// writes to slow ones meanwhile: the part of its rate that the first keeps beside them.
func BenchmarkBesideSlowReaders(b *testing.B) {
	for _, readers := range []int{1, 8} {
		b.Run(fmt.Sprint(readers), func(b *testing.B) {
			const rate = 4e6 // bytes a second; a transfer takes longer than the benchmark
			alone, beside := newSizedAgent(b, Config{}, testBlocks, testBlock), newSizedAgent(b, Config{}, testBlocks, testBlock)
			fast := map[*agent]*agent{}
			for _, p := range []*agent{alone, beside} {
				fast[p] = newSizedAgent(b, Config{}, testBlocks, testBlock)
				if err := fast[p].Connect("p", p.Endpoint(), p.admit(b, "fast")); err != nil {
					b.Fatal(err)
				}
			}
			for i := range readers {
				name := core.AgentID(fmt.Sprint("slow ", i))
				d := newSizedAgent(b, Config{}, testBlocks, testBlock)
				if err := d.Connect("p", newNarrow(b, beside.Endpoint(), rate).Addr().String(), beside.admit(b, name)); err != nil {
					b.Fatal(err)
				}
				grant := d.expect(b, core.TransferID(name), "p", allBlocks(testBlocks))
				pairs, err := beside.layout.Plan(allBlocks(testBlocks), beside.layout.Shapes(), allBlocks(testBlocks))
				if err != nil {
					b.Fatal(err)
				}
				beside.Write(core.WriteOp{ID: core.TransferID(name), Peer: name, Grant: grant[:], Pairs: pairs})
			}
			until(b, "each slow reader has some bytes", func() bool {
				beside.sender.mu.Lock()
				defer beside.sender.mu.Unlock()
				for i := range readers {
					if out := beside.sender.byID[core.TransferID(fmt.Sprint("slow ", i))]; out == nil || out.left == out.total {
						return false
					}
				}
				return true
			})
			var parts []float64
			for n := 0; b.Loop(); n++ {
				var took [2]time.Duration
				for i, p := range []*agent{alone, beside} {
					var err error
					if took[i], err = writes(b, p, fast[p], "fast", core.TransferID(fmt.Sprint(n))); err != nil {
						b.Fatal(err)
					}
				}
				parts = append(parts, took[0].Seconds()/took[1].Seconds())
			}
			for i := range readers {
				if n := len(beside.sink.All("written", core.TransferID(fmt.Sprint("slow ", i)))); n > 0 {
					b.Fatalf("slow reader %d has all its bytes: the rounds were not beside it", i)
				}
			}
			slices.Sort(parts)
			b.ReportMetric(parts[len(parts)/2], "of-alone")
		})
	}
}
