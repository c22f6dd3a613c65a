// What lies where in the blocks of a rank, cell by cell.

package sim

import (
	"fmt"
	"strings"

	"github.com/kvconn/kvconn/kv"
)

// geometry is what the blocks of a rank are like: opaque, or of some tokens and of
// some of the model's heads, in either order.
type geometry struct {
	tokens     uint32 // 0: opaque
	first, end uint32 // heads
	hnd        bool
	gap        uint64 // bytes between two blocks
	layers     []int  // the model's that it has, one a region
	index      kv.IndexKind
}

const (
	modelHeads = 4
	cellBytes  = 1024 // an item, or an opaque block
	regions    = 3    // of a layout: as many as there are prefill ranks at most
)

// opaque blocks are alike everywhere.
func (g geometry) opaque() bool { return g.tokens == 0 }

// size is the positions of the prompt that a block has.
func (g geometry) size() int { return max(1, int(g.tokens)) }

func (g geometry) heads() uint64 { return max(1, uint64(g.end-g.first)) }

// cells of a block, and from one block to the next.
func (g geometry) cells() uint64  { return uint64(g.size()) * g.heads() }
func (g geometry) stride() uint64 { return g.cells() + g.gap/cellBytes }

// cell is the place of an item in its block.
func (g geometry) cell(token, head uint64) uint64 {
	if g.hnd {
		return head*uint64(g.size()) + token
	}
	return token*g.heads() + head
}

func (g geometry) layout() *kv.Layout {
	var list []kv.Region
	for i, layer := range g.layers {
		r := kv.Region{Name: strings.Repeat("k", 1+layer), Base: uint64(1<<24) * uint64(1+i), BlockStride: g.stride() * cellBytes, BlockBytes: g.cells() * cellBytes, NumBlocks: 100, IndexKind: g.index}
		if !g.opaque() {
			r.Tokens, r.Heads, r.FirstHead, r.TotalHeads = g.tokens, g.end-g.first, g.first, modelHeads
			if r.TokenStride, r.HeadStride = uint64(r.Heads)*cellBytes, cellBytes; g.hnd {
				r.TokenStride, r.HeadStride = cellBytes, uint64(r.Tokens)*cellBytes
			}
		}
		list = append(list, r)
	}
	l, err := kv.NewLayout(list)
	if err != nil {
		panic(err)
	}
	return l
}

// geometryOf is a rank's geometry. A prefill rank has all heads unless each prefill rank
// has heads of its own.
func (w *world) geometryOf(tokens uint32, rank, ranks int, prefill bool) geometry {
	layers := w.layersOf(rank, ranks, prefill)
	if !w.plan.cut {
		return geometry{layers: layers, index: w.plan.index}
	}
	g := geometry{layers: layers, tokens: tokens, end: modelHeads, hnd: w.chance(0.5), gap: uint64(w.rnd.IntN(2)) * cellBytes}
	switch {
	case w.plan.ranks == byHeads:
		g.first, g.end = uint32(rank*modelHeads/ranks), uint32((rank+1)*modelHeads/ranks)
	case !prefill && w.chance(0.7):
		g.first = w.rnd.Uint32N(modelHeads)
		g.end = g.first + 1 + w.rnd.Uint32N(modelHeads-g.first)
	}
	return g
}

// meets says whether two ranks have heads in common.
func (g geometry) meets(o geometry) bool {
	return g.opaque() || g.first < o.end && o.first < g.end
}

func (g geometry) has(head uint64) bool {
	return g.opaque() || head >= uint64(g.first) && head < uint64(g.end)
}

// match is what package node makes when two agents meet.
func (w *world) match(p, d *host) *kv.Match {
	k := way{p, d}
	if w.matches[k] == nil {
		m, err := kv.NewMatch(p.geometry.layout().Shapes(), d.geometry.layout().Shapes())
		if err != nil {
			w.fault("", "%s and %s do not fit: %v", p.name, d.name, err)
			panic(err)
		}
		w.matches[k] = m
	}
	return w.matches[k]
}

// place is a cell of a rank's memory.
type place struct {
	region uint32
	cell   uint64
}

// block is the block that the cell belongs to.
func (h *host) block(p place) kv.BlockID { return kv.BlockID(p.cell / h.geometry.stride()) }

func places(out []place, region uint32, offset, length uint64) []place {
	for o := uint64(0); o < length; o += cellBytes {
		out = append(out, place{region, (offset + o) / cellBytes})
	}
	return out
}

// each goes through the cells of a block: the layer, the token in the block, and
// the head of the model.
func (h *host) each(b kv.BlockID, f func(layer, token int, head uint64, c *content)) {
	g := h.geometry
	for r, layer := range g.layers {
		for t := range g.size() {
			for n := range g.heads() {
				f(layer, t, uint64(g.first)+n, &h.cells[r][uint64(b)*g.stride()+g.cell(uint64(t), n)])
			}
		}
	}
}

// prompt is how many blocks a rank needs for it.
func (w *world) prompt(h *host) int {
	if !w.plan.cut {
		return w.plan.blocks
	}
	n := h.geometry.size()
	return (w.plan.tokens + n - 1) / n
}

// offered is how many of the prompt's positions P's blocks have room for.
func (w *world) offered() int {
	if !w.plan.cut {
		return w.plan.blocks
	}
	return w.plan.blocks * w.plan.blockTokens[0]
}

// reaches is how far a load reaches if it is told how long the prompt is: to the end of the
// unit, which is the smaller of the two sides' blocks.
func (w *world) reaches(h *host) int {
	unit := min(w.plan.blockTokens[0], h.geometry.size())
	return (w.plan.tokens + unit - 1) / unit * unit
}

// has says whether P's blocks hold all that a load wants.
func (w *world) has(d *host, h *half) bool {
	return h.upTo > 0 || (h.first+len(h.blocks))*d.size() <= w.offered()
}

func (w *world) tokensOf(engine int) uint32 {
	if !w.plan.cut {
		return 0
	}
	return uint32(w.plan.blockTokens[engine])
}

// said is a rank's geometry as far as the machines know it, as transcripts have it.
func (g geometry) said() string {
	if g.opaque() {
		return fmt.Sprintf(" regions=%d", len(g.layers))
	}
	return fmt.Sprintf(" regions=%d size=[%d]", len(g.layers), g.tokens)
}

func (w *world) countCuts(dl *deal, d *host) {
	for _, p := range dl.ps {
		switch {
		case d.opaque():
			continue
		case p.tokens > d.tokens:
			w.faults["smaller-blocks"]++
		case p.tokens < d.tokens:
			w.faults["larger-blocks"]++
		}
		if p.hnd != d.hnd {
			w.faults["other-order"]++
		}
		if p.heads() > d.heads() {
			w.faults["cut-heads"]++
		} else if p.heads() < d.heads() {
			w.faults["gathered-heads"]++
		}
	}
	if w.plan.cut && w.plan.tokens%d.size() > 0 {
		w.faults["half-block"]++
	}
}
