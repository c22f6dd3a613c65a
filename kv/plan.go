// A match and two selections give a plan: which bytes go where, here as lists.

package kv

import (
	"fmt"
	"iter"

	"github.com/kvconn/kvconn/internal/fault"
)

// Segment is a contiguous run of bytes in one region: Offset from the region's
// base, Length bytes.
type Segment struct {
	Region uint32
	Offset uint64
	Length uint64
}

// Pair is one contiguous copy from the sender's region to the receiver's.
type Pair struct {
	SrcRegion, DstRegion uint32
	SrcOffset, DstOffset uint64 // bytes from each region's base
	Length               uint64
}

// Extent is a run of pairs whose bytes follow each other in a transfer's linear
// order.
type Extent struct {
	Position uint64 // of the first byte
	Pairs    int
	Bytes    uint64 // of a Plan's
}

// MaxPieces bounds the runs of one transfer. Runs are so small, and so many, only where
// blocks are cut by heads or turned into another order.
const MaxPieces = 1 << 24

// A transfer's bytes have one linear order that both sides know without talking,
// the receiver's: region after region as registered, within a region block after
// block as the load lists them, within a block as it lies there (several regions
// of P that go into one of D come one after the other). A position in this order
// names a byte on either side, which is all that a TCP frame carries.

// Segments lists, in the transfer's linear order, where the bytes of a load land
// in D's layout. Runs that are adjacent in memory are merged. The ids must have
// passed CheckBlocks.
func (m *Match) Segments(dst Selection) ([]Segment, error) {
	wanted := progress{m: m, dst: dst}
	bound, err := wanted.bound(func(k *mapping) uint64 { return k.seg.perUnit() })
	if err != nil {
		return nil, err
	}
	out := make([]Segment, 0, bound)
	for k := range m.of(dst) {
		g := int(k.group)
		r := m.ratios[g]
		switch from, to := m.units(&dst, g); {
		case k.whole == 0:
			out = k.land(out, dst.Blocks[g], r.dst, to-from)
		default:
			out = k.landWhole(out, dst.Blocks[g][:to-from])
		}
	}
	return out, nil
}

// Pairs pairs P's blocks with D's, in the transfer's linear order, and merges runs
// that are adjacent on both sides. Of src only First and Blocks count. P reads in
// its own blocks whatever D says; the transport checks where the bytes land.
func (m *Match) Pairs(src, dst Selection) ([]Pair, error) {
	return m.pairs(src, &progress{m: m, dst: dst}, nil)
}

// PairsBetween is Pairs of the blocks that have become ready: per region of P, the blocks
// of the prompt from begin (nil: 0) to end (nil: all of src). A block of D goes when all
// of it is ready, or all that the load has of it. The extents say where in the linear
// order the pairs lie. If each call begins at the end of the last, each byte comes once.
func (m *Match) PairsBetween(src, dst Selection, begin, end []uint32) (pairs []Pair, extents []Extent, err error) {
	pairs, err = m.pairs(src, &progress{m: m, dst: dst, begin: begin, end: end}, &extents)
	return pairs, extents, err
}

func (m *Match) pairs(src Selection, wanted *progress, extents *[]Extent) ([]Pair, error) {
	dst := &wanted.dst
	if err := wanted.checkGroups(&src); err != nil {
		return nil, err
	}
	bound, err := wanted.bound(func(k *mapping) uint64 { return k.pair.perUnit() })
	if err != nil {
		return nil, err
	}
	out := make([]Pair, 0, bound)
	var position uint64
	for k := range m.of(*dst) {
		g := int(k.group)
		r, has := m.ratios[g], uint64(OrZero(src.First, g))
		first, from, to, last := wanted.units(k)
		start, before := position+(from-first)*k.unitBytes(), len(out)
		position += fault.Pick("position-of-parts", last-first, to-from) * k.unitBytes()
		if from == to {
			continue
		}
		if err := wanted.checkHeld(&src, k, from, to); err != nil {
			return nil, err
		}
		skip := (from - first) / r.dst // blocks of D
		if k.whole == 0 {
			out = k.copy(out, r, src.Blocks[g], has, dst.Blocks[g][skip:], from, to)
		} else {
			out = k.copyWhole(out, src.Blocks[g][from-has:to-has], dst.Blocks[g][skip:skip+to-from])
		}
		if extents != nil {
			*extents = append(*extents, Extent{Position: start, Pairs: len(out) - before})
		}
	}
	return out, nil
}

// Bytes is how many a load has.
func (m *Match) Bytes(dst Selection) (n uint64) {
	for k := range m.of(dst) {
		from, to := m.units(&dst, int(k.group))
		n += (to - from) * k.unitBytes()
	}
	return n
}

// unitBytes is how many bytes a unit of a group's blocks has in this mapping.
func (k *mapping) unitBytes() uint64 {
	if k.whole != 0 {
		return k.whole
	}
	return k.seg.perUnit() * k.seg.run
}

// units is the range of units of a group that a load has.
func (m *Match) units(dst *Selection, group int) (from, to uint64) {
	return m.ratios[group].span(OrZero(dst.First, group), len(dst.Blocks[group]), OrZero(dst.Tokens, group))
}

// progress is how far a load has come: the bytes that go now lie between begin and end.
type progress struct {
	m          *Match
	dst        Selection
	begin, end []uint32 // blocks of the prompt, per region of P; nil: its start, its end
}

// units of one mapping: the load has those from first to last, and those between
// from and to go now.
func (s *progress) units(k *mapping) (first, from, to, last uint64) {
	r := s.m.ratios[k.group]
	first, last = s.m.units(&s.dst, int(k.group))
	from, to = first, last
	if s.begin != nil {
		from = r.wholeBlocks(first, last, OrZero(s.begin, int(k.Src)))
	}
	if s.end != nil {
		to = r.wholeBlocks(first, last, OrZero(s.end, int(k.Src)))
	}
	return first, from, max(from, to), last
}

// checkGroups: P has all groups that the load has.
func (s *progress) checkGroups(src *Selection) error {
	if len(s.dst.Blocks) > len(src.Blocks) {
		return fmt.Errorf("plan: %d groups at the prefill engine, %d at the decode engine", len(src.Blocks), len(s.dst.Blocks))
	}
	return nil
}

// checkHeld: P has the blocks that hold some units of a mapping.
func (s *progress) checkHeld(src *Selection, k *mapping, from, to uint64) error {
	g := int(k.group)
	n, has := max(s.m.ratios[g].src, 1), uint64(OrZero(src.First, g))
	if low, high := from/n, (to+n-1)/n; low < has || high > has+uint64(len(src.Blocks[g])) {
		return fmt.Errorf("plan: the load needs blocks %d to %d of group %d, the offer has %d to %d", low, high, g, has, has+uint64(len(src.Blocks[g])))
	}
	return nil
}

// wholeBlocks is the unit up to which a load's blocks are whole when so many blocks of
// P's prompt are ready.
func (r ratio) wholeBlocks(first, last uint64, blocks uint32) uint64 {
	ready := uint64(blocks) * r.src
	if ready >= last {
		return last
	}
	return max(first, fault.Pick("part-of-a-block", ready-ready%r.dst, ready))
}

// landWhole is Segments of blocks that are copied whole.
func (k *mapping) landWhole(out []Segment, ids []BlockID) []Segment {
	for i := 0; i < len(ids); {
		n := 1
		if k.denseDst {
			for i+n < len(ids) && ids[i+n] == ids[i]+BlockID(n) {
				n++
			}
		}
		out = append(out, Segment{Region: k.Dst, Offset: uint64(ids[i]) * k.dstStride, Length: uint64(n) * k.whole})
		i += n
	}
	return out
}

// copyWhole is Pairs of blocks that are copied whole.
func (k *mapping) copyWhole(out []Pair, s, d []BlockID) []Pair {
	for i := 0; i < len(s); {
		n := 1
		if k.dense {
			for i+n < len(s) && s[i+n] == s[i]+BlockID(n) && d[i+n] == d[i]+BlockID(n) {
				n++
			}
		}
		out = append(out, Pair{
			SrcRegion: k.Src, DstRegion: k.Dst,
			SrcOffset: uint64(s[i]) * k.srcStride, DstOffset: uint64(d[i]) * k.dstStride,
			Length: uint64(n) * k.whole,
		})
		i += n
	}
	return out
}

// land is Segments of blocks that are cut: units of them, perBlock in each.
func (k *mapping) land(out []Segment, ids []BlockID, perBlock, units uint64) []Segment {
	p, begin := &k.seg, len(out)
	for _, id := range ids {
		count := min(units, perBlock)
		if units -= count; count == 0 {
			break
		}
		block := uint64(id)*k.dstStride + k.dst
		for h := range p.heads {
			for u := range count {
				unit := block + h*p.dstHead + u*k.dstUnit
				for o := range p.outer {
					for i := range p.inner {
						at := unit + o*p.dstOuter + i*p.dstInner
						if n := len(out); n > begin && out[n-1].Offset+out[n-1].Length == at {
							out[n-1].Length += p.run
							continue
						}
						out = append(out, Segment{Region: k.Dst, Offset: at, Length: p.run})
					}
				}
			}
		}
	}
	return out
}

// copy is Pairs of blocks that are cut.
func (k *mapping) copy(out []Pair, r ratio, src []BlockID, srcFirst uint64, dst []BlockID, from, to uint64) []Pair {
	p, begin := &k.pair, len(out)
	for _, id := range dst {
		count := min(to-from, r.dst)
		if count == 0 {
			break
		}
		block := uint64(id)*k.dstStride + k.dst
		for h := range p.heads {
			for u := range count {
				h, u := h, u
				if fault.On("units-first") {
					h, u = (h*count+u)%p.heads, (h*count+u)/p.heads
				}
				b, part := from+u, uint64(0)
				if r.src > 1 {
					b, part = b/r.src, b%r.src
				}
				s := uint64(src[b-srcFirst])*k.srcStride + k.src + h*p.srcHead + fault.Pick("first-half", part, 0)*k.srcUnit
				d := block + h*p.dstHead + u*k.dstUnit
				for o := range p.outer {
					s, d := s+o*p.srcOuter, d+o*p.dstOuter
					for range p.inner {
						if n := len(out); n > begin && out[n-1].DstOffset+out[n-1].Length == d && out[n-1].SrcOffset+out[n-1].Length == s {
							out[n-1].Length += p.run
						} else {
							out = append(out, Pair{SrcRegion: k.Src, DstRegion: k.Dst, SrcOffset: s, DstOffset: d, Length: p.run})
						}
						s, d = s+p.srcInner, d+p.dstInner
					}
				}
			}
		}
		from += count
	}
	return out
}

// of yields the mappings of a selection, in the order of D's regions.
func (m *Match) of(dst Selection) iter.Seq[*mapping] {
	return func(yield func(*mapping) bool) {
		rest := dst.Regions
		for i := range m.mappings {
			k := &m.mappings[i]
			if dst.Regions != nil {
				for len(rest) > 0 && rest[0] < k.Dst {
					rest = rest[1:]
				}
				if len(rest) == 0 || rest[0] != k.Dst {
					continue
				}
			}
			if int(k.group) < len(dst.Blocks) && !yield(k) {
				return
			}
		}
	}
}

// bound is the number of runs when nothing merges, so that one allocation holds
// every plan.
func (s *progress) bound(perUnit func(*mapping) uint64) (int, error) {
	dst, m := &s.dst, s.m
	if len(dst.Blocks) > MaxGroups {
		return 0, fmt.Errorf("plan: %d groups, at most %d are supported", len(dst.Blocks), MaxGroups)
	}
	if err := m.checkRegions(dst.Regions); err != nil {
		return 0, fmt.Errorf("plan: %w", err)
	}
	if err := m.checkHas(dst.Regions); err != nil {
		return 0, err
	}
	var total, cut uint64
	for k := range m.of(*dst) {
		first, from, to, last := s.units(k)
		units, now := last-first, to-from
		if k.whole != 0 {
			total += now
			continue
		}
		runs := perUnit(k)
		total += now * runs
		if units > 0 && runs > MaxPieces/units || cut+units*runs > MaxPieces {
			return 0, fmt.Errorf("the load is cut into more than %d pieces (%d of each %d tokens in group %d): have the heads outside of the tokens (HND) on both sides, or load fewer blocks at a time",
				MaxPieces, runs, m.ratios[k.group].unit, k.group)
		}
		cut += units * runs
	}
	return int(total), nil
}

// checkHas: P has something of each of D's regions.
func (m *Match) checkHas(regions []uint32) error {
	k := 0
	for _, r := range regions {
		for k < len(m.mappings) && m.mappings[k].Dst < r {
			k++
		}
		if k == len(m.mappings) || m.mappings[k].Dst != r {
			return fmt.Errorf("the load asks for region %d of the decode engine, but the prefill engine has no part of that region: register the same layers on both", r)
		}
	}
	return nil
}

// Plan is NewMatch and Pairs in one, for a single plan from the first of this layout's
// blocks to a peer's.
func (l *Layout) Plan(src [][]BlockID, peer []Shape, dst [][]BlockID) ([]Pair, error) {
	m, err := NewMatch(l.Shapes(), peer)
	if err != nil {
		return nil, err
	}
	return m.Pairs(Selection{Blocks: src}, Selection{Blocks: dst})
}

// Segments is where blocks lie in this layout, all of them whole.
func (l *Layout) Segments(blocks [][]BlockID) []Segment {
	m, err := NewMatch(l.Shapes(), l.Shapes())
	var out []Segment
	if err == nil {
		out, err = m.Segments(Selection{Blocks: blocks})
	}
	if err != nil {
		panic(err) // a layout fits itself, and whole blocks are one piece each
	}
	return out
}
