package core

import "fmt"

type mustFunc func(ok bool, format string, args ...any)

// checkInvariants panics when the machine contradicts itself; only in builds
// with the tag "invariants".
func (m *Machine) checkInvariants() {
	must := func(ok bool, format string, args ...any) {
		if !ok {
			panic("core: broken invariant: " + fmt.Sprintf(format, args...))
		}
	}
	must(len(m.outcomes) == 0, "%d outcomes of halves were not settled", len(m.outcomes))
	m.checkOffers(must)
	m.checkClaims(must)
	m.checkLoads(must)
	m.checkFans(must)
	m.checkDemands(must)
	m.checkMoments(must)
	m.checkLost(must)
	must(m.namedClaims() <= m.opt.MaxTransfers, "%d claims, over the limit", m.namedClaims())
	must(len(m.claims.byID)+len(m.loads.byID)+len(m.farewells.byID) > 0 || len(m.peers) == 0, "%d peers are watched for no load", len(m.peers))
	must(len(m.offers) > 0 || len(m.probes) == 0, "%d peers are asked for no offer", len(m.probes))
	own := &m.ended.own
	must(len(own.order) == len(own.byID) && len(own.byID) <= own.limit, "%d tombstones, %d in order", len(own.byID), len(own.order))
	m.checkEarly(must)
	must(len(m.lost.order) == len(m.lost.byID) && len(m.lost.byID) <= m.lost.limit, "%d lost claims, %d in order", len(m.lost.byID), len(m.lost.order))
}

func (m *Machine) checkOffers(must mustFunc) {
	early, earlyBlocks := 0, 0
	for id, of := range m.offers {
		loaded, timed := of.load != nil, !of.deadline.IsZero()
		_, gone := m.ended.get(id)
		must(!loaded || of.load.Peer == of.peer, "offer %q is loaded by another agent than %q, for which it is kept", id, of.peer)
		must(of.id == id, "offer %q is kept as %q", of.id, id)
		must(!gone, "offer %q has ended and is under way", id)
		must(of.endBy.IsZero() == of.offered.IsZero(), "offer %q: offered %v, to end by %v", id, of.offered, of.endBy)
		must(of.sent == nil || of.state.sending() || of.state.ends(), "offer %q in state %v has sent a part", id, of.state)
		switch of.state {
		case offerEarly:
			early++
			earlyBlocks += of.loadBlocks()
			must((of.peer != "" || isPart(id)) && timed && of.held.Blocks == nil, "early offer %q: peer %q, deadline %v", id, of.peer, timed)
		case offerPrefill:
			must((of.peer != "") == timed, "prefill %q: peer %q, deadline %v", id, of.peer, timed)
		case offerAwaiting:
			must(timed && !of.offered.IsZero(), "awaiting offer %q: deadline %v", id, of.deadline)
		case offerFinishing:
			must(loaded && timed && !of.offered.IsZero() && of.sent != nil, "finishing offer %q: load %v, deadline %v", id, loaded, timed)
		case offerPartial:
			must(loaded && timed && of.offered.IsZero() && of.sent != nil, "partial offer %q: load %v, deadline %v", id, loaded, timed)
		case offerReady:
			must(!loaded && timed, "ready offer %q: load %v, deadline %v", id, loaded, timed)
		case offerSending, offerWithdrawing, offerEnding, offerEndingWithdrawn, offerRefused:
			must(loaded && timed && !of.sendAt.IsZero(), "sending offer %q: load %v, deadline %v, sent at %v", id, loaded, timed, of.sendAt)
		default:
			must(false, "offer %q in state %v", id, of.state)
		}
	}
	must(early == m.early && earlyBlocks == m.earlyBlocks, "%d early offers of %d blocks, counted %d of %d", early, earlyBlocks, m.early, m.earlyBlocks)
	must(early <= m.opt.MaxTransfers && len(m.offers)-early <= m.opt.MaxTransfers, "%d offers, %d early, over the limit", len(m.offers), early)
}

func (m *Machine) checkClaims(must mustFunc) {
	for id, c := range m.claims.byID {
		must(c.id == id && c.state <= claimVoid, "claim %q is kept as %q in state %v", c.id, id, c.state)
		must(m.loads.get(id) == nil && m.farewells.get(id) == nil, "claim %q has another half beside it", id)
		must((c.state == claimVoid) == (c.end.code != OK), "claim %q in state %v ends as %v", id, c.state, c.end.code)
		must(!c.state.lookedUp() || c.peer == "", "claim %q is with %q in state %v", id, c.peer, c.state)
		must((c.state == claimKept) == (c.keeper != "") || c.state == claimVoid, "claim %q is kept by %q in state %v", id, c.keeper, c.state)
		must((c.state != claimRelocating || c.former != "") && (c.state != claimResolving || c.former == ""), "claim %q was with %q in state %v", id, c.former, c.state)
		must(!c.state.atPeer() || m.peers[c.peer] != nil, "claim %q is kept by %q, which nobody watches", id, c.peer)
	}
}

func (m *Machine) checkLoads(must mustFunc) {
	busy := m.fans.busyLoads()
	for id, ld := range m.loads.byID {
		must(ld.id == id && ld.state <= loadEnding, "load %q is kept as %q in state %v", ld.id, id, ld.state)
		must(m.farewells.get(id) == nil, "load %q has another half beside it", id)
		must(ld.state.lookedUp() == (ld.peer == ""), "load %q is with %q in state %v", id, ld.peer, ld.state)
		must(ld.state != loadEnding || ld.end.code != OK, "load %q ends well in state %v", id, ld.state)
		must(ld.state == loadEnding || ld.end.code == OK, "load %q ends as %v in state %v", id, ld.end.code, ld.state)
		must((ld.state != loadRelocating && ld.state != loadMoving || ld.former != "") && (ld.state != loadResolving || ld.former == ""), "load %q was with %q in state %v", id, ld.former, ld.state)
		must(ld.state != loadWaiting && ld.state != loadAwaiting || m.peers[ld.peer] != nil, "load %q waits for %q, which nobody watches", id, ld.peer)
		if !isPart(id) && ld.Count() > 0 {
			busy++
		}
	}
	must(busy <= m.opt.MaxTransfers, "%d loads, over the limit", busy)
}

// checkEarly: what only peers have named is counted for each of them.
func (m *Machine) checkEarly(must mustFunc) {
	places, blocks, words := 0, 0, 0
	for peer, h := range m.earlyOf.byPeer {
		for _, id := range h.ids {
			of := m.offers[id]
			must(of != nil && of.state == offerEarly && of.broughtBy == peer, "early offer %q is counted for %q and is none of its", id, peer)
		}
		must(len(h.ids) > 0 && h.weight == len(h.ids), "%q has %d early offers, weight %d", peer, len(h.ids), h.weight)
		must(h.weight <= m.earlyOf.most().weight, "%q has more than the greediest", peer)
		places += len(h.ids)
	}
	for peer, h := range m.earlyLoads.byPeer {
		held := 0
		for _, id := range h.ids {
			of := m.offers[id]
			must(of != nil && of.state == offerEarly && of.broughtBy == peer && of.load != nil, "early load %q is counted for %q and is none of its", id, peer)
			held += of.loadBlocks()
		}
		must(len(h.ids) > 0 && h.weight == held, "early loads of %q have %d blocks, weight %d", peer, held, h.weight)
		must(h.weight <= m.earlyLoads.most().weight, "%q has more than the greediest", peer)
		blocks += held
	}
	must(places == m.early && blocks == m.earlyBlocks, "%d early offers of %d blocks, counted %d of %d", places, blocks, m.early, m.earlyBlocks)
	for peer, h := range m.ended.words.of.byPeer {
		must(len(h.ids) > 0 && h.weight == len(h.ids), "%q has %d words, weight %d", peer, len(h.ids), h.weight)
		words += len(h.ids)
	}
	must(words == len(m.ended.words.byID) && words <= m.ended.words.limit, "%d words, counted %d", len(m.ended.words.byID), words)
}
