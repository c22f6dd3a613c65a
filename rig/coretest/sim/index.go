// What ids name: blocks, slots, or entries of rings. Of a ring the engine must take the
// entries where the positions lie. And stages: ranks of either engine with layers of their own.

package sim

import (
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/core/machine"
	"github.com/kvconn/kvconn/kv"
)

const ringEntries = 5 // a prompt has 4 blocks

func ringOf(x kv.IndexKind) int {
	switch x {
	case kv.Ring(ringEntries):
		return ringEntries
	case kv.Ring(2 * ringEntries):
		return 2 * ringEntries
	}
	return 0
}

// chooseIndex is of worlds without geometry.
func (w *world) chooseIndex(p *plan) {
	if p.cut {
		return
	}
	switch w.rnd.IntN(4) {
	case 0:
		p.index = kv.IndexSlot
		w.faults["slots"]++
	case 1: // a prompt of which earlier blocks are overwritten
		p.index, p.begin = kv.Ring(ringEntries), 20+w.rnd.IntN(ringEntries)
		p.pool = 30
		w.faults["rings"]++
	}
}

func otherThan(x kv.IndexKind) kv.IndexKind {
	switch x {
	case kv.IndexBlock:
		return kv.IndexRow
	case kv.IndexSlot:
		return kv.IndexBlock
	}
	return kv.Ring(2 * ringEntries)
}

// begin is First of what prefill offers.
func (w *world) begin() []uint32 {
	if w.plan.begin == 0 {
		return nil
	}
	return []uint32{uint32(w.plan.begin)}
}

// takeRing finds a free ring, and in it the entries of the prompt's blocks.
func (h *host) takeRing(ring, first, n int) []kv.BlockID {
rings:
	for _, r := range h.w.rnd.Perm(len(h.mem) / ring) {
		for _, b := range h.mem[r*ring : (r+1)*ring] {
			if b.owner != 0 {
				continue rings
			}
		}
		var out []kv.BlockID
		for i := range n {
			out = append(out, kv.BlockID(r*ring+(h.w.plan.begin+first+i)%ring))
		}
		if n > 1 && out[n-1] < out[0] {
			h.w.faults["ring-wraps"]++
		}
		return out
	}
	return nil
}

// misplaced is an engine's mistake: it offers the entries of a ring one place too far.
func (a *agent) misplaced(id core.TransferID, blocks []kv.BlockID) {
	w, ring := a.w, kv.BlockID(ringOf(a.host.index))
	if ring == 0 || !w.chance(0.2) {
		return
	}
	w.faults["misplaced"]++
	wrong := make([]kv.BlockID, len(blocks))
	for i, b := range blocks {
		wrong[i] = b - b%ring + (b+1)%ring
	}
	r := core.PartialOffer{ID: id, First: w.begin(), Blocks: [][]kv.BlockID{wrong}, Prompt: w.prompts[id].p}
	probe := machine.New(a.host.layout(), w.plan.opt) // of no transfer: what the machine knows stays as it is
	if answer, _ := core.Split(probe.Step(time.Unix(0, 0), r)); answer == nil {
		w.fault(id, "%s: entries %v of rings of %d are taken for positions from %d on", a.id, wrong, ring, w.plan.begin)
	}
}

// layersOf are those of a rank.
func (w *world) layersOf(rank, ranks int, prefill bool) (layers []int) {
	staged := w.plan.decodeStages
	if prefill {
		staged = w.plan.stages
	}
	for layer := range regions {
		if !staged || layer%ranks == rank {
			layers = append(layers, layer)
		}
	}
	return layers
}

// cover is what package node does: it finds by names which stage has what.
func (w *world) cover(dl *deal, k int) [][]uint32 {
	w.faults["stages"]++
	var sources []kv.Source
	for _, p := range dl.ps {
		sources = append(sources, kv.Source{Name: p.name, Shapes: p.geometry.layout().Shapes()})
	}
	of, err := kv.Cover(dl.ds[k].geometry.layout().Shapes(), sources)
	if err != nil {
		w.fault(dl.id, "%s finds not all of its layers: %v", dl.ds[k].name, err)
		return w.regionsOf(dl, k)
	}
	return of
}

// misfit says why caches do not fit, as a hello does.
func (a *agent) misfit(p core.AgentID) error {
	_, err := kv.NewMatch(a.w.byID[p].host.geometry.layout().Shapes(), a.host.geometry.layout().Shapes())
	if err != nil {
		a.w.faults["other-index"]++
	}
	return err
}

// host is the sender's.
func (wr *write) host() *host { return wr.link.host }
