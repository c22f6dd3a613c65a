package half

import (
	"container/list"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/invariants"
)

// Check panics when the halves contradict themselves; only in builds
// with the tag "invariants". It returns how many loads of a whole engine have blocks.
func (h *Set) Check() (busy int) {
	invariants.Must(len(h.outcomes) == 0, "%d outcomes of halves were not settled", len(h.outcomes))
	h.checkOffers()
	h.checkClaims()
	busy = h.checkLoads()
	h.checkMoments()
	invariants.Must(len(h.claims.byID)+len(h.loads.byID)+len(h.pendingFinishes.byID) > 0 || len(h.peers) == 0, "%d peers are watched for no load", len(h.peers))
	invariants.Must(len(h.offers) > 0 || len(h.probes) == 0, "%d peers are asked for no offer", len(h.probes))
	for id, p := range h.peers {
		invariants.Must(p.state >= peerResting && p.state <= peerAskingFresh, "agent %q is watched in state %v", id, p.state)
	}
	for id, p := range h.probes {
		missing := p.state == probeAskingAbsent || p.state == probeAbsent || p.state == probeGone
		invariants.Must(p.state >= probeAsking && p.state <= probeGone && (p.absent > 0) == missing, "agent %q, in state %v, was absent for %d ticks", id, p.state, p.absent)
		invariants.Must(p.state == probeGone || len(p.rest) == 0, "%d offers of agent %q end in state %v", len(p.rest), id, p.state)
	}
	h.Ended.own.Check("tombstones")
	h.checkEarly()
	return busy
}

func (h *Set) checkOffers() {
	early, earlyBlocks := 0, 0
	for id, of := range h.offers {
		loaded, timed := of.load != nil, !of.deadline.IsZero()
		_, gone := h.Ended.Get(id)
		invariants.Must(!loaded || of.load.Peer == of.peer, "offer %q is loaded by another agent than %q, for which it is kept", id, of.peer)
		invariants.Must(of.id == id, "offer %q is kept as %q", of.id, id)
		invariants.Must(!gone, "offer %q has ended and is under way", id)
		invariants.Must(of.endBy.IsZero() == of.offered.IsZero(), "offer %q: offered %v, to end by %v", id, of.offered, of.endBy)
		invariants.Must(of.sent == nil || of.state.sending() || of.state.ends(), "offer %q in state %v has sent a part", id, of.state)
		switch of.state {
		case offerEarly:
			early++
			earlyBlocks += of.loadBlocks()
			invariants.Must((of.peer != "" || of.share) && timed && of.held.Blocks == nil, "early offer %q: peer %q, deadline %v", id, of.peer, timed)
		case offerPrefill:
			invariants.Must((of.peer != "") == timed, "prefill %q: peer %q, deadline %v", id, of.peer, timed)
		case offerAwaiting:
			invariants.Must(timed && !of.offered.IsZero(), "awaiting offer %q: deadline %v", id, of.deadline)
		case offerFinishing:
			invariants.Must(loaded && timed && !of.offered.IsZero() && of.sent != nil, "finishing offer %q: load %v, deadline %v", id, loaded, timed)
		case offerPartial:
			invariants.Must(loaded && timed && of.offered.IsZero() && of.sent != nil, "partial offer %q: load %v, deadline %v", id, loaded, timed)
		case offerReady:
			invariants.Must(!loaded && timed, "ready offer %q: load %v, deadline %v", id, loaded, timed)
		case offerSending, offerWithdrawing, offerEnding, offerEndingWithdrawn, offerRefused:
			invariants.Must(loaded && timed && !of.sendAt.IsZero(), "sending offer %q: load %v, deadline %v, sent at %v", id, loaded, timed, of.sendAt)
		default:
			invariants.Must(false, "offer %q in state %v", id, of.state)
		}
	}
	invariants.Must(early == h.early && earlyBlocks == h.earlyBlocks, "%d early offers of %d blocks, counted %d of %d", early, earlyBlocks, h.early, h.earlyBlocks)
	invariants.Must(early <= 2*h.opt.MaxTransfers && len(h.offers)-early <= h.opt.MaxTransfers, "%d offers, %d early, over the limit", len(h.offers), early)
}

func (h *Set) checkClaims() {
	for id, c := range h.claims.byID {
		invariants.Must(!h.opt.ReportClaims || c.state != claimVoid, "claim %q is lost (%v) and not reported", id, c.end.Code)
		invariants.Must(c.id == id && c.state <= claimVoid, "claim %q is kept as %q in state %v", c.id, id, c.state)
		invariants.Must(h.loads.byID[id] == nil && h.pendingFinishes.byID[id] == nil, "claim %q has another half beside it", id)
		invariants.Must((c.state == claimVoid) == (c.end.Code != core.OK), "claim %q in state %v ends as %v", id, c.state, c.end.Code)
		invariants.Must(!c.state.lookedUp() || c.peer == "", "claim %q is with %q in state %v", id, c.peer, c.state)
		invariants.Must((c.state == claimKept) == (c.confirmedBy != "") || c.state == claimVoid, "claim %q is kept by %q in state %v", id, c.confirmedBy, c.state)
		switch c.state {
		case claimResolving, claimBackoff, claimAsked:
			invariants.Must(c.previousPeer == "", "claim %q was with %q in state %v", id, c.previousPeer, c.state)
		case claimRelocating, claimBackoffAgain, claimAskedAgain:
			invariants.Must(c.previousPeer != "", "claim %q was with nobody in state %v", id, c.state)
		}
		invariants.Must(!c.state.atPeer() || h.peers[c.peer] != nil, "claim %q is kept by %q, which nobody watches", id, c.peer)
	}
}

func (h *Set) checkLoads() (busy int) {
	for id, ld := range h.loads.byID {
		invariants.Must(ld.id == id && ld.state <= loadEnding, "load %q is kept as %q in state %v", ld.id, id, ld.state)
		invariants.Must(h.pendingFinishes.byID[id] == nil, "load %q has another half beside it", id)
		invariants.Must(ld.state.lookedUp() == (ld.peer == ""), "load %q is with %q in state %v", id, ld.peer, ld.state)
		invariants.Must(ld.state != loadEnding || ld.end.Code != core.OK, "load %q ends well in state %v", id, ld.state)
		invariants.Must(ld.state == loadEnding || ld.end.Code == core.OK, "load %q ends as %v in state %v", id, ld.end.Code, ld.state)
		invariants.Must((ld.state != loadRelocating && ld.state != loadMoving || ld.previousPeer != "") && (ld.state != loadResolving || ld.previousPeer == ""), "load %q was with %q in state %v", id, ld.previousPeer, ld.state)
		invariants.Must(ld.state != loadWaiting && ld.state != loadAwaiting || h.peers[ld.peer] != nil, "load %q waits for %q, which nobody watches", id, ld.peer)
		if !ld.rank && ld.Count() > 0 {
			busy++
		}
	}
	return busy
}

// checkEarly: what only peers have named is counted for each of them.
func (h *Set) checkEarly() {
	places, blocks := 0, 0
	of := map[core.TransferID][]*Offer{}
	for id, o := range h.offers {
		name := h.above.Name(id)
		of[name] = append(of[name], o)
	}
	h.earlyOf.check(func(s *stake) {
		held, loads := 0, 0
		half := of[h.above.Name(s.id)]
		for _, of := range half {
			invariants.Must(of.state == offerEarly && of.place.offers == s && of.place.who == s.who, "early offer %q is counted for %v and is none of its", of.id, s.who)
			if held += of.loadBlocks(); of.load != nil {
				loads++
			}
		}
		invariants.Must(len(half) == s.weight && (loads == 0 || s.firm), "%d early offers of %q with %d loads, counted %d, firm %v", len(half), s.id, loads, s.weight, s.firm)
		if places += len(half); len(half) > 0 && half[0].place.blocks != nil {
			at := half[0].place.blocks
			invariants.Must(at.id == s.id && at.weight == held && at.who == s.who, "early loads %q have %d blocks, weight %d of %q", s.id, held, at.weight, at.id)
		}
		blocks += held
	})
	held := 0
	h.earlyLoads.check(func(s *stake) { held += s.weight })
	invariants.Must(places == h.early && blocks == h.earlyBlocks && held == blocks, "%d early offers of %d blocks, counted %d of %d, weights %d", places, blocks, h.early, h.earlyBlocks, held)
	invariants.Must(h.early <= h.opt.MaxTransfers && h.earlyBlocks <= maxEarlyBlocks || h.yielded, "%d early offers of %d blocks, and nothing gives way", h.early, h.earlyBlocks)
	words := 0
	h.Ended.of.check(func(s *stake) {
		invariants.Must(h.Ended.words[s.id].of == s, "the word of %q is counted for %v and is none of its", s.id, s.who)
		words++
	})
	invariants.Must(words == len(h.Ended.words) && words <= h.Ended.own.limit, "%d words, counted %d", len(h.Ended.words), words)
}

// check checks that each weight is the sum of its parts, and that none is above who gives way first, and calls f for each stake.
func (g *greedy) check(f func(s *stake)) {
	first, _ := g.held.Most()
	most, _ := g.held.Held(first.account)
	accounts := map[core.Account]int64{}
	for who, of := range g.by {
		held := 0
		for _, l := range []*list.List{&of.soft, &of.firm} {
			for el := l.Front(); el != nil; el = el.Next() {
				s := el.Value.(*stake)
				invariants.Must(s.who == who && s.weight > 0 && s.el == el && s.firm == (l == &of.firm), "%q of %v has %d, and is with %v", s.id, s.who, s.weight, who)
				held += s.weight
				f(s)
			}
		}
		n := g.held.Of(who.account, who)
		invariants.Must(held > 0 && n == int64(held), "%v has %d, counted %d", who, held, n)
		invariants.Must(who.account != first.account || n <= g.held.Of(first.account, first), "%v has %d, and %v gives way", who, n, first)
		accounts[who.account] += n
	}
	for account, sum := range accounts {
		n, ending := g.held.Held(account)
		invariants.Must(n == sum && ending == 0 && n <= most, "account %q has %d, counted %d and %d; %q, which gives way, has %d", account, sum, n, ending, first.account, most)
	}
	n := g.held.Holders()
	invariants.Must(n == len(g.by), "%d agents have something, counted %d", len(g.by), n)
}
