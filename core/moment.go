package core

import (
	"fmt"
	"time"

	"github.com/kvconn/kvconn/internal/fault"
)

// Moment is a point in what the engine has queued on a device, as the engine's agent has
// numbered it: it passes when all that was queued before it is done. A machine knows no more
// of it, not even an order. 0 is a moment that has passed.
type Moment uint64

// awaited is a moment that halves wait for.
type awaited struct {
	since   time.Time
	waits   int      // how often halves that are under way wait for it
	waiters []waiter // in the order in which they came; some may wait no more
}

type waiter struct {
	side Side
	id   TransferID
}

// await has a half wait for a moment.
func (m *Machine) await(now time.Time, at Moment, side Side, id TransferID) {
	w := m.moments[at]
	if w == nil {
		w = &awaited{since: now}
		m.moments[at] = w
		m.act(Await{Moment: at})
	}
	w.waits++
	w.waiters = append(w.waiters, waiter{side, id})
}

// awaitNot ends a half's wait for a moment.
func (m *Machine) awaitNot(at Moment) {
	if at == 0 {
		return
	}
	if w := m.moments[at]; w != nil { // else it has just passed, or failed
		if w.waits--; w.waits == 0 {
			delete(m.moments, at)
		}
	}
}

func (m *Machine) stepMomentPassed(now time.Time, at Moment) {
	for _, w := range m.waitersOf(at) {
		of, ld := m.offers[w.id], m.loads.get(w.id)
		switch {
		case w.side == SideOffer && of != nil:
			m.offerPassed(now, of, at)
		case w.side == SideLoad && ld != nil && ld.after == at:
			m.loadPassed(now, ld)
		}
		m.settle(now)
	}
}

func (m *Machine) stepMomentFailed(now time.Time, e MomentFailed) {
	if fault.On("failed-is-passed") {
		defer m.because("MomentPassed")()
		m.stepMomentPassed(now, e.Moment)
		return
	}
	m.momentFails(now, e.Moment, fmt.Sprintf("has failed: %v", e.Err))
}

// tickMoments gives up moments that have not passed in time.
func (m *Machine) tickMoments(now time.Time) {
	for _, at := range sortedKeys(m.moments) {
		if w := m.moments[at]; w != nil && now.Sub(w.since) >= m.opt.MomentTimeout && !fault.On("waits-for-its-moment") {
			m.momentFails(now, at, fmt.Sprintf("has not passed within %v", m.opt.MomentTimeout))
		}
	}
}

func (m *Machine) momentFails(now time.Time, at Moment, how string) {
	defer m.because("MomentFailed")()
	for _, w := range m.waitersOf(at) {
		of, ld := m.offers[w.id], m.loads.get(w.id)
		switch {
		case w.side == SideOffer && of != nil && of.awaits(at):
			m.endOffer(now, of, ending{Failed, fmt.Sprintf("transfer %q waited for moment %d of the prefill engine, and that moment %s", string(nameOf(of.id)), at, how)}, true)
		case w.side == SideLoad && ld != nil && ld.after == at:
			m.endLoad(now, ld, ending{Failed, fmt.Sprintf("transfer %q waited for moment %d of the decode engine, and that moment %s", string(nameOf(ld.id)), at, how)}, true)
		}
		m.settle(now)
	}
}

// waitersOf takes a moment out: nobody need wait for it any more.
func (m *Machine) waitersOf(at Moment) []waiter {
	w := m.moments[at]
	if w == nil {
		return nil
	}
	delete(m.moments, at)
	return w.waiters
}

// loadAfter has a load await the moment from which on its blocks may be written.
func (m *Machine) loadAfter(now time.Time, ld *load, after Moment) {
	if ld.after = after; ld.Count() == 0 {
		ld.after = 0 // nothing is written
	}
	if ld.after != 0 {
		m.await(now, ld.after, SideLoad, ld.id)
	}
}

// loadPassed goes on with a load whose moment has passed.
func (m *Machine) loadPassed(now time.Time, ld *load) {
	ld.after = 0
	if ld.state != loadAwaiting {
		return
	}
	if !ld.nameBy.IsZero() {
		ld.nameBy = later(ld.nameBy, now.Add(m.opt.PeerTimeout/3))
	}
	m.proceed(now, ld)
}

// loadKept takes P's answer to a renewal of a load that it keeps as a claim.
func (m *Machine) loadKept(now time.Time, ld *load, a Answer) {
	if kept, end := a.ofClaim(ld.id); kept {
		ld.keeper = ld.peer
	} else if end.code != OK {
		m.endLoad(now, ld, end, false)
	}
}

// loadPeerGone: the P agent of a load that awaits its moment does not answer any more. As
// with a claim, another agent may take its place unless it has answered. absent: nobody
// listens there.
func (m *Machine) loadPeerGone(now time.Time, ld *load, heard time.Time, absent bool, reason string) {
	if ld.keeper != "" || ld.former != "" {
		m.endLoad(now, ld, ending{PeerLost, reason}, !absent)
		return
	}
	m.count.Retries++
	ld.former, ld.until = ld.peer, later(later(heard, ld.since).Add(m.patience()), now.Add(m.opt.PeerTimeout/4))
	ld.peer = ""
	m.loadTo(ld, loadRelocating, lookUp(ld.id, ld.seq, ld.from, true))
}

// checkMoments checks what waits; only in builds with the tag "invariants".
func (m *Machine) checkMoments() {
	waits := map[Moment]int{}
	for id, ld := range m.loads.byID {
		must(ld.after == 0 || ld.state.lookedUp() || ld.state == loadAwaiting, "load %q waits for moment %d in state %v", id, ld.after, ld.state)
		must(ld.after != 0 || ld.state != loadAwaiting, "load %q waits for no moment in state %v", id, ld.state)
		if ld.after != 0 {
			waits[ld.after]++
		}
	}
	for id, of := range m.offers {
		whole := false
		for i := range of.growths {
			g := &of.growths[i]
			must(!whole, "offer %q grows when it is whole", id)
			if whole = g.whole; g.after != 0 {
				waits[g.after]++
			}
		}
		must(len(of.growths) == 0 || of.growths[0].after != 0, "offer %q waits for a moment that has passed", id)
		waiting := of.state == offerAwaiting || of.state == offerFinishing
		must(waiting && whole || !waiting && (!whole || of.state == offerWithdrawing), "offer %q in state %v waits for a moment of all: %v", id, of.state, whole)
		must(len(of.growths) == 0 || waiting || of.state == offerPrefill || of.state == offerPartial || of.state == offerWithdrawing, "offer %q in state %v waits for a moment", id, of.state)
	}
	for at, w := range m.moments {
		must(w.waits == waits[at] && w.waits > 0, "%d wait for moment %d, counted %d", waits[at], at, w.waits)
	}
	must(len(waits) == len(m.moments), "%d moments are awaited, %d are known", len(waits), len(m.moments))
}
