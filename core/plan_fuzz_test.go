package core

import (
	"encoding/binary"
	"slices"
	"testing"

	"github.com/kvconn/kvconn/internal/alloctest"
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

// FuzzPlan: a layout of this agent, the shapes and the load that a peer claims,
// and an offer. A peer's shapes have passed no check but CheckPeer: strides and
// numbers of blocks may be anything.
//
// What it checks: what NewLayout accepts lies within the address space and does
// not overlap; what passes CheckPeer, CheckBlocks and selectBlocks plans without
// an error, reads whole blocks of the offer within their regions and in the
// load's order, and allocates for the blocks there are, not for those claimed.
func FuzzPlan(f *testing.F) {
	small := func(size int) []byte { return []byte{byte(3*size/RegionAlign + 1)} }
	whole := func(size uint64) []byte { return binary.LittleEndian.AppendUint64([]byte{0}, size) }
	region := func(name, group byte, sizes ...[]byte) []byte {
		return append([]byte{name, group}, slices.Concat(sizes...)...)
	}
	k, v := region('k', 0, whole(4096), small(64), small(64), small(16)), region('v', 0, whole(1<<20), small(32), small(16), small(12))
	state := region('s', 1, whole(1<<30), small(8), small(8), small(16))
	ids := func(groups ...[]byte) []byte {
		b := []byte{byte(len(groups))}
		for _, g := range groups {
			b = append(append(b, byte(len(g))), g...)
		}
		return b
	}
	same, fromStart := []byte{0}, []byte{0}
	for _, parts := range [][][]byte{
		{{1}, k, same, ids([]byte{1, 2, 3, 7}), fromStart, ids([]byte{4, 5, 6, 7})},
		{{3}, k, v, state, same, ids([]byte{1, 2, 3}, []byte{4, 5}), {1}, small(4), ids([]byte{4, 5}, []byte{7, 9}), {1}},
		{{3}, k, v, state, {2, 0, 0}, whole(^uint64(3)), {1, 1}, whole(0), ids([]byte{1, 2, 3}, []byte{4}), {2}, whole(0), whole(0), ids([]byte{0xff}, nil), whole(1 << 31)},
		{{1}, k, same, ids([]byte{1}), {1}, whole(1<<32 - 1), ids([]byte{4})},
		{{1}, k, same, ids([]byte{1, 2}), {1}, small(4), ids([]byte{4, 5})},
		{{1}, k, same, ids([]byte{1, 2}), {1}, small(0), ids([]byte{4, 5, 6})},
		{{1}, k, {1, 0, 0}, small(128), ids([]byte{1, 2, 3}), fromStart, ids([]byte{4, 5, 6})},
		{{1}, k, same, ids([]byte{1, 1}), fromStart, ids([]byte{4, 4})},
		{{2}, k, v, {1, 1, 4}}, {{2}, k, v, {1, 1, 2}, small(8)}, {{2}, k, v, {1, 0, 3}, whole(1)}, {{2}, k, k},
		{{1}, region('x', 0, whole(1<<63), whole(1<<40), whole(1<<39), whole(1<<22)), same, ids([]byte{200}), fromStart, ids([]byte{200})},
		{{1}, region('x', 0, whole(^uint64(3)), small(4), small(4), whole(1)), same, ids([]byte{0}), fromStart, ids([]byte{0})},
		{{1}, region('x', 0, whole(^uint64(4095)), whole(4096), small(4), small(16))},
		{{2}, region('a', 0, whole(4096), small(64), small(32), small(16)), region('b', 0, whole(4096+48), small(64), small(32), small(16))},
		{{1}, region('x', 15, small(4), whole(1<<40), small(4), whole(1<<32-1))},
		{{2}, region('a', 0, whole(4096), small(64), small(32), small(16)), region('b', 0, whole(4128), small(64), small(32), small(16)), same, ids([]byte{0, 15, 4}), fromStart, ids([]byte{5, 6, 7})},
		{{2}, region('a', 0, whole(4096), small(64), small(32), small(16)), region('b', 0, whole(4112), small(64), small(32), small(16))},
	} {
		f.Add(slices.Concat(parts...))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		n := &numbers{in}
		regions := make([]Region, n.byte()%5)
		for i := range regions {
			regions[i] = Region{Name: string([]byte{n.byte()}), Group: uint32(n.byte() % 20), Base: n.size(), BlockStride: n.size(), BlockBytes: n.size(), NumBlocks: uint32(n.size())}
		}
		l, err := NewLayout(regions)
		if err != nil {
			return
		}
		checkApart(t, l)
		peer := l.Shapes()
		for range n.byte() % 8 {
			p := &peer[int(n.byte())%len(peer)]
			switch n.byte() % 5 {
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
			}
			if len(peer) == 0 {
				break
			}
		}
		if l.CheckPeer(peer) != nil {
			return
		}
		for i, r := range l.Regions {
			if p := peer[i]; p.Name != r.Name || p.BlockBytes != r.BlockBytes || p.Group != r.Group {
				t.Fatalf("%v passes for %v", p, &r)
			}
		}
		offered := n.blocks()
		load := &LoadMessage{First: make([]uint32, n.byte()%4)}
		for i := range load.First {
			load.First[i] = uint32(n.size())
		}
		load.Blocks = n.blocks()
		// CheckUnique takes a bit for each block of the engine's own layout.
		small := !slices.ContainsFunc(l.Groups, func(g Group) bool { return g.NumBlocks > 1<<20 })
		if small && l.CheckBlocks(load.Blocks) == nil {
			checkTwice(t, l, load.Blocks)
		}
		if l.CheckBlocks(offered) != nil {
			return
		}
		src, err := selectBlocks(offered, load)
		if err != nil {
			return
		}
		checkSelected(t, offered, src, load)
		alloctest.Bound(t, 1<<20, func() { checkPlan(t, l, peer, src, load.Blocks) })
	})
}

// checkApart: no region leaves the address space, and no two of a group share a
// byte; as far as there are few blocks, block by block.
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

func checkSelected(t *testing.T, offered, src [][]BlockID, load *LoadMessage) {
	t.Helper()
	if len(src) != len(load.Blocks) {
		t.Fatalf("%d groups are selected for %d", len(src), len(load.Blocks))
	}
	for g := range src {
		first := 0
		if g < len(load.First) {
			first = int(load.First[g])
		}
		if len(src[g]) != len(load.Blocks[g]) || !slices.Equal(src[g], offered[g][first:first+len(src[g])]) {
			t.Fatalf("group %d: %v is selected of %v from %d for %v", g, src[g], offered[g], first, load.Blocks[g])
		}
	}
}

// checkPlan compares with one copy for each block. Destinations may overflow:
// they are the peer's, and transports leave them to the peer.
func checkPlan(t *testing.T, l *Layout, peer []Shape, src, dst [][]BlockID) {
	t.Helper()
	pairs, err := l.Plan(src, peer, dst)
	if err != nil {
		t.Fatalf("no plan of %v to %v: %v", src, dst, err)
	}
	segments := l.Segments(src)
	var total uint64
	at, rest := 0, Pair{}
	for i := range l.Regions {
		r := &l.Regions[i]
		if int(r.Group) >= len(src) {
			continue
		}
		for k, id := range src[r.Group] {
			if rest.Length == 0 {
				if at == len(pairs) {
					t.Fatalf("the plan ends before block %d of region %d: %v", k, i, pairs)
				}
				rest = pairs[at]
				at++
			}
			want := Pair{uint32(i), uint32(i), uint64(id) * r.BlockStride, uint64(dst[r.Group][k]) * peer[i].BlockStride, rest.Length}
			if rest != want || rest.Length < r.BlockBytes || rest.SrcOffset+r.BlockBytes > r.Extent() {
				t.Fatalf("block %d of region %d: %+v, want %+v", k, i, rest, want)
			}
			rest.SrcOffset, rest.DstOffset, rest.Length = rest.SrcOffset+r.BlockBytes, rest.DstOffset+r.BlockBytes, rest.Length-r.BlockBytes
			total += r.BlockBytes
		}
	}
	if at != len(pairs) || rest.Length != 0 {
		t.Fatalf("the plan goes on after the last block: %v", pairs[max(at-1, 0):])
	}
	for _, s := range segments {
		total -= s.Length
		if s.Offset+s.Length > l.Regions[s.Region].Extent() {
			t.Fatalf("%+v is outside of its region", s)
		}
	}
	if total != 0 {
		t.Fatalf("segments and plan differ by %d bytes", int64(total))
	}
}
