// P's half of a transfer. P writes when the engine has given blocks and D's load has come, if the two fit.

package half

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/kv"
)

// offerState: doc.go has the table of transitions.
type offerState uint8

const (
	offerNone            offerState = iota // before its begin and after its end
	offerEarly                             // D's claim or load is here, the engine has not named the request
	offerPrefill                           // the engine works on it
	offerAwaiting                          // the engine has offered all; the moment of the last blocks has not passed, and nothing is read
	offerPartial                           // as prefill; the transport reads the blocks that are there
	offerFinishing                         // as awaiting; the transport reads the blocks that are there
	offerReady                             // blocks hold it, no load yet
	offerSending                           // the transport reads the blocks
	offerWithdrawing                       // the engine has withdrawn its blocks; when the transport reads no more, D starts over
	offerEnding                            // it ends; the transport may still read
	offerEndingWithdrawn                   // likewise, and the engine has withdrawn its blocks
	offerRefused                           // D's transport expects it no more, nothing is read; D's word, which says why, is on its way
)

func (s offerState) String() string {
	return [...]string{"-", "early", "prefill", "awaiting", "partial", "finishing", "ready", "sending", "withdrawing", "ending", "ending-withdrawn", "refused"}[s]
}

// sending says whether a Write is under way that nobody has stopped.
func (s offerState) sending() bool {
	return s == offerPartial || s == offerFinishing || s == offerSending
}

// growing says whether further blocks may become ready.
func (s offerState) growing() bool {
	return s == offerPrefill || s == offerAwaiting || s == offerPartial || s == offerFinishing
}

// ends says whether the half is ending.
func (s offerState) ends() bool {
	return s == offerEnding || s == offerEndingWithdrawn || s == offerRefused
}

// stopping says whether a Write is under way that the machine has stopped.
func (s offerState) stopping() bool { return s == offerWithdrawing || s.ends() }

// Offer is P's half of a transfer.
type Offer struct {
	id        ID
	state     offerState
	token     uint64
	held      kv.Selection    // First and Blocks of what the engine has given
	ready     []uint32        // per region: blocks of the prompt, from its start, that are ready; nil: no partial offer was made
	sent      []uint32        // ready as it was when the Write under way was last extended
	pending   []pendingBlocks // what becomes ready with moments that have not passed, in the engine's order
	prompt    uint64          // fingerprint of the prompt whose cache the blocks hold; 0: not said yet
	offered   time.Time       // zero: the engine has not offered all of it
	sendAt    time.Time       // when the Write began
	deadline  time.Time       // end of the lease, or of the wait for the engine
	endBy     time.Time       // the half ends then, whatever D says; zero: the engine has not offered all of it
	peer      core.AgentID    // the D agent that claims or loads it
	place     *earlyPlace     // if the transfer is early, or was
	load      *core.LoadMessage
	landed    bool     // D has all bytes
	share     bool     // the transfer has other offers too
	nacked    bool     // D's transport does not expect the transfer any more
	elsewhere int      // writes that ended with ErrOtherWay
	voided    []string // digests of the grants of the latest loads that P has told D to make anew
	end       Ending   // while it ends
	endedIn   offerState
	stats     core.TransferStats
}

// Early says whether the engine has not named the offer's transfer.
func (of *Offer) Early() bool { return of.state == offerEarly }

// State names its state.
func (of *Offer) State() string { return of.state.String() }

// Offered is when the engine has offered all of it; zero: it has not.
func (of *Offer) Offered() time.Time { return of.offered }

// Load is the load that D has asked for; nil if there is none.
func (of *Offer) Load() *core.LoadMessage { return of.load }

// lease is how long D may be silent.
func (h *Set) lease(of *Offer) time.Duration {
	if of.load == nil {
		return h.opt.Lease
	}
	return of.load.Lease
}

// offerTo performs one row of the table, that of the offer's state, of the event and of the guard: it sets the offer's next state,
// and wants the row's actions.
func (h *Set) offerTo(of *Offer, guard Guard, next offerState, does ...core.Action) {
	if next == offerNone || next.ends() {
		h.ends++
		h.awaitNothing(of)
	}
	switch offerNone {
	case next:
		delete(h.offers, of.id)
	case of.state:
		h.offers[of.id] = of
	}
	h.taken.row("offer", of.id, guard, of.state, next, does)
	of.state = next
	h.actions = append(h.actions, does...)
}

// unread is the state of an offer whose blocks nothing reads, with the guard of the rows that lead there; of is nil if the offer has not come.
func (of *Offer) unread() (offerState, Guard) {
	switch {
	case of == nil:
		return offerEarly, whenNew
	case of.offered.IsZero():
		return offerPrefill, whenGrowing
	case len(of.pending) > 0:
		return offerAwaiting, whenMoment
	}
	return offerReady, whenReady
}

// NewOffer begins an offer of a transfer that the engine names and no D has named.
func (h *Set) NewOffer(now time.Time, id ID) *Offer {
	h.begin(now)
	of := &Offer{id: id}
	h.offerTo(of, Always, offerPrefill)
	return of
}

// Announced has an early offer, which has left its place, go on: the engine works on it.
func (h *Set) Announced(now time.Time, of *Offer) {
	h.offerTo(of, Always, offerPrefill)
	of.deadline = time.Time{}
	if of.peer != "" {
		of.deadline = now.Add(h.lease(of))
	}
}

// Ready takes all blocks of an offer.
func (h *Set) Ready(now time.Time, of *Offer, r *core.OfferRequest) {
	of.token, of.held, of.offered, of.endBy = r.Token, kv.Selection{First: r.First, Blocks: r.Blocks}, now, now.Add(h.opt.Offer)
	of.prompt = cmp.Or(of.prompt, r.Prompt)
	if of.state.ends() {
		return
	}
	if h.readyNow(now, of, pendingBlocks{after: r.After, whole: true}) {
		h.complete(now, of)
		return
	}
	of.held = of.held.OfGroups(len(h.layout.Groups))
	switch of.state {
	case offerPartial:
		h.offerTo(of, whenMoment, offerFinishing)
	case offerEarly, offerPrefill:
		h.offerTo(of, whenMoment, offerAwaiting)
		of.deadline = now.Add(h.opt.Lease)
	}
}

// complete goes on with an offer that has all its blocks.
func (h *Set) complete(now time.Time, of *Offer) {
	switch {
	case of.state.stopping():
	case of.state.sending():
		h.write(now, of)
	default:
		if of.state != offerAwaiting { // else its lease runs
			of.deadline = now.Add(fault.Pick("no-expiry", h.opt.Lease, 1000*h.opt.Lease))
		}
		h.offerTo(of, whenReady, offerReady)
		if of.load != nil {
			h.write(now, of)
		}
	}
}

// write has the transport send what the load asks for, or the rest of it if a write has begun, if the two halves fit.
func (h *Set) write(now time.Time, of *Offer) {
	err := h.samePrompt(of)
	var src kv.Selection
	if err == nil {
		src, err = of.held.Wanted(of.load.Match, &of.load.Selection)
	}
	if err != nil {
		h.EndOffer(now, of, whenMisfits, Ending{core.Refused, err.Error()})
		return
	}
	w := of.reads(src)
	if of.state.sending() {
		w.Begin, w.Extends = fault.Pick("offer-from-the-start", of.sent, nil), true
	} else {
		of.sendAt, of.deadline = now, now.Add(of.load.Lease)
	}
	h.offerTo(of, whenFits, offerSending, w)
}

// reads is the Write of an offer's load that reads src.
func (of *Offer) reads(src kv.Selection) core.Write {
	l := of.load
	return core.Write{ID: core.TransferID(of.id), Peer: l.Peer, Grant: l.Grant, Src: src, Dst: l.Selection, Match: l.Match}
}

// samePrompt: an id alone does not say that both halves are of one request. If the prompts
// of two requests had as many blocks, decode would take one request's cache for the
// other's. An engine that has replaced its weights says another fingerprint than before,
// because then its caches are other ones.
func (h *Set) samePrompt(of *Offer) error {
	if of.prompt == 0 || of.load.Prompt == 0 || of.prompt == of.load.Prompt || fault.On("any-prompt") {
		return nil
	}
	return fmt.Errorf("transfer %q: decode asks for another prompt than prefill has (fingerprints %016x and %016x): both need the same request, under a transfer_id of its own, and weights replaced as often",
		h.name(of.id), of.load.Prompt, of.prompt)
}

// RoomToDivide says whether there is room for an offer's shares, so many, in its place; of is nil if it has not come.
func (h *Set) RoomToDivide(now time.Time, of *Offer, who Party, shares int) bool {
	if of == nil {
		return h.roomForEarly(now, who, shares, 0)
	}
	return h.Backed()+shares-1 <= h.opt.MaxTransfers
}

// Divide has an offer go on as shares of these ids; of is nil if it has not come, and who brings it then.
func (h *Set) Divide(now time.Time, of *Offer, who Party, ids []core.TransferID) {
	defer h.Because("FanOut")()
	h.begin(now)
	state, guard := of.unread()
	var early *earlyPlace
	for _, id := range ids {
		part := of.part(ID(id), now.Add(h.opt.EarlyLoad))
		h.offerTo(part, guard, state)
		if state == offerEarly {
			early = h.cameEarly(part, early, who)
		}
		for i := range part.pending {
			h.await(now, part.pending[i].after, core.SideOffer, ID(id))
		}
	}
	if of != nil {
		h.offerTo(of, whenDivided, offerNone)
	}
	for _, id := range ids { // D's word that it needs no more may have come before
		if t, gone := h.Ended.Get(ID(id)); gone {
			part := h.offers[ID(id)]
			part.end = Ending{t.Code, t.Reason}
			h.reportOffer(now, part, whenOver, core.TransferStats{})
		}
	}
}

// part makes one part of an offer; of is nil if the offer has not come.
func (of *Offer) part(id ID, deadline time.Time) *Offer {
	if of == nil {
		return &Offer{id: id, share: true, deadline: deadline}
	}
	held := kv.Selection{First: slices.Clone(of.held.First), Blocks: slices.Clone(of.held.Blocks)}
	for g := range held.Blocks {
		held.Blocks[g] = slices.Clip(held.Blocks[g]) // each part's list is extended apart
	}
	return &Offer{id: id, share: true, token: of.token, held: held, offered: of.offered, deadline: of.deadline, endBy: of.endBy, ready: slices.Clone(of.ready), pending: fault.Pick("shares-forget-moments", slices.Clone(of.pending), nil), prompt: fault.Pick("shares-of-any-prompt", of.prompt, 0)}
}
