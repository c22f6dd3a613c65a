package core

import (
	"fmt"
	"time"

	"github.com/kvconn/kvconn/internal/fault"
)

// What D agents claim or load before P's engine has named the request has a limit for all D
// agents together. Beyond it the agent that has brought the most gives way.

// maxEarlyBlocks bounds the block ids that early loads hold: 16 MiB.
const maxEarlyBlocks = 1 << 22

// roomForEarly makes room for so many more, with so many block ids, of a D agent. It is
// false if the agent itself has the most of what there is no room for.
func (m *Machine) roomForEarly(now time.Time, from AgentID, places, blocks int) bool {
	for {
		scarce, more := &m.earlyOf, places
		switch {
		case m.early+places > m.opt.MaxTransfers:
		case m.earlyBlocks+blocks > maxEarlyBlocks:
			scarce, more = &m.earlyLoads, blocks
		default:
			return true
		}
		greediest := scarce.most()
		if greediest == nil || greediest.weight <= scarce.of(from)+more || fault.On("early-for-the-first") {
			return false
		}
		newest := greediest.ids[len(greediest.ids)-1]
		m.endOffer(now, m.offers[newest], ending{Refused, "the prefill engine has no room for so many claims and loads of requests that it does not know"}, true)
		m.settle(now)
	}
}

// cameEarly counts an early offer.
func (m *Machine) cameEarly(of *offer, from AgentID) {
	of.broughtBy = from
	m.earlyOf.add(from, of.id, 1)
	m.early++
}

func (m *Machine) leaveEarly(of *offer) {
	m.early--
	m.earlyOf.drop(of.broughtBy, of.id, 1)
	m.dropEarlyLoad(of)
}

// dropEarlyLoad counts the block ids of an early offer's load no more.
func (m *Machine) dropEarlyLoad(of *offer) {
	if n := of.loadBlocks(); n > 0 {
		m.earlyBlocks -= n
		m.earlyLoads.drop(of.broughtBy, of.id, n)
	}
}

// keepEarlyLoad gives an early offer a load, in the place of an earlier one.
func (m *Machine) keepEarlyLoad(of *offer, l *LoadMessage) {
	m.dropEarlyLoad(of)
	of.load, of.peer = l, l.Peer
	if n := of.loadBlocks(); n > 0 {
		m.earlyBlocks += n
		m.earlyLoads.add(of.broughtBy, of.id, n)
	}
}

// loadEarly keeps a load whose request P's engine has not named.
func (m *Machine) loadEarly(now time.Time, of *offer, l *LoadMessage) (Code, string) {
	places, more := 0, l.Count()
	if of == nil {
		places = 1
	}
	if (places > 0 || m.earlyBlocks+more > maxEarlyBlocks) && !m.roomForEarly(now, l.Peer, places, more) || of != nil && m.offers[l.ID] != of {
		return Refused, fmt.Sprintf("%d claims and loads of %d blocks already wait for requests that the prefill engine does not know", m.early, m.earlyBlocks)
	}
	if of == nil {
		of = m.addEarly(now, l.ID, l.Peer)
	}
	m.keepEarlyLoad(of, l)
	return OK, ""
}

// loadBlocks is how many block ids its load holds.
func (of *offer) loadBlocks() int {
	if of.load == nil {
		return 0
	}
	return of.load.Count()
}

// addEarly keeps a D's claim or load whose request P's engine has not named yet.
func (m *Machine) addEarly(now time.Time, id TransferID, peer AgentID) *offer {
	m.begin(now)
	of := &offer{id: id, peer: peer, deadline: now.Add(fault.Pick("no-reap", m.opt.EarlyLoad, 1000*m.opt.EarlyLoad))}
	m.offerTo(of, offerEarly)
	m.cameEarly(of, peer)
	return of
}
