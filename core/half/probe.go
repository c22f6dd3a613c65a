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

// probeState: doc.go has the table of transitions.
type probeState uint8

const (
	probeNone         probeState = iota // before its begin and after its end
	probeAsking                         // P has asked
	probeResting                        // somebody listens, most likely; P asks again with the next tick
	probeAskingAbsent                   // P has asked again; the last time nobody listened
	probeAbsent                         // nobody listened; P asks again with the next tick
	probeGone                           // the agent is gone, and its offers end
)

func (s probeState) String() string {
	return [...]string{"-", "asking", "resting", "asking-absent", "absent", "gone"}[s]
}

// probe is a D agent whose connections broke: P asks whether it lives.
type probe struct {
	since  time.Time // when its connections broke, or it was heard of
	absent int       // ticks in a row in which nobody listened as the agent; ticks that pass before an answer comes count too
	state  probeState
	rest   []*Offer // in probeGone: its offers that are still to end; later offers are of an agent that has come back
}

// probeTo performs one row of the table, as peerTo does.
func (h *Set) probeTo(id core.AgentID, p *probe, guard Guard, next probeState, does ...core.Action) {
	switch probeNone {
	case next:
		delete(h.probes, id)
	case p.state:
		h.probes[id] = p
	}
	h.taken.row("probe", ID(id), guard, p.state, next, does)
	p.state = next
	h.actions = append(h.actions, does...)
}

// restProbes forgets all D agents if P has no offer. Tick forgets them one by one, but a machine that is not busy may get no Tick.
func (h *Set) restProbes() {
	if len(h.offers) > 0 {
		return
	}
	undo := h.Because("Idle")
	for id, p := range h.probes { // in any order: nothing is wanted
		h.probeTo(id, p, Always, probeNone)
	}
	undo()
}

func (h *Set) StepPeerDown(now time.Time, id core.AgentID) {
	if p := h.peers[id]; p != nil {
		p.next = now
		h.tickPeers(now)
	}
	if h.probes[id] == nil && len(h.offersOf(id)) > 0 && !fault.On("no-probe") {
		h.probeTo(id, &probe{since: now}, Always, probeAsking, core.SendProbe{Peer: id})
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
		case p.state == probeGone:
		case p.state == probeAskingAbsent:
			p.absent++ // the answer takes longer than a tick
		case p.state == probeAsking && !fault.On("probed-beside"):
		case now.Sub(p.since) >= 2*h.opt.PeerTimeout:
			h.probeTo(id, p, whenLate, probeNone)
		case len(h.offersOf(id)) == 0:
			h.probeTo(id, p, whenUnneeded, probeNone)
		case p.state == probeAbsent:
			h.probeTo(id, p, whenDue, probeAskingAbsent, core.SendProbe{Peer: id})
		default:
			h.probeTo(id, p, whenDue, probeAsking, core.SendProbe{Peer: id})
		}
	}
}

func (h *Set) StepProbeReplied(now time.Time, e core.ProbeReplied) {
	p := h.probes[e.Peer]
	if p == nil || p.state == probeGone {
		return
	}
	switch {
	case e.Absent:
		// D counts as gone only if nobody has listened for much longer than D's link needs to come back. This time is counted
		// in ticks, since nobody can connect to a process that does not run. P has asked for the first time between two ticks.
		within := h.opt.PeerTimeout / 3
		if e.Away || fault.On("gone-late") {
			within = h.patience()
		}
		if p.absent++; p.absent < fault.Pick("gone-at-once", 2+int(within/core.TickInterval), 1) {
			h.probeTo(e.Peer, p, whenAbsent, probeAbsent)
			return
		}
		p.rest = h.offersOf(e.Peer)
		h.probeTo(e.Peer, p, whenGone, probeGone)
		h.endGone(now)
	case e.Err != nil:
		p.absent = 0 // somebody listens, most likely
		h.probeTo(e.Peer, p, whenUnanswered, probeResting)
	default:
		h.probeTo(e.Peer, p, whenAnswered, fault.Pick("alive-asked-on", probeNone, probeResting))
	}
}

// endGone ends the offers of the D agents that are gone, as many as a step may.
func (h *Set) endGone(now time.Time) {
	for _, id := range sortedKeys(h.probes) {
		p := h.probes[id]
		if p == nil || p.state != probeGone {
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
		if p.state == probeGone { // else it was forgotten with the last offer
			h.probeTo(id, p, Always, probeNone)
		}
	}
}
