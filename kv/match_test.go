package kv

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvconn/kvconn/rig/seed"
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
			pos, begin := uint64(OrZero(first, int(s.Group)))+uint64(k), uint64(id)*s.BlockStride
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
	rnd := seed.Rand(t)
	sizes := []uint32{1, 2, 3, 4, 6, 12, 16, 32, 48, 64}
	const limit = 12
	seen := map[string]int{}
	times := 3000
	if raced {
		times = 1000
	}
	for range times {
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
		checkMatch(t, m, p.Shapes(), d.Shapes(), Selection{First: fromFirst, Blocks: from}, Selection{First: toFirst, Blocks: to, Tokens: ends, Regions: regions})
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
							checkMatch(t, m, p.Shapes(), d.Shapes(), Selection{Blocks: [][]BlockID{upTo(n / tokens[0])}}, Selection{Blocks: [][]BlockID{upTo(n / tokens[1])}})
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
