package rdma

import (
	"testing"

	"github.com/kvconn/kvconn/rdma/internal/verbs"
)

// BenchmarkPosting is what 20,000 scattered blocks of 4 KiB cost a prefill agent
// from the plan to the doorbell, without the device's part: cut for 4 lanes, filled
// in chains, credits and signals, work requests built in C. Completions come as in a
// long transfer.
func BenchmarkPosting(b *testing.B) {
	pairs, local, remote := benchmarkSetup(b, 20000, 4096)
	qp, err := verbs.NewNullQP(verbs.Caps{SendDepth: 512, Pieces: 30})
	if err != nil {
		b.Fatal(err)
	}
	defer qp.DestroyNull()
	var chain [maxChain]verbs.Write
	var pieces [maxChain * 4]verbs.SGE
	limit := writeLimits{maxPieces: 30, maxWrite: maxWrite}
	queue := newSendQueue[*job](512, maxFlight, signalEvery)
	doorbells := 0
	b.ReportAllocs()
	for b.Loop() {
		stripes := split(pairs, []float64{1, 1, 1, 1}, minStripe)
		doorbells = 0
		for i := range stripes {
			c := cursor{ranges: stripes[i : i+1], whole: true, imm: uint32(i)}
			for done := false; !done; {
				room, bytes := queue.room()
				limit.maxBytes = bytes
				n, k, _, end, err := c.fill(chain[:min(room, maxChain)], pieces[:], nil, local, remote, limit)
				if err != nil {
					b.Fatal(err)
				}
				queue.posting(nil, chain[:n], pieces[:k], end)
				if _, err := qp.Post(chain[:n], pieces[:k]); err != nil {
					b.Fatal(err)
				}
				doorbells++
				done = end
				if room, _ := queue.room(); room < 2*maxChain { // the device is done with half
					for {
						if _, ok := queue.completed(chain[n-1].ID - 256); !ok {
							break
						}
					}
				}
			}
		}
	}
	b.ReportMetric(20000/float64(doorbells), "writes/doorbell")
}
