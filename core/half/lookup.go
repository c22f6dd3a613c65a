// P was looked up: the half goes on with the agent that was found, or as one half for each rank, or without P.

package half

import (
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
)

// restPeers forgets all P agents if nothing waits for one. Tick forgets them one by one, but
// a machine that is not busy may get no Tick.
func (h *Set) restPeers() {
	if len(h.loads.byID)+len(h.claims.byID)+len(h.pendingFinishes.byID) > 0 {
		return
	}
	undo := h.Because("Idle")
	for id, p := range h.peers { // in any order: nothing is wanted
		h.peerTo(id, p, Always, peerNone)
	}
	undo()
}

// StepResolvedParts has a half that was looked up go on as several halves with these ids, one for each rank that was found. All of
// them are made before the first goes on, since that one may learn that its agent is gone, and then end the others.
func (h *Set) StepResolvedParts(now time.Time, r core.ResolvedParts, ids []core.TransferID) {
	if f := h.pendingFinishes.byID[ID(r.ID)]; f != nil && f.seq == r.Seq {
		var tell []core.Action
		for i := range r.Found {
			if fault.On("found-not-told") || fault.On("found-first-told") && i > 0 {
				break
			}
			tell = append(tell, f.finish(r.Found[i].Peer, ids[i]))
		}
		h.endPendingFinish(f, Always, tell...)
		h.restPeers()
	}
	seq, after := h.seq+1, core.Moment(0)
	if c := h.claims.byID[ID(r.ID)]; c != nil && c.seq == r.Seq && c.state.lookedUp() {
		was := c.state
		h.claimTo(c, Always, claimNone)
		h.above.Divided(now, c.report(now), ids, r.Found)
		undo := h.Because("Divided")
		for i := range r.Found {
			h.seq++
			part := *c // what was tried before
			part.id, part.seq, part.from, part.rank = ID(ids[i]), h.seq, r.Found[i].From, true
			h.claimTo(&part, dividedIn(was == claimRelocating), was)
		}
		undo()
	}
	if ld := h.loads.byID[ID(r.ID)]; ld != nil && ld.seq == r.Seq && ld.state.lookedUp() {
		was := ld.state
		after, ld.after = ld.after, 0 // its moment is awaited until the parts await it
		h.loadTo(ld, Always, loadNone)
		h.above.Divided(now, ld.report(now), ids, r.Found)
		undo := h.Because("Divided")
		for i := range r.Found {
			h.seq++
			part := *ld // what was claimed or tried before
			part.id, part.seq, part.from, part.rank = ID(ids[i]), h.seq, r.Found[i].From, true
			part.Selection = ld.Cut(h.layout, r.Found[i].Regions)
			h.loadAfter(now, &part, fault.Pick("found-parts-at-once", after, 0))
			h.loadTo(&part, dividedIn(was == loadRelocating), was)
		}
		undo()
	}
	undo := h.Because("Resolved")
	for i := range r.Found {
		h.StepResolved(now, core.Resolved{ID: ids[i], Seq: seq + uint64(i), Peer: r.Found[i].Peer, Opened: r.Found[i].Opened})
	}
	undo()
	h.awaitNot(after)
}

// dividedIn is the guard of the parts of a claim or load that is divided.
func dividedIn(relocating bool) Guard {
	if relocating {
		return whenRelocating
	}
	return whenResolving
}

func (h *Set) StepResolved(now time.Time, e core.Resolved) {
	if f := h.pendingFinishes.byID[ID(e.ID)]; f != nil && f.seq == e.Seq {
		if e.Code == core.OK {
			h.endPendingFinish(f, whenFound, f.finish(e.Peer, e.ID))
		} else {
			h.endPendingFinish(f, whenUnresolved)
		}
		h.restPeers()
	}
	if c := h.claims.byID[ID(e.ID)]; c != nil && (c.seq == e.Seq || fault.On("stale-answer")) && c.state.lookedUp() {
		h.claimResolved(now, c, e)
	}
	if ld := h.loads.byID[ID(e.ID)]; ld != nil && (ld.seq == e.Seq || fault.On("stale-answer")) && ld.state.lookedUp() {
		h.loadResolved(now, ld, e)
	}
}

// found notes the agent that was found for a half. It says why this agent cannot know the request; "" if it can.
func (h *Set) found(now time.Time, a *asked, e core.Resolved) string {
	a.peer, a.nameBy = e.Peer, time.Time{}
	younger := a.since.Before(e.Opened)
	if younger { // so that it is reported within PeerTimeout of its beginning, with the next renewal
		a.nameBy = later(a.since.Add(h.patience()-h.renewInterval()), now.Add(h.opt.PeerTimeout/3))
	}
	return a.replaced(younger)
}
