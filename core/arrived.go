package core

import (
	"fmt"
	"slices"
	"time"

	"github.com/kvconn/kvconn/internal/fault"
)

// stepLoadMessage returns the answer to D.
func (m *Machine) stepLoadMessage(now time.Time, l LoadMessage) (Code, string) {
	if m.closed {
		return Closed, "the prefill agent is closing"
	}
	if checkWireID(l.ID) != nil {
		return Refused, "malformed transfer_id"
	}
	defer m.settle(now)
	if t, gone := m.ended.get(l.ID); gone {
		return t.answer(&l)
	}
	if err := l.CheckPeerLoad(m.layout, l.Match); err != nil {
		return Refused, err.Error()
	}
	if l.Lease <= 0 || l.Lease > time.Hour {
		l.Lease = m.opt.Lease
	}
	if code, reason := m.fanOut(now, partyOf(l.Account, l.Peer), l.ID); code != OK {
		return code, reason
	}
	of := m.offers[l.ID]
	if of != nil && of.state == offerRefused && of.peer == l.Peer { // D begins anew
		m.reportOffer(now, of, of.stats)
		t, _ := m.ended.get(l.ID)
		return t.answer(&l)
	}
	if of != nil {
		if known, code, reason := of.knows(&l); known {
			return code, reason
		}
	}
	if of == nil || of.state == offerEarly {
		return m.loadEarly(now, of, &l)
	}
	of.load, of.peer, of.deadline = &l, l.Peer, now.Add(l.Lease)
	m.demanded(nameOf(l.ID))
	if of.state == offerReady {
		m.startWrite(now, of)
	} else {
		m.extend(now, of)
	}
	if t, gone := m.ended.get(l.ID); gone {
		return t.code, t.reason // the halves do not fit
	}
	return OK, ""
}

// answer is P's answer to a load of a transfer that has ended.
func (t *tombstone) answer(l *LoadMessage) (Code, string) {
	switch {
	case t.nacked == l.Peer && t.nacked != "":
		return Failed, fmt.Sprintf("transfer %q was begun for an earlier load, and that load was cancelled or its answer was lost: %s", string(l.ID), t.reason)
	case t.code == OK || t.code == PeerCancelled:
		return Refused, fmt.Sprintf("transfer %q has ended already (%s); each request needs a transfer_id of its own", string(l.ID), t.code)
	}
	return peerCode(t.code), t.reason
}

// knows says whether a load needs no more than an answer: the transfer is another agent's,
// or the same message came twice. A load of a D that starts over, since its first load got
// no answer, needs more.
func (of *offer) knows(l *LoadMessage) (known bool, code Code, reason string) {
	switch {
	case of.peer != "" && of.peer != l.Peer &&
		!(fault.On("second-load") && of.state == offerPrefill) && !(fault.On("share-taken-twice") && isPart(of.id)):
		return true, Refused, fmt.Sprintf("transfer %q is being loaded by decode agent %s already", string(l.ID), of.peer)
	case of.voided != nil && slices.Contains(of.voided, digest(l.Grant)):
		return true, OK, "" // it is late: D is to load anew
	case of.load != nil && string(of.load.Grant) == string(l.Grant):
		return true, OK, ""
	case of.load != nil && of.state > offerAwaiting:
		return true, Refused, fmt.Sprintf("transfer %q is being sent to decode agent %s already", string(l.ID), of.peer)
	}
	return false, OK, ""
}

// MaxLocked is how many transfers of a peer's message a user with a lock should give at a
// time, so that the engine's calls get in between.
const MaxLocked = 8

func (m *Machine) stepRenewMessage(now time.Time, r RenewMessage) []Answer {
	if p := m.probes[r.From]; p != nil {
		p.since = now // D lives, or this is the last that it has sent
	}
	who := partyOf(r.Account, r.From)
	out := make([]Answer, 0, len(r.Loads)+len(r.Claims))
	for _, id := range r.Loads {
		out = append(out, m.renewed(now, who, id, false))
		m.settle(now)
	}
	for _, id := range r.Claims {
		out = append(out, m.renewed(now, who, id, true))
		m.settle(now)
	}
	return out
}

func (m *Machine) renewed(now time.Time, who party, id TransferID, claim bool) Answer {
	of, from := m.offers[id], who.agent
	if of == nil {
		t, gone := m.ended.get(id)
		switch {
		case gone && t.code == OK:
			return Answer{Status: StatusSent}
		case gone && fault.On("ended-is-sending"):
			return Answer{Status: StatusSending}
		case gone:
			return Answer{StatusEnded, peerCode(t.code), t.reason}
		case !claim || m.closed || checkWireID(id) != nil:
			return Answer{Status: StatusUnknown}
		}
		switch code, reason := m.fanOut(now, who, id); code {
		case OK:
		case Refused, Closed:
			return Answer{Status: StatusUnknown}
		default:
			return Answer{StatusEnded, code, reason}
		}
		if of = m.offers[id]; of == nil {
			if !m.roomForEarly(now, who, 1, 0) {
				return Answer{Status: StatusUnknown}
			}
			of = m.addEarly(now, id, who)
		}
	}
	if claim && (of.peer == "" || fault.On("second-claim") && of.load == nil) {
		of.peer = from
	}
	switch {
	case of.peer == from && !claim && of.load == nil && of.voided != nil:
		return Answer{Status: StatusRestart, Reason: of.voided[len(of.voided)-1]}
	case of.peer != from || !claim && of.load == nil:
		return Answer{Status: fault.Pick("unknown-is-sending", StatusUnknown, StatusSending)}
	}
	if of.state != offerEarly && !of.state.stopping() && !fault.On("no-renewal") && !(fault.On("claim-not-kept") && claim) {
		of.deadline = now.Add(m.lease(of))
		if fault.On("lease-of-all") {
			for _, o := range m.halfOf(nameOf(id)) {
				o.deadline = of.deadline
			}
		}
	}
	switch of.state {
	case offerEarly:
		return Answer{Status: StatusEarly}
	case offerPrefill, offerAwaiting:
		return Answer{Status: StatusPrefill}
	case offerReady:
		return Answer{Status: StatusOffered}
	}
	return Answer{Status: StatusSending}
}

func (m *Machine) stepFinishMessage(now time.Time, f FinishMessage) {
	defer m.settle(now)
	c, ld := m.claims.get(f.ID), m.loads.get(f.ID)
	switch {
	case c != nil && c.peer == f.From:
		if f.Code != OK && c.state.atPeer() && !fault.On("claim-forgets-end") {
			m.loseClaim(c, ending{peerCode(f.Code), f.Reason})
		}
	case ld != nil && ld.peer == f.From:
		if f.Code != OK { // only the bytes themselves say that a load went well
			m.endLoad(now, ld, ending{peerCode(f.Code), f.Reason}, false)
		}
	case (c != nil || ld != nil) && m.offers[f.ID] == nil && !fault.On("strangers-word-kept"): // only its P may say how it ended
	default:
		m.finishOffer(now, partyOf(f.Account, f.From), f.ID, peerCode(f.Code), f.Reason)
	}
}

func (m *Machine) stepRestartMessage(now time.Time, r RestartMessage) {
	if ld := m.loads.get(r.ID); ld != nil && ld.peer == r.From {
		m.restartLoad(now, ld, r.Digest)
	}
}

// finishOffer takes D's word that its half has ended.
func (m *Machine) finishOffer(now time.Time, who party, id TransferID, code Code, reason string) {
	from := who.agent
	_, gone := m.ended.get(id)
	of := m.offers[id]
	if of == nil && !gone {
		m.fanOut(now, who, id) // if it is a part, the others are waited for
		of = m.offers[id]
	}
	switch {
	case of == nil && !gone:
		m.ended.addWord(who, id, tombstone{code: code, reason: reason}) // the word overtook the load, or came before the engine's request
	case of == nil, of.peer != "" && of.peer != from && !fault.On("anybodys-finish"): // the transfer is another agent's
	case code == OK && of.state.sending():
		if fault.On("finish-before-written") {
			m.reportOffer(now, of, TransferStats{})
		}
		of.landed = true // the transport's own word, with its figures, is about to come
	case of.state == offerRefused:
		of.end = ending{code, reason}
		m.reportOffer(now, of, of.stats)
	default:
		m.endOffer(now, of, ending{code, reason}, false)
	}
}
