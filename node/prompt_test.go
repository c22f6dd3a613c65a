package node

import (
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// TestAnotherPrompt: two requests that a router has mixed up under one id are refused on
// both sides, whichever side comes first, and no byte is written.
func TestAnotherPrompt(t *testing.T) {
	leaktest.Check(t)
	p, d := open(t, testConfig(RolePrefill)), open(t, testConfig(RoleDecode))
	p.fill(1, 4, 5)
	blocks := [][]kv.BlockID{{4, 5}}
	offer := func(id core.TransferID, prompt uint64) {
		t.Helper()
		if _, err := p.Offer([]core.OfferRequest{{ID: id, Selection: kv.Selection{Blocks: blocks}, Prompt: prompt}}); err != nil {
			t.Fatal(err)
		}
	}
	load := func(id core.TransferID, prompt uint64) {
		t.Helper()
		from := core.Target{Bootstrap: p.BootstrapAddress()}
		if _, err := d.StartLoad([]core.LoadRequest{{ID: id, From: from, Selection: kv.Selection{Blocks: [][]kv.BlockID{{7, 9}}}, Prompt: prompt}}); err != nil {
			t.Fatal(err)
		}
	}
	refused := func(id core.TransferID) {
		t.Helper()
		d.want(id, core.Refused, "another prompt", "0badc0de00000007", "8000000000000001")
		p.want(id, core.Refused, "another prompt", "0badc0de00000007", "8000000000000001")
		for l := range layers {
			clean(t, l, d, 7, 9)
		}
	}
	const theirs, ours = 0x0badc0de00000007, 1<<63 + 1
	offer("offer first", ours)
	load("offer first", theirs)
	refused("offer first")

	load("load first", theirs)
	p.knows(1)
	offer("load first", ours)
	refused("load first")

	load("partial", theirs)
	p.knows(1)
	if _, err := p.OfferPartial([]core.PartialOffer{{ID: "partial", Blocks: blocks, Ready: []uint32{1}, Prompt: ours}}); err != nil {
		t.Fatal(err)
	}
	d.want("partial", core.Refused)
	offer("partial", ours)
	refused("partial")

	offer("said by one", 0)
	load("said by one", theirs)
	d.want("said by one", core.OK)
	offer("the same", ours)
	load("the same", ours)
	d.want("the same", core.OK)
	same(t, p, blocks[0], d, []kv.BlockID{7, 9})
}

// clean checks that blocks of a layer were not written.
func clean(t testing.TB, layer int, d *side, ids ...kv.BlockID) {
	t.Helper()
	for _, id := range ids {
		for _, b := range d.block(layer, id) {
			if b != 0 {
				t.Fatalf("layer %d: block %d was written", layer, id)
			}
		}
	}
}
