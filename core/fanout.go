package core

import (
	"fmt"
	"slices"
	"time"

	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/kv"
)

// P's fan-out: several D agents have shares of one offer, or one D has a share of it beside
// shares of other P agents' offers. Each part is an offer of its own, of one peer. The
// engine knows only the transfer, and its blocks are free when all parts have ended.
type fanOut struct {
	sum
	id      TransferID
	of      int // shares
	source  int
	parts   []TransferID
	left    int       // parts that have not ended
	offered time.Time // zero: the engine has not offered
	token   uint64
	blocks  int
}

// fanOut makes sure that a part that a peer names is one of this transfer's. The first
// part to come says how many there are. The code is the answer to the peer. If the id is
// no part's, there is nothing to do.
func (m *Machine) fanOut(now time.Time, who party, part TransferID) (Code, string) {
	id, share, ok := splitPart(part)
	if !ok {
		if f := m.fans.offers[part]; f != nil {
			return Refused, fmt.Sprintf("transfer %q is being loaded in %d shares already", string(part), f.of)
		}
		return OK, ""
	}
	if f := m.fans.offers[id]; f != nil {
		if f.of != share.Of || f.source != share.Source {
			return Refused, fmt.Sprintf("transfer %q is being loaded in %d shares from source %d already, not in %d from %d", string(id), f.of, f.source, share.Of, share.Source)
		}
		return m.partThere(part)
	}
	if t, gone := m.ended.get(id); gone {
		if t.code == OK || t.code == PeerCancelled {
			return Refused, fmt.Sprintf("transfer %q has ended already (%s); each request needs a transfer_id of its own", string(id), t.code)
		}
		return peerCode(t.code), t.reason
	}
	base := m.offers[id]
	switch {
	case m.closed:
		return Closed, "the prefill agent is closing"
	case base != nil && base.peer != "":
		return Refused, fmt.Sprintf("transfer %q is being loaded by decode agent %s already", string(id), base.peer)
	case base == nil && !m.roomForEarly(now, who, share.Of, 0), base != nil && len(m.offers)-m.early+share.Of-1 > m.opt.MaxTransfers:
		return Refused, fmt.Sprintf("%d shares of transfer %q do not fit beside %d others", share.Of, string(id), len(m.offers))
	}
	defer m.because("FanOut")()
	m.begin(now)
	f := &fanOut{id: id, of: share.Of, source: share.Source, left: share.Of}
	m.fans.offers[id] = f
	state := offerEarly
	if base != nil {
		f.offered, f.token, f.blocks = base.offered, base.token, base.held.Count()
		state = base.state
	}
	var early *earlyPlace
	for k := range share.Of {
		of := base.part(PartID(id, kv.Share{K: k, Of: share.Of, Source: share.Source}), now.Add(m.opt.EarlyLoad))
		f.parts = append(f.parts, of.id)
		m.offerTo(of, state)
		if state == offerEarly {
			early = m.cameEarly(of, early, who)
		}
		for i := range of.growths {
			if after := of.growths[i].after; after != 0 {
				m.await(now, after, SideOffer, of.id)
			}
		}
	}
	if base != nil {
		m.offerTo(base, offerNone)
	}
	for _, p := range f.parts { // D's word that it needs no more may have come before
		if t, gone := m.ended.get(p); gone {
			of := m.offers[p]
			of.end = ending{t.code, t.reason}
			m.reportOffer(now, of, TransferStats{})
		}
	}
	return m.partThere(part)
}

// partThere says whether a part has not ended.
func (m *Machine) partThere(part TransferID) (Code, string) {
	if m.offers[part] == nil {
		return Refused, fmt.Sprintf("transfer %q has ended already; each request needs a transfer_id of its own", string(part))
	}
	return OK, ""
}

// part makes one part of an offer; of is nil if the offer has not come.
func (of *offer) part(id TransferID, deadline time.Time) *offer {
	if of == nil {
		return &offer{id: id, deadline: deadline}
	}
	held := kv.Selection{First: slices.Clone(of.held.First), Blocks: slices.Clone(of.held.Blocks)}
	for g := range held.Blocks {
		held.Blocks[g] = slices.Clip(held.Blocks[g]) // each part's list is extended apart
	}
	return &offer{id: id, token: of.token, held: held, offered: of.offered, deadline: of.deadline, endBy: of.endBy, ready: slices.Clone(of.ready), growths: fault.Pick("shares-forget-moments", slices.Clone(of.growths), nil), prompt: fault.Pick("shares-of-any-prompt", of.prompt, 0)}
}

// halfOf is P's half of a transfer, or the parts of it that have not ended.
func (m *Machine) halfOf(id TransferID) (out []*offer) {
	if f := m.fans.offers[id]; f != nil {
		for _, part := range f.parts {
			if of := m.offers[part]; of != nil {
				out = append(out, of)
			}
		}
		return out
	}
	if of := m.offers[id]; of != nil {
		return []*offer{of}
	}
	return nil
}

// noteOfferOfParts notes, if several ranks load the transfer, when and what the engine has
// offered: all parts have one report.
func (m *Machine) noteOfferOfParts(now time.Time, r *OfferRequest) {
	if f := m.fans.offers[r.ID]; f != nil {
		f.offered, f.token, f.blocks = now, r.Token, r.Count()
	}
}

// offerEnded takes an offer's end to the engine. If the offer is a part, the engine's
// blocks are free when all parts have ended. If the engine has not offered, nobody waits
// for a report.
func (m *Machine) offerEnded(now time.Time, of *offer) {
	r := of.report(now)
	switch {
	case !isPart(of.id) && of.offered.IsZero():
		m.reportDemand(r.ID, r.Code, r.Reason, 0)
		return
	case !isPart(of.id):
		m.act(r)
		return
	}
	f := m.fans.offers[nameOf(of.id)]
	f.add(&r)
	if f.left--; f.left > 0 && !(fault.On("first-share-ends") && f.left >= f.of-1) {
		m.demanded(f.id)
		return
	}
	delete(m.fans.offers, f.id)
	m.reportDemand(f.id, f.code, f.reason, 0)
	end := tombstone{code: f.code, reason: f.reason, offered: !f.offered.IsZero(), stats: f.stats}
	if of.endedIn == offerEarly && f.offered.IsZero() && f.code != Cancelled {
		m.ended.addWord(of.place.who, f.id, end)
	} else {
		m.ended.add(f.id, end)
	}
	if !f.offered.IsZero() {
		m.act(Report{ID: f.id, Parts: f.parts, Side: SideOffer, Token: f.token, Code: f.code, Reason: f.reason, Blocks: f.blocks,
			Wait: f.wait, Elapsed: now.Sub(f.offered), State: f.state, Peer: f.peer, Stats: f.stats})
	}
}
