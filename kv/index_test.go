package kv

import (
	"strings"
	"testing"
)

// ofIndex is a layout of one region with 12 blocks.
func ofIndex(t *testing.T, x IndexKind) *Layout {
	t.Helper()
	l, err := NewLayout([]Region{{Name: "k", Base: 1 << 20, BlockStride: 64, BlockBytes: 64, NumBlocks: 12, IndexKind: x}})
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func wantError(t *testing.T, err error, parts ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("no error, want one with %q", parts)
	}
	for _, p := range parts {
		if !strings.Contains(err.Error(), p) {
			t.Errorf("error %q does not say %q", err, p)
		}
	}
}

// Two sides whose ids name other things must not exchange a byte, though their blocks are
// as long.
func TestIndicesMustBeTheSame(t *testing.T) {
	of := map[string]IndexKind{"blocks": IndexBlock, "rows": IndexRow, "slots": IndexSlot, "entries of rings of 6": Ring(6), "entries of rings of 4": Ring(4)}
	for p, x := range of {
		for d, y := range of {
			_, err := NewMatch(ofIndex(t, x).Shapes(), ofIndex(t, y).Shapes())
			if x == y && err != nil {
				t.Errorf("%s with %s: %v", p, d, err)
			}
			if x != y {
				wantError(t, err, `region "k"`, p+" of 64 bytes at the prefill engine", d+" of 64 bytes at the decode engine")
			}
		}
	}
}

func TestIndexOfARegion(t *testing.T) {
	region := func(name string, x IndexKind, tokens uint32) Region {
		r := Region{Name: name, Base: 1 << 20, BlockStride: 64, BlockBytes: 64, NumBlocks: 12, IndexKind: x}
		if tokens > 0 {
			r.Tokens, r.Heads, r.TokenStride, r.HeadStride = tokens, 1, uint64(64/tokens), uint64(64/tokens)
		}
		return r
	}
	second := region("b", IndexSlot, 0)
	second.Base += 1 << 10
	for _, c := range []struct {
		regions []Region
		says    []string
	}{
		{[]Region{region("a", 4, 0)}, []string{`region "a"`, "index 0x4"}},
		{[]Region{region("a", IndexRing, 0)}, []string{`region "a"`, "index 0x3"}},
		{[]Region{region("a", Ring(5), 0)}, []string{`region "a"`, "rings of 5", "12 entries"}},
		{[]Region{region("a", Ring(4), 4)}, []string{`region "a"`, "rings of 4", "4 tokens"}},
		{[]Region{region("a", IndexRow, 0), second}, []string{`"a"`, "name rows", `"b"`, "name slots"}},
	} {
		_, err := NewLayout(c.regions)
		wantError(t, err, c.says...)
	}
	for _, x := range []IndexKind{IndexRow, IndexSlot, Ring(4), Ring(12)} {
		if _, err := NewLayout([]Region{region("a", x, 1)}); err != nil {
			t.Error(err)
		}
	}
}

// A row or slot of other tokens is another thing, also where blocks of such numbers fit.
func TestRowsHaveEqualTokens(t *testing.T) {
	shape := func(tokens uint32) []Shape {
		return []Shape{{Name: "k", BlockStride: 64, BlockBytes: 16 * uint64(tokens), NumBlocks: 4, Tokens: tokens, Heads: 1, TotalHeads: 1, TokenStride: 16, HeadStride: 16, IndexKind: IndexRow}}
	}
	_, err := NewMatch(shape(2), shape(4))
	wantError(t, err, "rows of 2 tokens", "rows of 4 tokens")
}

func TestEntriesOfARing(t *testing.T) {
	l := ofIndex(t, Ring(6))
	for _, c := range []struct {
		first uint32
		ids   []BlockID
		says  []string // nil: taken
	}{
		{3, []BlockID{3, 4, 5}, nil},
		{10, []BlockID{4, 5, 0, 1}, nil}, // it wraps
		{10, []BlockID{10, 11, 6, 7}, nil},
		{6, []BlockID{0, 1, 2, 3, 4, 5}, nil},
		{10, []BlockID{4, 5, 6}, []string{"id 6", "entry 0 of ring 1", "position 12", "entry 0 of ring 0", "rings of 6"}}, // it should wrap
		{9, []BlockID{4, 5}, []string{"id 4", "entry 4 of ring 0", "position 9", "entry 3 of ring 0"}},
		{0, []BlockID{0, 2}, []string{"id 2", "entry 2 of ring 0", "position 1", "entry 1 of ring 0"}},
		{0, []BlockID{0, 1, 2, 3, 4, 5, 0}, []string{"7 entries", "rings have 6"}},
		{0, []BlockID{12}, []string{"block id 12", "has 12 blocks"}},
	} {
		s := Selection{First: []uint32{c.first}, Blocks: [][]BlockID{c.ids}}
		if err := s.Check(l); c.says != nil {
			wantError(t, err, c.says...)
		} else if err != nil {
			t.Errorf("%d, %v: %v", c.first, c.ids, err)
		}
	}
}
