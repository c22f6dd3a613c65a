// Claims and loads that come before P's engine has named the request are limited for all D agents together. Beyond the limit the
// account that has the most gives way: its claims before its loads, and the newest first. A claim that gives way is forgotten: its D
// asks again with the next renewal. A load that gives way ends, and its D is told. All shares of a transfer are kept or give way
// together. If one share has a load, all of them count as loads.

package half

import (
	"container/list"
	"fmt"
	"slices"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
)

// maxEarlyBlocks bounds the block ids that early loads hold: 16 MiB.
const maxEarlyBlocks = 1 << 22

// earlyPlace is what an early transfer holds of that room, for all its shares together.
type earlyPlace struct {
	who    Party
	offers *stake // the weight is how many offers there are
	blocks *stake // the weight is how many block ids their loads hold; nil if they hold none
}

// roomForEarly makes room for so many more places and block ids of a D agent. It returns false if there is no room and the agent's
// own account has the most. If this step has ended enough offers already, those that must give way do so in the next step. Until then
// there are more than the limit, but never twice as many.
func (h *Set) roomForEarly(now time.Time, who Party, places, blocks int) bool {
	for {
		scarce, more := h.scarce(places, blocks)
		if scarce == nil {
			return true
		}
		gives := scarce.gives(who, more)
		switch {
		case gives == nil, fault.On("early-for-the-first"):
			return false
		case !h.enough():
			h.giveWay(now, gives)
		case h.early+places > 2*h.opt.MaxTransfers, h.earlyBlocks+blocks > 2*maxEarlyBlocks:
			return false
		default:
			h.yield()
			return true
		}
	}
}

// scarce is what there is no room for if so much more comes, and how much more of it; nil if there is room. If nothing more comes, it is
// what there is too much of.
func (h *Set) scarce(places, blocks int) (of *greedy, more int) {
	switch {
	case h.early+places > h.opt.MaxTransfers && (places > 0 || blocks == 0):
		return &h.earlyOf, places
	case h.earlyBlocks+blocks > maxEarlyBlocks && (blocks > 0 || places == 0):
		return &h.earlyLoads, blocks
	}
	return nil, 0
}

// trimEarly has give way what an earlier step has left over.
func (h *Set) trimEarly(now time.Time) {
	for scarce, _ := h.scarce(0, 0); scarce != nil; scarce, _ = h.scarce(0, 0) {
		if h.enough() {
			h.yield()
			return
		}
		h.giveWay(now, scarce.most().outermost((*list.List).Back))
	}
}

// giveWay ends an early transfer, all shares of it. If no share is loaded, nobody need be told.
func (h *Set) giveWay(now time.Time, s *stake) {
	ids, told := h.above.Shares(s.id), fault.On("claims-told")
	if fault.On("shares-give-way-apart") {
		lives := func(id core.TransferID) bool { return h.offers[ID(id)] != nil }
		ids, told = ids[slices.IndexFunc(ids, lives):][:1], true
	}
	for _, id := range ids {
		of := h.offers[ID(id)]
		told = told || of != nil && of.load != nil
	}
	for _, id := range ids {
		switch of := h.offers[ID(id)]; {
		case of == nil: // it has ended
		case told:
			noRoom := "the prefill engine has no room for so many claims and loads of requests that it does not know"
			h.EndOffer(now, of, Always, Ending{core.Refused, noRoom})
			h.Settle(now)
		default: // as if it had not come
			h.offerTo(of, whenForgotten, offerNone)
			h.LeaveEarly(of)
		}
	}
	if told {
		return
	}
	h.above.Forgotten(s.id)
	h.restProbes()
}

// cameEarly counts an early offer. at is the place of its transfer; nil if this is the transfer's first offer.
func (h *Set) cameEarly(of *Offer, at *earlyPlace, who Party) *earlyPlace {
	if at == nil {
		at = &earlyPlace{who: who, offers: h.earlyOf.add(who, of.id, 1)}
	} else {
		h.earlyOf.change(at.offers, 1)
	}
	of.place = at
	h.early++
	return at
}

// LeaveEarly has an offer leave its place: the engine has named its transfer, or it ends.
func (h *Set) LeaveEarly(of *Offer) {
	h.early--
	h.earlyOf.change(of.place.offers, -1)
	h.holdBlocks(of.place, -of.loadBlocks())
}

// holdBlocks counts more or fewer block ids of an early transfer's loads.
func (h *Set) holdBlocks(at *earlyPlace, more int) {
	h.earlyBlocks += more
	switch {
	case more == 0:
	case at.blocks == nil:
		at.blocks = h.earlyLoads.add(at.who, at.offers.id, more)
	default:
		if h.earlyLoads.change(at.blocks, more); at.blocks.weight == 0 {
			at.blocks = nil
		}
	}
}

// loadEarly keeps a load whose request P's engine has not named, in the place of an earlier one.
func (h *Set) loadEarly(now time.Time, of *Offer, l *core.LoadMessage) (core.Code, string) {
	who, places, more := partyOf(l.Account, l.Peer), 1, l.Count()
	if of != nil {
		who, places = of.place.who, 0
	}
	if places+more > 0 && !h.roomForEarly(now, who, places, more) || of != nil && h.offers[ID(l.ID)] != of {
		return core.Refused, fmt.Sprintf("%d claims and loads of %d blocks already wait for requests that the prefill engine does not know", h.early, h.earlyBlocks)
	}
	if of == nil {
		of = h.addEarly(now, ID(l.ID), who)
	}
	h.holdBlocks(of.place, l.Count()-of.loadBlocks())
	h.earlyOf.harden(of.place.offers)
	of.load, of.peer = l, l.Peer
	return core.OK, ""
}

// loadBlocks is how many block ids its load holds.
func (of *Offer) loadBlocks() int {
	if of.load == nil {
		return 0
	}
	return of.load.Count()
}

// addEarly keeps a D's claim or load whose request P's engine has not named yet.
func (h *Set) addEarly(now time.Time, id ID, who Party) *Offer {
	h.begin(now)
	of := &Offer{id: id, peer: who.agent, deadline: now.Add(fault.Pick("no-reap", h.opt.EarlyLoad, 1000*h.opt.EarlyLoad))}
	h.offerTo(of, Always, offerEarly)
	h.cameEarly(of, nil, who)
	return of
}
