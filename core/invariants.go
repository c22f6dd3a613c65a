package core

import (
	"container/list"
	"fmt"
	"reflect"
	"unsafe"
)

// must panics unless ok. Nearly all of the checks hold, and a step makes some for each half: arguments that escape would be the larger
// part of what a seed of the simulator takes. So the compiler does not see that they are read here, and what is printed are copies.
//
//go:nocheckptr
func must(ok bool, format string, args ...any) {
	if ok {
		return
	}
	copies := make([]any, len(args))
	at := uintptr(unsafe.Pointer(&args)) // no call may come before it is read, so none of checkptr's either: the stack may move in one
	unseen := **(**[]any)(unsafe.Pointer(&at))
	for i, arg := range unseen {
		if arg != nil {
			v := reflect.New(reflect.TypeOf(arg)).Elem()
			v.Set(reflect.ValueOf(arg))
			copies[i] = v.Interface()
		}
	}
	panic("core: broken invariant: " + fmt.Sprintf(format, copies...))
}

// checkInvariants panics when the machine contradicts itself; only in builds
// with the tag "invariants".
func (m *Machine) checkInvariants() {
	must(len(m.outcomes) == 0, "%d outcomes of halves were not settled", len(m.outcomes))
	m.checkOffers()
	m.checkClaims()
	m.checkLoads()
	m.checkFans()
	m.checkDemands()
	m.checkMoments()
	m.checkLost()
	must(m.namedClaims() <= m.opt.MaxTransfers, "%d claims, over the limit", m.namedClaims())
	must(len(m.claims.byID)+len(m.loads.byID)+len(m.farewells.byID) > 0 || len(m.peers) == 0, "%d peers are watched for no load", len(m.peers))
	must(len(m.offers) > 0 || len(m.probes) == 0, "%d peers are asked for no offer", len(m.probes))
	own := &m.ended.own
	must(len(own.order) == len(own.byID) && len(own.byID) <= own.limit, "%d tombstones, %d in order", len(own.byID), len(own.order))
	m.checkEarly()
	must(len(m.lost.order) == len(m.lost.byID) && len(m.lost.byID) <= m.lost.limit, "%d lost claims, %d in order", len(m.lost.byID), len(m.lost.order))
}

func (m *Machine) checkOffers() {
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
	must(early <= 2*m.opt.MaxTransfers && len(m.offers)-early <= m.opt.MaxTransfers, "%d offers, %d early, over the limit", len(m.offers), early)
}

func (m *Machine) checkClaims() {
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

func (m *Machine) checkLoads() {
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
func (m *Machine) checkEarly() {
	places, blocks := 0, 0
	m.earlyOf.check(func(s *stake) {
		held, loads := 0, 0
		half := m.halfOf(s.id)
		for _, of := range half {
			must(of.state == offerEarly && of.place.offers == s && of.place.who == s.who, "early offer %q is counted for %v and is none of its", of.id, s.who)
			if held += of.loadBlocks(); of.load != nil {
				loads++
			}
		}
		must(len(half) == s.weight && (loads == 0 || s.firm), "%d early offers of %q with %d loads, counted %d, firm %v", len(half), s.id, loads, s.weight, s.firm)
		if places += len(half); len(half) > 0 && half[0].place.blocks != nil {
			at := half[0].place.blocks
			must(at.id == s.id && at.weight == held && at.who == s.who, "early loads %q have %d blocks, weight %d of %q", s.id, held, at.weight, at.id)
		}
		blocks += held
	})
	held := 0
	m.earlyLoads.check(func(s *stake) { held += s.weight })
	must(places == m.early && blocks == m.earlyBlocks && held == blocks, "%d early offers of %d blocks, counted %d of %d, weights %d", places, blocks, m.early, m.earlyBlocks, held)
	must(m.early <= m.opt.MaxTransfers && m.earlyBlocks <= maxEarlyBlocks || m.yielded, "%d early offers of %d blocks, and nothing gives way", m.early, m.earlyBlocks)
	words := 0
	m.ended.words.of.check(func(s *stake) {
		must(m.ended.words.byID[s.id].of == s, "the word of %q is counted for %v and is none of its", s.id, s.who)
		words++
	})
	must(words == len(m.ended.words.byID) && words <= m.ended.words.limit, "%d words, counted %d", len(m.ended.words.byID), words)
}

// check checks that each weight is the sum of its parts, and calls f for each stake.
func (g *greedy) check(f func(s *stake)) {
	for name, a := range g.accounts.byName {
		all := 0
		for agent, h := range a.agents.byName {
			held := 0
			for _, l := range []*list.List{&h.soft, &h.firm} {
				for el := l.Front(); el != nil; el = el.Next() {
					s := el.Value.(*stake)
					must(s.who == party{Account(name), AgentID(agent)} && s.weight > 0 && s.el == el && s.firm == (l == &h.firm), "%q of %v has %d, and is with %q of %q", s.id, s.who, s.weight, agent, name)
					held += s.weight
					f(s)
				}
			}
			must(h.weight == held && h.weight <= a.agents.most().weight, "%q has %d, counted %d", agent, held, h.weight)
			all += held
		}
		must(a.weight == all && a.weight <= g.accounts.most().weight, "account %q has %d, counted %d", name, all, a.weight)
	}
}
