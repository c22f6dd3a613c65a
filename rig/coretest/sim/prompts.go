package sim

import (
	"fmt"

	"github.com/kvconn/kvconn/core"
)

// prompts are the fingerprints that the two engines say of a transfer.
type prompts struct{ p, d uint64 }

// crossed: a router has given the id to two requests, of which each engine has one.
func (s prompts) crossed() bool { return s.p != 0 && s.d != 0 && s.p != s.d }

func (w *world) choosePrompts(id core.TransferID) {
	if _, chosen := w.prompts[id]; chosen { // an id twice
		return
	}
	one := 1 + w.prompting.Uint64N(9)
	s := prompts{one, one}
	switch n := w.prompting.IntN(10); {
	case n == 0 && !w.plan.kind:
		w.faults["crossed"]++
		s.d++
	case n == 1:
		s.p = 0
	case n == 2:
		s.d = 0
	case n == 3:
		s = prompts{}
	}
	w.prompts[id] = s
}

// promptOf is the prompt that P's engine says with a partial offer. Once said, it holds,
// unless the machine has room for so few that it forgets ended transfers.
func (a *agent) promptOf(p *computation) uint64 {
	if p.said && a.w.plan.opt.MaxTransfers > 16 && a.w.prompting.IntN(2) == 0 {
		return 0
	}
	p.said = true
	return a.w.prompts[p.id].p
}

// prompt is a fingerprint as transcripts have it.
func prompt(fingerprint uint64) string {
	if fingerprint == 0 {
		return ""
	}
	return fmt.Sprintf(" prompt=%d", fingerprint)
}
