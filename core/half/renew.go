// D decides that a P agent is gone: each renewal asks it whether it lives, and which of D's transfers it still knows.

package half

import (
	"fmt"
	"slices"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
)

// peer is a P agent that claims and loads wait for. D renews all of these together. The
// answer says that P lives, and which of them it knows.
type peer struct {
	heard  time.Time // last sign of life
	next   time.Time // next renewal of all
	fresh  bool      // there are claims that P has not heard of
	asking bool      // a renewal is under way
}

// renewInterval leaves room for three renewals within either bound.
func (h *Set) renewInterval() time.Duration {
	return min(h.opt.PeerTimeout, h.opt.Lease) / 3
}

// patience is the silence after which a peer counts as gone: two ticks less than PeerTimeout, so that
// its loads are reported within PeerTimeout.
func (h *Set) patience() time.Duration {
	return fault.Pick("gone-unnoticed", h.opt.PeerTimeout-2*core.TickInterval, 1000*h.opt.PeerTimeout)
}

func (h *Set) watch(now time.Time, id core.AgentID) {
	if h.peers[id] == nil {
		h.peers[id] = &peer{heard: now, next: now.Add(h.renewInterval())}
	}
}

// kept says whether D renews the load like a claim. In these states D has not asked P for the load yet, or must
// ask anew, and this agent's driver or engine may take long before that.
func (s loadState) kept() bool {
	return s == loadAwaiting || s == loadExpecting || s == loadRestarting
}

// renewed is kept, but for defects.
func (s loadState) renewed() bool {
	return s == loadAwaiting && !fault.On("awaiting-not-renewed") || s == loadExpecting && !fault.On("expecting-not-renewed") ||
		s == loadRestarting && !fault.On("restarting-not-renewed")
}

// renewals lists what to renew at each P agent. If a renewal is due at an agent, D renews all waiting loads,
// all claims that P knows, and, like claims, the loads that this agent's own memory still holds up. Claims
// that P has not heard of go at once, even if no renewal is due. used are the agents that D still needs.
func (h *Set) renewals(now time.Time) (list map[core.AgentID]*core.SendRenew, used map[core.AgentID]bool) {
	list, used = make(map[core.AgentID]*core.SendRenew, len(h.peers)), make(map[core.AgentID]bool, len(h.peers))
	at := func(id core.AgentID) *core.SendRenew {
		if list[id] == nil {
			list[id] = &core.SendRenew{Peer: id}
		}
		return list[id]
	}
	for id, ld := range h.loads.byID {
		used[ld.peer] = true
		if ld.state == loadWaiting {
			r := at(ld.peer)
			r.Loads = append(r.Loads, core.TransferID(id))
		}
		if p := h.peers[ld.peer]; p != nil && ld.state.kept() { // nil: P is gone, and the load learns it by its SendLoad
			if r := at(ld.peer); p.due(now) && ld.state.renewed() {
				r.Claims = append(r.Claims, core.TransferID(id))
			}
		}
	}
	for id, c := range h.claims.byID {
		used[c.peer] = true
		if !c.state.atPeer() {
			continue
		}
		r := at(c.peer)
		if c.state.unanswered() || h.peers[c.peer].due(now) && !fault.On("claim-not-renewed") {
			r.Claims = append(r.Claims, core.TransferID(id))
		}
	}
	return list, used
}

func (p *peer) due(now time.Time) bool { return !now.Before(p.next) }

func (h *Set) tickPeers(now time.Time) {
	h.noticePause(now) // before anyone counts as silent: events come before the first tick
	if len(h.peers) == 0 {
		return
	}
	renewals, used := h.renewals(now)
	for _, id := range sortedKeys(h.peers) {
		p, r := h.peers[id], renewals[id]
		switch {
		case p == nil: // the last load went with another peer
		case !used[id]:
			if !p.asking {
				delete(h.peers, id)
			}
		case r == nil:
			p.heard = now // SendLoad has a bound of its own
		case now.Sub(p.heard) >= h.patience() && !fault.On("silence-unasked"):
			h.peerGone(now, id, false, "no answer")
		case p.asking || !p.due(now) && !p.fresh:
		default:
			if p.due(now) {
				p.next = now.Add(h.renewInterval())
			} else {
				r.Loads = nil // only what is new, and at once
			}
			p.fresh = false
			if len(r.Loads)+len(r.Claims) == 0 {
				continue // loaded or cancelled meanwhile
			}
			if fault.On("never-renews") {
				p.asking, p.heard = false, now
				continue
			}
			p.asking = true
			slices.Sort(r.Loads) // one order, so that a run can be told again
			slices.Sort(r.Claims)
			h.Act(*r)
		}
	}
}

func (h *Set) StepRenewReplied(now time.Time, r core.RenewReplied) {
	p := h.peers[r.Renewal.Peer]
	if p == nil {
		return
	}
	p.asking = r.Renewal.More
	h.noticePause(now)
	err, n := r.Err, len(r.Renewal.Loads)+len(r.Renewal.Claims)
	if err == nil && !r.Absent && len(r.Answers) != n {
		err = fmt.Errorf("malformed reply: %d answers for %d transfers", len(r.Answers), n)
	}
	switch {
	case r.Absent, err != nil && now.Sub(p.heard) >= h.patience():
		h.peerGone(now, r.Renewal.Peer, r.Absent, fmt.Sprint(err))
		return
	case err != nil:
		p.next = now // with the next tick
		return
	}
	p.heard = now
	for i, id := range r.Renewal.Loads {
		if ld := h.loads.byID[ID(id)]; ld != nil && ld.peer == r.Renewal.Peer && ld.state == loadWaiting {
			h.loadRenewed(now, ld, r.Answers[i])
			h.Settle(now)
		}
	}
	for i, id := range r.Renewal.Claims {
		h.claimAnswered(now, r.Renewal.Peer, ID(id), r.Answers[len(r.Renewal.Loads)+i])
		h.Settle(now)
	}
	if !r.Renewal.More && (p.fresh || p.due(now)) { // they came while this was under way
		h.tickPeers(now)
	}
}

// peerGone ends the claims and loads that wait for a P agent. absent says that nobody listens as the
// agent. If absent is false, the agent may live, so D tells it of the ends.
func (h *Set) peerGone(now time.Time, id core.AgentID, absent bool, cause string) {
	defer h.Because("PeerGone")()
	heard := h.peers[id].heard
	silent := now.Sub(heard).Round(time.Millisecond)
	reason := fmt.Sprintf("prefill agent %s is gone: silent for %v: %s", id, silent, cause)
	delete(h.peers, id)
	h.Act(core.Forget{Peer: id, Gone: true})
	// Other loads learn by their own SendLoad that P is gone, and may find the agent that took P's place.
	waits := func(ld *load) bool { return ld.peer == id && (ld.state == loadWaiting || ld.state == loadAwaiting) }
	for ld := range turns(h, now, h.loads.byID, waits) {
		h.loadPeerGone(now, ld, heard, absent, reason)
	}
	for c := range turns(h, now, h.claims.byID, func(c *claim) bool { return c.peer == id && c.state.atPeer() }) {
		h.claimPeerGone(now, c, heard, absent, reason)
	}
}

// tickLookups ends claims that no load has followed, and loads whose P is gone without a
// successor. It looks again for a P that a claim has not found.
func (h *Set) tickLookups(now time.Time) {
	late := func(ld *load) bool {
		return ld.state == loadRelocating && !now.Before(ld.until) && !fault.On("waits-for-successor")
	}
	for ld := range turns(h, now, h.loads.byID, late) {
		h.endLoad(now, ld, whenNoSuccessor, Ending{core.PeerLost, ld.noSuccessor()}, false)
	}
	for c := range turns(h, now, h.claims.byID, func(c *claim) bool { return c.due(now) }) {
		h.tickClaim(now, c)
	}
}
