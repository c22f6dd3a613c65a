package kv

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// checkMatch copies P's blocks by Pairs and looks at each cell of D: it holds what it
// should, and nothing else was written. Segments are the pairs' other ends in the same
// order.
func checkMatch(t testing.TB, m *Match, src, dst []Shape, from, to Selection) {
	t.Helper()
	pairs, err := m.Pairs(from, to)
	if err != nil {
		t.Fatalf("no plan: %v", err)
	}
	segments, err := m.Segments(to)
	if err != nil {
		t.Fatalf("no segments: %v", err)
	}
	holds, has := map[cell]label{}, map[label]bool{}
	eachCell(src, from.Blocks, from.First, func(c cell, l label) { holds[c] = l; has[l] = true })
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
	checkPairsBetween(t, m, src, pairs, from, to)
	checkWindows(t, m, from, to, pairs, segments)
	eachCell(dst, to.Blocks, to.First, func(c cell, l label) {
		got, written := lands[c]
		delete(lands, c)
		wanted := has[l] && (to.Regions == nil || slices.Contains(to.Regions, c.region)) &&
			(l.opaqueBlock || l.token < units(src, dst, l.group, uint64(OrZero(to.Tokens, int(l.group)))))
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
func checkPairsBetween(t testing.TB, m *Match, src []Shape, pairs []Pair, from, to Selection) {
	t.Helper()
	type move struct{ src, dst cell }
	var want []move
	for _, p := range pairs {
		for o := uint64(0); o < p.Length; o += RegionAlign {
			want = append(want, move{cell{p.SrcRegion, p.SrcOffset + o}, cell{p.DstRegion, p.DstOffset + o}})
		}
	}
	if n := m.Bytes(to); n != uint64(len(want))*RegionAlign {
		t.Fatalf("the load has %d bytes, its plan %d", n, len(want)*RegionAlign)
	}
	rnd := rand.New(rand.NewPCG(uint64(len(want)), uint64(len(src))))
	got, cut := make([]move, len(want)), make([]move, len(want))
	var begin []uint32
	for done := false; !done; {
		end := make([]uint32, len(src))
		for r := range end {
			end[r] = OrZero(begin, r) + uint32(rnd.IntN(3)*rnd.IntN(3))
		}
		if done = rnd.IntN(6) == 0; done {
			end = nil
		}
		part, extents, err := m.PairsBetween(from, to, begin, end)
		if err != nil {
			t.Fatalf("no plan of %v to %v: %v", begin, end, err)
		}
		plan, err := m.Plan(from, to, begin, end)
		if err != nil {
			t.Fatalf("no plan of %v to %v: %v", begin, end, err)
		}
		for _, e := range plan.Extents() {
			for position := e.Position; position < e.Position+e.Bytes; {
				for _, p := range plan.Pairs(make([]Pair, 0, 3), position, ^uint64(0)) {
					for o := uint64(0); o < p.Length; o, position = o+RegionAlign, position+RegionAlign {
						if cut[position/RegionAlign] != (move{}) || position >= e.Position+e.Bytes {
							t.Fatalf("a plan gives the byte at %d twice, or gives it unasked", position)
						}
						cut[position/RegionAlign] = move{cell{p.SrcRegion, p.SrcOffset + o}, cell{p.DstRegion, p.DstOffset + o}}
					}
				}
			}
		}
		begin = end
		for _, p := range part {
			of := src[p.SrcRegion]
			for b := p.SrcOffset / of.BlockStride; end != nil && b*of.BlockStride < p.SrcOffset+p.Length; b++ {
				if n := OrZero(from.First, int(of.Group)) + uint32(slices.Index(from.Blocks[of.Group], BlockID(b))); n >= end[p.SrcRegion] {
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
	if !slices.Equal(got, want) || !slices.Equal(cut, want) {
		t.Fatalf("bit by bit %v, as plans %v, at once %v", got, cut, want)
	}
}

// sources is the number of P's regions that one region of D comes from.
func sources(m *Match, region uint32) (n int) {
	for _, c := range m.Commons() {
		if c.Dst == region {
			n++
		}
	}
	return n
}
