package kv

import (
	"slices"

	"github.com/kvconn/kvconn/internal/fault"
)

// Plan is where the bytes of a transfer lie, or some of them. It cuts them into pieces where
// it is asked. So it takes no more memory for a million pieces than for one. It may be asked
// from any goroutine. Of D's only the destination half counts.
type Plan interface {
	// Extents are the runs of bytes that the plan has, by position; their Bytes count.
	Extents() []Extent

	// Pairs appends the pieces from a position on that the plan has: as many as out has room
	// for, to the end of the extent at most, and at least one. It may stop when they have
	// limit bytes.
	Pairs(out []Pair, position, limit uint64) []Pair

	// Pieces is the most pieces that the plan may be cut into.
	Pieces() int
}

// PlanBytes is the number of bytes that a plan has.
func PlanBytes(p Plan) (n uint64) {
	for _, e := range p.Extents() {
		n += e.Bytes
	}
	return n
}

// window is a Match's Plan. It keeps block ids, and cuts them into pieces where it is asked:
// a list of the pieces would take more memory by the number of regions, or by that of heads
// and tokens.
type window struct {
	m        *Match
	src, dst Selection
	parts    []part // by position
	pieces   int
	lands    bool // it is D's: nothing is read
}

// part is what a plan has of one mapping: some units, and where the first of them lies in the
// linear order.
type part struct {
	k               *mapping
	begin, from, to uint64
}

func (p *part) end() uint64 { return p.begin + (p.to-p.from)*p.k.unitBytes() }

// Pieces is the most pieces that Pairs, or Segments if the plan is D's, would list of a load.
func (m *Match) Pieces(dst Selection, lands bool) (int, error) {
	s := progress{m: m, dst: dst}
	return s.bound(pieces(lands))
}

func pieces(lands bool) func(*mapping) uint64 {
	if lands {
		return func(k *mapping) uint64 { return k.seg.perUnit() }
	}
	return func(k *mapping) uint64 { return k.pair.perUnit() }
}

// Landing is Segments as a Plan.
func (m *Match) Landing(dst Selection) (Plan, error) {
	s := progress{m: m, dst: dst}
	bound, err := s.bound(pieces(true))
	if err != nil {
		return nil, err
	}
	w := &window{m: m, dst: dst, pieces: bound, lands: true}
	return w, w.add(&s)
}

// Plan is PairsBetween as a Plan.
func (m *Match) Plan(src, dst Selection, begin, end []uint32) (Plan, error) {
	s := progress{m: m, dst: dst, begin: begin, end: end}
	if err := s.checkGroups(&src); err != nil {
		return nil, err
	}
	bound, err := s.bound(pieces(false))
	if err != nil {
		return nil, err
	}
	w := &window{m: m, src: src, dst: dst, pieces: bound}
	return w, w.add(&s)
}

func (w *window) add(s *progress) error {
	var position uint64
	for k := range w.m.of(w.dst) {
		first, from, to, last := s.units(k)
		p := part{k: k, begin: position + (from-first)*k.unitBytes(), from: from, to: to}
		position += (last - first) * k.unitBytes()
		if from == to {
			continue
		}
		if !w.lands {
			if err := s.checkHeld(&w.src, k, from, to); err != nil {
				return err
			}
		}
		w.parts = append(w.parts, p)
	}
	return nil
}

// Pieces implements Plan.
func (w *window) Pieces() int { return w.pieces }

// Extents implements Plan.
func (w *window) Extents() []Extent {
	var out []Extent
	for i := range w.parts {
		p := &w.parts[i]
		if n := len(out); n > 0 && out[n-1].Position+out[n-1].Bytes == p.begin {
			out[n-1].Bytes += p.end() - p.begin
			continue
		}
		out = append(out, Extent{Position: p.begin, Bytes: p.end() - p.begin})
	}
	return out
}

// Pairs implements Plan.
func (w *window) Pairs(out []Pair, position, limit uint64) []Pair {
	limit += min(position, ^uint64(0)-limit) // a position from here on
	i, found := slices.BinarySearchFunc(w.parts, position, func(p part, at uint64) int {
		switch {
		case p.end() <= at:
			return -1
		case p.begin > at:
			return 1
		}
		return 0
	})
	for looks := uint64(mostLooks); found && position < limit && looks > 0 && len(out) < cap(out); i++ {
		p := &w.parts[i]
		if p.k.whole != 0 {
			out, looks = w.wholes(out, p, position-p.begin, limit-p.begin, looks)
		} else {
			out, looks = w.cut(out, p, position-p.begin, min(limit, p.end())-p.begin, looks)
		}
		position = p.end()
		found = i+1 < len(w.parts) && w.parts[i+1].begin == position
	}
	return out
}

// mostLooks bounds the pieces that one call looks at, where many merge into one: callers hold locks.
const mostLooks = 1 << 14

// blocks are D's, from the one on that holds a part's first unit.
func (w *window) blocks(p *part) []BlockID {
	g := int(p.k.group)
	first, _ := w.m.units(&w.dst, g)
	return w.dst.Blocks[g][(p.from-first)/w.m.ratios[g].dst:]
}

// wholes is Pairs of blocks that are copied whole, from an offset in their part on.
func (w *window) wholes(out []Pair, p *part, offset, limit, looks uint64) ([]Pair, uint64) {
	k := p.k
	i, skip := offset/k.whole, offset%k.whole
	dst, dense := w.blocks(p)[:p.to-p.from], k.denseDst
	var src []BlockID
	if !w.lands {
		has := uint64(OrZero(w.src.First, int(k.group)))
		src, dense = w.src.Blocks[k.group][p.from-has:p.to-has], k.dense
	}
	for i < uint64(len(dst)) && i*k.whole < limit && looks > 0 && len(out) < cap(out) {
		n := uint64(1)
		for dense && n < looks && i+n < uint64(len(dst)) && dst[i+n] == dst[i]+BlockID(n) && (w.lands || src[i+n] == src[i]+BlockID(n)) {
			n++
		}
		piece := Pair{SrcRegion: k.Src, DstRegion: k.Dst, DstOffset: uint64(dst[i])*k.dstStride + skip, Length: n*k.whole - skip}
		if !w.lands {
			piece.SrcOffset = uint64(src[i])*k.srcStride + skip
		}
		out = append(out, piece)
		i, looks, skip = i+n, looks-n, 0
	}
	return out, looks
}

// cut is Pairs of blocks that are cut, from an offset in their part on. All pieces are as long.
// In each block of D they lie head by head, unit by unit, row by row.
func (w *window) cut(out []Pair, p *part, offset, limit, looks uint64) ([]Pair, uint64) {
	k, t, r := p.k, &p.k.pair, w.m.ratios[p.k.group]
	dst, src, has := w.blocks(p), []BlockID(nil), uint64(0)
	if w.lands {
		t = &k.seg
	} else {
		src, has = w.src.Blocks[k.group], uint64(OrZero(w.src.First, int(k.group)))
	}
	begin, units := len(out), p.to-p.from
	perBlock := r.dst * t.perUnit() * t.run
	for offset < limit {
		block := offset / perBlock
		count := min(fault.Pick("window-of-whole-blocks", units-block*r.dst, r.dst), r.dst)
		i, skip := offset%perBlock/t.run, fault.Pick("window-from-the-piece", offset%t.run, 0)
		row, inner := i/t.inner, i%t.inner
		o := row % t.outer
		u := row / t.outer % count
		h := row / t.outer / count
		d := uint64(dst[block])*k.dstStride + k.dst + h*t.dstHead + u*k.dstUnit + o*t.dstOuter + inner*t.dstInner
		var s uint64
		if !w.lands {
			b, of := p.from+block*r.dst+u, uint64(0)
			if r.src > 1 {
				b, of = b/r.src, b%r.src
			}
			s = uint64(src[b-has])*k.srcStride + k.src + h*t.srcHead + of*k.srcUnit + o*t.srcOuter + inner*t.srcInner
		}
		for ; inner < t.inner; inner++ {
			if looks == 0 {
				return out, 0
			}
			looks--
			length := t.run - skip
			if n := len(out); n > begin && out[n-1].DstOffset+out[n-1].Length == d+skip && (w.lands || out[n-1].SrcOffset+out[n-1].Length == s+skip) {
				out[n-1].Length += length
			} else {
				if n == cap(out) {
					return out, 0
				}
				out = append(out, Pair{SrcRegion: k.Src, DstRegion: k.Dst, SrcOffset: s + skip, DstOffset: d + skip, Length: length})
			}
			offset += length
			s, d, skip = s+t.srcInner, d+t.dstInner, 0
		}
	}
	return out, looks
}
