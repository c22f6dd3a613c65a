package half

import (
	"strings"
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
)

// TestPartialOfferOfARing: the entries of a partial offer follow those that were offered before.
func TestPartialOfferOfARing(t *testing.T) {
	l, err := kv.NewLayout([]kv.Region{{Name: "k", Base: 1 << 20, BlockStride: 64, BlockBytes: 64, NumBlocks: 12, IndexKind: kv.Ring(6)}})
	if err != nil {
		t.Fatal(err)
	}
	held := &Offer{held: kv.Selection{First: []uint32{10}, Blocks: [][]kv.BlockID{{10, 11}}}}
	h := New(l, core.Options{}, nil)
	for _, c := range []struct {
		ids  []kv.BlockID
		says []string // nil: taken
	}{
		{[]kv.BlockID{6, 7}, nil},
		{[]kv.BlockID{0}, []string{"id 0", "entry 0 of ring 1"}},
		{[]kv.BlockID{6, 7, 8, 9, 10}, []string{"7 entries", "rings have 6"}},
	} {
		err := h.CheckPartialOffer(held, &core.PartialOffer{Blocks: [][]kv.BlockID{c.ids}})
		if (err == nil) != (c.says == nil) {
			t.Errorf("%v: error %v, want one with %q", c.ids, err, c.says)
			continue
		}
		for _, part := range c.says {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("%v: error %q does not say %q", c.ids, err, part)
			}
		}
	}
}
