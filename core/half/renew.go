package half

import (
	"fmt"
	"slices"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
)

// peer is a P agent that claims and loads wait for. They are renewed together; the
// answer says that P lives and knows them.
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

// patience is the silence after which a peer counts as gone, so that its loads
// are reported within PeerTimeout: two ticks less.
func (h *Set) patience() time.Duration {
	return fault.Pick("gone-unnoticed", h.opt.PeerTimeout-2*core.TickInterval, 1000*h.opt.PeerTimeout)
}

func (h *Set) watch(now time.Time, id core.AgentID) {
	if h.peers[id] == nil {
		h.peers[id] = &peer{heard: now, next: now.Add(h.renewInterval())}
	}
}

// kept says whether D renews the load as a claim: P has not been asked for it, or is to be asked anew, and
// this agent's driver or engine may take its time before.
func (s loadState) kept() bool {
	return s == loadAwaiting || s == loadExpecting || s == loadRestarting
}

// renewed is kept, but for defects.
func (s loadState) renewed() bool {
	switch s {
	case loadAwaiting:
		return !fault.On("awaiting-not-renewed")
	case loadExpecting:
		return !fault.On("expecting-not-renewed")
	case loadRestarting:
		return !fault.On("restarting-not-renewed")
	}
	return false
}

// renewals lists what is to be renewed at each P agent. Where a renewal is due, these are
// all waiting loads, all claims that P knows, and, as claims, the loads that this agent's own memory
// keeps from being asked for. Claims that P has not heard of go at
// once. used are the agents that are still needed.
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
		if c.state == claimAsked || h.peers[c.peer].due(now) && !fault.On("claim-not-renewed") {
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
	err := r.Err
	if err == nil && !r.Absent && len(r.Answers) != len(r.Renewal.Loads)+len(r.Renewal.Claims) {
		err = fmt.Errorf("malformed reply: %d answers for %d transfers", len(r.Answers), len(r.Renewal.Loads)+len(r.Renewal.Claims))
	}
	if err != nil || r.Absent {
		if r.Absent || now.Sub(p.heard) >= h.patience() {
			h.peerGone(now, r.Renewal.Peer, r.Absent, fmt.Sprint(err))
			return
		}
		p.next = now // with the next tick
		return
	}
	p.heard = now
	for i, id := range r.Renewal.Loads {
		if ld := h.loads.get(ID(id)); ld != nil && ld.peer == r.Renewal.Peer && ld.state == loadWaiting {
			h.loadRenewed(now, ld, r.Answers[i])
			h.Settle(now)
		}
	}
	for i, id := range r.Renewal.Claims {
		if c := h.claims.get(ID(id)); c != nil && c.peer == r.Renewal.Peer && c.state.atPeer() {
			h.claimAnswered(now, c, r.Answers[len(r.Renewal.Loads)+i])
			h.Settle(now)
		}
		if ld := h.loads.get(ID(id)); ld != nil && ld.peer == r.Renewal.Peer && ld.state.kept() {
			h.loadKept(now, ld, r.Answers[len(r.Renewal.Loads)+i])
			h.Settle(now)
		}
	}
	if !r.Renewal.More && (p.fresh || p.due(now)) { // they came while this was under way
		h.tickPeers(now)
	}
}

// peerGone ends what waits for a P agent. absent says that nobody listens there. Else the
// agent may live, and is told when it listens again.
func (h *Set) peerGone(now time.Time, id core.AgentID, absent bool, cause string) {
	defer h.Because("PeerGone")()
	heard := h.peers[id].heard
	silent := now.Sub(heard).Round(time.Millisecond)
	reason := fmt.Sprintf("prefill agent %s is gone: silent for %v: %s", id, silent, cause)
	delete(h.peers, id)
	h.Act(core.Forget{Peer: id, Gone: true})
	for _, tid := range sortedKeys(h.loads.byID) {
		// A load that has not been asked yet learns by its own SendLoad that P is gone, and
		// may find the agent that took P's place.
		if ld := h.loads.get(tid); ld != nil && ld.peer == id && ld.state == loadWaiting {
			h.endLoad(now, ld, Ending{core.PeerLost, reason}, !absent)
			h.Settle(now)
		}
		if ld := h.loads.get(tid); ld != nil && ld.peer == id && ld.state == loadAwaiting {
			h.loadPeerGone(now, ld, heard, absent, reason)
			h.Settle(now)
		}
	}
	for _, tid := range sortedKeys(h.claims.byID) {
		if c := h.claims.get(tid); c != nil && c.peer == id && c.state.atPeer() {
			h.claimPeerGone(now, c, heard, absent, reason)
			h.Settle(now)
		}
	}
}

// tickLookups ends claims that no load has followed, and loads whose P is gone without a
// successor. It looks again for a P that a claim has not found.
func (h *Set) tickLookups(now time.Time) {
	for _, id := range sortedKeys(h.loads.byID) {
		if ld := h.loads.get(id); ld != nil && ld.state == loadRelocating && !now.Before(ld.until) && !fault.On("waits-for-successor") {
			h.endLoad(now, ld, Ending{core.PeerLost, ld.noSuccessor()}, false)
			h.Settle(now)
		}
	}
	var due []ID
	for id, c := range h.claims.byID {
		if c.due(now) {
			due = append(due, id)
		}
	}
	slices.Sort(due)
	for _, id := range due {
		if c := h.claims.get(id); c != nil { // another part of the same fan-in may have taken it along
			h.tickClaim(now, c)
			h.Settle(now)
		}
	}
}
