// P decides that a D agent is gone: it asks a D whose connections broke whether the agent still listens.

package half

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
)

// probe is a D agent whose connections broke: P asks whether it lives.
type probe struct {
	since  time.Time // when its connections broke, or it was heard of
	absent int       // ticks in a row in which nobody listened as the agent; ticks that pass before an answer comes count too
	asking bool
	gone   bool     // the agent is gone, and its offers end
	rest   []*Offer // if it is gone: its offers that are still to end; later offers are of an agent that has come back
}

func (h *Set) StepPeerDown(now time.Time, id core.AgentID) {
	if p := h.peers[id]; p != nil {
		p.next = now
		h.tickPeers(now)
	}
	if h.probes[id] == nil && len(h.offersOf(id)) > 0 && !fault.On("no-probe") {
		h.probes[id] = &probe{since: now, asking: true}
		h.Act(core.SendProbe{Peer: id})
	}
}

// offersOf lists what P keeps for a D agent.
func (h *Set) offersOf(id core.AgentID) (list []*Offer) {
	for _, of := range h.offers {
		if of.peer == id {
			list = append(list, of)
		}
	}
	slices.SortFunc(list, func(x, y *Offer) int { return cmp.Compare(x.id, y.id) })
	return list
}

// tickProbes asks those D agents again that have not answered. If an agent never answers, the
// leases of its offers end them.
func (h *Set) tickProbes(now time.Time) {
	for _, id := range sortedKeys(h.probes) {
		switch p := h.probes[id]; {
		case p.gone:
		case p.asking && p.absent > 0:
			p.absent++ // the answer takes longer than a tick
		case p.asking:
		case now.Sub(p.since) >= 2*h.opt.PeerTimeout, len(h.offersOf(id)) == 0:
			delete(h.probes, id)
		default:
			p.asking = true
			h.Act(core.SendProbe{Peer: id})
		}
	}
}

func (h *Set) StepProbeReplied(now time.Time, e core.ProbeReplied) {
	p := h.probes[e.Peer]
	if p == nil || p.gone {
		return
	}
	p.asking = false // again with the next tick
	switch {
	case e.Absent:
		// D counts as gone only if nobody has listened for much longer than D's link needs to come back. This time is counted
		// in ticks, since nobody can connect to a process that does not run. P has asked for the first time between two ticks.
		within := h.opt.PeerTimeout / 3
		if e.Away || fault.On("gone-late") {
			within = h.patience()
		}
		if p.absent++; p.absent < fault.Pick("gone-at-once", 2+int(within/core.TickInterval), 1) {
			return
		}
		p.gone, p.rest = true, h.offersOf(e.Peer)
		h.endGone(now)
	case e.Err != nil:
		p.absent = 0 // somebody listens, most likely
	default:
		delete(h.probes, e.Peer)
	}
}

// endGone ends the offers of the D agents that are gone, as many as a step may.
func (h *Set) endGone(now time.Time) {
	for _, id := range sortedKeys(h.probes) {
		p := h.probes[id]
		if p == nil || !p.gone {
			continue
		}
		for ; len(p.rest) > 0; p.rest = p.rest[1:] {
			of := p.rest[0]
			if h.offers[of.id] != of || of.peer != id { // the offer has ended meanwhile, or waits for another agent
				continue
			}
			if h.enough() {
				h.yield()
				return
			}
			h.EndOffer(now, of, whenAbsent, Ending{core.PeerLost, fmt.Sprintf("decode agent %s is gone", id)})
			h.Settle(now)
		}
		delete(h.probes, id)
	}
}
