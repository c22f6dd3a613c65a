package core

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
)

// shaped gives a region its geometry: heads from first up to end of total.
func shaped(r Region, order string, tokens, first, end, total uint32) Region {
	r.Tokens, r.Heads, r.FirstHead, r.TotalHeads = tokens, end-first, first, total
	item := r.BlockBytes / uint64(tokens) / uint64(r.Heads)
	r.TokenStride, r.HeadStride = uint64(r.Heads)*item, item
	if order == "HND" {
		r.TokenStride, r.HeadStride = item, uint64(tokens)*item
	}
	return r
}

// cell is RegionAlign bytes of memory, named by the region and their place in it.
type cell struct {
	region uint32
	offset uint64
}

// label is a cell's content: a part of the item of a token and head of a cache.
type label struct {
	group       uint32
	name        string
	token       uint64 // position in the prompt; of opaque blocks the block's
	head        uint32
	part        uint64
	opaqueBlock bool
}

// eachCell calls f for all cells of listed blocks, whatever order they have.
func eachCell(shapes []Shape, blocks [][]BlockID, first []uint32, f func(cell, label)) {
	for i := range shapes {
		s := &shapes[i]
		s.complete()
		if int(s.Group) >= len(blocks) {
			continue
		}
		for k, id := range blocks[s.Group] {
			pos, begin := uint64(at(first, int(s.Group)))+uint64(k), uint64(id)*s.BlockStride
			if s.Tokens == 0 {
				for o := uint64(0); o < s.BlockBytes; o += RegionAlign {
					f(cell{uint32(i), begin + o}, label{s.Group, s.Name, pos, 0, o, true})
				}
				continue
			}
			for t := range uint64(s.Tokens) {
				for h := range s.Heads {
					for o := uint64(0); o < s.ItemBytes(); o += RegionAlign {
						f(cell{uint32(i), begin + t*s.TokenStride + uint64(h)*s.HeadStride + o}, label{s.Group, s.Name, pos*uint64(s.Tokens) + t, s.FirstHead + h, o, false})
					}
				}
			}
		}
	}
}

// units is how many tokens of a group are copied: whole units of the smaller
// blocks, up to the end of the prompt.
func units(src, dst []Shape, group uint32, tokens uint64) uint64 {
	unit := uint64(0)
	for _, list := range [][]Shape{src, dst} {
		for _, s := range list {
			if s.Group == group && s.Tokens != 0 && (unit == 0 || uint64(s.Tokens) < unit) {
				unit = uint64(s.Tokens)
			}
		}
	}
	if tokens == 0 || unit == 0 {
		return ^uint64(0)
	}
	return (tokens + unit - 1) / unit * unit
}

// checkMatch copies P's blocks by Pairs and looks at each cell of D: it holds what it
// should, and nothing else was written. Segments are the pairs' other ends in the same
// order.
func checkMatch(t testing.TB, m *Match, src, dst []Shape, regions []uint32, from [][]BlockID, fromFirst []uint32, to [][]BlockID, toFirst, tokens []uint32) {
	t.Helper()
	pairs, err := m.Pairs(Selection{First: fromFirst, Blocks: from}, Selection{First: toFirst, Blocks: to, Tokens: tokens, Regions: regions})
	if err != nil {
		t.Fatalf("no plan: %v", err)
	}
	segments, err := m.Segments(Selection{First: toFirst, Blocks: to, Tokens: tokens, Regions: regions})
	if err != nil {
		t.Fatalf("no segments: %v", err)
	}
	holds, has := map[cell]label{}, map[label]bool{}
	eachCell(src, from, fromFirst, func(c cell, l label) { holds[c] = l; has[l] = true })
	lands := map[cell]label{}
	var order, want []cell
	for i, p := range pairs {
		for o := uint64(0); o < p.Length; o += RegionAlign {
			s, d := cell{p.SrcRegion, p.SrcOffset + o}, cell{p.DstRegion, p.DstOffset + o}
			l, ok := holds[s]
			if _, twice := lands[d]; !ok || twice {
				t.Fatalf("%+v reads %v of P (in its blocks: %v) into %v of D (written before: %v)", p, s, ok, d, twice)
			}
			lands[d] = l
			order = append(order, d)
		}
		if i > 0 && pairs[i-1].SrcRegion == p.SrcRegion && pairs[i-1].DstRegion == p.DstRegion &&
			pairs[i-1].SrcOffset+pairs[i-1].Length == p.SrcOffset && pairs[i-1].DstOffset+pairs[i-1].Length == p.DstOffset {
			t.Fatalf("pairs %d and %d are adjacent on both sides", i-1, i)
		}
	}
	for i, s := range segments {
		for o := uint64(0); o < s.Length; o += RegionAlign {
			want = append(want, cell{s.Region, s.Offset + o})
		}
		if i > 0 && segments[i-1].Region == s.Region && segments[i-1].Offset+segments[i-1].Length == s.Offset && sources(m, s.Region) == 1 {
			t.Fatalf("segments %d and %d are adjacent", i-1, i)
		}
	}
	if !slices.Equal(order, want) {
		t.Fatalf("P sends in another order, or another number of bytes, than D expects: %d cells, %d", len(order), len(want))
	}
	checkPairsBetween(t, m, src, pairs, regions, from, fromFirst, to, toFirst, tokens)
	eachCell(dst, to, toFirst, func(c cell, l label) {
		got, written := lands[c]
		delete(lands, c)
		wanted := has[l] && (regions == nil || slices.Contains(regions, c.region)) &&
			(l.opaqueBlock || l.token < units(src, dst, l.group, uint64(at(tokens, int(l.group)))))
		if written != wanted || written && got != l {
			t.Fatalf("D's cell %+v of %+v: written %v with %+v, want %v", c, l, written, got, wanted)
		}
	})
	for c := range lands {
		t.Fatalf("D's cell %+v, outside of the load, is written", c)
	}
}

// checkPairsBetween: while regions become ready, in any order and at any pace,
// PairsBetween gives each byte of Pairs once and at its position. No block goes before it
// is ready.
func checkPairsBetween(t testing.TB, m *Match, src []Shape, pairs []Pair, regions []uint32, from [][]BlockID, fromFirst []uint32, to [][]BlockID, toFirst, tokens []uint32) {
	t.Helper()
	type move struct{ src, dst cell }
	var want []move
	for _, p := range pairs {
		for o := uint64(0); o < p.Length; o += RegionAlign {
			want = append(want, move{cell{p.SrcRegion, p.SrcOffset + o}, cell{p.DstRegion, p.DstOffset + o}})
		}
	}
	if n := m.Bytes(Selection{First: toFirst, Blocks: to, Tokens: tokens, Regions: regions}); n != uint64(len(want))*RegionAlign {
		t.Fatalf("the load has %d bytes, its plan %d", n, len(want)*RegionAlign)
	}
	rnd := rand.New(rand.NewPCG(uint64(len(want)), uint64(len(src))))
	got := make([]move, len(want))
	var begin []uint32
	for done := false; !done; {
		end := make([]uint32, len(src))
		for r := range end {
			end[r] = at(begin, r) + uint32(rnd.IntN(3)*rnd.IntN(3))
		}
		if done = rnd.IntN(6) == 0; done {
			end = nil
		}
		part, extents, err := m.PairsBetween(Selection{First: fromFirst, Blocks: from}, Selection{First: toFirst, Blocks: to, Tokens: tokens, Regions: regions}, begin, end)
		if err != nil {
			t.Fatalf("no plan of %v to %v: %v", begin, end, err)
		}
		begin = end
		for _, p := range part {
			of := src[p.SrcRegion]
			for b := p.SrcOffset / of.BlockStride; end != nil && b*of.BlockStride < p.SrcOffset+p.Length; b++ {
				if n := at(fromFirst, int(of.Group)) + uint32(slices.Index(from[of.Group], BlockID(b))); n >= end[p.SrcRegion] {
					t.Fatalf("%+v is block %d of the prompt, ready are %d", p, n, end[p.SrcRegion])
				}
			}
		}
		for _, e := range extents {
			position := e.Position / RegionAlign
			for _, p := range part[:e.Pairs] {
				for o := uint64(0); o < p.Length; o += RegionAlign {
					if position >= uint64(len(got)) || got[position] != (move{}) {
						t.Fatalf("a byte at %d of %d is given twice, or is none", position*RegionAlign, len(got)*RegionAlign)
					}
					got[position] = move{cell{p.SrcRegion, p.SrcOffset + o}, cell{p.DstRegion, p.DstOffset + o}}
					position++
				}
			}
			part = part[e.Pairs:]
		}
		if len(part) > 0 {
			t.Fatalf("%d pairs are of no extent", len(part))
		}
	}
	if !slices.Equal(got, want) {
		t.Fatalf("bit by bit %v, at once %v", got, want)
	}
}

// sources is from how many regions of P one of D comes.
func sources(m *Match, region uint32) (n int) {
	for _, c := range m.Commons() {
		if c.Dst == region {
			n++
		}
	}
	return n
}

// someSide is a rank's regions of one cache of total heads: one region, or one for each
// head.
type someSide struct {
	order       string
	tokens      uint32
	first, end  uint32
	gap         uint64
	apart       bool
	backToFront bool
}

func (s someSide) regions(name string, group uint32, base uint64, item uint64, total, blocks uint32) (out []Region) {
	add := func(first, end uint32) {
		bytes := item * uint64(s.tokens) * uint64(end-first)
		out = append(out, shaped(region(name, group, base+uint64(len(out))<<24, bytes+s.gap, bytes, blocks), s.order, s.tokens, first, end, total))
	}
	if !s.apart {
		add(s.first, s.end)
		return out
	}
	for h := s.first; h < s.end; h++ {
		add(h, h+1)
	}
	if s.backToFront {
		slices.Reverse(out)
	}
	return out
}

// TestMatchAgainstNaive: random geometries on both sides.
func TestMatchAgainstNaive(t *testing.T) {
	rnd := newRand(t)
	sizes := []uint32{1, 2, 3, 4, 6, 12, 16, 32, 48, 64}
	const limit = 12
	seen := map[string]int{}
	for range 3000 {
		var src, dst []Region
		ranks := [2]uint32{1 + rnd.Uint32N(4), 1 + rnd.Uint32N(4)}
		rank := [2]uint32{rnd.Uint32N(ranks[0]), rnd.Uint32N(ranks[1])}
		total := 1 + rnd.Uint32N(8)
		groups := 1 + rnd.IntN(2)
		var tokens [2][2]uint32 // by group and side
		for g := range groups {
			for { // one divides the other
				tokens[g] = [2]uint32{sizes[rnd.IntN(len(sizes))], sizes[rnd.IntN(len(sizes))]}
				if rnd.IntN(3) == 0 {
					tokens[g][1] = tokens[g][0]
				}
				if a, b := tokens[g][0], tokens[g][1]; (a%b == 0 || b%a == 0) && max(a, b)/min(a, b) <= 8 {
					break
				}
			}
		}
		for i := range 1 + rnd.IntN(3) {
			g := uint32(i % groups)
			item := uint64(RegionAlign * (1 + rnd.IntN(2)))
			for side, list := range []*[]Region{&src, &dst} {
				if i >= groups && rnd.IntN(8) == 0 {
					continue // a layer that only the other has
				}
				s := someSide{order: []string{"NHD", "HND"}[rnd.IntN(2)], tokens: tokens[g][side], gap: uint64(rnd.IntN(2) * 64),
					apart: rnd.IntN(4) == 0, backToFront: rnd.IntN(2) == 0}
				s.first, s.end = share(rank[side], ranks[side], total)
				*list = append(*list, s.regions(fmt.Sprint("layer", i), g, uint64(1+i)<<32, item, total, limit)...)
			}
		}
		for g := range groups {
			if tokens[g][0] == tokens[g][1] && rnd.IntN(3) == 0 {
				for _, list := range []*[]Region{&src, &dst} {
					*list = append(*list, region("state", uint32(g), 100<<32, 40, 36, limit))
				}
			}
		}
		rnd.Shuffle(len(dst), func(i, j int) { dst[i], dst[j] = dst[j], dst[i] })
		p, d, ok := bothLayouts(t, src, dst)
		if !ok {
			continue
		}
		m, err := NewMatch(p.Shapes(), d.Shapes())
		if err != nil {
			t.Fatalf("%v\nof %+v\nand %+v", err, src, dst)
		}
		from, to := make([][]BlockID, groups), make([][]BlockID, groups)
		fromFirst, toFirst, ends := make([]uint32, groups), make([]uint32, groups), make([]uint32, groups)
		for g := range groups {
			// D wants a run of its blocks; P offers what holds it, and some more.
			a, b := uint64(tokens[g][0]), uint64(tokens[g][1])
			toFirst[g] = rnd.Uint32N(4)
			to[g] = fewBlocks(rnd, rnd.IntN(5), limit)
			begin, end := uint64(toFirst[g])*b, (uint64(toFirst[g])+uint64(len(to[g])))*b
			if end > begin && rnd.IntN(2) == 0 {
				ends[g] = uint32(begin + 1 + rnd.Uint64N(end-begin+3))
				end = min(end, units(p.Shapes(), d.Shapes(), uint32(g), uint64(ends[g])))
			}
			first, last := begin/a, (end+a-1)/a
			if last-first > limit {
				to[g], ends[g], first, last = nil, 0, 0, 0
			}
			more := min(first, rnd.Uint64N(3), limit-(last-first))
			fromFirst[g] = uint32(first - more)
			from[g] = fewBlocks(rnd, int(last-first+more), limit)
		}
		var regions []uint32
		if rnd.IntN(4) == 0 {
			for _, c := range m.Commons() {
				if len(regions) == 0 || regions[len(regions)-1] != c.Dst {
					regions = append(regions, c.Dst)
				}
			}
			if len(regions) > 0 {
				k := rnd.IntN(len(regions))
				regions = slices.Delete(regions, k, min(k+1, len(regions)-1))
			}
		}
		for i := range m.mappings {
			seen[fmt.Sprintf("whole %v", m.mappings[i].whole != 0)]++
			seen[fmt.Sprintf("heads %v", m.mappings[i].pair.heads > 1)]++
			seen[fmt.Sprintf("items %v", m.mappings[i].pair.inner > 1)]++
		}
		for _, r := range m.ratios {
			seen[fmt.Sprintf("blocks %v", cmpWord(r.src, r.dst))]++
		}
		checkMatch(t, m, p.Shapes(), d.Shapes(), regions, from, fromFirst, to, toFirst, ends)
	}
	for _, k := range []string{"whole true", "whole false", "heads true", "items true", "blocks smaller", "blocks larger"} {
		if seen[k] < 20 {
			t.Errorf("too few with %q: %v", k, seen)
		}
	}
}

func cmpWord(a, b uint64) string {
	switch {
	case a < b:
		return "smaller"
	case a > b:
		return "larger"
	}
	return "equal"
}

// share is the heads of a rank. If there are more ranks than heads, several hold the same
// one.
func share(rank, ranks, total uint32) (first, end uint32) {
	first = rank * total / ranks
	return first, max(first+1, (rank+1)*total/ranks)
}

func bothLayouts(t testing.TB, src, dst []Region) (p, d *Layout, ok bool) {
	t.Helper()
	for g := range uint32(2) {
		for _, list := range [][]Region{src, dst} { // without a gap
			if slices.ContainsFunc(list, func(r Region) bool { return r.Group == 1 }) && !slices.ContainsFunc(list, func(r Region) bool { return r.Group == g }) {
				return nil, nil, false
			}
		}
	}
	if len(src) == 0 || len(dst) == 0 {
		return nil, nil, false
	}
	return mustLayout(t, src...), mustLayout(t, dst...), true
}

// fewBlocks are different ones, in runs or not.
func fewBlocks(rnd *rand.Rand, n, limit int) []BlockID {
	out := make([]BlockID, n)
	begin := rnd.IntN(limit - n + 1)
	perm := rnd.Perm(limit)
	scattered := rnd.IntN(2) == 0
	for i := range out {
		if out[i] = BlockID(begin + i); scattered {
			out[i] = BlockID(perm[i])
		}
	}
	return out
}

// TestMatchRanks: all of D's ranks together get each item once from P's ranks,
// whatever the ratio and the order.
func TestMatchRanks(t *testing.T) {
	const total, item, blocks = 12, 8, 6
	for _, ranks := range [][2]uint32{{1, 2}, {2, 1}, {2, 2}, {3, 2}, {2, 3}, {1, 4}, {4, 1}, {6, 4}} {
		for _, order := range [][2]string{{"NHD", "NHD"}, {"HND", "HND"}, {"NHD", "HND"}, {"HND", "NHD"}} {
			for _, tokens := range [][2]uint32{{16, 16}, {16, 32}, {48, 16}} {
				t.Run(fmt.Sprint(ranks, order, tokens), func(t *testing.T) {
					for r := range ranks[1] {
						first, end := share(r, ranks[1], total)
						dst := someSide{order: order[1], tokens: tokens[1], first: first, end: end}.regions("k", 0, 4096, item, total, blocks)
						got := map[uint32]int{}
						for s := range ranks[0] {
							from, to := share(s, ranks[0], total)
							src := someSide{order: order[0], tokens: tokens[0], first: from, end: to}.regions("k", 0, 4096, item, total, blocks)
							p, d := mustLayout(t, src...), mustLayout(t, dst...)
							m, err := NewMatch(p.Shapes(), d.Shapes())
							if err != nil {
								t.Fatal(err)
							}
							for _, c := range m.Commons() {
								for h := c.First; h < c.End; h++ {
									got[h]++
								}
							}
							n := uint32(96) // of the prompt
							checkMatch(t, m, p.Shapes(), d.Shapes(), nil, [][]BlockID{upTo(n / tokens[0])}, nil, [][]BlockID{upTo(n / tokens[1])}, nil, nil)
						}
						for h := first; h < end; h++ {
							if got[h] != 1 || len(got) != int(end-first) {
								t.Errorf("rank %d gets its heads %d to %d as %v", r, first, end, got)
							}
						}
					}
				})
			}
		}
	}
}

func upTo(n uint32) []BlockID {
	out := make([]BlockID, n)
	for i := range out {
		out[i] = BlockID(i)
	}
	return out
}

// TestMatchPieces: cut plans have no more pieces than they must.
func TestMatchPieces(t *testing.T) {
	const item = 64
	side := func(order string, tokens, first, end uint32) someSide {
		return someSide{order: order, tokens: tokens, first: first, end: end}
	}
	for _, c := range []struct {
		name        string
		src, dst    someSide
		pairs, segs int // a block's last piece may be adjacent to the next one's first
	}{
		{"alike", side("NHD", 16, 0, 4), side("NHD", 16, 0, 4), 1, 1},
		{"alike, HND", side("HND", 16, 0, 4), side("HND", 16, 0, 4), 1, 1},
		{"head slice, HND", side("HND", 16, 0, 4), side("HND", 16, 2, 4), 6, 1},
		{"head slice, NHD", side("NHD", 16, 0, 4), side("NHD", 16, 2, 4), 6 * 16, 1},
		{"gathered, HND", side("HND", 16, 0, 2), side("HND", 16, 0, 4), 6, 6},
		{"gathered, NHD", side("NHD", 16, 0, 2), side("NHD", 16, 0, 4), 6 * 16, 6 * 16},
		{"smaller blocks at P", side("NHD", 16, 0, 4), side("NHD", 32, 0, 4), 1, 1},
		{"smaller blocks at D", side("NHD", 32, 0, 4), side("NHD", 16, 0, 4), 1, 1},
		{"smaller blocks at P, HND", side("HND", 16, 0, 4), side("HND", 32, 0, 4), 6*4 - 2, 1},
		{"smaller blocks at D, HND", side("HND", 32, 0, 4), side("HND", 16, 0, 4), 6*4 - 2, 1},
		{"one head", side("NHD", 16, 0, 1), side("HND", 16, 0, 1), 1, 1},
		{"other order", side("NHD", 16, 0, 4), side("HND", 16, 0, 4), 6*16*4 - 5, 1},
		{"one of several heads", side("NHD", 16, 0, 4), side("HND", 16, 1, 2), 6 * 16, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, d := mustLayout(t, c.src.regions("k", 0, 4096, item, 4, 12)...), mustLayout(t, c.dst.regions("k", 0, 4096, item, 4, 12)...)
			m, err := NewMatch(p.Shapes(), d.Shapes())
			if err != nil {
				t.Fatal(err)
			}
			src, dst := [][]BlockID{upTo(96 / c.src.tokens)}, [][]BlockID{upTo(96 / c.dst.tokens)}
			checkMatch(t, m, p.Shapes(), d.Shapes(), nil, src, nil, dst, nil, nil)
			pairs, _ := m.Pairs(Selection{Blocks: src}, Selection{Blocks: dst})
			segments, _ := m.Segments(Selection{Blocks: dst})
			if len(pairs) != c.pairs || len(segments) != c.segs {
				t.Errorf("%d pairs and %d segments, want %d and %d", len(pairs), len(segments), c.pairs, c.segs)
			}
			if n := testing.AllocsPerRun(10, func() { _, _ = m.Pairs(Selection{Blocks: src}, Selection{Blocks: dst}) }); n > 1 {
				t.Errorf("a plan makes %v allocations", n)
			}
			if n := testing.AllocsPerRun(10, func() { _, _ = m.Segments(Selection{Blocks: dst}) }); n > 1 {
				t.Errorf("segments make %v allocations", n)
			}
		})
	}
}

// TestMatchWanted: a region that is asked for by name must be there.
func TestMatchWanted(t *testing.T) {
	p := mustLayout(t, region("a", 0, 1<<20, 64, 64, 4), region("c", 0, 2<<20, 64, 64, 4))
	d := mustLayout(t, region("a", 0, 1<<20, 64, 64, 4), region("b", 0, 2<<20, 64, 64, 4), region("c", 0, 3<<20, 64, 64, 4))
	m, err := NewMatch(p.Shapes(), d.Shapes())
	if err != nil {
		t.Fatal(err)
	}
	blocks := [][]BlockID{{1}}
	for _, regions := range [][]uint32{{1}, {0, 1}, {1, 2}, {0, 1, 2}} {
		_, err := m.Segments(Selection{Blocks: blocks, Regions: regions})
		checkError(t, err, []string{"region 1 of the decode engine"})
		_, err = m.Pairs(Selection{Blocks: blocks}, Selection{Blocks: blocks, Regions: regions})
		checkError(t, err, []string{"region 1 of the decode engine"})
	}
	checkMatch(t, m, p.Shapes(), d.Shapes(), []uint32{0, 2}, blocks, nil, blocks, nil, nil)
}

func TestNewMatchRefuses(t *testing.T) {
	base := func() []Shape {
		return mustLayout(t, shaped(region("k", 0, 1<<20, 1024, 1024, 4), "NHD", 16, 0, 4, 8), region("s", 1, 2<<20, 128, 32, 9)).Shapes()
	}
	for _, c := range []struct {
		name   string
		change func([]Shape) []Shape // of D's
		want   []string              // nil: they fit
	}{
		{"same", func(s []Shape) []Shape { return s }, nil},
		{"other stride and number of blocks", func(s []Shape) []Shape { s[0].BlockStride, s[0].NumBlocks = 4096, 1; return s }, nil},
		{"other order of regions", func(s []Shape) []Shape { s[0], s[1] = s[1], s[0]; return s }, nil},
		{"larger blocks", func(s []Shape) []Shape { s[0].Tokens, s[0].BlockBytes = 32, 2048; return s }, nil},
		{"blocks that do not divide", func(s []Shape) []Shape { s[0].Tokens, s[0].BlockBytes = 24, 1536; return s }, []string{`"k"`, "16 tokens", "24 tokens"}},
		{"item", func(s []Shape) []Shape { s[0].BlockBytes, s[0].TokenStride, s[0].HeadStride = 2048, 128, 32; return s }, []string{`"k"`, "16 bytes", "32 bytes"}},
		{"heads of the model", func(s []Shape) []Shape { s[0].TotalHeads = 4; return s }, []string{`"k"`, "of 8", "of 4"}},
		{"opaque at one side", func(s []Shape) []Shape {
			s[0].Tokens, s[0].Heads, s[0].TokenStride, s[0].HeadStride, s[0].TotalHeads = 0, 0, 0, 0, 0
			return s
		}, []string{`"k"`, "16 tokens", "opaque blocks of 1024 bytes"}},
		{"opaque bytes", func(s []Shape) []Shape { s[1].BlockBytes = 36; return s }, []string{`"s"`, "32 bytes", "36 bytes"}},
		{"strides", func(s []Shape) []Shape { s[0].TokenStride = 32; return s }, []string{"at the decode engine", `"k"`, "32 bytes a token", "64 and 16 (NHD)", "16 and 256 (HND)"}},
		{"heads beyond", func(s []Shape) []Shape { s[0].FirstHead = 5; return s }, []string{"at the decode engine", "4 heads from 5 on", "8 in all"}},
		{"heads that wrap", func(s []Shape) []Shape { s[0].FirstHead = ^uint32(0); return s }, []string{"from 4294967295 on"}},
		{"many heads", func(s []Shape) []Shape { s[0].Heads = 1 << 31; return s }, []string{"2147483648 heads"}},
		{"many tokens", func(s []Shape) []Shape { s[0].Tokens = 1 << 31; return s }, []string{"2147483648 tokens"}},
		{"no heads", func(s []Shape) []Shape { s[0].Heads = 0; return s }, []string{"0 heads"}},
		{"heads without tokens", func(s []Shape) []Shape { s[1].Heads = 2; return s }, []string{`"s"`, "0 tokens with 2 heads"}},
		{"no bytes", func(s []Shape) []Shape { s[0].BlockBytes = 0; return s }, []string{`"k"`, "0 bytes"}},
		{"items that do not fit", func(s []Shape) []Shape { s[0].BlockBytes = 1020; return s }, []string{"1020 bytes", "16 tokens of 4 heads"}},
		{"group", func(s []Shape) []Shape { s[1].Group = 16; return s }, []string{`"s"`, "below 16"}},
		{"twice", func(s []Shape) []Shape { return append(s, s[0]) }, []string{"at the decode engine", `"k"`, "registered twice"}},
		{"heads twice", func(s []Shape) []Shape { s = append(s, s[0]); s[2].FirstHead = 3; return s }, []string{`"k"`, "registered twice", "heads 0 to 3", "heads 3 to 6"}},
		{"more heads", func(s []Shape) []Shape { s = append(s, s[0]); s[2].FirstHead = 4; return s }, nil},
		{"more heads of another length", func(s []Shape) []Shape {
			s = append(s, s[0])
			s[2].FirstHead, s[2].Tokens, s[2].BlockBytes = 4, 32, 2048
			return s
		}, []string{`"k"`, "of 16:", "32 tokens"}},
		{"opaque beside larger blocks", func(s []Shape) []Shape {
			s[0].Tokens, s[0].BlockBytes, s[1].Group = 32, 2048, 0
			return s
		}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := NewMatch(base(), c.change(base()))
			checkError(t, err, c.want)
		})
	}
	p := mustLayout(t, shaped(region("k", 0, 1<<20, 1024, 1024, 4), "NHD", 16, 0, 4, 4), region("s", 0, 2<<20, 32, 32, 4))
	d := mustLayout(t, shaped(region("k", 0, 1<<20, 2048, 2048, 4), "NHD", 32, 0, 4, 4), region("s", 0, 2<<20, 32, 32, 4))
	_, err := NewMatch(p.Shapes(), d.Shapes())
	checkError(t, err, []string{`"s"`, "opaque blocks of 32 bytes", "blocks of 16 tokens and of 32"})
}

func checkError(t *testing.T, err error, want []string) {
	t.Helper()
	if (err == nil) != (want == nil) {
		t.Fatalf("error %v, want one: %v", err, want != nil)
	}
	for _, part := range want {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%q does not say %q", err, part)
		}
	}
}

// TestMatchWhole: regions of one side only are told, and do not stand in the way.
func TestMatchWhole(t *testing.T) {
	k := func(first, end uint32) Region {
		return shaped(region("k", 0, 1<<20, uint64(end-first)*256, uint64(end-first)*256, 4), "HND", 16, first, end, 8)
	}
	opaque := func(name string) Region { return region(name, 0, 1<<21, 32, 32, 4) }
	for _, c := range []struct {
		name     string
		src, dst []Region
		commons  []Common
		want     []string
	}{
		{"all", []Region{k(0, 4), opaque("s")}, []Region{k(0, 4), opaque("s")}, []Common{{0, 0, 0, 4}, {1, 1, 0, 1}}, nil},
		{"only at D", []Region{k(0, 4)}, []Region{k(0, 4), opaque("s")}, []Common{{0, 0, 0, 4}}, []string{"1 regions at the prefill", "2 at the decode", `"s"`, "0 of 1 heads"}},
		{"only at P", []Region{opaque("t"), k(0, 4)}, []Region{k(0, 4)}, []Common{{1, 0, 0, 4}}, []string{`"t"`, "only at the prefill engine"}},
		{"some heads", []Region{k(2, 4)}, []Region{k(0, 8)}, []Common{{0, 0, 2, 4}}, []string{`"k"`, "2 of 8 heads"}},
		{"more heads", []Region{k(0, 8)}, []Region{k(2, 4)}, []Common{{0, 0, 2, 4}}, nil},
		{"no head", []Region{k(0, 2)}, []Region{k(4, 8)}, []Common{}, []string{`"k"`, "0 of 4 heads"}},
		{"nothing", []Region{opaque("a")}, []Region{opaque("b")}, []Common{}, []string{`"a"`, `"b"`}},
	} {
		t.Run(c.name, func(t *testing.T) {
			m, err := NewMatch(mustLayout(t, c.src...).Shapes(), mustLayout(t, c.dst...).Shapes())
			if err != nil {
				t.Fatal(err)
			}
			if got := m.Commons(); !reflect.DeepEqual(got, c.commons) {
				t.Errorf("in common: %v, want %v", got, c.commons)
			}
			checkError(t, m.Whole(), c.want)
		})
	}
}

// TestMatchArguments: values that do not fit are refused, and the error names both.
func TestMatchArguments(t *testing.T) {
	p := mustLayout(t, shaped(region("k", 0, 1<<20, 1024, 1024, 9), "NHD", 16, 0, 4, 4))
	d := mustLayout(t, shaped(region("k", 0, 1<<20, 2048, 2048, 9), "NHD", 32, 0, 4, 4))
	m := matched(t, p, d)
	for _, c := range []struct {
		name       string
		regions    []uint32
		src        [][]BlockID
		srcFirst   []uint32
		dst        [][]BlockID
		dstFirst   []uint32
		tokens     []uint32
		want       []string
		wantPieces int
	}{
		{"whole", nil, [][]BlockID{{1, 2}}, nil, [][]BlockID{{5}}, nil, nil, nil, 1},
		{"half a block", nil, [][]BlockID{{1}}, nil, [][]BlockID{{5}}, nil, []uint32{16}, nil, 1},
		{"half a block is missing", nil, [][]BlockID{{1}}, nil, [][]BlockID{{5}}, nil, []uint32{17}, []string{"blocks 0 to 2 of group 0", "0 to 1"}, 0},
		{"before the first", nil, [][]BlockID{{3, 4}}, []uint32{2}, [][]BlockID{{5}}, nil, nil, []string{"blocks 0 to 2", "2 to 4"}, 0},
		{"from the first on", nil, [][]BlockID{{3, 4}}, []uint32{2}, [][]BlockID{{5}}, []uint32{1}, nil, nil, 1},
		{"behind the prompt", nil, nil, nil, [][]BlockID{{5}}, []uint32{1}, []uint32{20}, []string{"1 at the decode engine"}, 0},
		{"nothing of the prompt", nil, [][]BlockID{{}}, nil, [][]BlockID{{5}}, []uint32{1}, []uint32{20}, nil, 0},
		{"no such region", []uint32{1}, [][]BlockID{{1, 2}}, nil, [][]BlockID{{5}}, nil, nil, []string{"region 1", "below 1"}, 0},
		{"no region", []uint32{}, [][]BlockID{{1, 2}}, nil, [][]BlockID{{5}}, nil, nil, []string{"no region"}, 0},
		{"many groups", nil, make([][]BlockID, 17), nil, make([][]BlockID, 17), nil, nil, []string{"17 groups"}, 0},
		{"the largest position", nil, [][]BlockID{{1, 2}}, nil, [][]BlockID{{5}}, []uint32{^uint32(0)}, nil, []string{"blocks 8589934590 to 8589934592"}, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			pairs, err := m.Pairs(Selection{First: c.srcFirst, Blocks: c.src}, Selection{First: c.dstFirst, Blocks: c.dst, Tokens: c.tokens, Regions: c.regions})
			checkError(t, err, c.want)
			if len(pairs) != c.wantPieces {
				t.Errorf("%d pairs, want %d", len(pairs), c.wantPieces)
			}
		})
	}
	wide := mustLayout(t, shaped(region("k", 0, 1<<20, 1<<20, 1<<20, 1<<16), "NHD", 1<<9, 0, 1<<9, 1<<9))
	deep := mustLayout(t, shaped(region("k", 0, 1<<20, 1<<20, 1<<20, 1<<16), "HND", 1<<9, 0, 1<<9, 1<<9))
	if _, err := matched(t, wide, deep).Pairs(Selection{Blocks: [][]BlockID{upTo(65)}}, Selection{Blocks: [][]BlockID{upTo(65)}}); err == nil || !strings.Contains(err.Error(), "more than 16777216 pieces") {
		t.Errorf("a plan of 17 million pieces: %v", err)
	}
}

// BenchmarkCut plans 20,000 block pairs that are cut by heads, half of them to each
// of two decode ranks, or go into blocks of another size.
func BenchmarkCut(b *testing.B) {
	const regions, blocks, limit = 40, 500, 4000
	rnd := rand.New(rand.NewPCG(1, 2))
	for _, c := range []struct {
		name     string
		src, dst someSide
	}{
		{"heads HND", someSide{order: "HND", tokens: 16, end: 8}, someSide{order: "HND", tokens: 16, first: 4, end: 8}},
		{"heads NHD", someSide{order: "NHD", tokens: 16, end: 8}, someSide{order: "NHD", tokens: 16, first: 4, end: 8}},
		{"blocks 16 to 32", someSide{order: "NHD", tokens: 16, end: 8}, someSide{order: "NHD", tokens: 32, end: 8}},
		{"blocks 32 to 16 HND", someSide{order: "HND", tokens: 32, end: 8}, someSide{order: "HND", tokens: 16, end: 8}},
		{"NHD to HND", someSide{order: "NHD", tokens: 16, end: 8}, someSide{order: "HND", tokens: 16, end: 8}},
	} {
		var src, dst []Region
		for i := range regions {
			src = append(src, c.src.regions(fmt.Sprint("layer", i), 0, 1<<40+uint64(i)<<32, 128, 8, limit)...)
			dst = append(dst, c.dst.regions(fmt.Sprint("layer", i), 0, 1<<40+uint64(i)<<32, 128, 8, limit)...)
		}
		m, err := NewMatch(mustLayout(b, src...).Shapes(), mustLayout(b, dst...).Shapes())
		if err != nil {
			b.Fatal(err)
		}
		some := func(tokens uint32) [][]BlockID {
			ids := make([]BlockID, blocks*16/tokens)
			for i, p := range rnd.Perm(limit)[:len(ids)] {
				ids[i] = BlockID(p)
			}
			return [][]BlockID{ids}
		}
		from, to := some(c.src.tokens), some(c.dst.tokens)
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			n := 0
			for b.Loop() {
				pairs, err := m.Pairs(Selection{Blocks: from}, Selection{Blocks: to})
				if err != nil {
					b.Fatal(err)
				}
				n = len(pairs)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(n), "ns/piece")
			b.ReportMetric(float64(n), "pieces")
		})
	}
}
