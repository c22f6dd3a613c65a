package sim

import (
	"slices"
	"strings"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/core/machine"
	"github.com/kvconn/kvconn/kv"
)

// deal is which ranks of two engines a transfer goes between: each decode rank
// loads its share from each prefill rank. Between one and one it is a plain
// transfer, else each pair has a part of it.
type deal struct {
	id     core.TransferID
	ps, ds []*host
}

func (dl *deal) plain() bool { return len(dl.ps) == 1 && len(dl.ds) == 1 }

// engine is the name under which a deal's prefill ranks are found: one engine has the same
// ranks for the same decode ranks.
func (w *world) engine(dl *deal) core.Target {
	name := "/"
	for _, h := range slices.Concat(dl.ps, dl.ds) {
		name += h.name
	}
	t := core.Target{Bootstrap: bootstrap, EngineID: name, DPRank: -1}
	if w.engines[t] == nil {
		w.engines[t] = dl
	}
	return t
}

// regionsOf lists, for each prefill rank of a deal, the regions that decode rank k
// loads from it: all of one that it alone is, or what all hold; else each has its own.
func (w *world) regionsOf(dl *deal, k int) [][]uint32 {
	out := make([][]uint32, len(dl.ps))
	for region, layer := range dl.ds[k].layers {
		r := uint32(region)
		if w.plan.stages {
			for i, p := range dl.ps {
				if slices.Contains(p.layers, layer) {
					out[i] = append(out[i], r)
				}
			}
			continue
		}
		if w.plan.ranks == byHeads { // of each that has some of its heads
			for i, p := range dl.ps {
				if p.meets(dl.ds[k].geometry) {
					out[i] = append(out[i], r)
				}
			}
			continue
		}
		i := 0
		if !w.plan.latent {
			i = (int(r) + k) % len(dl.ps)
		}
		out[i] = append(out[i], r)
	}
	return out
}

// found is what decode rank k learns of a deal's prefill ranks.
func (w *world) found(dl *deal, k int) (list []core.FoundPart) {
	of := w.regionsOf(dl, k)
	if w.plan.stages {
		of = w.cover(dl, k)
	}
	if w.plan.decodeStages && len(dl.ds) > 1 {
		w.faults["decode-stages"]++
		if w.plan.stages && slices.ContainsFunc(of, func(regions []uint32) bool { return len(regions) == 0 }) {
			w.faults["stage-without"]++ // a prefill rank with no layer of this decode rank
		}
	}
	for i, p := range dl.ps {
		list = append(list, core.FoundPart{From: p.target, Share: dl.share(k, p), Regions: of[i]})
	}
	return list
}

// isOf says whether a load's end that names this target may be from this prefill rank.
func (w *world) isOf(p *host, from core.Target) bool {
	dl := w.engines[from]
	return p.target == from || dl != nil && dl.plain() && dl.ps[0] == p
}

// part is what decode rank k gets from a prefill rank.
func (dl *deal) part(k int, p *host) core.TransferID {
	if dl.plain() {
		return dl.id
	}
	return machine.PartID(dl.id, dl.share(k, p))
}

func (dl *deal) share(k int, p *host) kv.Share {
	return kv.Share{K: k, Of: len(dl.ds), Source: p.number}
}

// base is the id that the engines know.
func base(id core.TransferID) core.TransferID {
	b, _, _ := strings.Cut(string(id), "\x00")
	return core.TransferID(b)
}

// alone is the part of a prefill rank's half that its only decode rank has; ok is false if
// the half has several decode ranks.
func (w *world) alone(h *host, id core.TransferID) (part core.TransferID, ok bool) {
	dl := w.deals[id]
	if dl == nil || len(dl.ds) != 1 {
		return "", false
	}
	return dl.part(0, h), true
}

// allClaimed says whether each share of a prefill rank's half was claimed, as far
// as that rank has told.
func (a *agent) allClaimed(id core.TransferID) bool {
	dl := a.w.deals[id]
	if dl == nil {
		return false
	}
	for k := range dl.ds {
		part, claimed := dl.part(k, a.host), false
		for _, d := range a.w.all {
			claimed = claimed || d.claims[part] == a.id
		}
		if !claimed {
			return false
		}
	}
	return true
}

// deals are those of a request: as few ranks as can be on one side, or, where
// engines cut their caches in two ways, all with all.
func (w *world) dealsOf(id string, prefills, decodes []*host) (out []*deal) {
	switch {
	case w.plan.ranks == allWithAll, w.plan.ranks == byHeads:
		out = append(out, &deal{ps: prefills, ds: decodes})
	case w.plan.ranks == shares && len(decodes) >= len(prefills):
		for j, p := range prefills {
			dl := &deal{ps: []*host{p}}
			for k := j; k < len(decodes); k += len(prefills) {
				dl.ds = append(dl.ds, decodes[k])
			}
			out = append(out, dl)
		}
	case w.plan.ranks == shares:
		for k, d := range decodes {
			dl := &deal{ds: []*host{d}}
			for j := k; j < len(prefills); j += len(decodes) {
				dl.ps = append(dl.ps, prefills[j])
			}
			out = append(out, dl)
		}
	default:
		for k, d := range decodes {
			out = append(out, &deal{ps: []*host{prefills[k%len(prefills)]}, ds: []*host{d}})
		}
	}
	for i, dl := range out {
		dl.id = pairID(id, i)
		w.deals[dl.id] = dl
		w.choosePrompts(dl.id)
		if len(dl.ps) > 1 {
			w.faults["several-sources"]++
		}
		if len(dl.ds) > 1 {
			w.faults["several-shares"]++
		}
	}
	return out
}

// opensAt is when all of a deal's prefill ranks are there.
func (dl *deal) opensAt() (at time.Duration) {
	for _, p := range dl.ps {
		at = max(at, p.openAt)
	}
	return at
}
