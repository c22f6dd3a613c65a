package tcp

import (
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
)

// TestRunsCountOnce: the pieces of a plan count once as segments of a transfer, also if they are cut again.
func TestRunsCountOnce(t *testing.T) {
	const blocks, block = 4096, 1024
	for _, slots := range []Mover{nil, newFewSlots(32, 512<<10)} {
		cfg := Config{Mover: slots}
		p, d := newSizedAgent(t, cfg, blocks, block), newSizedAgent(t, Config{Streams: 1}, blocks, block)
		mustBe(t, d.Connect("p", p.Endpoint(), p.admit(t, "d")))
		match, err := kv.NewMatch(p.layout.Shapes(), d.layout.Shapes())
		mustBe(t, err)
		var src, dst []kv.BlockID // of which no two are neighbours
		for i := range kv.BlockID(blocks / 2) {
			src, dst = append(src, 2*i), append(dst, blocks-1-2*i)
		}
		to, err := match.Landing(kv.Selection{Blocks: [][]kv.BlockID{dst}})
		mustBe(t, err)
		grant, err := d.ExpectPlan("t", "p", to)
		mustBe(t, err)
		op := core.WriteOp{ID: "t", Peer: "d", Grant: grant}
		op.Plan, err = match.Plan(kv.Selection{Blocks: [][]kv.BlockID{src}}, kv.Selection{Blocks: [][]kv.BlockID{dst}}, nil, nil)
		mustBe(t, err)
		p.Write(op)
		if o := p.sink.Wait("written", "t", 1); o.Err != nil || o.Stats.Segments != blocks/2 {
			t.Errorf("%v, %d segments, want %d", o.Err, o.Stats.Segments, blocks/2)
		}
	}
}

// TestRunsCutAgain: a plan that is cut from its begin again has no more runs than before.
func TestRunsCutAgain(t *testing.T) {
	const blocks, block = 4 * maxVector, 8
	p := newSizedAgent(t, Config{}, blocks, block)
	match, err := kv.NewMatch(p.layout.Shapes(), p.layout.Shapes())
	mustBe(t, err)
	ids := make([]kv.BlockID, blocks/2)
	for i := range ids {
		ids[i] = kv.BlockID(2 * i)
	}
	some := kv.Selection{Blocks: [][]kv.BlockID{ids}}
	plan, err := match.Plan(some, some, nil, nil)
	mustBe(t, err)
	g := given{layout: p.layout}
	for _, s := range stretchesOf(nil, p.layout, &core.WriteOp{Plan: plan}) {
		g.add(&s)
	}
	const total = blocks / 2 * block
	for _, from := range []uint64{0, total / 3, 0} {
		for at := from; at < total; {
			_, n := g.fill(make([]iovec, 0, 100), at, total-at)
			at += n
		}
		if g.runs != blocks/2 {
			t.Errorf("%d runs, want %d", g.runs, blocks/2)
		}
	}
}
