package kv

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"unsafe"

	"github.com/kvconn/kvconn/internal/fault"
)

// Match says which bytes of a prefill agent's caches go where in a decode agent's. Both
// agents make it once, when they meet, out of the same two descriptions. So both know one
// linear order of a transfer's bytes without talking. It does not change.
//
// Regions belong together by group and name. Of two such regions the heads that both hold
// are copied. Blocks of the two sides may have unequal numbers of tokens, if one number
// divides the other, and their items may lie in another order.
type Match struct {
	mappings []mapping // in the order of D's regions, then of heads
	ratios   [MaxGroups]ratio
	regions  int // of D
	whole    error
}

// Common is a run of heads that a region of P and one of D both hold.
type Common struct {
	Src, Dst   uint32 // the regions
	First, End uint32 // heads of the model, End is the first beyond; 0 and 1 of opaque blocks
}

// ratio is how the blocks of a group fit: one of src and dst is 1.
type ratio struct {
	unit     uint64 // tokens of the smaller block; 0: unknown
	src, dst uint64 // units of a block of P, of D; 0: nothing of the group is in common
}

// mapping is one Common, ready to be copied.
type mapping struct {
	Common
	group                uint32
	srcStride, dstStride uint64 // of blocks
	whole                uint64 // bytes of a block that is copied whole on both sides; 0: it is cut
	dense                bool   // of whole ones: neighbours are adjacent on both sides, or in D
	denseDst             bool
	src, dst             uint64 // of the first head in common, from the block's start
	srcUnit, dstUnit     uint64 // from a unit to the next one in a block
	pair, seg            pattern
}

// pattern is the runs that are contiguous, in D's order: outer times inner of them
// in each unit. Where a block of D has several units and head after head, it is
// gone through once for each of the heads.
type pattern struct {
	heads              uint64 // else 1
	outer, inner       uint64 // at least 1
	run                uint64 // bytes
	srcHead, dstHead   uint64
	srcOuter, dstOuter uint64
	srcInner, dstInner uint64
}

// perUnit is the number of runs of a unit.
func (p *pattern) perUnit() uint64 { return p.heads * p.outer * p.inner }

// NewMatch finds what P's regions and D's have in common. A region that only one of them
// has is no error (see Whole). A region that both have and that cannot be copied is an
// error, which names both values.
func NewMatch(src, dst []Shape) (*Match, error) {
	src, dst = slices.Clone(src), slices.Clone(dst)
	if fault.On("stage-by-place") {
		nameByPlace(src)
		nameByPlace(dst)
	}
	order, from, err := checkShapes(src)
	if err != nil {
		return nil, fmt.Errorf("at the prefill engine: %w", err)
	}
	_, to, err := checkShapes(dst)
	if err != nil {
		return nil, fmt.Errorf("at the decode engine: %w", err)
	}
	m := &Match{regions: len(dst)}
	var diffs []string
	used, held := make([]bool, len(src)), make([]uint32, len(dst)) // whether D has its name, and how many heads
	for i := range dst {
		d := &dst[i]
		r := groupRatio(from[d.Group], to[d.Group])
		k, _ := slices.BinarySearchFunc(order, d, func(j uint32, d *Shape) int { return compareNames(&src[j], d) })
		for ; k < len(order) && compareNames(&src[order[k]], d) == 0; k++ {
			j := order[k]
			s := &src[j]
			if !fit(s, d, r) {
				if len(diffs) < maxDiffs {
					diffs = append(diffs, fmt.Sprintf("%v has %s at the prefill engine, %s at the decode engine", d, s.geometry(), d.geometry()))
					if s.Tokens == 0 && d.Tokens == 0 && r.src != r.dst {
						diffs[len(diffs)-1] += fmt.Sprintf(", in a group with blocks of %d tokens and of %d", from[d.Group], to[d.Group])
					}
				}
				break
			}
			used[j] = true // as far as D needs it
			c := Common{Src: j, Dst: uint32(i)}
			first, end := s.heads()
			c.First, c.End = d.heads()
			if c.First, c.End = max(c.First, first), min(c.End, end); c.First >= c.End {
				continue
			}
			m.mappings = append(m.mappings, newLink(c, s, d, r))
			m.ratios[d.Group] = r
			held[i] += c.End - c.First
		}
	}
	if diffs != nil {
		return nil, fmt.Errorf("layouts differ: %s", strings.Join(diffs, "; "))
	}
	m.mappings = slices.Clone(m.mappings) // without room for more
	m.whole = unmatched(src, dst, used, held)
	return m, nil
}

// maxDiffs is how many differences an error names.
const maxDiffs = 3

// fit says whether the heads of two regions can be copied. Opaque blocks can if the
// group's blocks are alike.
func fit(s, d *Shape, r ratio) bool {
	switch {
	case s.IndexKind != d.IndexKind && !fault.On("any-index"), s.IndexKind != IndexBlock && s.Tokens != d.Tokens:
		return false
	case (s.Tokens == 0) != (d.Tokens == 0):
		return false
	case s.Tokens == 0:
		return s.BlockBytes == d.BlockBytes && r.src == r.dst
	}
	return s.ItemBytes() == d.ItemBytes() && s.TotalHeads == d.TotalHeads && (s.Tokens%d.Tokens == 0 || d.Tokens%s.Tokens == 0)
}

// groupRatio is how blocks of so many tokens fit; 0 is unknown.
func groupRatio(src, dst uint32) ratio {
	if src == 0 || dst == 0 {
		return ratio{src: 1, dst: 1}
	}
	unit := min(src, dst)
	return ratio{unit: uint64(unit), src: uint64(src / unit), dst: uint64(dst / unit)}
}

// unmatched names what only one side has, in turn: what stands in a name differs on both.
// Regions of a name that the other side lacks are told without their geometry, so that both
// names stand in what a reason has room for.
func unmatched(src, dst []Shape, used []bool, held []uint32) error {
	var sides [2][]string
	for j := range src {
		if !used[j] && len(sides[0]) < maxDiffs {
			sides[0] = append(sides[0], fmt.Sprintf("%v is only at the prefill engine", &src[j]))
		}
	}
	for i := range dst {
		first, end := dst[i].heads()
		if held[i] == end-first || len(sides[1]) == maxDiffs {
			continue
		}
		geometry := ""
		if slices.ContainsFunc(src, func(s Shape) bool { return compareNames(&s, &dst[i]) == 0 }) {
			geometry = fmt.Sprintf(" (%s)", dst[i].geometry())
		}
		sides[1] = append(sides[1], fmt.Sprintf("%v%s has %d of %d heads at the prefill engine", &dst[i], geometry, held[i], end-first))
	}
	var diffs []string
	for n := range maxDiffs {
		for _, side := range sides {
			if n < len(side) && len(diffs) < maxDiffs {
				diffs = append(diffs, side[n])
			}
		}
	}
	if diffs == nil {
		return nil
	}
	return fmt.Errorf("layouts differ: %d regions at the prefill engine, %d at the decode engine: %s", len(src), len(dst), strings.Join(diffs, "; "))
}

// Whole names the regions that only one side has. Where each engine has one rank, that is
// an error.
func (m *Match) Whole() error { return m.whole }

// Kept is how many bytes of memory it takes.
func (m *Match) Kept() int {
	n := int(unsafe.Sizeof(*m)) + len(m.mappings)*int(unsafe.Sizeof(mapping{}))
	if m.whole != nil {
		n += len(m.whole.Error())
	}
	return n
}

// Commons lists what both hold, in the order of D's regions and then of heads.
func (m *Match) Commons() []Common {
	out := make([]Common, len(m.mappings))
	for i := range m.mappings {
		out[i] = m.mappings[i].Common
	}
	return out
}

// Opaque says whether, for some regions in common, nobody knows how many tokens a block
// has.
func (m *Match) Opaque() bool {
	return slices.ContainsFunc(m.mappings, func(k mapping) bool { return m.ratios[k.group].unit == 0 })
}

func newLink(c Common, s, d *Shape, r ratio) mapping {
	k := mapping{Common: c, group: d.Group, srcStride: s.BlockStride, dstStride: d.BlockStride}
	if s.Tokens == 0 {
		k.whole, k.dense, k.denseDst = d.BlockBytes, s.BlockStride == d.BlockBytes && d.BlockStride == d.BlockBytes, d.BlockStride == d.BlockBytes
		return k
	}
	k.src, k.dst = uint64(c.First-s.FirstHead)*s.HeadStride, uint64(c.First-d.FirstHead)*d.HeadStride
	if fault.On("first-heads") {
		k.src = 0
	}
	if fault.On("heads-at-the-front") {
		k.dst = 0
	}
	k.srcUnit, k.dstUnit = r.unit*s.TokenStride, r.unit*d.TokenStride
	heads := uint64(c.End - c.First)
	k.pair = newPattern(heads, s, d, r)
	k.seg = newPattern(heads, d, d, r)
	if r.src == r.dst && k.pair.perUnit() == 1 && k.pair.run == s.BlockBytes && k.pair.run == d.BlockBytes {
		k.whole, k.dense, k.denseDst = d.BlockBytes, s.BlockStride == d.BlockBytes && d.BlockStride == d.BlockBytes, d.BlockStride == d.BlockBytes
	}
	return k
}

// newPattern finds the runs of a unit that are contiguous on both sides.
func newPattern(heads uint64, s, d *Shape, r ratio) pattern {
	item := d.ItemBytes()
	if heads == 1 || d.HeadStride == item { // D has token after token
		p := pattern{heads: 1, outer: r.unit, srcOuter: s.TokenStride, dstOuter: d.TokenStride, inner: heads, srcInner: s.HeadStride, dstInner: d.HeadStride, run: item}
		if heads == 1 || s.HeadStride == item || fault.On("order-ignored") {
			p.run, p.inner = heads*item, 1
			if s.TokenStride == p.run && d.TokenStride == p.run {
				p.run, p.outer = r.unit*p.run, 1
			}
		}
		return p
	}
	p := pattern{heads: 1, outer: heads, srcOuter: s.HeadStride, dstOuter: d.HeadStride, inner: r.unit, srcInner: s.TokenStride, dstInner: d.TokenStride, run: item}
	if s.TokenStride == item {
		p.run, p.inner = r.unit*item, 1
		if r.dst == 1 && s.HeadStride == p.run && d.HeadStride == p.run {
			p.run, p.outer = heads*p.run, 1
		}
	}
	if r.dst > 1 {
		p.heads, p.srcHead, p.dstHead = p.outer, p.srcOuter, p.dstOuter
		p.outer, p.srcOuter, p.dstOuter = 1, 0, 0
	}
	return p
}

// ratio is a group's; without a Match both sides are alike.
func (m *Match) ratio(group int) ratio {
	if m == nil {
		return ratio{src: 1, dst: 1}
	}
	return m.ratios[group]
}

// span is the units of a load: from those of its first block up to the end of its
// last one, or of the prompt.
func (r ratio) span(first uint32, blocks int, tokens uint32) (from, to uint64) {
	from, to = uint64(first)*r.dst, (uint64(first)+uint64(blocks))*r.dst
	if tokens > 0 && r.unit > 0 && !fault.On("beyond-the-prompt") {
		to = max(from, min(to, (uint64(tokens)+fault.Pick("before-the-prompt-ends", r.unit-1, 0))/r.unit))
	}
	return from, to
}

// sources is the blocks of P, by their position in the prompt, that hold a load's.
func (r ratio) sources(first uint32, blocks int, tokens uint32) (from, to uint64) {
	from, to = r.span(first, blocks, tokens)
	n := max(r.src, 1)
	return from / n, (to + n - 1) / n
}

// checkRegions says what is wrong with a load's list of D's regions: nil means all.
func (m *Match) checkRegions(regions []uint32) error { return checkRegions(regions, m.regions) }

// CheckRegions says what is wrong with a list of this layout's regions: nil means all.
func (l *Layout) CheckRegions(regions []uint32) error { return checkRegions(regions, len(l.Regions)) }

func checkRegions(regions []uint32, n int) error {
	if regions != nil && len(regions) == 0 {
		return errors.New("the list of regions is empty: to mean all regions, leave it out")
	}
	for i, r := range regions {
		if int(r) >= n || i > 0 && r <= regions[i-1] {
			return fmt.Errorf("region %d at position %d: want ascending numbers below %d", r, i, n)
		}
	}
	return nil
}
