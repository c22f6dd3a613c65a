package core

import (
	"fmt"
	"time"

	"github.com/kvconn/kvconn/internal/fault"
)

// What D agents claim or load before P's engine has named the request has a limit for all D
// agents together. Beyond it the account that has brought the most gives way: its claims before its loads, and the newest first.
// A claim is forgotten: its D asks again with the next renewal. A load ends, and its D is told. All shares of a transfer are kept or
// give way together, and are as firm as one of them: a load of one share makes a load of the transfer.

// maxEarlyBlocks bounds the block ids that early loads hold: 16 MiB.
const maxEarlyBlocks = 1 << 22

// earlyPlace is what an early transfer holds of that room, all shares of it together.
type earlyPlace struct {
	who    party
	offers *stake // the weight is how many offers there are
	blocks *stake // the weight is how many block ids their loads hold; nil if they hold none
}

// roomForEarly makes room for so many more, with so many block ids, of a D agent. It is
// false if the agent's account itself has the most of what there is no room for. If a step has ended enough, what must give way for
// this room does so in the next: until then there is more than there is room for, but never twice as much.
func (m *Machine) roomForEarly(now time.Time, who party, places, blocks int) bool {
	for {
		scarce, more := m.scarce(places, blocks)
		if scarce == nil {
			return true
		}
		gives := scarce.gives(who, more)
		switch {
		case gives == nil, fault.On("early-for-the-first"):
			return false
		case !m.enough():
			m.giveWay(now, gives)
		case m.early+places > 2*m.opt.MaxTransfers, m.earlyBlocks+blocks > 2*maxEarlyBlocks:
			return false
		default:
			m.yield()
			return true
		}
	}
}

// scarce is what there is no room for if so much more comes, and how much more of it; nil if there is room. If nothing more comes, it is
// what there is too much of.
func (m *Machine) scarce(places, blocks int) (of *greedy, more int) {
	switch {
	case m.early+places > m.opt.MaxTransfers && (places > 0 || blocks == 0):
		return &m.earlyOf, places
	case m.earlyBlocks+blocks > maxEarlyBlocks && (blocks > 0 || places == 0):
		return &m.earlyLoads, blocks
	}
	return nil, 0
}

// trimEarly has give way what an earlier step has left over.
func (m *Machine) trimEarly(now time.Time) {
	for scarce, _ := m.scarce(0, 0); scarce != nil; scarce, _ = m.scarce(0, 0) {
		if m.enough() {
			m.yield()
			return
		}
		m.giveWay(now, scarce.accounts.most().newest())
	}
}

// giveWay ends an early transfer, all shares of it. If no share is loaded, nobody need be told.
func (m *Machine) giveWay(now time.Time, s *stake) {
	half, told := m.halfOf(s.id), fault.On("claims-told")
	if fault.On("shares-give-way-apart") {
		half, told = half[:1], true
	}
	for _, of := range half {
		told = told || of.load != nil
	}
	if !told {
		m.forgetEarly(s.id, half)
		return
	}
	for _, of := range half {
		m.endOffer(now, of, ending{Refused, noRoom}, true)
		m.settle(now)
	}
}

const noRoom = "the prefill engine has no room for so many claims and loads of requests that it does not know"

// forgetEarly takes the claims of a transfer back out, as if they had not come.
func (m *Machine) forgetEarly(id TransferID, half []*offer) {
	for _, of := range half {
		m.offerTo(of, offerNone)
		m.leaveEarly(of)
	}
	delete(m.fans.offers, id)
	if len(m.offers) == 0 {
		clear(m.probes) // as in reportOffer
	}
}

// cameEarly counts an early offer: at the place of its transfer, nil if it is the first of it.
func (m *Machine) cameEarly(of *offer, at *earlyPlace, who party) *earlyPlace {
	if at == nil {
		at = &earlyPlace{who: who, offers: m.earlyOf.add(who, nameOf(of.id), 1)}
	} else {
		m.earlyOf.change(at.offers, 1)
	}
	of.place = at
	m.early++
	return at
}

func (m *Machine) leaveEarly(of *offer) {
	m.early--
	m.earlyOf.change(of.place.offers, -1)
	m.holdBlocks(of.place, -of.loadBlocks())
}

// holdBlocks counts more or fewer block ids of an early transfer's loads.
func (m *Machine) holdBlocks(at *earlyPlace, more int) {
	m.earlyBlocks += more
	switch {
	case more == 0:
	case at.blocks == nil:
		at.blocks = m.earlyLoads.add(at.who, at.offers.id, more)
	default:
		if m.earlyLoads.change(at.blocks, more); at.blocks.weight == 0 {
			at.blocks = nil
		}
	}
}

// keepEarlyLoad gives an early offer a load, in the place of an earlier one.
func (m *Machine) keepEarlyLoad(of *offer, l *LoadMessage) {
	m.holdBlocks(of.place, l.Count()-of.loadBlocks())
	m.earlyOf.harden(of.place.offers)
	of.load, of.peer = l, l.Peer
}

// loadEarly keeps a load whose request P's engine has not named.
func (m *Machine) loadEarly(now time.Time, of *offer, l *LoadMessage) (Code, string) {
	who, places, more := partyOf(l.Account, l.Peer), 1, l.Count()
	if of != nil {
		who, places = of.place.who, 0
	}
	if places+more > 0 && !m.roomForEarly(now, who, places, more) || of != nil && m.offers[l.ID] != of {
		return Refused, fmt.Sprintf("%d claims and loads of %d blocks already wait for requests that the prefill engine does not know", m.early, m.earlyBlocks)
	}
	if of == nil {
		of = m.addEarly(now, l.ID, who)
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
func (m *Machine) addEarly(now time.Time, id TransferID, who party) *offer {
	m.begin(now)
	of := &offer{id: id, peer: who.agent, deadline: now.Add(fault.Pick("no-reap", m.opt.EarlyLoad, 1000*m.opt.EarlyLoad))}
	m.offerTo(of, offerEarly)
	m.cameEarly(of, nil, who)
	return of
}
