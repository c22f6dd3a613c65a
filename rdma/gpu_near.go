// A GPU's blocks go by the cards that are nearest to it. Cards that are far from a GPU reach it by way
// of the processor, at a fraction of their speed. So a transfer of a GPU's memory never takes near cards
// and far ones together.

package rdma

import (
	"io/fs"
	"slices"
	"strings"
	"time"

	"github.com/kvconn/kvconn/kv"
)

// gpuPlace returns where a GPU is, and its number among the host's GPUs. The ranks of one host have a GPU
// each, and do not know each other. If several cards are equally near, the number keeps the ranks from all
// taking the same card.
func gpuPlace(sys fs.FS, pci string) (at place, number int) {
	at, err := placeOf(sys, "bus/pci/devices/"+pci)
	if err != nil {
		at = place{Node: noNode}
	}
	all, _ := fs.ReadDir(sys, "bus/pci/devices")
	var gpus []string
	for _, e := range all {
		if readWord(sys, e.Name(), "vendor") == "0x10de" && strings.HasPrefix(readWord(sys, e.Name(), "class"), "0x03") {
			gpus = append(gpus, e.Name())
		}
	}
	slices.Sort(gpus)
	return at, max(slices.Index(gpus, pci), 0)
}

func readWord(sys fs.FS, pci, file string) string {
	b, _ := fs.ReadFile(sys, "bus/pci/devices/"+pci+"/"+file)
	return strings.TrimSpace(string(b))
}

// memoryOf is the memory in which the blocks of a part of a write lie. If they lie in several memories,
// it is that of the first piece.
func (cn *conn) memoryOf(g *writePart) kv.Memory {
	if cn.t.cfg.GPUs == nil {
		return kv.HostMemory
	}
	pairs := g.pairs
	if g.plan != nil {
		pairs = nil
		if at := g.plan.Extents(); len(at) > 0 {
			pairs = g.plan.Pairs(cn.window[:0:1], at[0].Position, 1)
		}
	}
	if len(pairs) == 0 {
		return kv.HostMemory
	}
	return cn.t.layout.Regions[pairs[0].SrcRegion].Memory
}

// distanceTo says how near the port is to a memory of this agent.
func (p *localPort) distanceTo(m kv.Memory) distance {
	if gpu, ok := m.Device(); ok {
		return p.nearGPU[gpu]
	}
	return p.near
}

// turnWaits is how much sooner another path must be done than the one whose turn it is.
const turnWaits = 2

// turn returns the path that a small write of a GPU's memory takes. Each GPU of a host takes another one of
// the nearest paths. If that path has too much to do, or if there is only one nearest path, turn returns -1.
func turn(paths []candidate, number int, bytes uint64, now time.Time) int {
	var nearest []int
	for i, c := range paths {
		switch {
		case !c.path.usable():
		case len(nearest) == 0 || c.near < paths[nearest[0]].near:
			nearest = []int{i}
		case c.near == paths[nearest[0]].near:
			nearest = append(nearest, i)
		}
	}
	if len(nearest) < 2 {
		return -1
	}
	done := func(i int) float64 {
		p := paths[i].path
		return (float64(p.inFlight) + float64(bytes)) / p.rate(now)
	}
	mine := nearest[number%len(nearest)]
	for _, i := range nearest {
		if done(mine) > turnWaits*done(i) {
			return -1
		}
	}
	return mine
}
