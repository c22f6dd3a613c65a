package core

import (
	"cmp"
	"fmt"
	"slices"
	"time"

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

// growing says whether blocks may become ready by and by.
func (s offerState) growing() bool {
	return s == offerPrefill || s == offerAwaiting || s == offerPartial || s == offerFinishing
}

// ends says whether the half's end is under way.
func (s offerState) ends() bool {
	return s == offerEnding || s == offerEndingWithdrawn || s == offerRefused
}

// stopping says whether a Write is under way that was stopped.
func (s offerState) stopping() bool { return s == offerWithdrawing || s.ends() }

// offer is P's half of a transfer.
type offer struct {
	id        TransferID
	state     offerState
	token     uint64
	held      kv.Selection // First and Blocks of what the engine has given
	ready     []uint32     // per region: blocks of the prompt, from its start, that are ready; nil: no partial offer was made
	sent      []uint32     // ready as it was when the Write under way was last extended
	growths   []growth     // what becomes ready with moments that have not passed, in the engine's order
	prompt    uint64       // fingerprint of the prompt that they are the cache of; 0: not said yet
	offered   time.Time    // zero: the engine has not offered all of it
	sendAt    time.Time    // when the Write began
	deadline  time.Time    // end of the lease, or of the wait for the engine
	endBy     time.Time    // whatever D says; zero: the engine has not offered all of it
	peer      AgentID      // the D agent that claims or loads it
	place     *earlyPlace  // of a transfer that is early, or was
	load      *LoadMessage
	landed    bool     // D has all bytes
	nacked    bool     // D's transport expects it no more
	elsewhere int      // writes whose way was not there
	voided    []string // the latest loads that D was told to make anew, by their grants' digests
	end       ending   // while it ends
	endedIn   offerState
	stats     TransferStats
}

// lease is how long D may be silent.
func (m *Machine) lease(of *offer) time.Duration {
	if of.load == nil {
		return m.opt.Lease
	}
	return of.load.Lease
}

// offerTo is one row of the table: the offer's next state, and what is to be done.
func (m *Machine) offerTo(of *offer, next offerState, does ...Action) {
	if next == offerNone || next.ends() {
		m.ends++
		m.awaitNothing(of)
	}
	switch offerNone {
	case next:
		delete(m.offers, of.id)
	case of.state:
		m.offers[of.id] = of
	}
	m.moved("offer", of.id, of.state, next)
	of.state = next
	m.act(does...)
}

func (m *Machine) stepAnnounce(now time.Time, id TransferID) error {
	if err := checkID(id); err != nil {
		return err
	}
	if m.closed {
		return ErrClosed
	}
	if t, gone := m.ended.get(id); gone {
		m.demandGone(id, t)
		return nil // D gave up first; the OfferRequest will tell so
	}
	if err := m.checkDemand(id); err != nil {
		return err
	}
	if err := m.announce(now, id); err != nil {
		return err
	}
	if m.opt.ReportDemands {
		m.demands[id] = true
		m.demanded(id)
	}
	return nil
}

// announce backs a half with the engine's word. D may have begun the half.
func (m *Machine) announce(now time.Time, id TransferID) error {
	early, err := m.backEarly(id)
	if err != nil {
		return err
	}
	for _, of := range early {
		m.offerTo(of, offerPrefill)
		of.deadline = time.Time{}
		if of.peer != "" {
			of.deadline = now.Add(m.lease(of))
		}
	}
	if m.halfOf(id) == nil {
		m.begin(now)
		m.offerTo(&offer{id: id}, offerPrefill)
	}
	return nil
}

// backEarly finds room for a transfer that a call of the engine backs from now on,
// and lists those of its offers that no call has backed yet.
func (m *Machine) backEarly(id TransferID) (early []*offer, err error) {
	half := m.halfOf(id)
	early = slices.DeleteFunc(half, func(of *offer) bool { return of.state != offerEarly })
	more := len(early)
	if len(half) == 0 {
		more = 1
	}
	if more > 0 && len(m.offers)-m.early+more > m.opt.MaxTransfers {
		return nil, m.overload("offers")
	}
	for _, of := range early {
		m.leaveEarly(of)
	}
	return early, nil
}

func (m *Machine) stepOffer(now time.Time, r OfferRequest) error {
	if err := checkID(r.ID); err != nil {
		return err
	}
	if m.closed {
		return ErrClosed
	}
	if err := r.Check(m.layout); err != nil {
		return fmt.Errorf("%w: offer %q: %w", ErrInvalid, string(r.ID), err)
	}
	half := m.halfOf(r.ID)
	for _, of := range half {
		if !of.offered.IsZero() {
			return fmt.Errorf("%w: transfer %q is offered already; give each request a transfer_id of its own", ErrDuplicate, string(r.ID))
		}
		if err := of.checkPartial(&r); err != nil {
			return fmt.Errorf("%w: offer %q: %w", ErrInvalid, string(r.ID), err)
		}
	}
	m.reportDemand(r.ID, OK, "", 0) // the engine did not wait for it
	if t, gone := m.ended.get(r.ID); gone && half == nil {
		if t.offered {
			return fmt.Errorf("%w: transfer %q was offered before and has ended (%s); give each request a transfer_id of its own", ErrDuplicate, string(r.ID), t.code)
		}
		m.ended.add(r.ID, tombstone{code: t.code, reason: t.reason, offered: true})
		m.count.Offered++
		m.act(Report{ID: r.ID, Side: SideOffer, Token: r.Token, Code: t.code, Reason: t.reason, Blocks: r.Count(), State: "ended", Stats: t.stats})
		return nil
	}
	if _, err := m.backEarly(r.ID); err != nil {
		return err
	}
	m.count.Offered++
	m.noteOfferOfParts(now, &r)
	if half == nil {
		m.begin(now)
		of := &offer{id: r.ID}
		m.offerTo(of, offerPrefill)
		half = []*offer{of}
	}
	for _, of := range half {
		m.ready(now, of, &r)
		m.settle(now)
	}
	return nil
}

// ready takes all blocks of an offer.
func (m *Machine) ready(now time.Time, of *offer, r *OfferRequest) {
	of.token, of.held, of.offered, of.endBy = r.Token, kv.Selection{First: r.First, Blocks: r.Blocks}, now, now.Add(m.opt.Offer)
	of.prompt = cmp.Or(of.prompt, r.Prompt)
	if of.state.ends() {
		return
	}
	if m.grows(now, of, growth{after: r.After, whole: true}) {
		m.complete(now, of)
		return
	}
	of.held = of.held.OfGroups(len(m.layout.Groups))
	switch of.state {
	case offerPartial:
		m.offerTo(of, offerFinishing)
	case offerEarly, offerPrefill:
		m.offerTo(of, offerAwaiting)
		of.deadline = now.Add(m.opt.Lease)
	}
}

// complete goes on with an offer of which all blocks are there.
func (m *Machine) complete(now time.Time, of *offer) {
	switch {
	case of.state.stopping():
	case of.state.sending():
		m.finishPartial(now, of)
	default:
		if of.state != offerAwaiting { // else its lease runs
			of.deadline = now.Add(fault.Pick("no-expiry", m.opt.Lease, 1000*m.opt.Lease))
		}
		m.offerTo(of, offerReady)
		if of.load != nil {
			m.startWrite(now, of)
		}
	}
}

// startWrite has the transport send what the load asks for, if the two halves fit.
func (m *Machine) startWrite(now time.Time, of *offer) {
	src, err := m.joinHalves(of)
	if err != nil {
		m.endOffer(now, of, ending{Refused, err.Error()}, true)
		return
	}
	of.sendAt, of.deadline = now, now.Add(of.load.Lease)
	m.offerTo(of, offerSending, of.write(src))
}

// write is the Write of an offer's load that reads src.
func (of *offer) write(src kv.Selection) Write {
	l := of.load
	return Write{ID: of.id, Peer: l.Peer, Grant: l.Grant, Src: src, Dst: l.Selection, Match: l.Match}
}

// joinHalves finds the blocks of an offer that its load asks for, or says why the halves
// do not fit.
func (m *Machine) joinHalves(of *offer) (src kv.Selection, err error) {
	if err := of.samePrompt(); err != nil {
		return kv.Selection{}, err
	}
	return of.held.Wanted(of.load.Match, &of.load.Selection)
}

// samePrompt: an id alone does not say that both halves are of one request. If the prompts
// of two requests had as many blocks, decode would take one request's cache for the
// other's. An engine that has replaced its weights says another fingerprint than before,
// because then its caches are other ones.
func (of *offer) samePrompt() error {
	if of.prompt == 0 || of.load.Prompt == 0 || of.prompt == of.load.Prompt || fault.On("any-prompt") {
		return nil
	}
	return fmt.Errorf("transfer %q: decode asks for another prompt than prefill has (fingerprints %016x and %016x): both need the same request, under a transfer_id of its own, and weights replaced as often",
		string(nameOf(of.id)), of.load.Prompt, of.prompt)
}

func (m *Machine) overload(what string) error {
	return fmt.Errorf("%w: %d %s are under way (max_transfers); collect finished ones or raise the limit", ErrOverload, m.opt.MaxTransfers, what)
}
