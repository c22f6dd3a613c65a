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
	m.checkFanIns(must)
	m.checkFanOuts(must)
	m.checkDemands(must)
	m.checkMoments(must)
	m.checkLost(must)
	must(m.namedClaims() <= m.opt.MaxTransfers, "%d claims, over the limit", m.namedClaims())
	must(len(m.claims.byID)+len(m.loads.byID)+len(m.farewells.byID) > 0 || len(m.peers) == 0, "%d peers are watched for no load", len(m.peers))
	must(len(m.offers) > 0 || len(m.probes) == 0, "%d peers are asked for no offer", len(m.probes))
	must(len(m.ended.order) == len(m.ended.byID) && len(m.ended.byID) <= m.ended.limit, "%d tombstones, %d in order", len(m.ended.byID), len(m.ended.order))
	must(len(m.lost.order) == len(m.lost.byID) && len(m.lost.byID) <= m.lost.limit, "%d lost claims, %d in order", len(m.lost.byID), len(m.lost.order))
}

func (m *Machine) checkOffers(must mustFunc) {
	early, earlyBlocks := 0, 0
	for id, of := range m.offers {
		loaded, timed := of.load != nil, !of.deadline.IsZero()
		_, gone := m.ended.byID[id]
		must(!loaded || of.load.Peer == of.peer, "offer %q is loaded by another agent than %q, for which it is kept", id, of.peer)
		must(of.id == id, "offer %q is kept as %q", of.id, id)
		must(!gone, "offer %q has ended and is under way", id)
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
		case offerSending, offerWithdrawing, offerEnding, offerEndingWithdrawn:
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
	busy := len(m.loadFanIns)
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
	for _, f := range m.loadFanIns {
		if f.blocks == 0 {
			busy--
		}
	}
	must(busy <= m.opt.MaxTransfers, "%d loads, over the limit", busy)
}

func (m *Machine) checkFanIns(must mustFunc) {
	left := map[TransferID]int{}
	for id := range m.claims.byID {
		if isPart(id) {
			left[nameOf(id)]++
			must(m.claimFanIns[nameOf(id)] != nil, "claim %q is a part of none", id)
		}
	}
	for id := range m.loads.byID {
		if isPart(id) {
			left[nameOf(id)]++
			must(m.loadFanIns[nameOf(id)] != nil, "load %q is a part of none", id)
		}
	}
	check := func(id TransferID, p *parts) {
		must(p.id == id && p.left == left[id] && p.left > 0, "load %q has %d of %d parts, counted %d", id, left[id], len(p.ids), p.left)
		must(m.claims.get(id) == nil && m.loads.get(id) == nil, "load %q is whole and in parts", id)
	}
	for id, f := range m.claimFanIns {
		check(id, &f.parts)
		must(m.loadFanIns[id] == nil, "transfer %q is claimed and loaded", id)
	}
	for id, f := range m.loadFanIns {
		check(id, &f.parts)
	}
}

func (m *Machine) checkFanOuts(must mustFunc) {
	for id, f := range m.fanOuts {
		live := m.halfOf(id)
		must(f.id == id && len(live) == f.left && f.left > 0 && len(f.parts) == f.of, "offer %q has %d of %d parts, counted %d", id, len(live), f.of, f.left)
		must(m.offers[id] == nil, "offer %q is whole and in parts", id)
		for _, of := range live {
			must(of.offered.Equal(f.offered), "part %q of offer %q in state %v", of.id, id, of.state)
		}
	}
	for id := range m.offers {
		must(!isPart(id) || m.fanOuts[nameOf(id)] != nil, "offer %q is a part of none", id)
	}
}
