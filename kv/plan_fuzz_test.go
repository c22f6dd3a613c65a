package kv

import (
	"encoding/binary"
	"slices"
	"testing"

	"github.com/kvconn/kvconn/rig/alloctest"
)

// numbers reads an input as numbers of any size, small ones most of the time.
type numbers struct{ b []byte }

func (n *numbers) byte() byte {
	if len(n.b) == 0 {
		return 0
	}
	v := n.b[0]
	n.b = n.b[1:]
	return v
}

// size: two thirds are small multiples of the alignment, the others anything.
func (n *numbers) size() uint64 {
	kind := n.byte()
	if kind%3 != 0 {
		return uint64(kind/3) * RegionAlign
	}
	var b [8]byte
	for i := range b {
		b[i] = n.byte()
	}
	return binary.LittleEndian.Uint64(b[:])
}

func (n *numbers) blocks() [][]BlockID {
	out := make([][]BlockID, n.byte()%6)
	for g := range out {
		out[g] = make([]BlockID, n.byte()%20)
		for i := range out[g] {
			if out[g][i] = BlockID(n.byte()); out[g][i] == 0xff {
				out[g][i] = BlockID(n.size())
			}
		}
	}
	return out
}

// geometry gives a shape one that its numbers fit, most of the time: its bytes
// become those of so many items.
func (n *numbers) geometry(s *Shape) {
	kind := n.byte()
	if kind == 0 {
		return
	}
	s.Tokens, s.Heads, s.FirstHead = []uint32{1, 2, 4, 16, 32, 3, 48, 64}[kind%8], 1+uint32(kind/8%4), uint32(n.byte()%4)
	s.TotalHeads = uint32(n.byte() % 8)
	item := uint64(1+kind/64) * RegionAlign
	s.BlockBytes = item * uint64(s.Tokens) * uint64(s.Heads)
	s.BlockStride = max(s.BlockStride, s.BlockBytes)
	s.TokenStride, s.HeadStride = uint64(s.Heads)*item, item
	switch n.byte() % 8 {
	case 0, 1, 2, 3:
		s.TokenStride, s.HeadStride = item, uint64(s.Tokens)*item
	case 7: // whatever there is
		s.TokenStride, s.HeadStride, s.BlockBytes = n.size(), n.size(), n.size()
		s.Tokens, s.Heads, s.FirstHead, s.TotalHeads = uint32(n.size()), uint32(n.size()), uint32(n.size()), uint32(n.size())
	}
}

// FuzzPlan: a layout of this agent, the shapes and the load that a peer claims,
// and an offer. A peer's shapes have passed no check but NewMatch: strides and
// numbers of blocks may be anything.
//
// It checks that a layout that NewLayout accepts lies within the address space and does
// not overlap. A load that passes NewMatch, CheckPeerLoad and Wanted plans without an
// error or is cut into too many pieces. The plan reads offered blocks, within their
// regions, as many bytes as the decode engine expects and in its order. It allocates for
// the blocks there are, not for those claimed. If the peer's shapes are those of a layout,
// each byte lands where it belongs.
func FuzzPlan(f *testing.F) {
	small := func(size int) []byte { return []byte{byte(3*size/RegionAlign + 1)} }
	whole := func(size uint64) []byte { return binary.LittleEndian.AppendUint64([]byte{0}, size) }
	region := func(name, group byte, sizes ...[]byte) []byte {
		return append([]byte{name, group}, slices.Concat(sizes...)...)
	}
	opaque := []byte{0}
	k := region('k', 0, whole(4096), small(64), small(64), small(16), opaque)
	v := region('v', 0, whole(1<<20), small(32), small(16), small(12), opaque)
	state := region('s', 1, whole(1<<30), small(8), small(8), small(16), opaque)
	// 4 tokens of 2 heads from the first on, of 4: NHD and HND.
	nhd := region('k', 0, whole(4096), small(32), small(32), small(16), []byte{2 + 8, 0, 4, 4})
	hnd := region('k', 0, whole(4096), small(32), small(32), small(16), []byte{2 + 8, 0, 4, 0})
	heads := region('k', 0, whole(1<<20), small(32), small(32), small(16), []byte{2 + 8, 2, 4, 0})
	latent := region('l', 1, whole(1<<30), small(64), small(64), small(16), []byte{3, 0, 0, 4})
	ids := func(groups ...[]byte) []byte {
		b := []byte{byte(len(groups))}
		for _, g := range groups {
			b = append(append(b, byte(len(g))), g...)
		}
		return b
	}
	same, zero := []byte{0, 0}, []byte{0}
	for _, parts := range [][][]byte{
		{{1}, k, same, ids([]byte{1, 2, 3, 7}), zero, zero, ids([]byte{4, 5, 6, 7}), zero},
		{{3}, k, v, state, same, ids([]byte{1, 2, 3}, []byte{4, 5}), zero, {1}, small(4), ids([]byte{4, 5}, []byte{7, 9}), zero},
		{{3}, k, v, state, {0, 2, 0, 0}, whole(^uint64(3)), {1, 1}, whole(0), ids([]byte{1, 2, 3}, []byte{4}), zero, {2}, whole(0), whole(0), ids([]byte{0xff}, nil), whole(1 << 31), zero},
		{{1}, k, same, ids([]byte{1}), zero, {1}, whole(1<<32 - 1), ids([]byte{4}), zero},
		{{1}, k, same, ids([]byte{1, 2}), {1}, small(4), {1}, small(4), ids([]byte{4, 5}), zero},
		{{1}, nhd, same, ids([]byte{1, 2}), zero, zero, ids([]byte{4, 5}), {1}, small(4)},
		{{1}, nhd, {1, 1 + 8, 0, 4, 4, 0}, ids([]byte{1, 2, 3, 4}), zero, zero, ids([]byte{4, 5}), zero},
		{{1}, nhd, {1, 3 + 8, 0, 4, 4, 0}, ids([]byte{1, 2, 3, 4}), zero, zero, ids([]byte{4}), {1}, small(12)},
		{{1}, hnd, {1, 3 + 8, 0, 4, 0, 0}, ids([]byte{1, 2, 3, 4, 5, 6, 7, 8}), zero, zero, ids([]byte{4, 9}), zero},
		{{1}, hnd, {1, 2 + 16, 1, 4, 0, 0}, ids([]byte{1, 2}), zero, zero, ids([]byte{4, 5}), zero},
		{{1}, nhd, {1, 2 + 8, 0, 4, 0, 0}, ids([]byte{1, 2}), zero, zero, ids([]byte{4, 5}), zero},
		{{3}, hnd, heads, latent, {1, 2 + 24, 0, 4, 4, 2 + 8, 2, 4, 0, 3, 0, 0, 4, 0}, ids([]byte{1, 2}, []byte{3}), zero, zero, ids([]byte{4, 5}, []byte{6}), zero},
		{{2}, nhd, heads, same, ids([]byte{1, 2, 3}), zero, zero, ids([]byte{4, 5}), zero},
		{{2}, nhd, nhd},
		{{1}, nhd, {1, 2 + 8, 0, 4, 7}, whole(1 << 63), whole(4), whole(1 << 40), whole(1 << 31), whole(1 << 31), whole(1<<32 - 1), whole(1 << 31), zero},
		{{2}, k, v, {0, 1, 1, 4}}, {{2}, k, v, {0, 1, 1, 2}, small(8)}, {{2}, k, v, {0, 1, 0, 3}, whole(1)}, {{2}, k, k},
		{{1}, region('x', 0, whole(1<<63), whole(1<<40), whole(1<<39), whole(1<<22), opaque), same, ids([]byte{200}), zero, zero, ids([]byte{200}), zero},
		{{1}, region('x', 0, whole(^uint64(3)), small(4), small(4), whole(1), opaque), same, ids([]byte{0}), zero, zero, ids([]byte{0}), zero},
		{{1}, region('x', 0, whole(^uint64(4095)), whole(4096), small(4), small(16), opaque)},
		{{2}, region('a', 0, whole(4096), small(64), small(32), small(16), opaque), region('b', 0, whole(4096+48), small(64), small(32), small(16), opaque)},
		{{1}, region('x', 15, small(4), whole(1<<40), small(4), whole(1<<32-1), opaque)},
		{{2}, region('a', 0, whole(4096), small(64), small(32), small(16), opaque), region('b', 0, whole(4128), small(64), small(32), small(16), opaque), same, ids([]byte{0, 15, 4}), zero, zero, ids([]byte{5, 6, 7}), zero},
	} {
		f.Add(slices.Concat(parts...))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		n := &numbers{in}
		regions := make([]Region, n.byte()%5)
		for i := range regions {
			regions[i] = Region{Name: string([]byte{n.byte()}), Group: uint32(n.byte() % 20), Base: n.size(), BlockStride: n.size(), BlockBytes: n.size(), NumBlocks: uint32(n.size())}
			s := regions[i].shape()
			n.geometry(&s)
			regions[i].take(&s)
		}
		l, err := NewLayout(regions)
		if err != nil {
			return
		}
		checkApart(t, l)
		peer := l.Shapes()
		if n.byte() == 1 { // it has a geometry of its own
			for i := range peer {
				n.geometry(&peer[i])
			}
		}
		for range n.byte() % 8 {
			p := &peer[int(n.byte())%len(peer)]
			switch n.byte() % 6 {
			case 0:
				p.BlockStride = n.size()
			case 1:
				p.NumBlocks = uint32(n.size())
			case 2:
				p.BlockBytes = n.size()
			case 3:
				p.Group = uint32(n.size())
			case 4:
				peer = peer[:len(peer)-1]
			case 5:
				slices.Reverse(peer)
			}
			if len(peer) == 0 {
				break
			}
		}
		m, err := NewMatch(l.Shapes(), peer)
		if err != nil {
			return
		}
		checkCommons(t, m, l, peer)
		offered, begin := n.blocks(), n.positions()
		load := Selection{First: n.positions(), Blocks: n.blocks(), Tokens: n.positions()}
		// CheckUnique takes a bit for each block of the engine's own layout.
		small := !slices.ContainsFunc(l.Groups, func(g Group) bool { return g.NumBlocks > 1<<20 })
		if small && l.CheckBlocks(load.Blocks) == nil {
			checkTwice(t, l, load.Blocks)
		}
		if l.CheckBlocks(offered) != nil || load.CheckPeerLoad(l, m) != nil {
			return
		}
		held := Selection{First: begin, Blocks: offered}
		selected, err := held.Wanted(m, &load)
		if err != nil {
			return
		}
		first, src := selected.First, selected.Blocks
		checkSelected(t, begin, offered, first, src)
		if pieces, err := (&progress{m: m, dst: load}).bound(func(k *mapping) uint64 { return k.pair.perUnit() }); err != nil || pieces > 1<<13 {
			return // else an input takes its time
		}
		alloctest.Bound(t, 1<<22, func() { checkPlan(t, l, m, first, src, load) })
		if d := decodeLayout(peer); d != nil && d.CheckBlocks(load.Blocks) == nil && d.CheckUnique(load.Blocks) == nil && l.CheckUnique(src) == nil && cells(peer, load.Blocks)+cells(l.Shapes(), src) < 1<<12 {
			checkMatch(t, m, l.Shapes(), peer, Selection{First: first, Blocks: src}, load)
		}
	})
}

// positions are up to 3, of one group each.
func (n *numbers) positions() []uint32 {
	out := make([]uint32, n.byte()%4)
	for i := range out {
		out[i] = uint32(n.size())
	}
	return out
}

func (r *Region) take(s *Shape) {
	r.BlockStride, r.BlockBytes = s.BlockStride, s.BlockBytes
	r.Tokens, r.Heads, r.FirstHead, r.TotalHeads, r.TokenStride, r.HeadStride = s.Tokens, s.Heads, s.FirstHead, s.TotalHeads, s.TokenStride, s.HeadStride
}

// decodeLayout is one of these shapes, each in a place of its own; nil if there is none.
func decodeLayout(shapes []Shape) *Layout {
	regions := make([]Region, len(shapes))
	for i := range shapes {
		s := &shapes[i]
		regions[i] = Region{Name: s.Name, Group: s.Group, Base: uint64(1+i) << 50, NumBlocks: s.NumBlocks}
		if regions[i].take(s); s.NumBlocks > 1<<10 || s.BlockStride > 1<<30 {
			return nil
		}
	}
	l, err := NewLayout(regions)
	if err != nil {
		return nil
	}
	return l
}

func cells(shapes []Shape, blocks [][]BlockID) (n uint64) {
	for _, s := range shapes {
		if int(s.Group) < len(blocks) {
			n += uint64(len(blocks[s.Group])) * (s.BlockBytes / RegionAlign)
		}
	}
	return n
}

// checkCommons: a Common has one name, one length of items, and heads that both regions
// have, none of them twice.
func checkCommons(t *testing.T, m *Match, l *Layout, peer []Shape) {
	t.Helper()
	got := map[[2]uint32]bool{}
	for _, c := range m.Commons() {
		s, d := l.Regions[c.Src].shape(), peer[c.Dst]
		d.complete()
		if s.Name != d.Name || s.Group != d.Group || s.ItemBytes() != d.ItemBytes() || s.TotalHeads != d.TotalHeads || s.Tokens == 0 && s.BlockBytes != d.BlockBytes {
			t.Fatalf("%v (%s) is matched with %v (%s)", &s, s.geometry(), &d, d.geometry())
		}
		for _, r := range []*Shape{&s, &d} {
			if first, end := r.heads(); c.First < first || c.End > end || c.First >= c.End {
				t.Fatalf("heads %d to %d of %v, which has %s", c.First, c.End, r, r.geometry())
			}
		}
		for h := c.First; h < c.End; h++ {
			if k := [2]uint32{c.Dst, h}; got[k] {
				t.Fatalf("head %d of region %d comes twice", h, c.Dst)
			} else {
				got[k] = true
			}
		}
	}
}

// checkApart: no region leaves the address space, and no two of a group share a byte. If
// there are few blocks, it looks at each.
func checkApart(t *testing.T, l *Layout) {
	t.Helper()
	const few = 40
	for i := range l.Regions {
		a := &l.Regions[i]
		if end := a.Base + a.Extent(); end < a.Base || a.Extent() < a.BlockBytes || (a.Extent()-a.BlockBytes)/max(a.BlockStride, 1) != uint64(a.NumBlocks-1) {
			t.Fatalf("%v leaves the address space", a)
		}
		if a.NumBlocks < l.Groups[a.Group].NumBlocks {
			t.Fatalf("%v has fewer blocks than its group", a)
		}
		for j := range i {
			b := &l.Regions[j]
			if b.Group != a.Group || a.NumBlocks > few || b.NumBlocks > few {
				continue
			}
			for x := range uint64(a.NumBlocks) {
				for y := range uint64(b.NumBlocks) {
					p, q := a.Base+x*a.BlockStride, b.Base+y*b.BlockStride
					if p < q+b.BlockBytes && q < p+a.BlockBytes {
						t.Fatalf("block %d of %v and block %d of %v share a byte", x, a, y, b)
					}
				}
			}
		}
	}
}

func checkTwice(t *testing.T, l *Layout, blocks [][]BlockID) {
	t.Helper()
	twice := false
	for _, ids := range blocks {
		sorted := slices.Sorted(slices.Values(ids))
		twice = twice || len(slices.Compact(sorted)) != len(ids)
	}
	if err := l.CheckUnique(blocks); (err != nil) != twice {
		t.Fatalf("%v: a block stands twice: %v, said is %v", blocks, twice, err)
	}
}

// checkSelected: the blocks that are read were offered, and stand where the load says.
func checkSelected(t *testing.T, begin []uint32, offered [][]BlockID, first []uint32, src [][]BlockID) {
	t.Helper()
	for g := range src {
		if len(src[g]) == 0 {
			continue
		}
		k := int(first[g]) - int(OrZero(begin, g))
		if k < 0 || k+len(src[g]) > len(offered[g]) || !slices.Equal(src[g], offered[g][k:k+len(src[g])]) {
			t.Fatalf("group %d: %v is selected from %d on, offered is %v from %d on", g, src[g], first[g], offered[g], OrZero(begin, g))
		}
	}
}

// checkPlan looks at the bytes that are read, and compares with the peer's expectation.
// Places at the peer may overflow: transports leave them to it.
func checkPlan(t *testing.T, l *Layout, m *Match, first []uint32, src [][]BlockID, load Selection) {
	t.Helper()
	pairs, err := m.Pairs(Selection{First: first, Blocks: src}, load)
	if err != nil {
		t.Fatalf("no plan of %v to %v: %v", src, load.Blocks, err)
	}
	segments, err := m.Segments(load)
	if err != nil {
		t.Fatalf("no segments of %v: %v", load.Blocks, err)
	}
	checkWindows(t, m, Selection{First: first, Blocks: src}, load, pairs, segments)
	at, rest := 0, Segment{}
	for _, p := range pairs {
		r := &l.Regions[p.SrcRegion]
		if p.SrcOffset+p.Length > r.Extent() {
			t.Fatalf("%+v is read outside of its region", p)
		}
		for b := p.SrcOffset / r.BlockStride; b*r.BlockStride < p.SrcOffset+p.Length; b++ {
			if !slices.Contains(src[r.Group], BlockID(b)) {
				t.Fatalf("%+v reads block %d, of %v", p, b, src[r.Group])
			}
		}
		for offset, left := p.DstOffset, p.Length; left > 0; {
			if rest.Length == 0 {
				if at == len(segments) {
					t.Fatalf("%+v goes on after the last segment", p)
				}
				rest = segments[at]
				at++
			}
			if rest.Region != p.DstRegion || rest.Offset != offset {
				t.Fatalf("%+v at offset %d, expected is %+v", p, offset, rest)
			}
			n := min(left, rest.Length)
			rest.Offset, rest.Length, offset, left = rest.Offset+n, rest.Length-n, offset+n, left-n
		}
	}
	if at != len(segments) || rest.Length != 0 {
		t.Fatalf("%d of %d segments are written, of the last one %d bytes are not", at, len(segments), rest.Length)
	}
}
