// An offer ends here, whatever ends it: its write, D's word, the engine, or time.

package half

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
)

// maxElsewhere is how often P has D load a transfer anew, by another transport or the same one, before the transfer fails.
const maxElsewhere = 4

// wordWithin is how long P waits for D's word on a transfer that D's transport does not expect any more. D gives its word when it
// revokes the transfer, and the word comes by another way than the bytes.
const wordWithin = time.Second

func (h *Set) StepWritten(now time.Time, e core.Written) {
	of := h.offers[ID(e.ID)]
	if of == nil {
		return
	}
	guard, does := whenWhole, []core.Action(nil)
	switch {
	case of.state == offerWithdrawing:
		h.startOver(now, of)
		return
	case of.state == offerEnding, of.state == offerEndingWithdrawn:
		guard = Always
	case !of.state.sending():
		return
	case errors.Is(e.Err, core.ErrOtherWay) && !of.landed && of.elsewhere < fault.Pick("elsewhere-for-ever", maxElsewhere, 1<<30):
		of.elsewhere++
		of.sent = nil
		h.startOver(now, of)
		return
	case e.Err != nil && !of.landed:
		of.nacked = errors.Is(e.Err, core.ErrNotExpected)
		of.end = Ending{transportCode(e.Err), "sending to decode agent " + string(of.load.Peer) + ": " + e.Err.Error()}
		if guard = whenBroken; !fault.On("broken-untold") {
			does = []core.Action{of.finish(of.end)}
		}
		if of.nacked {
			of.stats, of.deadline = e.Stats, now.Add(wordWithin)
			h.offerTo(of, whenNotExpected, offerRefused, does...)
			return
		}
	}
	h.reportOffer(now, of, guard, e.Stats, does...)
}

// finish tells the offer's D how the offer ends.
func (of *Offer) finish(end Ending) core.Action {
	return core.SendFinish{Peer: of.peer, ID: core.TransferID(of.id), Code: end.Code.AtPeer(), Reason: end.Reason}
}

// EndOffer brings P's half to its end. D is told, unless the guard says that D has said the end itself, or that D is gone. An offer
// that is ending already keeps its first end.
func (h *Set) EndOffer(now time.Time, of *Offer, guard Guard, end Ending) {
	if of.state == offerRefused {
		h.reportOffer(now, of, Always, of.stats)
		return
	}
	if of.state.ends() {
		return
	}
	does := make([]core.Action, 0, 2)
	if of.peer != "" && guard != whenOver && (guard != whenAbsent || fault.On("told-though-gone")) && !(fault.On("no-finish-from-p") && end.Code == core.Cancelled) {
		does = append(does, of.finish(end))
	}
	of.end = end
	switch {
	case of.state == offerWithdrawing: // it is being stopped already
		h.offerTo(of, guard, offerEndingWithdrawn, does...)
	case of.state.sending() && !fault.On("no-stop"):
		h.offerTo(of, guard, offerEnding, append(does, core.StopWrite{ID: core.TransferID(of.id)})...)
		if fault.On("report-before-written") {
			h.reportOffer(now, of, Always, core.TransferStats{})
		}
	default:
		if guard == Always {
			if guard = whenWanted; of.peer == "" {
				guard = whenUnwanted
			}
		}
		h.reportOffer(now, of, guard, core.TransferStats{}, does...)
	}
}

// reportOffer ends an offer, and has who stands above hear of that.
func (h *Set) reportOffer(now time.Time, of *Offer, guard Guard, s core.TransferStats, does ...core.Action) {
	of.endedIn = of.state
	h.offerTo(of, guard, offerNone, does...)
	if of.endedIn == offerEarly {
		h.LeaveEarly(of)
	}
	end := Tombstone{Code: of.end.Code, Reason: of.end.Reason, Offered: !of.offered.IsZero(), Stats: s}
	if of.nacked {
		end.nacked = of.peer
	}
	h.Remember(of, of.id, end)
	of.stats = s
	h.tell("offer", of.id, outcome{offer: of, over: true})
	h.restProbes()
}

// Remember remembers the end of an offer, or of the transfer that it was a share of. If only peers have named it, that is their word.
func (h *Set) Remember(of *Offer, id ID, end Tombstone) {
	if of.endedIn == offerEarly && end.Code != core.Cancelled {
		h.Ended.addWord(of.place.who, id, end)
	} else {
		h.Ended.Add(id, end)
	}
}

// Report is the report of an offer that has ended.
func (of *Offer) Report(now time.Time) core.Report {
	wait := now.Sub(of.offered)
	switch {
	case of.offered.IsZero():
		wait = 0
	case !of.sendAt.IsZero():
		wait = max(of.sendAt.Sub(of.offered), 0)
	}
	state := of.endedIn
	if state.stopping() {
		state = offerSending
	}
	return core.Report{ID: core.TransferID(of.id), Side: core.SideOffer, Token: of.token, Code: of.end.Code, Reason: of.end.Reason,
		Blocks: of.held.Count(), Wait: wait, Elapsed: now.Sub(of.offered), State: state.String(), Peer: of.peer, Stats: of.stats}
}

// mustEndBy is until when an offer may keep the engine's blocks; zero: for ever. A D that lives may say that it claims or loads the
// transfer, and never take it. Such a D must not keep the blocks for ever.
func (h *Set) mustEndBy(of *Offer) time.Time {
	if of.state.stopping() || fault.On("waits-for-decode") {
		return time.Time{}
	}
	return of.endBy
}

// lateAt is when an offer has waited too long; zero: it may wait for ever.
func (h *Set) lateAt(of *Offer) time.Time {
	by := h.mustEndBy(of)
	if by.IsZero() || !of.deadline.IsZero() && of.deadline.Before(by) {
		return of.deadline
	}
	return by
}

// passed says whether a time has come, if one is set.
func passed(now, at time.Time) bool { return !at.IsZero() && !now.Before(at) }

// tickOffers ends offers that have waited too long for D or for the engine, as many as a step may. Those that are late for longest come
// first: else a crowd that goes on coming could have others kept for as long as it likes.
func (h *Set) tickOffers(now time.Time) {
	var late []*Offer
	for _, of := range h.offers {
		if passed(now, h.lateAt(of)) {
			late = append(late, of)
		}
	}
	slices.SortFunc(late, func(x, y *Offer) int {
		if c := h.lateAt(x).Compare(h.lateAt(y)); c != 0 && !fault.On("late-by-name") {
			return c
		}
		return cmp.Compare(x.id, y.id)
	})
	for _, of := range late {
		if h.enough() {
			h.yield()
			return
		}
		h.offerLate(now, of)
		h.Settle(now)
	}
}

// offerLate ends an offer that has waited too long.
func (h *Set) offerLate(now time.Time, of *Offer) {
	if passed(now, h.mustEndBy(of)) {
		reason := fmt.Sprintf("no decode agent has loaded it within %v (offer_timeout_s)", h.opt.Offer)
		if of.peer != "" {
			reason = fmt.Sprintf("decode agent %s has not loaded it within %v (offer_timeout_s); the offer is %s", of.peer, h.opt.Offer, of.state)
		}
		h.EndOffer(now, of, Always, Ending{core.Expired, reason})
		return
	}
	switch of.state {
	case offerEarly:
		h.Count.ExpiredEarly++
		h.EndOffer(now, of, Always, Ending{core.NotOffered, fmt.Sprintf("the prefill engine has not named transfer %q within %v", h.name(of.id), h.opt.EarlyLoad)})
	case offerPrefill:
		if h.above.Demanded(of.id) {
			h.EndOffer(now, of, Always, Ending{core.PeerLost, fmt.Sprintf("decode agent %s has not renewed its claim for %v", of.peer, h.lease(of))})
			return
		}
		of.load, of.peer, of.deadline = nil, "", time.Time{} // D stopped renewing; the engine still works
	case offerReady, offerAwaiting:
		reason := fmt.Sprintf("no decode agent claimed or loaded transfer %q within its lease of %v", h.name(of.id), h.opt.Lease)
		if of.peer != "" {
			reason = fmt.Sprintf("decode agent %s has not renewed its claim for %v", of.peer, h.opt.Lease)
		}
		h.EndOffer(now, of, Always, Ending{core.Expired, reason})
	case offerRefused:
		h.reportOffer(now, of, Always, of.stats) // D's word was lost
	case offerPartial, offerFinishing, offerSending:
		h.EndOffer(now, of, Always, Ending{core.PeerLost, fmt.Sprintf("decode agent %s has not renewed its lease of %v", of.peer, of.load.Lease)})
	}
}

// peerFailure is Code.AtPeer where a peer tells of a failure. Only the bytes themselves say
// that a load went well.
func peerFailure(c core.Code) core.Code {
	if c = c.AtPeer(); c == core.OK {
		return core.Failed
	}
	return c
}

func transportCode(err error) core.Code {
	switch {
	case errors.Is(err, core.ErrConnectionLost):
		return core.PeerLost
	case errors.Is(err, core.ErrNotExpected):
		return core.PeerCancelled
	}
	return core.Failed
}
