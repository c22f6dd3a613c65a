package node

import (
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/wire"
)

// shapedSide is an agent whose two layers have blocks of items that name their
// token, head and layer.
type shapedSide struct {
	*side
	tokens, first, end uint32
	hnd                bool
}

const (
	itemBytes  = 8
	modelHeads = 6
	fewBlocks  = 8
)

func openShaped(t *testing.T, role string, tokens, first, end uint32, hnd bool) *shapedSide {
	t.Helper()
	a, err := Open(testConfig(role), Options{})
	if err != nil {
		t.Fatal(err)
	}
	s := &shapedSide{side: &side{Agent: a, t: t, seen: map[core.TransferID]core.Report{}}, tokens: tokens, first: first, end: end, hnd: hnd}
	t.Cleanup(func() { _ = a.Close() })
	bytes := uint64(tokens) * uint64(end-first) * itemBytes
	s.cache = make([]byte, 2*fewBlocks*bytes)
	var list []kv.Region
	for layer := range uint64(2) {
		r := kv.Region{Name: fmt.Sprint("layer.", layer), Base: uint64(uintptr(unsafe.Pointer(&s.cache[layer*fewBlocks*bytes]))), BlockStride: bytes, BlockBytes: bytes,
			NumBlocks: fewBlocks, Tokens: tokens, Heads: end - first, FirstHead: first, TotalHeads: modelHeads}
		if r.TokenStride, r.HeadStride = uint64(r.Heads)*itemBytes, itemBytes; hnd {
			r.TokenStride, r.HeadStride = itemBytes, uint64(tokens)*itemBytes
		}
		list = append(list, r)
	}
	if hnd { // their order does not matter
		slices.Reverse(list)
	}
	if err := a.RegisterKVCaches(list); err != nil {
		t.Fatal(err)
	}
	return s
}

// item is the memory of one item of a block.
func (s *shapedSide) item(layer int, id kv.BlockID, token, head uint32) []byte {
	heads := s.end - s.first
	n := uint64(token)*uint64(heads) + uint64(head-s.first)
	if s.hnd {
		n = uint64(head-s.first)*uint64(s.tokens) + uint64(token)
	}
	off := (uint64(layer*fewBlocks+int(id))*uint64(s.tokens)*uint64(heads) + n) * itemBytes
	return s.cache[off : off+itemBytes]
}

func word(salt, layer int, pos, head uint32) uint64 {
	return uint64(salt)<<48 | uint64(layer+1)<<40 | uint64(head)<<32 | uint64(pos) + 1
}

func (s *shapedSide) paint(salt int, ids ...kv.BlockID) {
	for layer := range 2 {
		for i, id := range ids {
			for token := range s.tokens {
				for head := s.first; head < s.end; head++ {
					binary.LittleEndian.PutUint64(s.item(layer, id, token, head), word(salt, layer, uint32(i)*s.tokens+token, head))
				}
			}
		}
	}
}

// holds: the blocks, from position first on, have the prompt's items up to end and
// nothing beyond.
func (s *shapedSide) holds(salt int, first, end uint32, ids ...kv.BlockID) {
	s.t.Helper()
	for layer := range 2 {
		for i, id := range ids {
			for token := range s.tokens {
				for head := s.first; head < s.end; head++ {
					pos, want := (first+uint32(i))*s.tokens+token, uint64(0)
					if pos < end {
						want = word(salt, layer, pos, head)
					}
					if got := binary.LittleEndian.Uint64(s.item(layer, id, token, head)); got != want {
						s.t.Fatalf("layer %d, block %d, token %d, head %d: %#x, want %#x", layer, id, pos, head, got, want)
					}
				}
			}
		}
	}
}

// TestUnequalGeometry: agents that load from each other, with blocks of 16 and of 32
// tokens, in other orders.
func TestUnequalGeometry(t *testing.T) {
	leaktest.Check(t)
	a, b := openShaped(t, RoleBoth, 16, 0, modelHeads, false), openShaped(t, RoleBoth, 32, 0, modelHeads, true)
	for i := range 2 { // each has then met the other as both
		a.paint(1+i, 1, 3, 2)
		id := core.TransferID(fmt.Sprint("there-", i))
		a.offer(id, 1, 3, 2)
		if _, err := b.StartLoad([]core.LoadRequest{{ID: id, From: core.Target{Bootstrap: a.BootstrapAddress()}, Selection: kv.Selection{Blocks: [][]kv.BlockID{{7, 5}}, Tokens: []uint32{40}}}}); err != nil {
			t.Fatal(err)
		}
		if r := b.want(id, core.OK); r.Stats.Bytes != 2*48*modelHeads*itemBytes || r.Blocks != 2 {
			t.Errorf("the load's report: %+v", r)
		}
		a.want(id, core.OK)
		b.holds(1+i, 0, 48, 7, 5)

		b.paint(11+i, 2, 3)
		id = core.TransferID(fmt.Sprint("back-", i))
		if _, err := b.Offer([]core.OfferRequest{{ID: id, Selection: kv.Selection{Blocks: [][]kv.BlockID{{2, 3}}}}}); err != nil {
			t.Fatal(err)
		}
		if _, err := a.StartLoad([]core.LoadRequest{{ID: id, From: core.Target{Bootstrap: b.BootstrapAddress()}, Selection: kv.Selection{First: []uint32{1}, Blocks: [][]kv.BlockID{{4, 6}}, Tokens: []uint32{48}}}}); err != nil {
			t.Fatal(err)
		}
		a.want(id, core.OK)
		b.want(id, core.OK)
		a.holds(11+i, 1, 48, 4, 6)
	}
}

// TestHeadsOfOne: a decode engine that has some of the heads gets those. An engine that
// wants more heads is refused by name, and so is an offer's missing begin.
func TestHeadsOfOne(t *testing.T) {
	leaktest.Check(t)
	p, d := openShaped(t, RolePrefill, 16, 0, 4, true), openShaped(t, RoleDecode, 16, 1, 3, false)
	more := openShaped(t, RoleDecode, 16, 2, modelHeads, false)
	p.paint(1, 1, 3)
	p.offer("t", 1, 3)
	d.load("t", p.BootstrapAddress(), 5, 2)
	d.want("t", core.OK)
	p.want("t", core.OK)
	d.holds(1, 0, 32, 5, 2)
	more.load("u", p.BootstrapAddress(), 5)
	more.want("u", core.Refused, "layer.", "2 of 4 heads at the prefill engine", "heads 2 to 5 of 6")
	if _, err := p.Offer([]core.OfferRequest{{ID: "v", Selection: kv.Selection{First: []uint32{2}, Blocks: [][]kv.BlockID{{1}}}}}); err != nil {
		t.Fatal(err)
	}
	d.load("v", p.BootstrapAddress(), 6)
	d.want("v", core.Refused, "blocks 0 to 1 of group 0", "begins with block 2")
	p.want("v", core.Refused, "begins with block 2")
}

// TestUnequalBlocksAreNamed: a cache that is packed in an order of its own has no
// tokens to match, and the operator has set none of its lengths but this.
func TestUnequalBlocksAreNamed(t *testing.T) {
	leaktest.Check(t)
	packed := func(tokens uint32) *wire.Agent {
		item := 64 * uint64(tokens)
		a := &wire.Agent{Version: wire.Version, TPSize: 1, PPSize: 1, BlockTokens: int(tokens)}
		describeShapes(a, []kv.Shape{{Name: "layer.0", BlockStride: 2 * item, BlockBytes: 2 * item, NumBlocks: 4, Tokens: 1, Heads: 2, TotalHeads: 2,
			TokenStride: 2 * item, HeadStride: item}})
		return a
	}
	if _, err := compatible(packed(128), packed(128), nil); err != nil {
		t.Fatal(err)
	}
	_, err := compatible(packed(128), packed(96), nil)
	if err == nil || !strings.HasPrefix(err.Error(), "a block has 128 tokens at the prefill engine, 96 at the decode engine: layouts differ: ") {
		t.Error(err)
	}
}

// TestSettingsThatDoNotFitAreNamed: the error has both values. A setting that one side
// leaves out is not held against the other.
func TestSettingsThatDoNotFitAreNamed(t *testing.T) {
	leaktest.Check(t)
	agent := func(model, dtype string) *wire.Agent {
		a := &wire.Agent{Version: wire.Version, TPSize: 1, PPSize: 1, Model: model, DType: dtype}
		describeShapes(a, []kv.Shape{{Name: "layer.0", BlockStride: 64, BlockBytes: 64, NumBlocks: 4}})
		return a
	}
	older := agent("llama", "bfloat16")
	older.Version--
	for _, c := range []struct {
		d    *wire.Agent
		says string
	}{
		{agent("llama", "bfloat16"), ""},
		{agent("", ""), ""},
		{agent("qwen", "bfloat16"), `model "llama" at the prefill engine, "qwen" at the decode engine`},
		{agent("llama", "float8_e4m3fn"), `dtype "bfloat16" at the prefill engine, "float8_e4m3fn" at the decode engine: start both with the same`},
		{older, fmt.Sprintf("wire version %d at the prefill engine, %d at the decode engine: run the same kvconn on both", wire.Version, wire.Version-1)},
	} {
		_, err := compatible(agent("llama", "bfloat16"), c.d, nil)
		if got := fmt.Sprint(err); c.says == "" && err != nil || c.says != "" && got != c.says {
			t.Errorf("%q, %q, version %d: %s, want %q", c.d.Model, c.d.DType, c.d.Version, got, c.says)
		}
	}
}

// What ids name travels with a shape, so that two agents that mean other things by them
// refuse each other.
func TestIndexIsCompared(t *testing.T) {
	of := func(x kv.IndexKind) *wire.Agent {
		a := &wire.Agent{Version: wire.Version, ID: "a"}
		describeShapes(a, []kv.Shape{{Name: "tail", BlockStride: 64, BlockBytes: 64, NumBlocks: 12, IndexKind: x}})
		return a
	}
	for _, x := range []kv.IndexKind{kv.IndexBlock, kv.IndexSlot, kv.Ring(6)} {
		if _, err := compatible(of(x), of(x), nil); err != nil {
			t.Error(err)
		}
	}
	_, err := compatible(of(kv.Ring(6)), of(kv.IndexSlot), nil)
	if err == nil || !strings.Contains(err.Error(), `region "tail" of group 0 has opaque entries of rings of 6 of 64 bytes at the prefill engine, opaque slots of 64 bytes at the decode engine`) {
		t.Error(err)
	}
}
