// Halves wait for moments. A moment that passes, fails or is late is told to each half that waits for it.

package half

import (
	"fmt"
	"slices"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/internal/invariants"
)

// awaited is a moment that halves wait for.
type awaited struct {
	since   time.Time
	waits   int      // how many waits there are for it now; a half may have several
	waiters []waiter // in the order in which they came; some may not wait any more
}

type waiter struct {
	side core.Side
	id   ID
}

// await has a half wait for a moment, unless it is 0.
func (h *Set) await(now time.Time, at core.Moment, side core.Side, id ID) {
	w := h.moments[at]
	switch {
	case at == 0:
		return
	case w == nil:
		w = &awaited{since: now}
		h.moments[at] = w
		h.Act(core.Await{Moment: at})
	}
	w.waits++
	w.waiters = append(w.waiters, waiter{side, id})
}

// awaitNot ends a half's wait for a moment.
func (h *Set) awaitNot(at core.Moment) {
	if w := h.moments[at]; w != nil { // else it has just passed, or failed, or is 0
		if w.waits--; w.waits == 0 {
			delete(h.moments, at)
		}
	}
}

func (h *Set) StepMomentPassed(now time.Time, at core.Moment) {
	h.awaitedBy(now, at, func(of *Offer) { h.offerPassed(now, of, at) }, func(ld *load) { h.loadPassed(now, ld) })
}

func (h *Set) StepMomentFailed(now time.Time, e core.MomentFailed) {
	if fault.On("failed-is-passed") {
		defer h.Because("MomentPassed")()
		h.StepMomentPassed(now, e.Moment)
		return
	}
	h.momentFails(now, e.Moment, fmt.Sprintf("has failed: %v", e.Err))
}

// tickMoments gives up moments that have not passed in time.
func (h *Set) tickMoments(now time.Time) {
	for _, at := range sortedKeys(h.moments) {
		if w := h.moments[at]; w != nil && now.Sub(w.since) >= h.opt.MomentTimeout && !fault.On("waits-for-its-moment") {
			h.momentFails(now, at, fmt.Sprintf("has not passed within %v", h.opt.MomentTimeout))
		}
	}
}

func (h *Set) momentFails(now time.Time, at core.Moment, how string) {
	defer h.Because("MomentFailed")()
	end := func(id ID, engine string) Ending {
		return Ending{core.Failed, fmt.Sprintf("transfer %q waited for moment %d of the %s engine, and that moment %s", h.name(id), at, engine, how)}
	}
	h.awaitedBy(now, at, func(of *Offer) { h.EndOffer(now, of, Always, end(of.id, "prefill")) },
		func(ld *load) { h.endLoad(now, ld, Always, end(ld.id, "decode"), true) })
}

// awaitedBy removes a moment, and calls offer or load for each half that waits for it.
func (h *Set) awaitedBy(now time.Time, at core.Moment, offer func(*Offer), load func(*load)) {
	w := h.moments[at]
	if w == nil {
		return
	}
	delete(h.moments, at)
	for _, w := range w.waiters {
		of, ld := h.offers[w.id], h.loads.byID[w.id]
		switch {
		case w.side == core.SideOffer && of != nil && slices.ContainsFunc(of.pending, func(g pendingBlocks) bool { return g.after == at }):
			offer(of)
		case w.side == core.SideLoad && ld != nil && ld.after == at:
			load(ld)
		}
		h.Settle(now)
	}
}

// loadAfter has a load await the moment from which on its blocks may be written.
func (h *Set) loadAfter(now time.Time, ld *load, after core.Moment) {
	if ld.after = after; after != 0 && ld.Count() == 0 {
		ld.after = 0 // nothing is written
	}
	h.await(now, ld.after, core.SideLoad, ld.id)
}

func (h *Set) loadPassed(now time.Time, ld *load) {
	ld.after = 0
	if ld.state != loadAwaiting {
		return
	}
	h.nameLater(now, ld)
	h.proceed(now, ld)
}

// loadPeerGone is called when the P agent of a load does not answer any more. If the load awaits its moment and
// the agent has not answered it yet, another agent may take the agent's place, as with a claim. absent says that
// nobody listens as the agent.
func (h *Set) loadPeerGone(now time.Time, ld *load, heard time.Time, absent bool, reason string) {
	if ld.state == loadWaiting || ld.confirmedBy != "" || ld.previousPeer != "" {
		guard := whenSilent
		if absent {
			guard = whenAbsent
		}
		h.endLoad(now, ld, guard, Ending{core.PeerLost, reason}, !absent)
		return
	}
	h.Count.Retries++
	ld.previousPeer, ld.until = ld.peer, later(later(heard, ld.since).Add(h.patience()), now.Add(h.opt.PeerTimeout/4))
	ld.peer = ""
	h.loadTo(ld, whenFirst, loadRelocating, ld.lookUp(true))
}

// checkMoments checks what waits; only in builds with the tag "invariants".
func (h *Set) checkMoments() {
	waits := map[core.Moment]int{}
	for id, ld := range h.loads.byID {
		invariants.Must(ld.after == 0 || ld.state.lookedUp() || ld.state == loadAwaiting, "load %q waits for moment %d in state %v", id, ld.after, ld.state)
		invariants.Must(ld.after != 0 || ld.state != loadAwaiting, "load %q waits for no moment in state %v", id, ld.state)
		if ld.after != 0 {
			waits[ld.after]++
		}
	}
	for id, of := range h.offers {
		whole := false
		for i := range of.pending {
			g := &of.pending[i]
			invariants.Must(!whole, "offer %q grows when it is whole", id)
			if whole = g.whole; g.after != 0 {
				waits[g.after]++
			}
		}
		invariants.Must(len(of.pending) == 0 || of.pending[0].after != 0, "offer %q waits for a moment that has passed", id)
		waiting := of.state == offerAwaiting || of.state == offerFinishing
		invariants.Must(waiting && whole || !waiting && (!whole || of.state == offerWithdrawing), "offer %q in state %v waits for a moment of all: %v", id, of.state, whole)
		invariants.Must(len(of.pending) == 0 || waiting || of.state == offerPrefill || of.state == offerPartial || of.state == offerWithdrawing, "offer %q in state %v waits for a moment", id, of.state)
	}
	for at, w := range h.moments {
		invariants.Must(w.waits == waits[at] && w.waits > 0, "%d wait for moment %d, counted %d", waits[at], at, w.waits)
	}
	invariants.Must(len(waits) == len(h.moments), "%d moments are awaited, %d are known", len(waits), len(h.moments))
}
