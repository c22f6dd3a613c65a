package rdma

import (
	"bytes"
	"encoding/binary"
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rdma/internal/verbs"
	"github.com/kvconn/kvconn/rig/coretest"
	"github.com/kvconn/kvconn/rig/seed"
)

// numbers reads an input as numbers.
type numbers struct{ b []byte }

func (n *numbers) byte() byte {
	if len(n.b) == 0 {
		return 0
	}
	v := n.b[0]
	n.b = n.b[1:]
	return v
}

func (n *numbers) two() uint64 { return uint64(n.byte())<<8 | uint64(n.byte()) }

// side is the memory of one agent in the model.
type side struct {
	base    uint64
	mem     []byte
	times   []byte // writes to each byte, in the receiver's
	regions []memRange
	keys    []keyRange
	table   *keyTable
}

const sideBytes = 4096

// newSide lays regions into the memory and registers all of it, in pieces.
func newSide(t *testing.T, n *numbers, where string, base uint64, firstKey uint32) *side {
	s := &side{base: base, mem: make([]byte, sideBytes), times: make([]byte, sideBytes)}
	for range 1 + n.byte()%3 {
		from := n.two() % (sideBytes - 1)
		s.regions = append(s.regions, memRange{base + from, 1 + n.two()%(sideBytes-from)})
	}
	for at := uint64(0); at < sideBytes; {
		length := uint64(sideBytes) - at
		if cut := n.two(); cut != 0 && len(s.keys) < 16 {
			length = min(length, cut)
		}
		s.keys = append(s.keys, key(base+at, length, firstKey+uint32(len(s.keys))))
		at += length
	}
	s.table = mustTable(t, where, s.regions, s.keys...)
	return s
}

// take is the memory at addr, which must be all under that key.
func (s *side) take(t *testing.T, addr, length uint64, k uint32) []byte {
	t.Helper()
	for _, r := range s.keys {
		if r.Key == k && addr >= r.Base && length <= r.Length && addr-r.Base <= r.Length-length {
			return s.mem[addr-s.base:][:length]
		}
	}
	t.Fatalf("%d bytes at %#x are not under key %d: %v", length, addr, k, s.keys)
	return nil
}

// FuzzWrites: regions, registrations, pairs and weights of any kind. The writes equal a
// copy pair by pair, each byte as often, in the same order. They stay in the regions and
// under the keys. Each stripe ends in one mark, when all of it was given. Pairs that
// leave their region are refused.
func FuzzWrites(f *testing.F) {
	two := func(v ...uint16) (b []byte) {
		for _, x := range v {
			b = binary.BigEndian.AppendUint16(b, x)
		}
		return b
	}
	one := func(pairs ...[]byte) []byte { // one region of all memory on each side
		b := append([]byte{0}, two(0, 4095, 0)...)
		b = append(b, 0)
		b = append(b, two(0, 4095, 0)...)
		b = append(b, byte(len(pairs)))
		for _, p := range pairs {
			b = append(b, p...)
		}
		return b
	}
	pair := func(src, dst, length uint16) []byte { return append([]byte{0}, two(src, dst, length)...) }
	f.Add(one())
	f.Add(one(pair(0, 0, 4096)))
	f.Add(append(one(pair(0, 64, 64), pair(128, 128, 64), pair(7, 192, 1000)), 3, 1, 1, 1, 0, 3, 2, 100))
	f.Add(append(one(pair(0, 1000, 700), pair(3000, 1700, 300), pair(0, 0, 0), pair(5, 9, 13)), 2, 1, 2, 40, 2, 1, 9, 3, 7, 1))
	f.Add(one(pair(4095, 0, 2)))
	f.Add(one(pair(0, 4000, 97)))
	f.Add([]byte("a few words of text are an input as good as any other, says the fuzzer, and so it is, 0123456789"))
	f.Add(bytes.Repeat([]byte{1, 3, 0, 7, 129}, 40))
	f.Fuzz(checkWrites)
}

// The same on inputs that are random all over.
func TestWritesRandom(t *testing.T) {
	rnd := seed.Rand(t)
	for range 500 {
		in := make([]byte, 100+rnd.IntN(400))
		for i := range in {
			in[i] = byte(rnd.Uint32())
		}
		checkWrites(t, in)
	}
}

func checkWrites(t *testing.T, in []byte) {
	n := &numbers{in}
	local := newSide(t, n, "here", 0x10000, 100)
	remote := newSide(t, n, "at the peer", 1<<63, 200)
	for i := range local.mem {
		local.mem[i] = byte(i*7 + i>>8)
	}
	pairs := make([]kv.Pair, n.byte()%40)
	inside := true
	want, times := make([]byte, sideBytes), make([]byte, sideBytes)
	for i := range pairs {
		r := n.byte()
		p := kv.Pair{SrcRegion: uint32(r) % 4, DstRegion: uint32(r>>4) % 4, SrcOffset: n.two(), DstOffset: n.two(), Length: n.two()}
		if int(p.SrcRegion) < len(local.regions) && int(p.DstRegion) < len(remote.regions) && r < 0xf0 {
			// Most are moved to where they fit.
			s, d := local.regions[p.SrcRegion].Length, remote.regions[p.DstRegion].Length
			p.Length %= min(s, d) + 1
			p.SrcOffset %= s - p.Length + 1
			p.DstOffset %= d - p.Length + 1
			s, d = local.regions[p.SrcRegion].Base+p.SrcOffset-local.base, remote.regions[p.DstRegion].Base+p.DstOffset-remote.base
			copy(want[d:d+p.Length], local.mem[s:])
			for j := range p.Length {
				times[d+j]++
			}
		} else if p.Length > 0 {
			fits := func(r uint32, off uint64, s *side) bool {
				return int(r) < len(s.regions) && off+p.Length <= s.regions[r].Length
			}
			if inside = fits(p.SrcRegion, p.SrcOffset, local) && fits(p.DstRegion, p.DstOffset, remote); !inside {
				pairs = append(pairs[:i], p)
				break
			}
			p.Length = 0
		}
		pairs[i] = p
	}
	weights := make([]float64, n.byte()%70)
	for i := range weights {
		weights[i] = float64(n.byte()) - 1
	}
	least := uint64(n.byte())
	stripes := split(pairs, weights, least)
	checkStripes(t, stripes, pairs, weights, least)
	if n.byte()%2 == 1 {
		stripes = stripesOfPlan(t, pairs, weights, least)
	}

	writes, pieces := make([]verbs.Write, 1+n.byte()%8), make([]verbs.SGE, 1+n.byte()%8)
	window := make([]kv.Pair, 1+n.byte()%4)
	lim := writeLimits{maxPieces: int(n.byte() % 6), maxWrite: n.two() % 1000, maxBytes: n.two()}
	for i, p := range stripes {
		c := cursor{imm: uint32(i)}
		later := p.bits(n)
		give := func() {
			if len(later) > 0 {
				c.ranges, later = append(c.ranges, later[0]), later[1:]
			}
			c.whole = len(later) == 0 && (c.whole || n.byte()%2 == 0)
		}
		var err error
		if n.byte()%2 == 1 { // a lane that failed
			for range n.byte() % 4 {
				give()
				c.fill(writes, pieces, window, local.table, remote.table, lim)
			}
			c.rewind()
		}
		for done := false; !done; {
			if !c.ready() {
				give()
				continue
			}
			var nw, np int
			var carried uint64
			nw, np, carried, done, err = c.fill(writes, pieces, window, local.table, remote.table, lim)
			if err != nil {
				if inside {
					t.Fatalf("%+v are all inside: %v", pairs, err)
				}
				return
			}
			if nw == 0 {
				t.Fatalf("a fill with room for %d writes and %d pieces made none: %+v", len(writes), len(pieces), c)
			}
			execute(t, local, remote, writes[:nw], pieces[:np], carried, lim)
			for j, w := range writes[:nw] {
				if marks := w.Flags&verbs.WithImm != 0; marks != (done && j == nw-1) || marks && w.Imm != uint32(i) {
					t.Fatalf("write %d of %d, done %v: %+v", j, nw, done, w)
				}
			}
		}
	}
	if !inside {
		t.Fatalf("the last of %+v leaves its region, and was written", pairs)
	}
	if !bytes.Equal(remote.mem, want) {
		t.Fatalf("what was written differs from %+v", pairs)
	}
	if !bytes.Equal(remote.times, times) {
		t.Fatalf("bytes were written another number of times than by %+v", pairs)
	}
}

// stripesOfPlan is splitPlan of a plan of all pairs. What it gives is what split gives of the list.
func stripesOfPlan(t *testing.T, pairs []kv.Pair, weights []float64, least uint64) []stripeRange {
	plan := coretest.Planned(core.WriteOp{Pairs: pairs}).Plan
	stripes, at := splitPlan(plan, weights, least), uint64(0)
	for _, s := range stripes {
		if s.position != at || s.length == 0 {
			t.Fatalf("%d bytes from %d on, want some from %d on: %+v", s.length, s.position, at, stripes)
		}
		at += s.length
	}
	if at != pairBytes(pairs) {
		t.Fatalf("the stripes end at %d of %d bytes", at, pairBytes(pairs))
	}
	if len(stripes) == 0 {
		stripes = []stripeRange{{}} // a stripe of nothing has a mark
	}
	return stripes
}

// bits is a range as it may be given, one bit after the other.
func (s stripeRange) bits(n *numbers) (out []stripeRange) {
	for most := n.byte() % 4; s.length > 0; {
		bit := s
		if len(out) < int(most) {
			bit.length = min(1+n.two()%300, s.length)
		}
		out = append(out, bit)
		s.length -= bit.length
		if s.plan != nil {
			s.position += bit.length
			continue
		}
		for s.skip += bit.length; s.first < len(s.pairs) && s.skip >= max(s.pairs[s.first].Length, 1); s.first++ {
			s.skip -= s.pairs[s.first].Length
		}
	}
	return out
}

// execute does what a device would.
func execute(t *testing.T, local, remote *side, writes []verbs.Write, pieces []verbs.SGE, carried uint64, lim writeLimits) {
	t.Helper()
	used, total := 0, uint64(0)
	for _, w := range writes {
		if int(w.First) != used || w.Flags&^verbs.WithImm != 0 || int(w.Pieces) > max(lim.maxPieces, 1) {
			t.Fatalf("%+v after %d pieces", w, used)
		}
		if total > 0 && total >= lim.maxBytes {
			t.Fatalf("a write begins after %d bytes of %d", total, lim.maxBytes)
		}
		at := w.RemoteAddr
		for _, p := range pieces[used:][:w.Pieces] {
			src := local.take(t, p.Addr, uint64(p.Length), p.Key)
			copy(remote.take(t, at, uint64(p.Length), w.RemoteKey), src)
			for i := range src {
				remote.times[at-remote.base+uint64(i)]++
			}
			at += uint64(p.Length)
		}
		if at-w.RemoteAddr > max(lim.maxWrite, 1) || (at == w.RemoteAddr && w.Flags&verbs.WithImm == 0) {
			t.Fatalf("a write of %d bytes, at most %d: %+v", at-w.RemoteAddr, lim.maxWrite, w)
		}
		total += at - w.RemoteAddr
		used += int(w.Pieces)
	}
	if used != len(pieces) || total != carried {
		t.Fatalf("%d pieces and %d bytes are used, %d and %d filled", used, total, len(pieces), carried)
	}
}
