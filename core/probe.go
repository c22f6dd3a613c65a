package core

import (
	"fmt"
	"slices"
	"time"

	"github.com/kvconn/kvconn/internal/fault"
)

// probe is a D agent whose connections broke: P asks whether it lives.
type probe struct {
	since  time.Time // when its connections broke, or it was heard of
	absent int       // ticks, in a row, in which nobody listened as it: answers that say so, and those that pass meanwhile
	asking bool
	gone   bool     // it is, and its offers end
	rest   []*offer // when it is gone: those of its offers that are to end. Others are of an agent that has come back
}

func (m *Machine) stepPeerDown(now time.Time, id AgentID) {
	if p := m.peers[id]; p != nil {
		p.next = now
		m.tickPeers(now)
	}
	if m.probes[id] == nil && len(m.offersOf(id)) > 0 && !fault.On("no-probe") {
		m.probes[id] = &probe{since: now, asking: true}
		m.act(SendProbe{Peer: id})
	}
}

// offersOf lists what P keeps for a D agent.
func (m *Machine) offersOf(id AgentID) (ids []TransferID) {
	for tid, of := range m.offers {
		if of.peer == id {
			ids = append(ids, tid)
		}
	}
	slices.Sort(ids)
	return ids
}

// tickProbes asks the D agents again that have not answered. If none ever does, the lease
// decides.
func (m *Machine) tickProbes(now time.Time) {
	for _, id := range sortedKeys(m.probes) {
		switch p := m.probes[id]; {
		case p.gone:
		case p.asking && p.absent > 0:
			p.absent++ // the answer takes longer than a tick
		case p.asking:
		case now.Sub(p.since) >= 2*m.opt.PeerTimeout, len(m.offersOf(id)) == 0:
			delete(m.probes, id)
		default:
			p.asking = true
			m.act(SendProbe{Peer: id})
		}
	}
}

func (m *Machine) stepProbeReplied(now time.Time, e ProbeReplied) {
	p := m.probes[e.Peer]
	if p == nil || p.gone {
		return
	}
	p.asking = false // again with the next tick
	switch {
	case e.Absent:
		// The first was asked between two ticks.
		if p.absent++; p.absent < fault.Pick("gone-at-once", 2+int(m.absence(e.Away)/TickInterval), 1) {
			return
		}
		p.gone = true
		for _, tid := range m.offersOf(e.Peer) {
			p.rest = append(p.rest, m.offers[tid])
		}
		m.endGone(now)
	case e.Err != nil:
		p.absent = 0 // somebody listens, most likely
	default:
		delete(m.probes, e.Peer)
	}
}

// endGone ends the offers of the D agents that are gone, as many as a step may.
func (m *Machine) endGone(now time.Time) {
	for _, id := range sortedKeys(m.probes) {
		p := m.probes[id]
		if p == nil || !p.gone {
			continue
		}
		for ; len(p.rest) > 0; p.rest = p.rest[1:] {
			of := p.rest[0]
			if m.offers[of.id] != of || of.peer != id { // it has ended meanwhile, or waits for another agent
				continue
			}
			if m.enough() {
				m.yield()
				return
			}
			m.endOffer(now, of, ending{PeerLost, fmt.Sprintf("decode agent %s is gone", id)}, false)
			m.settle(now)
		}
		delete(m.probes, id)
	}
}

// absence is how long nobody must have listened as a D before it counts as gone: the time
// in which its link comes back, with much to spare. It is counted in ticks, since nobody
// can connect to a process that does not run.
func (m *Machine) absence(away bool) time.Duration {
	if away || fault.On("gone-late") {
		return m.patience()
	}
	return m.opt.PeerTimeout / 3
}
