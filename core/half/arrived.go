// What a peer says reaches its half. If the transfer has ended, the answer is what is remembered of its end.

package half

import (
	"fmt"
	"slices"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
)

// StepLoadMessage returns the answer to D.
func (h *Set) StepLoadMessage(now time.Time, l core.LoadMessage) (core.Code, string) {
	if t, gone := h.Ended.Get(ID(l.ID)); gone {
		return t.Answer(h.name(ID(l.ID)), l.Peer)
	}
	if err := l.CheckPeerLoad(h.layout, l.Match); err != nil {
		return core.Refused, err.Error()
	}
	if l.Lease <= 0 || l.Lease > time.Hour {
		l.Lease = h.opt.Lease
	}
	if code, reason := h.above.Meet(now, partyOf(l.Account, l.Peer), ID(l.ID)); code != core.OK {
		return code, reason
	}
	of := h.offers[ID(l.ID)]
	if of != nil && of.state == offerRefused && of.peer == l.Peer { // D begins anew
		h.reportOffer(now, of, Always, of.stats)
		t, _ := h.Ended.Get(ID(l.ID))
		return t.Answer(h.name(ID(l.ID)), l.Peer)
	}
	if of != nil {
		if known, code, reason := h.knows(of, &l); known {
			return code, reason
		}
	}
	if of == nil || of.state == offerEarly {
		return h.loadEarly(now, of, &l)
	}
	of.load, of.peer, of.deadline = &l, l.Peer, now.Add(l.Lease)
	h.above.Loaded(ID(l.ID))
	if of.state == offerReady {
		h.write(now, of)
	} else {
		h.extend(now, of)
	}
	if t, gone := h.Ended.Get(ID(l.ID)); gone {
		return t.Code, t.Reason // the halves do not fit
	}
	return core.OK, ""
}

// Answer is P's answer to the D that loads what has ended. A peer of "" has named a share, and the whole has ended.
func (t *Tombstone) Answer(name string, peer core.AgentID) (core.Code, string) {
	switch {
	case t.nacked == peer && peer != "":
		return core.Failed, fmt.Sprintf("transfer %q was begun for an earlier load, and that load was cancelled or its answer was lost: %s", name, t.Reason)
	case t.Code == core.OK || t.Code == core.PeerCancelled:
		return core.Refused, fmt.Sprintf("transfer %q has ended already (%s); each request needs a transfer_id of its own", name, t.Code)
	}
	return t.Code.AtPeer(), t.Reason
}

// knows says whether P need only answer a load, because the transfer is another agent's, or the
// same message came twice. If D starts over because its first load got no answer, an answer
// alone is not enough.
func (h *Set) knows(of *Offer, l *core.LoadMessage) (known bool, code core.Code, reason string) {
	switch {
	case of.peer != "" && of.peer != l.Peer &&
		!(fault.On("second-load") && of.state == offerPrefill) && !(fault.On("share-taken-twice") && of.share):
		return true, core.Refused, fmt.Sprintf("transfer %q is being loaded by decode agent %s already", h.name(of.id), of.peer)
	case of.voided != nil && slices.Contains(of.voided, digest(l.Grant)):
		return true, core.OK, "" // it is late: D is to load anew
	case of.load != nil && string(of.load.Grant) == string(l.Grant):
		return true, core.OK, ""
	case of.load != nil && of.state > offerAwaiting:
		return true, core.Refused, fmt.Sprintf("transfer %q is being sent to decode agent %s already", h.name(of.id), of.peer)
	}
	return false, core.OK, ""
}

// StepRenewMessage returns the answer to D.
func (h *Set) StepRenewMessage(now time.Time, r core.RenewMessage) []core.Answer {
	if p := h.probes[r.From]; p != nil {
		p.since = now // D lives, or this is the last that it has sent
	}
	who := partyOf(r.Account, r.From)
	out := make([]core.Answer, 0, len(r.Loads)+len(r.Claims))
	for claim, ids := range [][]core.TransferID{r.Loads, r.Claims} {
		for _, id := range ids {
			out = append(out, h.renewed(now, who, ID(id), claim == 1))
			h.Settle(now)
		}
	}
	return out
}

func (h *Set) renewed(now time.Time, who Party, id ID, claim bool) core.Answer {
	of, from := h.offers[id], who.agent
	if of == nil {
		t, gone := h.Ended.Get(id)
		switch {
		case gone && t.Code == core.OK:
			return core.Answer{Status: core.StatusSent}
		case gone && fault.On("ended-is-sending"):
			return core.Answer{Status: core.StatusSending}
		case gone:
			return core.Answer{Status: core.StatusEnded, Code: t.Code.AtPeer(), Reason: t.Reason}
		case !claim:
			return core.Answer{Status: core.StatusUnknown}
		}
		switch code, reason := h.above.Meet(now, who, id); code {
		case core.OK:
		case core.Refused, core.Closed:
			return core.Answer{Status: core.StatusUnknown}
		default:
			return core.Answer{Status: core.StatusEnded, Code: code, Reason: reason}
		}
		if of = h.offers[id]; of == nil {
			if !h.roomForEarly(now, who, 1, 0) {
				return core.Answer{Status: core.StatusUnknown}
			}
			of = h.addEarly(now, id, who)
		}
	}
	if claim && (of.peer == "" || fault.On("second-claim") && of.load == nil) {
		of.peer = from
	}
	switch {
	case of.peer == from && !claim && of.load == nil && of.voided != nil:
		return core.Answer{Status: core.StatusRestart, Reason: of.voided[len(of.voided)-1]}
	case of.peer != from || !claim && of.load == nil:
		return core.Answer{Status: fault.Pick("unknown-is-sending", core.StatusUnknown, core.StatusSending)}
	}
	if of.state != offerEarly && !of.state.stopping() && !fault.On("no-renewal") && !(fault.On("claim-not-kept") && claim) {
		of.deadline = now.Add(h.lease(of))
		if fault.On("lease-of-all") {
			for _, other := range h.above.Shares(id) {
				if o := h.offers[ID(other)]; o != nil {
					o.deadline = of.deadline
				}
			}
		}
	}
	switch of.state {
	case offerEarly:
		return core.Answer{Status: core.StatusEarly}
	case offerPrefill, offerAwaiting:
		return core.Answer{Status: core.StatusPrefill}
	case offerReady:
		return core.Answer{Status: core.StatusOffered}
	}
	return core.Answer{Status: core.StatusSending}
}

func (h *Set) StepFinishMessage(now time.Time, f core.FinishMessage) {
	c, ld := h.claims.byID[ID(f.ID)], h.loads.byID[ID(f.ID)]
	switch {
	case c != nil && c.peer == f.From:
		if f.Code != core.OK && c.state.atPeer() && !fault.On("claim-forgets-end") {
			h.loseClaim(c, whenFailed, Ending{f.Code.AtPeer(), f.Reason})
		}
	case ld != nil && ld.peer == f.From:
		if f.Code != core.OK { // P's OK ends no load: only the transport knows whether all bytes have landed
			h.endLoad(now, ld, whenFailed, Ending{f.Code.AtPeer(), f.Reason}, false)
		}
	case (c != nil || ld != nil) && h.offers[ID(f.ID)] == nil && !fault.On("unknown-peers-word-kept"): // only its P may say how it ended
	default:
		h.finishOffer(now, partyOf(f.Account, f.From), ID(f.ID), f.Code.AtPeer(), f.Reason)
	}
}

func (h *Set) StepRestartMessage(now time.Time, r core.RestartMessage) {
	if ld := h.loads.byID[ID(r.ID)]; ld != nil && ld.peer == r.From {
		h.restartLoad(now, ld, r.Digest)
	}
}

// finishOffer handles D's message that its half has ended.
func (h *Set) finishOffer(now time.Time, who Party, id ID, code core.Code, reason string) {
	_, gone := h.Ended.Get(id)
	of := h.offers[id]
	if of == nil && !gone {
		h.above.Meet(now, who, id) // if the id is a part's, P now waits for the other parts too
		of = h.offers[id]
	}
	switch {
	case of == nil && !gone:
		h.Ended.addWord(who, id, Tombstone{Code: code, Reason: reason}) // the word overtook the load, or came before the engine's request
	case of == nil, of.peer != "" && of.peer != who.agent && !fault.On("anybodys-finish"): // the transfer is another agent's
	case code == core.OK && of.state.sending():
		if fault.On("finish-before-written") {
			h.reportOffer(now, of, whenWhole, core.TransferStats{})
		}
		of.landed = true // the transport's own word, with its figures, is about to come
	case of.state == offerRefused:
		of.end = Ending{code, reason}
		h.reportOffer(now, of, Always, of.stats)
	default:
		h.EndOffer(now, of, whenOver, Ending{code, reason})
	}
}
