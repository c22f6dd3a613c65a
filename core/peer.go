package core

import (
	"fmt"
	"slices"
	"time"
)

// peer is a P agent that loads wait for. One message renews them all and tells
// at the same time that P lives and knows them.
type peer struct {
	heard   time.Time // last sign of life
	next    time.Time // next renewal
	asking  bool      // a renewal is under way
	suspect bool      // the transport saw its connections break
}

// renewInterval leaves room for three renewals within either bound.
func (m *Machine) renewInterval() time.Duration {
	return min(m.opt.PeerTimeout, m.opt.Lease) / 3
}

func (m *Machine) watch(now time.Time, id AgentID) {
	if m.peers[id] == nil {
		m.peers[id] = &peer{heard: now, next: now.Add(m.renewInterval())}
	}
}

func (m *Machine) tickPeers(now time.Time) {
	if len(m.peers) == 0 {
		return
	}
	waiting := make(map[AgentID][]TransferID, len(m.peers))
	used := make(map[AgentID]bool, len(m.peers))
	for id, ld := range m.loads {
		used[ld.peer] = true
		if ld.state == loadWaiting {
			waiting[ld.peer] = append(waiting[ld.peer], id)
		}
	}
	for _, id := range sortedKeys(m.peers) {
		p := m.peers[id]
		switch {
		case !used[id]:
			if !p.asking {
				delete(m.peers, id)
			}
		case len(waiting[id]) == 0:
			p.heard = now // SendLoad has a bound of its own
		case !p.asking && !now.Before(p.next):
			p.asking = true
			p.next = now.Add(m.renewInterval())
			slices.Sort(waiting[id]) // one order, so that a run can be told again
			m.act(SendRenew{Peer: id, IDs: waiting[id]})
		}
	}
}

// RenewReplied answers SendRenew. absent says that nobody listens at the peer's
// address; err that no answer came.
func (m *Machine) RenewReplied(now time.Time, id AgentID, ids []TransferID, statuses []Status, absent bool, err error) {
	p := m.peers[id]
	if p == nil {
		return
	}
	p.asking = false
	if err == nil && !absent && len(statuses) != len(ids) {
		err = fmt.Errorf("malformed reply: %d statuses for %d transfers", len(statuses), len(ids))
	}
	if err != nil || absent {
		silent := now.Sub(p.heard)
		if absent || p.suspect || silent >= m.opt.PeerTimeout {
			m.peerGone(now, id, fmt.Sprintf("prefill agent %s is gone: silent for %v: %v", id, silent.Round(time.Millisecond), err))
			return
		}
		p.next = now
		return
	}
	p.heard, p.suspect = now, false
	for i, tid := range ids {
		ld := m.loads[tid]
		if ld == nil || ld.peer != id || ld.state != loadWaiting {
			continue
		}
		switch statuses[i] {
		case StatusUnknown:
			m.endLoad(now, ld, PeerLost, fmt.Sprintf("prefill agent %s does not know transfer %q any more", id, string(tid)))
		case StatusEnded:
			// The Finish that says why is on its way, or lost: the next round tells.
			if ld.ended++; ld.ended >= 2 {
				m.endLoad(now, ld, Failed, fmt.Sprintf("prefill agent %s has given transfer %q up", id, string(tid)))
			}
		case StatusSent:
			// The last bytes may be on their way; not for several rounds.
			if ld.sent++; ld.sent >= 3 {
				m.endLoad(now, ld, Failed, fmt.Sprintf("prefill agent %s has sent transfer %q, but bytes are missing", id, string(tid)))
			}
		}
	}
}

// PeerDown takes a transport's word that the way to a peer broke. Whether P is
// gone too is asked at once.
func (m *Machine) PeerDown(now time.Time, id AgentID) {
	if p := m.peers[id]; p != nil {
		p.suspect, p.next = true, now
		m.tickPeers(now)
	}
}

func (m *Machine) peerGone(now time.Time, id AgentID, reason string) {
	delete(m.peers, id)
	m.act(Forget{Peer: id})
	for _, tid := range sortedKeys(m.loads) {
		// What has not been asked yet learns it by its own SendLoad, and may find
		// the agent that took the place.
		if ld := m.loads[tid]; ld.peer == id && ld.state == loadWaiting {
			m.endLoad(now, ld, PeerLost, reason)
		}
	}
}
