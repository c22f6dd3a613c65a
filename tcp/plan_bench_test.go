package tcp

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
)

// BenchmarkPieces is transfers of blocks of which no two are adjacent, planned and sent, as
// lists of their pieces and as plans that are cut.
func BenchmarkPieces(b *testing.B) {
	for _, c := range []struct{ n, size int }{{4096, 256}, {4096, 4096}, {4096, 16384}} {
		for _, form := range []string{"list", "plan"} {
			b.Run(fmt.Sprintf("%d of %d bytes, %s", c.n, c.size, form), func(b *testing.B) {
				p, d := newSizedAgent(b, Config{}, uint32(c.n), uint64(c.size)), newSizedAgent(b, Config{}, uint32(c.n), uint64(c.size))
				if err := d.Connect("p", p.Endpoint(), p.admit(b, "d")); err != nil {
					b.Fatal(err)
				}
				until(b, "both streams are open", func() bool { return p.streams() == 2 })
				m, err := kv.NewMatch(p.layout.Shapes(), d.layout.Shapes())
				if err != nil {
					b.Fatal(err)
				}
				shuffled := func() kv.Selection {
					ids := make([]kv.BlockID, c.n)
					for i, k := range rand.Perm(c.n) {
						ids[i] = kv.BlockID(k)
					}
					return kv.Selection{Blocks: [][]kv.BlockID{ids}}
				}
				src, dst := shuffled(), shuffled()
				b.SetBytes(int64(c.n * c.size))
				b.ReportAllocs()
				for i := 0; b.Loop(); i++ {
					id := core.TransferID(fmt.Sprint(i))
					op, grant := core.WriteOp{ID: id, Peer: "d"}, []byte(nil)
					if form == "list" {
						segments, _ := m.Segments(dst)
						grant, err = d.Expect(id, "p", segments)
						op.Pairs, _ = m.Pairs(src, dst)
					} else {
						landing, _ := m.Landing(dst)
						grant, err = d.ExpectPlan(id, "p", landing)
						op.Plan, _ = m.Plan(src, dst, nil, nil)
					}
					if err != nil {
						b.Fatal(err)
					}
					op.Grant = grant
					p.Write(op)
					if o := p.sink.Wait("written", id, 1); o.Err != nil {
						b.Fatal(o.Err)
					}
				}
			})
		}
	}
}
