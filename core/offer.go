package core

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvconn/kvconn/internal/fault"
)

// The states of P's half.
type offerState uint8

const (
	offerEarly    offerState = iota // D's claim or load is here, the engine has not named the request
	offerPrefill                    // the engine works on it
	offerGrowing                    // likewise; the transport reads the blocks that are there
	offerReady                      // blocks hold it, no load yet
	offerSending                    // the transport reads the blocks
	offerStopping                   // it ends; the transport may still read
)

func (s offerState) String() string {
	return [...]string{"early", "prefill", "growing", "ready", "sending", "stopping"}[s]
}

type offer struct {
	id       TransferID
	state    offerState
	token    uint64
	first    []uint32
	blocks   [][]BlockID
	prompt   uint64 // fingerprint of what they are the cache of; 0: not said yet
	offered  time.Time
	sendAt   time.Time
	deadline time.Time // end of the lease, or of the wait for the engine
	peer     AgentID   // the D agent that claims or loads it
	load     *LoadMessage
	whole    *whole // whose part it is, or nil
	landed   bool   // D has all bytes
	nacked   bool   // D's transport expects it no more
	grown
	retracted bool     // stopping; the blocks that are read were taken back
	ends      bool     // then it does not start over
	voided    []string // the latest loads that D was told to make anew, by their grants' digests
	code      Code     // of the end, while stopping
	reason    string
}

// loadBlocks is how many block ids its load holds.
func (of *offer) loadBlocks() int {
	if of.load == nil {
		return 0
	}
	return countBlocks(of.load.Blocks)
}

// lease is how long D may be silent.
func (m *Machine) lease(of *offer) time.Duration {
	if of.load == nil {
		return m.opt.Lease
	}
	return of.load.Lease
}

// Announce says that the engine knows the request and works on it: D may wait.
func (m *Machine) Announce(now time.Time, id TransferID) error {
	if err := checkID(id); err != nil {
		return err
	}
	if m.closed {
		return ErrClosed
	}
	if t, gone := m.ended.byID[id]; gone {
		m.wantGone(id, t)
		return nil // D gave up first; the offer will be told so
	}
	if err := m.want(id); err != nil {
		return err
	}
	if err := m.announce(now, id); err != nil {
		return err
	}
	if m.opt.ReportWants {
		m.wants[id] = true
		m.wanted(id)
	}
	return nil
}

func (m *Machine) announce(now time.Time, id TransferID) error {
	if w := m.wholes[id]; w != nil {
		return m.announceParts(now, w)
	}
	of := m.offers[id]
	if of == nil {
		if m.fullOfOffers() {
			return m.overload("offers")
		}
		m.begin(now)
		of = &offer{id: id, state: offerPrefill}
		m.offers[id] = of
		return nil
	}
	if of.state == offerEarly {
		if m.fullOfOffers() {
			return m.overload("offers")
		}
		m.leaveEarly(of)
		of.state, of.deadline = offerPrefill, now.Add(m.lease(of))
	}
	return nil
}

// Offer says that blocks hold a transfer. They belong to the transfer until
// its Report.
func (m *Machine) Offer(now time.Time, r OfferRequest) error {
	if err := checkID(r.ID); err != nil {
		return err
	}
	if m.closed {
		return ErrClosed
	}
	err := m.layout.CheckBlocks(r.Blocks)
	if err == nil && r.First != nil && len(r.First) != len(r.Blocks) {
		err = fmt.Errorf("first blocks of %d groups, block ids of %d", len(r.First), len(r.Blocks))
	}
	if err != nil {
		return fmt.Errorf("%w: offer %q: %w", ErrInvalid, string(r.ID), err)
	}
	of, w := m.offers[r.ID], m.wholes[r.ID]
	if of != nil && !of.offered.IsZero() || w != nil && !w.offered.IsZero() {
		return fmt.Errorf("%w: transfer %q is offered already; give each request a transfer_id of its own", ErrDuplicate, string(r.ID))
	}
	for _, of := range m.halfOf(r.ID) {
		if err := of.checkGrown(&r); err != nil {
			return fmt.Errorf("%w: offer %q: %w", ErrInvalid, string(r.ID), err)
		}
	}
	m.reportWant(r.ID, OK, "", 0) // the engine did not wait for it
	if w != nil {
		return m.offerParts(now, w, r)
	}
	if t, gone := m.ended.byID[r.ID]; gone {
		if t.offered {
			return fmt.Errorf("%w: transfer %q was offered before and has ended (%s); give each request a transfer_id of its own", ErrDuplicate, string(r.ID), t.code)
		}
		m.ended.add(r.ID, t.code, t.reason, true)
		m.count.Offered++
		m.act(Report{ID: r.ID, Side: SideOffer, Token: r.Token, Code: t.code, Reason: t.reason, Blocks: countBlocks(r.Blocks), State: "ended", Stats: t.stats})
		return nil
	}
	if (of == nil || of.state == offerEarly) && m.fullOfOffers() {
		return m.overload("offers")
	}
	if of == nil {
		m.begin(now)
		of = &offer{id: r.ID}
		m.offers[r.ID] = of
	} else if of.state == offerEarly {
		m.leaveEarly(of)
	}
	m.count.Offered++
	m.ready(now, of, r)
	return nil
}

func (m *Machine) ready(now time.Time, of *offer, r OfferRequest) {
	of.token, of.first, of.blocks, of.offered = r.Token, r.First, r.Blocks, now
	of.prompt = cmp.Or(of.prompt, r.Prompt)
	switch {
	case of.state == offerStopping: // its end is under way
	case of.state == offerGrowing:
		m.finishGrowing(now, of)
	default:
		of.state, of.deadline = offerReady, now.Add(fault.Pick("no-expiry", m.opt.Lease, 1000*m.opt.Lease))
		if of.load != nil {
			m.startWrite(now, of)
		}
	}
}

// LoadArrived takes D's load; the result is the answer to D.
func (m *Machine) LoadArrived(now time.Time, l LoadMessage) (Code, string) {
	if m.closed {
		return Closed, "the prefill agent is closing"
	}
	if checkWireID(l.ID) != nil {
		return Refused, "malformed transfer_id"
	}
	if t, gone := m.ended.byID[l.ID]; gone {
		if t.nacked == l.Peer && t.nacked != "" {
			return Failed, fmt.Sprintf("transfer %q was begun for an earlier load, which was cancelled or whose answer was lost: %s", string(l.ID), t.reason)
		}
		if t.code == OK || t.code == PeerCancelled {
			return Refused, fmt.Sprintf("transfer %q has ended already (%s); each request needs a transfer_id of its own", string(l.ID), t.code)
		}
		return peerCode(t.code), t.reason
	}
	if reason := m.tooMuch(&l); reason != "" {
		return Refused, reason
	}
	if l.Lease <= 0 || l.Lease > time.Hour {
		l.Lease = m.opt.Lease
	}
	if code, reason := m.wholeOf(now, l.ID); code != OK {
		return code, reason
	}
	of := m.offers[l.ID]
	if of == nil && isPart(l.ID) {
		return Refused, fmt.Sprintf("transfer %q has ended already; each request needs a transfer_id of its own", string(l.ID))
	}
	if of != nil && of.peer != "" && of.peer != l.Peer &&
		!(fault.On("second-load") && of.state == offerPrefill) && !(fault.On("share-taken-twice") && of.whole != nil) {
		return Refused, fmt.Sprintf("transfer %q is being loaded by decode agent %s already", string(l.ID), of.peer)
	}
	if of != nil && of.voided != nil && slices.Contains(of.voided, digest(l.Grant)) {
		return OK, "" // it is late: D is to load anew
	}
	if of != nil && of.load != nil {
		if string(of.load.Grant) == string(l.Grant) {
			return OK, "" // the same message twice
		}
		if of.state > offerPrefill {
			return Refused, fmt.Sprintf("transfer %q is being sent to decode agent %s already", string(l.ID), of.peer)
		}
		// D has started over, because it got no answer to its first load.
	}
	if of == nil || of.state == offerEarly {
		more := countBlocks(l.Blocks)
		if of == nil && m.early >= m.opt.MaxTransfers || m.earlyBlocks+more > maxEarlyBlocks {
			return Refused, fmt.Sprintf("%d claims and loads of %d blocks already wait for requests that the prefill engine does not know", m.early, m.earlyBlocks)
		}
		if of == nil {
			of = m.addEarly(now, l.ID, l.Peer)
		}
		m.earlyBlocks += more - of.loadBlocks()
		of.load, of.peer = &l, l.Peer
		return OK, ""
	}
	of.load, of.peer = &l, l.Peer
	of.deadline = now.Add(l.Lease)
	m.wanted(m.nameOf(of))
	if of.state == offerReady {
		m.startWrite(now, of)
	} else {
		m.extend(now, of)
	}
	if t, gone := m.ended.byID[l.ID]; gone {
		return t.code, t.reason // the halves do not fit
	}
	return OK, ""
}

// addEarly keeps what a D wants and P's engine does not know yet.
func (m *Machine) addEarly(now time.Time, id TransferID, peer AgentID) *offer {
	m.begin(now)
	of := &offer{id: id, state: offerEarly, peer: peer, deadline: now.Add(fault.Pick("no-reap", m.opt.EarlyLoad, 1000*m.opt.EarlyLoad))}
	m.offers[id] = of
	m.early++
	return of
}

// maxEarlyBlocks bounds the block ids that early loads hold: 16 MiB.
const maxEarlyBlocks = 1 << 22

// tooMuch says why a load can fit no offer of this agent.
func (m *Machine) tooMuch(l *LoadMessage) string {
	if len(l.Blocks) > len(m.layout.Groups) {
		return fmt.Sprintf("the load has %d KV cache groups, %d are registered here", len(l.Blocks), len(m.layout.Groups))
	}
	for g, ids := range l.Blocks {
		from, to := l.Match.ratio(g).sources(0, len(ids), at(l.Tokens, g))
		if n := m.layout.Groups[g].NumBlocks; to-from > uint64(n) || len(ids) > MaxBlocks {
			return fmt.Sprintf("the load wants %d blocks of group %d, which has %d here", to-from, g, n)
		}
	}
	regions := len(m.layout.Regions)
	if l.Match != nil {
		regions = l.Match.regions
	}
	if err := checkRegions(l.Regions, regions); err != nil {
		return "the load is of " + err.Error()
	}
	return ""
}

func (m *Machine) leaveEarly(of *offer) {
	m.early--
	m.earlyBlocks -= of.loadBlocks()
}

// startWrite joins the halves.
func (m *Machine) startWrite(now time.Time, of *offer) {
	first, src, err := m.joinHalves(of)
	if err != nil {
		m.endOffer(now, of, Refused, err.Error(), true)
		return
	}
	of.state, of.sendAt, of.deadline = offerSending, now, now.Add(of.load.Lease)
	w := m.writeOf(of)
	w.SrcFirst, w.Src = first, src
	m.act(w)
}

// writeOf is the Write of an offer's load, without what is to be read.
func (m *Machine) writeOf(of *offer) Write {
	l := of.load
	return Write{ID: of.id, Peer: l.Peer, Grant: l.Grant, DstFirst: l.First, Dst: l.Blocks, Tokens: l.Tokens, Regions: l.Regions, Match: l.Match}
}

// joinHalves finds what of an offer its load asks for, or says why they do not fit.
func (m *Machine) joinHalves(of *offer) (first []uint32, src [][]BlockID, err error) {
	if err := m.samePrompt(of); err != nil {
		return nil, nil, err
	}
	return selectBlocks(of.first, of.blocks, of.load)
}

// samePrompt: an id alone does not say that both halves are of one request. Of two whose
// prompts have as many blocks, decode would take the other's cache for its own.
func (m *Machine) samePrompt(of *offer) error {
	if of.prompt == 0 || of.load.Prompt == 0 || of.prompt == of.load.Prompt || fault.On("any-prompt") {
		return nil
	}
	return fmt.Errorf("transfer %q: decode asks for another prompt than prefill has (fingerprints %016x and %016x): a router must send both the same request, and each request needs a transfer_id of its own",
		string(m.nameOf(of)), of.load.Prompt, of.prompt)
}

// selectBlocks finds the offered blocks that a load asks for, and where in the
// prompt the first ones stand.
func selectBlocks(begin []uint32, offered [][]BlockID, l *LoadMessage) (first []uint32, src [][]BlockID, err error) {
	if len(l.Blocks) > len(offered) {
		return nil, nil, fmt.Errorf("the load has %d KV cache groups, the offer %d", len(l.Blocks), len(offered))
	}
	first, src = make([]uint32, len(l.Blocks)), make([][]BlockID, len(l.Blocks))
	for g, dst := range l.Blocks {
		from, to := l.Match.ratio(g).sources(at(l.First, g), len(dst), at(l.Tokens, g))
		has := uint64(at(begin, g))
		switch {
		case from == to:
			continue
		case from < has:
			return nil, nil, fmt.Errorf("the load wants blocks %d to %d of group %d, the offer begins with block %d", from, to, g, has)
		case to > has+uint64(len(offered[g])):
			return nil, nil, fmt.Errorf("the load wants blocks %d to %d of group %d, the offer has %d", from, to, g, has+uint64(len(offered[g])))
		}
		first[g], src[g] = uint32(from), offered[g][from-has:to-has]
	}
	return first, src, nil
}

// Written takes the transport's outcome of a Write.
func (m *Machine) Written(now time.Time, id TransferID, s TransferStats, err error) {
	of := m.offers[id]
	if of == nil {
		return
	}
	switch of.state {
	case offerGrowing, offerSending:
		if err != nil && !of.landed {
			of.nacked = errors.Is(err, ErrNotExpected)
			of.code, of.reason = transportCode(err), "sending to decode agent "+string(of.load.Peer)+": "+err.Error()
			m.act(SendFinish{Peer: of.load.Peer, ID: id, Code: peerCode(of.code), Reason: of.reason})
		}
	case offerStopping:
		if of.retracted && !of.ends {
			m.startOver(now, of)
			return
		}
	default:
		return
	}
	m.reportOffer(now, of, s)
}

// RenewArrived takes D's renewal of its loads and claims, and answers for each
// of them in this order.
func (m *Machine) RenewArrived(now time.Time, from AgentID, loads, claims []TransferID) []Answer {
	if p := m.probes[from]; p != nil {
		p.since = now // it lives, or this is the last that it has sent
	}
	out := make([]Answer, 0, len(loads)+len(claims))
	for _, id := range loads {
		out = append(out, m.renewed(now, from, id, false))
	}
	for _, id := range claims {
		out = append(out, m.renewed(now, from, id, true))
	}
	return out
}

func (m *Machine) renewed(now time.Time, from AgentID, id TransferID, claim bool) Answer {
	of := m.offers[id]
	if of == nil {
		t, gone := m.ended.byID[id]
		switch {
		case gone && t.code == OK:
			return Answer{Status: StatusSent}
		case gone && fault.On("ended-is-sending"):
			return Answer{Status: StatusSending}
		case gone:
			return Answer{StatusEnded, peerCode(t.code), t.reason}
		case !claim || m.closed || checkWireID(id) != nil || m.early >= m.opt.MaxTransfers:
			return Answer{Status: StatusUnknown}
		}
		switch code, reason := m.wholeOf(now, id); code {
		case OK:
		case Refused, Closed:
			return Answer{Status: StatusUnknown}
		default:
			return Answer{StatusEnded, code, reason}
		}
		if of = m.offers[id]; of == nil && isPart(id) {
			return Answer{Status: StatusUnknown}
		} else if of == nil {
			of = m.addEarly(now, id, from)
		}
	}
	if claim && (of.peer == "" || fault.On("second-claim") && of.load == nil) {
		of.peer = from
	}
	if of.peer == from && !claim && of.load == nil && of.voided != nil {
		return Answer{StatusEnded, StartOver, of.voided[len(of.voided)-1]}
	}
	if of.peer != from || !claim && of.load == nil {
		return Answer{Status: fault.Pick("unknown-is-sending", StatusUnknown, StatusSending)}
	}
	if of.state != offerEarly && of.state != offerStopping && !fault.On("no-renewal") && !(fault.On("claim-not-kept") && claim) {
		of.deadline = now.Add(m.lease(of))
		if fault.On("lease-of-all") && of.whole != nil {
			for _, o := range m.live(of.whole) {
				o.deadline = of.deadline
			}
		}
	}
	switch of.state {
	case offerEarly:
		return Answer{Status: StatusEarly}
	case offerPrefill:
		return Answer{Status: StatusPrefill}
	case offerReady:
		return Answer{Status: StatusOffered}
	}
	return Answer{Status: StatusSending}
}

// finishOffer takes D's word that its half has ended.
func (m *Machine) finishOffer(now time.Time, from AgentID, id TransferID, code Code, reason string) {
	of := m.offers[id]
	if _, gone := m.ended.byID[id]; of == nil && !gone && isPart(id) {
		m.wholeOf(now, id) // the other parts are waited for
		of = m.offers[id]
	}
	if of != nil && of.peer != "" && of.peer != from && !fault.On("anybodys-finish") {
		return // not its transfer
	}
	code = peerCode(code)
	if of == nil {
		if _, gone := m.ended.byID[id]; !gone {
			m.ended.add(id, code, reason, false) // overtook the load, or came before the engine's request
		}
		return
	}
	if code == OK && (of.state == offerSending || of.state == offerGrowing) {
		of.landed = true // the transport's own word, with its figures, is about to come
		if fault.On("finish-before-written") {
			m.reportOffer(now, of, TransferStats{})
		}
		return
	}
	m.endOffer(now, of, code, reason, false)
}

func (m *Machine) cancelOffer(now time.Time, id TransferID, of *offer, reason string) {
	if of == nil {
		if _, gone := m.ended.byID[id]; !gone {
			m.ended.add(id, Cancelled, reason, false)
		}
		return
	}
	m.endOffer(now, of, Cancelled, reason, true)
}

// endOffer brings P's half to its end; tell says whether D must be told.
func (m *Machine) endOffer(now time.Time, of *offer, code Code, reason string, tell bool) {
	if of.state == offerStopping && (!of.retracted || of.ends) {
		return
	}
	sending := of.state == offerSending || of.state == offerGrowing
	if tell && of.peer != "" && !(fault.On("no-finish-from-p") && code == Cancelled) {
		m.act(SendFinish{Peer: of.peer, ID: of.id, Code: peerCode(code), Reason: reason})
	}
	of.code, of.reason = code, reason
	if of.retracted { // it is being stopped already
		of.ends = true
		return
	}
	if sending && !fault.On("no-stop") {
		of.state = offerStopping
		m.act(StopWrite{ID: of.id})
		if !fault.On("report-before-written") {
			return
		}
	}
	m.reportOffer(now, of, TransferStats{})
}

// reportOffer is the only way out of the map of offers.
func (m *Machine) reportOffer(now time.Time, of *offer, s TransferStats) {
	delete(m.offers, of.id)
	if len(m.offers) == 0 {
		clear(m.probes) // nobody may call Tick now
	}
	if of.state == offerEarly {
		m.leaveEarly(of)
	}
	m.ended.add(of.id, of.code, of.reason, !of.offered.IsZero())
	m.ended.moved(of.id, s)
	if of.nacked {
		m.ended.nacked(of.id, of.peer)
	}
	if of.offered.IsZero() && of.whole == nil {
		m.reportWant(of.id, of.code, of.reason, 0)
		return // the engine has not offered it and waits for no other report
	}
	wait := now.Sub(of.offered)
	switch {
	case of.offered.IsZero():
		wait = 0
	case !of.sendAt.IsZero():
		wait = max(of.sendAt.Sub(of.offered), 0)
	}
	state := of.state
	if state == offerStopping {
		state = offerSending
	}
	r := Report{ID: of.id, Side: SideOffer, Token: of.token, Code: of.code, Reason: of.reason,
		Blocks: countBlocks(of.blocks), Wait: wait, Elapsed: now.Sub(of.offered), State: state.String(), Peer: of.peer, Stats: s}
	if of.whole != nil {
		m.partOffered(now, of.whole, &r)
		return
	}
	m.act(r)
}

func (m *Machine) tickOffers(now time.Time) {
	var late []TransferID
	for id, of := range m.offers {
		if !of.deadline.IsZero() && !now.Before(of.deadline) {
			late = append(late, id)
		}
	}
	slices.Sort(late)
	for _, id := range late {
		of := m.offers[id]
		switch of.state {
		case offerEarly:
			m.count.Reaped++
			m.endOffer(now, of, NotOffered, fmt.Sprintf("the prefill engine has not named transfer %q within %v", string(of.id), m.opt.EarlyLoad), true)
		case offerPrefill:
			if m.wants[m.nameOf(of)] {
				m.endOffer(now, of, PeerLost, fmt.Sprintf("decode agent %s has not renewed its claim for %v", of.peer, m.lease(of)), true)
				continue
			}
			of.load, of.peer, of.deadline = nil, "", time.Time{} // D stopped renewing; the engine still works
		case offerReady:
			reason := fmt.Sprintf("no decode agent claimed or loaded transfer %q within its lease of %v", string(of.id), m.opt.Lease)
			if of.peer != "" {
				reason = fmt.Sprintf("decode agent %s has not renewed its claim for %v", of.peer, m.opt.Lease)
			}
			m.endOffer(now, of, Expired, reason, true)
		case offerGrowing, offerSending:
			m.endOffer(now, of, PeerLost, fmt.Sprintf("decode agent %s has not renewed its lease of %v", of.peer, of.load.Lease), true)
		}
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
	case !known, c == SayHello, c == StartOver:
		return Failed
	}
	return c
}

// fullOfOffers counts the offers that calls of the engine back.
func (m *Machine) fullOfOffers() bool { return len(m.offers)-m.early >= m.opt.MaxTransfers }

func (m *Machine) overload(what string) error {
	return fmt.Errorf("%w: %d %s are under way (max_transfers); collect finished ones or raise the limit", ErrOverload, m.opt.MaxTransfers, what)
}

func countBlocks(blocks [][]BlockID) int {
	n := 0
	for _, ids := range blocks {
		n += len(ids)
	}
	return n
}
