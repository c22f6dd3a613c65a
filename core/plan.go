package core

import (
	"fmt"

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

// MaxPieces bounds the runs of one transfer, which are that small only where
// blocks are cut by heads or turned into another order.
const MaxPieces = 1 << 24

// A transfer's bytes have one linear order that both sides know without talking,
// the receiver's: region after region as registered, within a region block after
// block as the load lists them, within a block as it lies there (several regions
// of P that go into one of D come one after the other). A position in this order
// names a byte on either side, which is all that a TCP frame carries.

// Segments lists, in the transfer's linear order, where the bytes of a load land
// in D's layout; runs that are adjacent in memory are merged. regions are D's, nil
// is all that both have; the other arguments are LoadRequest's. The ids must have
// passed CheckBlocks.
func (m *Match) Segments(regions []uint32, blocks [][]BlockID, first, tokens []uint32) ([]Segment, error) {
	bound, err := m.bound(regions, blocks, first, tokens, func(k *link) uint64 { return k.seg.perUnit() }, nil)
	if err != nil {
		return nil, err
	}
	out := make([]Segment, 0, bound)
	some := m.some(regions, len(blocks))
	for i := range m.links {
		k := &m.links[i]
		if !some.have(k) {
			continue
		}
		g := int(k.group)
		r := m.ratios[g]
		switch from, to := r.span(at(first, g), len(blocks[g]), at(tokens, g)); {
		case k.whole == 0:
			out = k.land(out, blocks[g], r.dst, to-from)
		default:
			out = k.landWhole(out, blocks[g][:to-from])
		}
	}
	return out, nil
}

// Pairs pairs P's blocks with D's, in the transfer's linear order, and merges runs
// that are adjacent on both sides. src are blocks of P, the first of a group at
// srcFirst in the prompt; the rest is the load's, as of Segments. What is read lies
// in P's blocks whatever D says; where it lands is for the transport to check.
func (m *Match) Pairs(regions []uint32, src [][]BlockID, srcFirst []uint32, dst [][]BlockID, dstFirst, tokens []uint32) ([]Pair, error) {
	return m.pairs(regions, src, srcFirst, &spans{m: m, dst: dst, first: dstFirst, tokens: tokens}, nil)
}

// PairsBetween is Pairs of what has become ready: per region of P, the blocks of
// the prompt from begin (nil: 0) to end (nil: all of src). A block of D goes when
// all of it is ready, or all that the load has of it. at says where in the linear
// order the pairs lie; taken one after the other, growing ends give each byte once.
func (m *Match) PairsBetween(regions []uint32, src [][]BlockID, srcFirst []uint32, dst [][]BlockID, dstFirst, tokens, begin, end []uint32) (pairs []Pair, extents []Extent, err error) {
	pairs, err = m.pairs(regions, src, srcFirst, &spans{m: m, dst: dst, first: dstFirst, tokens: tokens, begin: begin, end: end}, &extents)
	return pairs, extents, err
}

func (m *Match) pairs(regions []uint32, src [][]BlockID, srcFirst []uint32, wanted *spans, extents *[]Extent) ([]Pair, error) {
	dst := wanted.dst
	if len(dst) > len(src) {
		return nil, fmt.Errorf("plan: %d groups at the prefill engine, %d at the decode engine", len(src), len(dst))
	}
	bound, err := m.bound(regions, dst, wanted.first, wanted.tokens, func(k *link) uint64 { return k.pair.perUnit() }, wanted)
	if err != nil {
		return nil, err
	}
	out := make([]Pair, 0, bound)
	some := m.some(regions, len(dst))
	var position uint64
	for i := range m.links {
		k := &m.links[i]
		if !some.have(k) {
			continue
		}
		g := int(k.group)
		r, has := m.ratios[g], uint64(at(srcFirst, g))
		first, from, to, last := wanted.of(k)
		start, before := position+(from-first)*k.unitBytes(), len(out)
		position += fault.Pick("position-of-parts", last-first, to-from) * k.unitBytes()
		if from == to {
			continue
		}
		n := max(r.src, 1)
		if low, high := from/n, (to+n-1)/n; low < has || high > has+uint64(len(src[g])) {
			return nil, fmt.Errorf("plan: blocks %d to %d of group %d are wanted, there are %d to %d", low, high, g, has, has+uint64(len(src[g])))
		}
		skip := (from - first) / r.dst // blocks of D
		if k.whole == 0 {
			out = k.copy(out, r, src[g], has, dst[g][skip:], from, to)
		} else {
			out = k.copyWhole(out, src[g][from-has:to-has], dst[g][skip:skip+to-from])
		}
		if extents != nil {
			*extents = append(*extents, Extent{start, len(out) - before})
		}
	}
	return out, nil
}

// Bytes is how many a load has.
func (m *Match) Bytes(regions []uint32, dst [][]BlockID, first, tokens []uint32) (n uint64) {
	some := m.some(regions, len(dst))
	for i := range m.links {
		if k := &m.links[i]; some.have(k) {
			from, to := m.ratios[k.group].span(at(first, int(k.group)), len(dst[k.group]), at(tokens, int(k.group)))
			n += (to - from) * k.unitBytes()
		}
	}
	return n
}

// unitBytes is what a unit of a group's blocks has in this link.
func (k *link) unitBytes() uint64 {
	if k.whole != 0 {
		return k.whole
	}
	return k.seg.perUnit() * k.seg.run
}

// spans says which units of a load go, of each link.
type spans struct {
	m             *Match
	dst           [][]BlockID
	first, tokens []uint32
	begin, end    []uint32 // per region of P
}

// of: the load has the units from first to last, those from from to to go now.
func (s *spans) of(k *link) (first, from, to, last uint64) {
	r := s.m.ratios[k.group]
	first, last = r.span(at(s.first, int(k.group)), len(s.dst[k.group]), at(s.tokens, int(k.group)))
	from, to = first, last
	if s.begin != nil {
		from = r.settled(first, last, at(s.begin, int(k.Src)))
	}
	if s.end != nil {
		to = r.settled(first, last, at(s.end, int(k.Src)))
	}
	return first, from, max(from, to), last
}

// settled is the unit up to which a load's blocks are whole when so many blocks of
// P's prompt are ready.
func (r ratio) settled(first, last uint64, blocks uint32) uint64 {
	ready := uint64(blocks) * r.src
	if ready >= last {
		return last
	}
	return max(first, fault.Pick("part-of-a-block", ready-ready%r.dst, ready))
}

// landWhole is Segments of blocks that are copied whole.
func (k *link) landWhole(out []Segment, ids []BlockID) []Segment {
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

// copyWhole is Pairs of them.
func (k *link) copyWhole(out []Pair, s, d []BlockID) []Pair {
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
func (k *link) land(out []Segment, ids []BlockID, perBlock, units uint64) []Segment {
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
func (k *link) copy(out []Pair, r ratio, src []BlockID, srcFirst uint64, dst []BlockID, from, to uint64) []Pair {
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

// some picks the links of some of D's regions, in groups below that; they are
// asked for in their order.
type some struct {
	all    bool
	rest   []uint32
	groups int
}

func (m *Match) some(regions []uint32, groups int) some { return some{regions == nil, regions, groups} }

func (s *some) have(k *link) bool {
	if s.all {
		return int(k.group) < s.groups
	}
	for len(s.rest) > 0 && s.rest[0] < k.Dst {
		s.rest = s.rest[1:]
	}
	return len(s.rest) > 0 && s.rest[0] == k.Dst && int(k.group) < s.groups
}

// bound is the number of runs when nothing merges, so that one allocation holds
// every plan.
func (m *Match) bound(regions []uint32, blocks [][]BlockID, first, tokens []uint32, perUnit func(*link) uint64, spans *spans) (int, error) {
	if len(blocks) > MaxGroups {
		return 0, fmt.Errorf("plan: %d groups, at most %d are supported", len(blocks), MaxGroups)
	}
	if err := m.checkRegions(regions); err != nil {
		return 0, fmt.Errorf("plan: %w", err)
	}
	var total, cut uint64
	found := 0
	some := m.some(regions, MaxGroups)
	for i := range m.links {
		k := &m.links[i]
		if !some.have(k) {
			continue
		}
		g := int(k.group)
		if found < len(regions) && regions[found] == k.Dst {
			found++
		}
		if g >= len(blocks) {
			continue
		}
		from, to := m.ratios[g].span(at(first, g), len(blocks[g]), at(tokens, g))
		units, now := to-from, to-from
		if spans != nil {
			_, from, to, _ = spans.of(k)
			now = to - from
		}
		if k.whole != 0 {
			total += now
			continue
		}
		runs := perUnit(k)
		total += now * runs
		if units > 0 && runs > MaxPieces/units || cut+units*runs > MaxPieces {
			return 0, fmt.Errorf("the load is cut into more than %d pieces (%d of each %d tokens in group %d): have the heads outside of the tokens (HND) on both sides, or load fewer blocks at a time",
				MaxPieces, runs, m.ratios[g].unit, g)
		}
		cut += units * runs
	}
	if found < len(regions) {
		return 0, fmt.Errorf("region %d of the decode engine is wanted, of which the prefill engine has nothing", regions[found])
	}
	return int(total), nil
}

// at is an element of a list that may be shorter, or nil.
func at(list []uint32, i int) uint32 {
	if i < len(list) {
		return list[i]
	}
	return 0
}

// Plan is NewMatch and Pairs in one, for whoever plans but once: from the first of
// this layout's blocks to a peer's.
func (l *Layout) Plan(src [][]BlockID, peer []Shape, dst [][]BlockID) ([]Pair, error) {
	m, err := NewMatch(l.Shapes(), peer)
	if err != nil {
		return nil, err
	}
	return m.Pairs(nil, src, nil, dst, nil, nil)
}

// Segments is where blocks lie in this layout, all of them whole.
func (l *Layout) Segments(blocks [][]BlockID) []Segment {
	m, err := NewMatch(l.Shapes(), l.Shapes())
	var out []Segment
	if err == nil {
		out, err = m.Segments(nil, blocks, nil, nil)
	}
	if err != nil {
		panic(err) // a layout fits itself, and whole blocks are one piece each
	}
	return out
}
