// Items in blocks are painted by their place in the prompt, and moved between unequal blocks.

package coretest

import (
	"encoding/binary"
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
)

// geometrySpec says where the items lie in a region's blocks; no tokens: the blocks are
// opaque.
type geometrySpec struct {
	tokens, first, end, total uint32
	hnd                       bool
}

func (g geometrySpec) apply(r *kv.Region) {
	if g.tokens == 0 {
		return
	}
	item := r.BlockBytes / uint64(g.tokens) / uint64(g.end-g.first)
	r.Tokens, r.Heads, r.FirstHead, r.TotalHeads = g.tokens, g.end-g.first, g.first, g.total
	if r.TokenStride, r.HeadStride = uint64(r.Heads)*item, item; g.hnd {
		r.TokenStride, r.HeadStride = item, uint64(g.tokens)*item
	}
}

// eachItem calls f for every item of blocks: its region's name, its place in the
// prompt and its memory in mem, which is the arena's or a copy of it.
func (a *arena) eachItem(mem []byte, ids []kv.BlockID, f func(name string, token, head uint32, b []byte)) {
	for i := range a.layout.Regions {
		r := &a.layout.Regions[i]
		item := r.BlockBytes / uint64(r.Tokens) / uint64(r.Heads)
		for k, id := range ids {
			for t := range r.Tokens {
				for h := range r.Heads {
					off := a.starts[i] + uint64(id)*r.BlockStride + uint64(t)*r.TokenStride + uint64(h)*r.HeadStride
					f(r.Name, uint32(k)*r.Tokens+t, r.FirstHead+h, mem[off:off+item])
				}
			}
		}
	}
}

// paintItem fills an item with words that name it.
func paintItem(b []byte, name string, token, head uint32) {
	for i := 0; i < len(b); i += 4 {
		binary.LittleEndian.PutUint32(b[i:], uint32(name[0]&0x1f)<<24|head<<20|token<<6|uint32(i/4)&0x3f)
	}
}

// unequal moves blocks into larger or smaller ones, with only some of their heads, in
// another order, between regions with other numbers on either side.
func unequal(t *testing.T, f Fixture) {
	const item, units = 64, 20
	side := func(tokens, first, end uint32, hnd bool, gap uint64, names ...string) (specs []regionSpec) {
		bytes := uint64(tokens) * uint64(end-first) * item
		for _, n := range names {
			specs = append(specs, regionSpec{name: n, bytes: bytes, stride: bytes + gap, blocks: 40, geometrySpec: geometrySpec{tokens, first, end, 4, hnd}})
		}
		return specs
	}
	for _, c := range []struct {
		name     string
		src, dst []regionSpec
	}{
		{"heads cut", side(16, 0, 4, true, 0, "other", "k", "v"), side(16, 1, 3, true, 0, "v", "k")},
		{"heads cut, token by token", side(16, 0, 4, false, 0, "other", "k", "v"), side(16, 1, 3, false, 64, "v", "k")},
		{"heads gathered", side(16, 2, 4, true, 0, "k", "v"), side(16, 0, 4, true, 0, "v", "k", "own")},
		{"larger blocks", side(16, 0, 4, false, 0, "k", "v"), side(32, 0, 4, false, 0, "v", "k")},
		{"smaller blocks", side(64, 0, 4, false, 128, "k", "v"), side(16, 0, 4, false, 0, "v", "k")},
		{"all at once", side(16, 0, 3, true, 64, "other", "k", "v"), side(32, 1, 4, false, 0, "v", "k")},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, d := pair(t, f, c.src, c.dst)
			m, err := kv.NewMatch(p.layout.Shapes(), d.layout.Shapes())
			if err != nil {
				t.Fatal(err)
			}
			tokens := uint32(16*units - 7) // the last unit is not full
			blocks := func(per uint32) int { return int((tokens + per - 1) / per) }
			src, dst := shuffled(1, blocks(c.src[0].tokens), 40), shuffled(2, blocks(c.dst[0].tokens), 40)
			type place struct {
				name        string
				token, head uint32
			}
			has := map[place]bool{}
			p.eachItem(p.mem, src, func(name string, token, head uint32, b []byte) {
				paintItem(b, name, token, head)
				has[place{name, token, head}] = true
			})
			p.push()
			want, bytes := make([]byte, len(d.mem)), uint64(0)
			fill(want, guardByte)
			unit := min(c.src[0].tokens, c.dst[0].tokens)
			d.eachItem(want, dst, func(name string, token, head uint32, b []byte) {
				if has[place{name, token, head}] && token < (tokens+unit-1)/unit*unit {
					paintItem(b, name, token, head)
					bytes += uint64(len(b))
				}
			})
			segments, err := m.Segments(kv.Selection{Blocks: [][]kv.BlockID{dst}, Tokens: []uint32{tokens}})
			if err != nil {
				t.Fatal(err)
			}
			pairs, err := m.Pairs(kv.Selection{Blocks: [][]kv.BlockID{src}}, kv.Selection{Blocks: [][]kv.BlockID{dst}, Tokens: []uint32{tokens}})
			if err != nil {
				t.Fatal(err)
			}
			before := p.snapshot()
			grant, err := d.tr.Expect("t", p.id, segments)
			if err != nil {
				t.Fatal(err)
			}
			p.wrote["t"]++
			p.tr.Write(core.WriteOp{ID: "t", Peer: d.id, Grant: grant, Pairs: pairs})
			well(t, "t", p, d, bytes)
			if i := d.changed(want); i >= 0 || bytes == 0 {
				where, _ := d.place(max(i, 0))
				t.Errorf("memory differs at byte %d, %s: %#x, want %#x (%d bytes in all)", i, where, d.mem[max(i, 0)], want[max(i, 0)], bytes)
			}
			if p.changed(before) >= 0 {
				t.Error("the sender's memory has changed")
			}
		})
	}
}
