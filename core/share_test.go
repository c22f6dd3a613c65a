package core

import (
	"reflect"
	"slices"
	"strings"
	"testing"
)

func TestPartIDs(t *testing.T) {
	long := TransferID(strings.Repeat("x", MaxTransferID))
	for _, s := range []Share{{0, 1, 0}, {1, 2, 0}, {63, 64, maxSource - 1}} {
		for _, id := range []TransferID{"a", "a/1@2", "0/1@0", long} {
			part := s.Part(id)
			base, back, ok := splitPart(part)
			if !ok || base != id || back != s || !isPart(part) || isPart(id) || len(part) > MaxPartID || checkWireID(part) != nil {
				t.Errorf("%+v of %q is %q, which reads as %+v of %q (%v)", s, id, part, back, base, ok)
			}
		}
	}
	for _, bad := range []TransferID{"", "\x00", "\x000/1@0", "a\x00", "a\x000/1", "a\x000/1@", "a\x00/1@0", "a\x001/1@0", "a\x00-1/2@0", "a\x00+0/1@0",
		"a\x0000/1@0", "a\x000/1@00", "a\x000/0@0", "a\x000/65@0", "a\x000/1@65536", "a\x000/1@0\x00", "a\x000/1@0\x000/1@0", "a\x00 0/1@0", long + "x\x000/1@0"} {
		if base, s, ok := splitPart(bad); ok || checkWireID(bad) == nil {
			t.Errorf("%q reads as %+v of %q", bad, s, base)
		}
	}
}

// TestPartsOfRegions: a load of some regions is a load of all, without the others.
func TestPartsOfRegions(t *testing.T) {
	l := mustLayout(t, region("k", 0, 0x1000, 64, 64, 16), region("v", 0, 0x8000, 128, 64, 16), region("s", 1, 0x9000, 8, 8, 16), region("t", 1, 0xa000, 8, 8, 16))
	src, dst := [][]BlockID{{3, 4, 9}, {1, 2}}, [][]BlockID{{7, 8, 9}, {5, 6}}
	m := matched(t, l, l)
	plan, err := m.Pairs(Selection{Blocks: src}, Selection{Blocks: dst})
	if err != nil {
		t.Fatal(err)
	}
	for _, regions := range [][]uint32{{0}, {1, 2}, {3}, {0, 1, 2, 3}, {0, 3}} {
		want := slices.DeleteFunc(l.Segments(dst), func(s Segment) bool { return !slices.Contains(regions, s.Region) })
		if got, err := m.Segments(Selection{Blocks: dst, Regions: regions}); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("segments of %v, %v:\ngot  %v\nwant %v", regions, err, got, want)
		}
		pairs := slices.DeleteFunc(slices.Clone(plan), func(p Pair) bool { return !slices.Contains(regions, p.SrcRegion) })
		got, err := m.Pairs(Selection{Blocks: src}, Selection{Blocks: dst, Regions: regions})
		if err != nil || !reflect.DeepEqual(got, pairs) {
			t.Errorf("plan of %v, %v:\ngot  %v\nwant %v", regions, err, got, pairs)
		}
		if n := testing.AllocsPerRun(20, func() { _, _ = m.Pairs(Selection{Blocks: src}, Selection{Blocks: dst, Regions: regions}) }); n > 1 {
			t.Errorf("a plan of %v makes %v allocations", regions, n)
		}
	}
}
