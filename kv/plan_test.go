package kv

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/rig/seed"
)

func mustLayout(t testing.TB, regions ...Region) *Layout {
	t.Helper()
	l, err := NewLayout(regions)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func matched(t testing.TB, src, dst *Layout) *Match {
	t.Helper()
	m, err := NewMatch(src.Shapes(), dst.Shapes())
	if err == nil {
		err = m.Whole()
	}
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestSegments(t *testing.T) {
	l := mustLayout(t,
		region("k", 0, 0x1000, 64, 64, 16),  // dense: neighbours merge
		region("v", 0, 0x8000, 128, 64, 16), // a gap after each block: they do not
		region("s", 1, 0x9000, 8, 8, 16),
	)
	for _, c := range []struct {
		name   string
		blocks [][]BlockID
		want   []Segment
	}{
		{"nothing", nil, []Segment{}},
		{"empty", [][]BlockID{{}, {}}, []Segment{}},
		{"one", [][]BlockID{{3}}, []Segment{{0, 192, 64}, {1, 384, 64}}},
		{"a run", [][]BlockID{{3, 4, 5}}, []Segment{{0, 192, 192}, {1, 384, 64}, {1, 512, 64}, {1, 640, 64}}},
		{"backwards is no run", [][]BlockID{nil, {5, 4}}, []Segment{{2, 40, 8}, {2, 32, 8}}},
		{"the same twice", [][]BlockID{nil, {5, 5, 6}}, []Segment{{2, 40, 8}, {2, 40, 16}}},
		{"two runs and a gap", [][]BlockID{nil, {0, 1, 3, 4, 5}}, []Segment{{2, 0, 16}, {2, 24, 24}}},
		{"both groups", [][]BlockID{{0}, {15}}, []Segment{{0, 0, 64}, {1, 0, 64}, {2, 120, 8}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := l.Segments(c.blocks); !reflect.DeepEqual(got, c.want) {
				t.Errorf("got  %v\nwant %v", got, c.want)
			}
		})
	}
}

func TestPlan(t *testing.T) {
	dense := mustLayout(t, region("k", 0, 0x1000, 64, 64, 16), region("s", 1, 0x9000, 8, 8, 16))
	wide := mustLayout(t, region("k", 0, 0x1000, 256, 64, 16), region("s", 1, 0x9000, 8, 8, 16))
	for _, c := range []struct {
		name     string
		src, dst *Layout
		from, to [][]BlockID
		want     []Pair
	}{
		{"nothing", dense, dense, nil, nil, []Pair{}},
		{"runs on both sides", dense, dense, [][]BlockID{{1, 2, 3}}, [][]BlockID{{7, 8, 9}}, []Pair{{0, 0, 64, 448, 192}}},
		{"run at the source only", dense, dense, [][]BlockID{{1, 2}}, [][]BlockID{{7, 5}}, []Pair{{0, 0, 64, 448, 64}, {0, 0, 128, 320, 64}}},
		{"run at the destination only", dense, dense, [][]BlockID{{2, 1}}, [][]BlockID{{7, 8}}, []Pair{{0, 0, 128, 448, 64}, {0, 0, 64, 512, 64}}},
		{"run broken in the middle", dense, dense, [][]BlockID{{1, 2, 3, 4}}, [][]BlockID{{4, 5, 7, 8}}, []Pair{{0, 0, 64, 256, 128}, {0, 0, 192, 448, 128}}},
		{"gaps at the source", wide, dense, [][]BlockID{{1, 2}}, [][]BlockID{{1, 2}}, []Pair{{0, 0, 256, 64, 64}, {0, 0, 512, 128, 64}}},
		{"gaps at the destination", dense, wide, [][]BlockID{{1, 2}}, [][]BlockID{{1, 2}}, []Pair{{0, 0, 64, 256, 64}, {0, 0, 128, 512, 64}}},
		{"gaps on both", wide, wide, [][]BlockID{{1, 2}}, [][]BlockID{{1, 2}}, []Pair{{0, 0, 256, 256, 64}, {0, 0, 512, 512, 64}}},
		{"second group only", dense, wide, [][]BlockID{{}, {0, 1}}, [][]BlockID{{}, {4, 5}}, []Pair{{1, 1, 0, 32, 16}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := c.src.Plan(c.from, c.dst.Shapes(), c.to)
			if err != nil || !reflect.DeepEqual(got, c.want) {
				t.Errorf("got  %v, %v\nwant %v", got, err, c.want)
			}
		})
	}
	for _, c := range []struct {
		name     string
		from, to [][]BlockID
		want     []string
	}{
		{"groups", [][]BlockID{{1}}, [][]BlockID{{1}, {1}}, []string{"1 groups at the prefill engine", "2 at the decode engine"}},
		{"lengths", [][]BlockID{{1}, {1}}, [][]BlockID{{1}, {1, 2}}, []string{"group 1", "0 to 2", "0 to 1"}},
	} {
		t.Run("unequal "+c.name, func(t *testing.T) {
			_, err := dense.Plan(c.from, dense.Shapes(), c.to)
			for _, part := range c.want {
				if err == nil || !strings.Contains(err.Error(), part) {
					t.Errorf("error %v does not say %q", err, part)
				}
			}
		})
	}
}

// A byte of a transfer, named as the naive model does.
type place struct {
	region uint32
	offset uint64
}

// linear is the transfer's order written down byte by byte.
func linear(l *Layout, blocks [][]BlockID) (out []place) {
	for i, r := range l.Regions {
		if int(r.Group) >= len(blocks) {
			continue
		}
		for _, id := range blocks[r.Group] {
			for o := range r.BlockBytes {
				out = append(out, place{uint32(i), uint64(id)*r.BlockStride + o})
			}
		}
	}
	return out
}

// checkOrder compares Segments and Plan with the naive model, and checks that all
// mergeable runs are merged.
func checkOrder(t *testing.T, l, peer *Layout, src, dst [][]BlockID) {
	t.Helper()
	var got []place
	segs, err := matched(t, l, l).Segments(Selection{Blocks: src})
	if err != nil {
		t.Fatal(err)
	}
	for i, s := range segs {
		for o := range s.Length {
			got = append(got, place{s.Region, s.Offset + o})
		}
		if i > 0 && segs[i-1].Region == s.Region && segs[i-1].Offset+segs[i-1].Length == s.Offset {
			t.Errorf("segments %d and %d are adjacent: %v", i-1, i, segs)
		}
	}
	want, wantPeer := linear(l, src), linear(peer, dst)
	if !reflect.DeepEqual(got, want) {
		t.Fatalf("Segments(%v) of %v differ from the naive model", src, l.Regions)
	}
	pairs, err := l.Plan(src, peer.Shapes(), dst)
	if err != nil {
		t.Fatal(err)
	}
	var from, to []place
	for i, p := range pairs {
		for o := range p.Length {
			from = append(from, place{p.SrcRegion, p.SrcOffset + o})
			to = append(to, place{p.DstRegion, p.DstOffset + o})
		}
		if i > 0 && pairs[i-1].SrcRegion == p.SrcRegion && pairs[i-1].SrcOffset+pairs[i-1].Length == p.SrcOffset &&
			pairs[i-1].DstOffset+pairs[i-1].Length == p.DstOffset {
			t.Errorf("pairs %d and %d are adjacent on both sides: %v", i-1, i, pairs)
		}
	}
	if !reflect.DeepEqual(from, want) || !reflect.DeepEqual(to, wantPeer) {
		t.Fatalf("Plan(%v, %v) differs from the naive model", src, dst)
	}
	if uint64(len(want)) != l.Bytes(src) {
		t.Errorf("Bytes(%v) = %d, but the model has %d", src, l.Bytes(src), len(want))
	}
}

func TestOrderAgainstNaive(t *testing.T) {
	rnd := seed.Rand(t)
	for range 2000 {
		groups := 1 + rnd.IntN(3)
		var a, b []Region
		base := uint64(4096)
		for i := range groups + rnd.IntN(4) {
			g := uint32(i)
			if i >= groups {
				g = uint32(rnd.IntN(groups))
			}
			bytes := uint64(4 * (1 + rnd.IntN(5)))
			stride := func() uint64 { return bytes + uint64(4*max(0, rnd.IntN(6)-3)) }
			a = append(a, region(fmt.Sprint(i), g, base, stride(), bytes, 24))
			b = append(b, region(fmt.Sprint(i), g, base, stride(), bytes, 24))
			base += 4096
		}
		l, peer := mustLayout(t, a...), mustLayout(t, b...)
		src, dst := make([][]BlockID, rnd.IntN(groups+1)), [][]BlockID{}
		for g := range src {
			n := rnd.IntN(20)
			src[g] = someBlocks(rnd, n, 24)
			dst = append(dst, someBlocks(rnd, n, 24))
		}
		checkOrder(t, l, peer, src, dst)
	}
}

// someBlocks has runs and jumps.
func someBlocks(rnd *rand.Rand, n, limit int) []BlockID {
	out := make([]BlockID, n)
	for i := range out {
		out[i] = BlockID(rnd.IntN(limit))
		if i > 0 && rnd.IntN(3) > 0 {
			out[i] = (out[i-1] + 1) % BlockID(limit)
		}
	}
	return out
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

// FuzzLayout builds a layout and block lists from bytes. Nothing may panic, and an
// accepted layout must plan as the naive model does.
func FuzzLayout(f *testing.F) {
	entry := func(base, stride, bytes uint64, blocks, group uint32) []byte {
		b := binary.LittleEndian.AppendUint64(nil, base)
		b = binary.LittleEndian.AppendUint64(b, stride)
		b = binary.LittleEndian.AppendUint64(b, bytes)
		b = binary.LittleEndian.AppendUint32(b, blocks)
		return binary.LittleEndian.AppendUint32(b, group)
	}
	f.Add(entry(4096, 64, 64, 16, 0), []byte{1, 2, 3}, []byte{3, 2, 1})
	f.Add(append(entry(4096, 64, 32, 16, 0), entry(4128, 64, 32, 16, 0)...), []byte{0, 15, 4}, []byte{5, 6, 7})
	f.Add(append(entry(4096, 8, 8, 255, 0), entry(4096, 16, 16, 100, 1)...), []byte{9, 0x80, 3}, []byte{4, 0x80, 5})
	f.Add(entry(4096, 1<<40, 4, 1<<24+1, 0), []byte{1}, []byte{1})
	f.Add(entry(1<<63, 1<<40, 1<<39, 1<<22, 0), []byte{1}, []byte{200})
	f.Add(entry(^uint64(0)-3, 4, 4, 1, 0), []byte{0}, []byte{0})
	f.Fuzz(func(t *testing.T, regions, from, to []byte) {
		var list []Region
		for ; len(regions) >= 32 && len(list) < 20; regions = regions[32:] {
			u64 := binary.LittleEndian.Uint64
			u32 := binary.LittleEndian.Uint32
			list = append(list, region(fmt.Sprint(len(list)), u32(regions[28:]), u64(regions), u64(regions[8:]), u64(regions[16:]), u32(regions[24:])))
		}
		l, err := NewLayout(list)
		if err != nil {
			return
		}
		for _, r := range l.Regions {
			if last := r.Base + r.Extent() - 1; last < r.Base || r.Extent() < r.BlockBytes {
				t.Fatalf("%v ends before it begins", &r)
			}
		}
		src, dst := fuzzBlocks(from), fuzzBlocks(to)
		if l.CheckBlocks(src) != nil || l.CheckBlocks(dst) != nil {
			return
		}
		if _, err := l.Plan(src, l.Shapes(), dst); err != nil || !slices.EqualFunc(src, dst, func(a, b []BlockID) bool { return len(a) == len(b) }) {
			return
		}
		if l.Bytes(src) <= 1<<16 {
			checkOrder(t, l, l, src, dst)
		}
	})
}

// fuzzBlocks: a byte is an id, 0x80 starts the next group.
func fuzzBlocks(b []byte) [][]BlockID {
	out := [][]BlockID{nil}
	for _, v := range b {
		if v == 0x80 {
			out = append(out, nil)
			continue
		}
		out[len(out)-1] = append(out[len(out)-1], BlockID(v))
	}
	return out
}

// BenchmarkPlan plans 20,000 (region, block) pairs, 40 regions of 500 blocks, of
// equal geometry.
func BenchmarkPlan(b *testing.B) {
	const regions, blocks, limit = 40, 500, 4000
	var list []Region
	for i := range regions {
		list = append(list, region(fmt.Sprint("layer", i), 0, 1<<40+uint64(i)<<30, 16<<10, 16<<10, limit))
	}
	l := mustLayout(b, list...)
	m := matched(b, l, l)
	rnd := rand.New(rand.NewPCG(1, 2))
	some := func() [][]BlockID {
		ids := make([]BlockID, blocks)
		for i, p := range rnd.Perm(limit)[:blocks] {
			ids[i] = BlockID(p)
		}
		return [][]BlockID{ids}
	}
	run := make([]BlockID, blocks)
	for i := range run {
		run[i] = BlockID(100 + i)
	}
	for _, c := range []struct {
		name     string
		src, dst [][]BlockID
	}{{"scattered", some(), some()}, {"contiguous", [][]BlockID{run}, [][]BlockID{run}}} {
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := m.Pairs(Selection{Blocks: c.src}, Selection{Blocks: c.dst}); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run("segments "+c.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := m.Segments(Selection{Blocks: c.dst}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
