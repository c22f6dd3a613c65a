// D decides that a P agent is gone: each renewal asks it whether it lives, and which of D's transfers it still knows.

package half

import (
	"fmt"
	"slices"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
)

// peerState: doc.go has the table of transitions.
type peerState uint8

const (
	peerNone        peerState = iota // before its begin and after its end
	peerResting                      // no renewal is under way
	peerFresh                        // likewise, and there are claims that P has not heard of
	peerAsking                       // a renewal is under way
	peerAskingFresh                  // likewise, and there are claims that P has not heard of
)

func (s peerState) String() string {
	return [...]string{"-", "resting", "fresh", "asking", "asking-fresh"}[s]
}

// asking says whether a renewal is under way.
func (s peerState) asking() bool { return s == peerAsking || s == peerAskingFresh }

// fresh says whether there are claims that P has not heard of.
func (s peerState) fresh() bool { return s == peerFresh || s == peerAskingFresh }

// freshened is the state when a claim comes that P has not heard of.
func (s peerState) freshened() peerState {
	if s.asking() {
		return peerAskingFresh
	}
	return peerFresh
}

// answered is the state when a renewal is over or, if more is true, when a part of its answer has come and others follow.
func (s peerState) answered(more bool) peerState {
	switch {
	case more && s.fresh():
		return peerAskingFresh
	case more:
		return peerAsking
	case s.fresh():
		return peerFresh
	}
	return peerResting
}

// peer is a P agent that claims and loads wait for. D renews all of these together. The
// answer says that P lives, and which of them it knows.
type peer struct {
	heard time.Time // last sign of life
	next  time.Time // next renewal of all
	state peerState
}

// peerTo performs one row of the table, that of the peer's state, of the event and of the guard: it sets the peer's next state, and
// wants the row's actions. It is the only way into the map of peers, and out of it.
func (h *Set) peerTo(id core.AgentID, p *peer, guard Guard, next peerState, does ...core.Action) {
	switch peerNone {
	case next:
		delete(h.peers, id)
	case p.state:
		h.peers[id] = p
	}
	h.taken.row("peer", ID(id), guard, p.state, next, does)
	p.state = next
	h.actions = append(h.actions, does...)
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

// watch returns the P agent that a claim or load waits for.
func (h *Set) watch(now time.Time, id core.AgentID) *peer {
	p := h.peers[id]
	if p == nil {
		p = &peer{heard: now, next: now.Add(h.renewInterval())}
		h.peerTo(id, p, Always, peerResting)
	}
	return p
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

// tickPeers looks at each P agent: is it needed, is it gone, is there something to renew?
func (h *Set) tickPeers(now time.Time) {
	h.noticePause(now) // before anyone counts as silent: events come before the first tick
	if len(h.peers) == 0 {
		return
	}
	defer h.Because("Turn")()
	renewals, used := h.renewals(now)
	for _, id := range sortedKeys(h.peers) {
		p, r := h.peers[id], renewals[id]
		switch {
		case p == nil: // the last load went with another peer
		case !used[id]:
			if !p.state.asking() {
				h.peerTo(id, p, whenUnneeded, peerNone)
			}
		case r == nil:
			p.heard = now // SendLoad has a bound of its own
		case now.Sub(p.heard) >= h.patience() && !fault.On("silence-unasked"):
			h.peerGone(now, id, whenSilent, "no answer")
		case p.state.asking() && !fault.On("renewed-beside") || !p.due(now) && !p.state.fresh():
		default:
			guard := whenDue
			if p.due(now) {
				p.next = now.Add(h.renewInterval())
			} else {
				r.Loads, guard = nil, whenNew // only what is new, and at once
			}
			if len(r.Loads)+len(r.Claims) == 0 {
				h.peerTo(id, p, whenEmpty, peerResting) // loaded or cancelled meanwhile
				continue
			}
			if fault.On("never-renews") {
				p.heard = now
				h.peerTo(id, p, guard, peerResting)
				continue
			}
			slices.Sort(r.Loads) // one order, so that a run can be told again
			slices.Sort(r.Claims)
			h.peerTo(id, p, guard, peerAsking, *r)
		}
	}
}

func (h *Set) StepRenewReplied(now time.Time, r core.RenewReplied) {
	from, more := r.Renewal.Peer, r.Renewal.More
	p := h.peers[from]
	if p == nil {
		return
	}
	h.noticePause(now)
	err, n := r.Err, len(r.Renewal.Loads)+len(r.Renewal.Claims)
	if err == nil && !r.Absent && len(r.Answers) != n {
		err = fmt.Errorf("malformed reply: %d answers for %d transfers", len(r.Answers), n)
	}
	switch {
	case r.Absent:
		h.peerGone(now, from, whenAbsent, fmt.Sprint(err))
		return
	case err != nil && now.Sub(p.heard) >= h.patience():
		h.peerGone(now, from, whenSilent, fmt.Sprint(err))
		return
	case more && !p.state.asking(): // to a renewal that began before the peer was forgotten
		h.peerTo(from, p, whenMore, p.state.answered(true))
	case !more && p.state.asking():
		h.peerTo(from, p, whenLast, p.state.answered(false))
	}
	if err != nil {
		p.next = now // with the next tick
		return
	}
	p.heard = now
	for i, id := range r.Renewal.Loads {
		if ld := h.loads.byID[ID(id)]; ld != nil && ld.peer == from && ld.state == loadWaiting {
			h.loadRenewed(now, ld, r.Answers[i])
			h.Settle(now)
		}
	}
	for i, id := range r.Renewal.Claims {
		h.claimAnswered(now, from, ID(id), r.Answers[len(r.Renewal.Loads)+i])
		h.Settle(now)
	}
	if !more && (p.state.fresh() || p.due(now)) { // they came while this was under way
		h.tickPeers(now)
	}
}

// peerGone ends the claims and loads that wait for a P agent. The guard says whether nobody listens as the
// agent (absent). If it is another, the agent may live, so D tells it of the ends.
func (h *Set) peerGone(now time.Time, id core.AgentID, guard Guard, cause string) {
	heard, absent := h.peers[id].heard, guard == whenAbsent
	silent := now.Sub(heard).Round(time.Millisecond)
	reason := fmt.Sprintf("prefill agent %s is gone: silent for %v: %s", id, silent, cause)
	if fault.On("gone-remembered") {
		h.peerTo(id, h.peers[id], guard, peerNone)
	} else {
		h.peerTo(id, h.peers[id], guard, peerNone, core.Forget{Peer: id, Gone: true})
	}
	defer h.Because("PeerGone")()
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
