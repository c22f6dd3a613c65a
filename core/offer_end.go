package core

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvconn/kvconn/internal/fault"
)

// maxElsewhere is how often a transfer goes another way before it fails. D may take the same way again.
const maxElsewhere = 4

// wordWithin is how long P waits for D's word about a transfer that D's transport expects no more. D says it when it
// revokes the transfer, by another way than the bytes.
const wordWithin = time.Second

func (m *Machine) stepWritten(now time.Time, e Written) {
	of := m.offers[e.ID]
	if of == nil {
		return
	}
	defer m.settle(now)
	switch {
	case of.state == offerWithdrawing:
		m.startOver(now, of)
		return
	case of.state == offerEnding, of.state == offerEndingWithdrawn:
	case !of.state.sending():
		return
	case errors.Is(e.Err, ErrOtherWay) && !of.landed && of.elsewhere < fault.Pick("elsewhere-for-ever", maxElsewhere, 1<<30):
		of.elsewhere++
		of.sent = nil
		m.startOver(now, of)
		return
	case e.Err != nil && !of.landed:
		of.nacked = errors.Is(e.Err, ErrNotExpected)
		of.end = ending{transportCode(e.Err), "sending to decode agent " + string(of.load.Peer) + ": " + e.Err.Error()}
		m.act(SendFinish{Peer: of.load.Peer, ID: of.id, Code: peerCode(of.end.code), Reason: of.end.reason})
		if of.nacked {
			of.stats, of.deadline = e.Stats, now.Add(wordWithin)
			m.offerTo(of, offerRefused)
			return
		}
	}
	m.reportOffer(now, of, e.Stats)
}

// cancelOffer ends P's half. If the half is not here yet, its end is remembered.
func (m *Machine) cancelOffer(now time.Time, id TransferID, reason string) {
	half := m.halfOf(id)
	if _, gone := m.ended.get(id); half == nil && !gone {
		m.ended.add(id, tombstone{code: Cancelled, reason: reason})
	}
	for i, of := range half {
		if fault.On("cancel-one-share") && i > 0 {
			break
		}
		m.endOffer(now, of, ending{Cancelled, reason}, true)
	}
}

// endOffer brings P's half to its end; tell says whether D must be told. An offer that is
// ending already keeps its first end.
func (m *Machine) endOffer(now time.Time, of *offer, end ending, tell bool) {
	if of.state == offerRefused {
		m.reportOffer(now, of, of.stats)
		return
	}
	if of.state.ends() {
		return
	}
	if tell && of.peer != "" && !(fault.On("no-finish-from-p") && end.code == Cancelled) {
		m.act(SendFinish{Peer: of.peer, ID: of.id, Code: peerCode(end.code), Reason: end.reason})
	}
	of.end = end
	switch {
	case of.state == offerWithdrawing: // it is being stopped already
		m.offerTo(of, offerEndingWithdrawn)
	case of.state.sending() && !fault.On("no-stop"):
		m.offerTo(of, offerEnding, StopWrite{ID: of.id})
		if fault.On("report-before-written") {
			m.reportOffer(now, of, TransferStats{})
		}
	default:
		m.reportOffer(now, of, TransferStats{})
	}
}

// reportOffer is the only way out of the map of offers.
func (m *Machine) reportOffer(now time.Time, of *offer, s TransferStats) {
	of.endedIn = of.state
	m.offerTo(of, offerNone)
	if len(m.offers) == 0 {
		clear(m.probes) // perhaps nobody tells Tick now
	}
	if of.endedIn == offerEarly {
		m.leaveEarly(of)
	}
	end := tombstone{code: of.end.code, reason: of.end.reason, offered: !of.offered.IsZero(), stats: s}
	if of.nacked {
		end.nacked = of.peer
	}
	if of.endedIn == offerEarly && of.end.code != Cancelled {
		m.ended.addWord(of.place.who, of.id, end)
	} else {
		m.ended.add(of.id, end)
	}
	of.stats = s
	m.outcomes = append(m.outcomes, outcome{offer: of, over: true})
}

func (of *offer) report(now time.Time) Report {
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
	return Report{ID: of.id, Side: SideOffer, Token: of.token, Code: of.end.code, Reason: of.end.reason,
		Blocks: of.held.Count(), Wait: wait, Elapsed: now.Sub(of.offered), State: state.String(), Peer: of.peer, Stats: of.stats}
}

// mustEndBy is how long an offer may keep the engine's blocks; zero: for ever. A D that lives, and claims or loads it in words only,
// must not keep them for ever.
func (m *Machine) mustEndBy(of *offer) time.Time {
	if of.state.stopping() || fault.On("waits-for-decode") {
		return time.Time{}
	}
	return of.endBy
}

// overdue says whether an offer has kept the engine's blocks for too long.
func (m *Machine) overdue(now time.Time, of *offer) bool {
	at := m.mustEndBy(of)
	return !at.IsZero() && !now.Before(at)
}

// lateAt is when an offer has waited too long; zero: it may wait for ever.
func (m *Machine) lateAt(of *offer) time.Time {
	by := m.mustEndBy(of)
	switch {
	case by.IsZero():
		return of.deadline
	case of.deadline.IsZero():
		return by
	}
	return earlier(of.deadline, by)
}

// tickOffers ends offers that have waited too long for D or for the engine, as many as a step may. Those that are late for longest come
// first: else a crowd that goes on coming could have others kept for as long as it likes.
func (m *Machine) tickOffers(now time.Time) {
	var late []*offer
	for _, of := range m.offers {
		if at := m.lateAt(of); !at.IsZero() && !now.Before(at) {
			late = append(late, of)
		}
	}
	slices.SortFunc(late, func(x, y *offer) int {
		if c := m.lateAt(x).Compare(m.lateAt(y)); c != 0 && !fault.On("late-by-name") {
			return c
		}
		return cmp.Compare(x.id, y.id)
	})
	for _, of := range late {
		if m.enough() {
			m.yield()
			return
		}
		m.offerLate(now, of)
		m.settle(now)
	}
}

// offerLate ends an offer that has waited too long.
func (m *Machine) offerLate(now time.Time, of *offer) {
	if m.overdue(now, of) {
		reason := fmt.Sprintf("no decode agent has loaded it within %v (offer_timeout_s)", m.opt.Offer)
		if of.peer != "" {
			reason = fmt.Sprintf("decode agent %s has not loaded it within %v (offer_timeout_s); the offer is %s", of.peer, m.opt.Offer, of.state)
		}
		m.endOffer(now, of, ending{Expired, reason}, true)
		return
	}
	switch of.state {
	case offerEarly:
		m.count.ExpiredEarly++
		m.endOffer(now, of, ending{NotOffered, fmt.Sprintf("the prefill engine has not named transfer %q within %v", string(of.id), m.opt.EarlyLoad)}, true)
	case offerPrefill:
		if m.demands[nameOf(of.id)] {
			m.endOffer(now, of, ending{PeerLost, fmt.Sprintf("decode agent %s has not renewed its claim for %v", of.peer, m.lease(of))}, true)
			return
		}
		of.load, of.peer, of.deadline = nil, "", time.Time{} // D stopped renewing; the engine still works
	case offerReady, offerAwaiting:
		reason := fmt.Sprintf("no decode agent claimed or loaded transfer %q within its lease of %v", string(of.id), m.opt.Lease)
		if of.peer != "" {
			reason = fmt.Sprintf("decode agent %s has not renewed its claim for %v", of.peer, m.opt.Lease)
		}
		m.endOffer(now, of, ending{Expired, reason}, true)
	case offerRefused:
		m.reportOffer(now, of, of.stats) // D's word was lost
	case offerPartial, offerFinishing, offerSending:
		m.endOffer(now, of, ending{PeerLost, fmt.Sprintf("decode agent %s has not renewed its lease of %v", of.peer, of.load.Lease)}, true)
	}
}

// peerCode is how one side's end reads on the other. It also bounds what comes
// from the network to the codes there are.
func peerCode(c Code) Code {
	switch _, known := codeNames[c]; {
	case c == Cancelled:
		return PeerCancelled
	case c == Closed:
		return PeerLost
	case !known:
		return Failed
	}
	return c
}

// peerFailure is peerCode where a peer tells of a failure. Only the bytes themselves say
// that a load went well.
func peerFailure(c Code) Code {
	if c = peerCode(c); c == OK {
		return Failed
	}
	return c
}
