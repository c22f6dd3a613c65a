package core

import (
	"fmt"
	"iter"
	"slices"
	"time"

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
func (m *Machine) renewInterval() time.Duration {
	return min(m.opt.PeerTimeout, m.opt.Lease) / 3
}

// patience is the silence after which a peer counts as gone, so that its loads
// are reported within PeerTimeout: two ticks less.
func (m *Machine) patience() time.Duration {
	return fault.Pick("gone-unnoticed", m.opt.PeerTimeout-2*TickInterval, 1000*m.opt.PeerTimeout)
}

func (m *Machine) watch(now time.Time, id AgentID) {
	if m.peers[id] == nil {
		m.peers[id] = &peer{heard: now, next: now.Add(m.renewInterval())}
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
func (m *Machine) renewals(now time.Time) (list map[AgentID]*SendRenew, used map[AgentID]bool) {
	list, used = make(map[AgentID]*SendRenew, len(m.peers)), make(map[AgentID]bool, len(m.peers))
	at := func(id AgentID) *SendRenew {
		if list[id] == nil {
			list[id] = &SendRenew{Peer: id}
		}
		return list[id]
	}
	for id, ld := range m.loads.byID {
		used[ld.peer] = true
		if ld.state == loadWaiting {
			r := at(ld.peer)
			r.Loads = append(r.Loads, id)
		}
		if p := m.peers[ld.peer]; p != nil && ld.state.kept() { // nil: P is gone, and the load learns it by its SendLoad
			if r := at(ld.peer); p.due(now) && ld.state.renewed() {
				r.Claims = append(r.Claims, id)
			}
		}
	}
	for id, c := range m.claims.byID {
		used[c.peer] = true
		if !c.state.atPeer() {
			continue
		}
		r := at(c.peer)
		if c.state == claimAsked || m.peers[c.peer].due(now) && !fault.On("claim-not-renewed") {
			r.Claims = append(r.Claims, id)
		}
	}
	return list, used
}

func (p *peer) due(now time.Time) bool { return !now.Before(p.next) }

func (m *Machine) tickPeers(now time.Time) {
	m.noticePause(now) // before anyone counts as silent: events come before the first tick
	if len(m.peers) == 0 {
		return
	}
	renewals, used := m.renewals(now)
	for _, id := range sortedKeys(m.peers) {
		p, r := m.peers[id], renewals[id]
		switch {
		case p == nil: // the last load went with another peer
		case !used[id]:
			if !p.asking {
				delete(m.peers, id)
			}
		case r == nil:
			p.heard = now // SendLoad has a bound of its own
		case now.Sub(p.heard) >= m.patience() && !fault.On("silence-unasked"):
			m.peerGone(now, id, false, "no answer")
		case p.asking || !p.due(now) && !p.fresh:
		default:
			if p.due(now) {
				p.next = now.Add(m.renewInterval())
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
			m.act(*r)
		}
	}
}

// Parts cuts the answers to a renewal up, for a user with a lock: see MaxLocked. Answers that
// are not as many as the transfers stay whole, for the machine to refuse.
func (r SendRenew) Parts(answers []Answer) iter.Seq2[SendRenew, []Answer] {
	return func(yield func(SendRenew, []Answer) bool) {
		if len(answers) != len(r.Loads)+len(r.Claims) {
			yield(r, answers)
			return
		}
		for rest := r; ; {
			part := SendRenew{Peer: r.Peer, Loads: rest.Loads[:min(MaxLocked, len(rest.Loads))]}
			part.Claims = rest.Claims[:min(MaxLocked-len(part.Loads), len(rest.Claims))]
			rest.Loads, rest.Claims = rest.Loads[len(part.Loads):], rest.Claims[len(part.Claims):]
			part.More = len(rest.Loads)+len(rest.Claims) > 0
			n := len(part.Loads) + len(part.Claims)
			if !yield(part, answers[:n]) || !part.More {
				return
			}
			answers = answers[n:]
		}
	}
}

func (m *Machine) stepRenewReplied(now time.Time, r RenewReplied) {
	p := m.peers[r.Renewal.Peer]
	if p == nil {
		return
	}
	p.asking = r.Renewal.More
	m.noticePause(now)
	err := r.Err
	if err == nil && !r.Absent && len(r.Answers) != len(r.Renewal.Loads)+len(r.Renewal.Claims) {
		err = fmt.Errorf("malformed reply: %d answers for %d transfers", len(r.Answers), len(r.Renewal.Loads)+len(r.Renewal.Claims))
	}
	if err != nil || r.Absent {
		if r.Absent || now.Sub(p.heard) >= m.patience() {
			m.peerGone(now, r.Renewal.Peer, r.Absent, fmt.Sprint(err))
			return
		}
		p.next = now // with the next tick
		return
	}
	p.heard = now
	for i, id := range r.Renewal.Loads {
		if ld := m.loads.get(id); ld != nil && ld.peer == r.Renewal.Peer && ld.state == loadWaiting {
			m.loadRenewed(now, ld, r.Answers[i])
			m.settle(now)
		}
	}
	for i, id := range r.Renewal.Claims {
		if c := m.claims.get(id); c != nil && c.peer == r.Renewal.Peer && c.state.atPeer() {
			m.claimAnswered(now, c, r.Answers[len(r.Renewal.Loads)+i])
			m.settle(now)
		}
		if ld := m.loads.get(id); ld != nil && ld.peer == r.Renewal.Peer && ld.state.kept() {
			m.loadKept(now, ld, r.Answers[len(r.Renewal.Loads)+i])
			m.settle(now)
		}
	}
	if !r.Renewal.More && (p.fresh || p.due(now)) { // they came while this was under way
		m.tickPeers(now)
	}
}

// peerGone ends what waits for a P agent. absent says that nobody listens there. Else the
// agent may live, and is told when it listens again.
func (m *Machine) peerGone(now time.Time, id AgentID, absent bool, cause string) {
	defer m.because("PeerGone")()
	heard := m.peers[id].heard
	silent := now.Sub(heard).Round(time.Millisecond)
	reason := fmt.Sprintf("prefill agent %s is gone: silent for %v: %s", id, silent, cause)
	delete(m.peers, id)
	m.act(Forget{Peer: id, Gone: true})
	for _, tid := range sortedKeys(m.loads.byID) {
		// A load that has not been asked yet learns by its own SendLoad that P is gone, and
		// may find the agent that took P's place.
		if ld := m.loads.get(tid); ld != nil && ld.peer == id && ld.state == loadWaiting {
			m.endLoad(now, ld, ending{PeerLost, reason}, !absent)
			m.settle(now)
		}
		if ld := m.loads.get(tid); ld != nil && ld.peer == id && ld.state == loadAwaiting {
			m.loadPeerGone(now, ld, heard, absent, reason)
			m.settle(now)
		}
	}
	for _, tid := range sortedKeys(m.claims.byID) {
		if c := m.claims.get(tid); c != nil && c.peer == id && c.state.atPeer() {
			m.claimPeerGone(now, c, heard, absent, reason)
			m.settle(now)
		}
	}
}

// tickLookups ends claims that no load has followed, and loads whose P is gone without a
// successor. It looks again for a P that a claim has not found.
func (m *Machine) tickLookups(now time.Time) {
	for _, id := range sortedKeys(m.loads.byID) {
		if ld := m.loads.get(id); ld != nil && ld.state == loadRelocating && !now.Before(ld.until) && !fault.On("waits-for-successor") {
			m.endLoad(now, ld, ending{PeerLost, ld.noSuccessor()}, false)
			m.settle(now)
		}
	}
	var due []TransferID
	for id, c := range m.claims.byID {
		if c.due(now) {
			due = append(due, id)
		}
	}
	slices.Sort(due)
	for _, id := range due {
		if c := m.claims.get(id); c != nil { // another part of the same fan-in may have taken it along
			m.tickClaim(now, c)
			m.settle(now)
		}
	}
}
