package machine

import (
	"fmt"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/core/half"
	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/kv"
)

// P's fan-out: several D agents have shares of one offer, or one D has a share of it beside
// shares of other P agents' offers. Each part is an offer of its own, of one peer. The
// engine knows only the transfer, and its blocks are free when all parts have ended.
type fanOut struct {
	sum
	id      core.TransferID
	of      int // shares
	source  int
	parts   []core.TransferID
	left    int       // parts that have not ended
	offered time.Time // zero: the engine has not offered
	token   uint64
	blocks  int
}

// Meet makes sure that a part that a peer names is one of this transfer's. The first
// part to come says how many there are. The code is the answer to the peer. If the id is
// no part's, there is nothing to do.
func (m above) Meet(now time.Time, who half.Party, part half.ID) (core.Code, string) {
	if m.closed {
		return core.Closed, "the prefill agent is closing"
	}
	id, share, ok := splitPart(part)
	if !ok {
		if checkID(part) != nil {
			return core.Refused, "malformed transfer_id"
		}
		if f := m.fans.offers[core.TransferID(part)]; f != nil {
			return core.Refused, fmt.Sprintf("transfer %q is being loaded in %d shares already", string(part), f.of)
		}
		return core.OK, ""
	}
	if f := m.fans.offers[id]; f != nil {
		if f.of != share.Of || f.source != share.Source {
			return core.Refused, fmt.Sprintf("transfer %q is being loaded in %d shares from source %d already, not in %d from %d", string(id), f.of, f.source, share.Of, share.Source)
		}
		return m.partThere(core.TransferID(part))
	}
	if t, gone := m.halves.Ended.Get(half.ID(id)); gone {
		return t.Answer(half.ID(id))
	}
	base := m.halves.Offer(half.ID(id))
	peer, _ := m.halves.At(core.SideOffer, half.ID(id))
	switch {
	case peer != "":
		return core.Refused, fmt.Sprintf("transfer %q is being loaded by decode agent %s already", string(id), peer)
	case !m.halves.RoomToDivide(now, base, who, share.Of):
		return core.Refused, fmt.Sprintf("%d shares of transfer %q do not fit beside %d others", share.Of, string(id), m.halves.Offers())
	}
	f := &fanOut{id: id, of: share.Of, source: share.Source, left: share.Of}
	for k := range share.Of {
		f.parts = append(f.parts, PartID(id, kv.Share{K: k, Of: share.Of, Source: share.Source}))
	}
	if base != nil {
		r := base.Report(now)
		f.offered, f.token, f.blocks = base.Offered(), r.Token, r.Blocks
	}
	m.fans.offers[id] = f
	m.halves.Divide(now, base, who, f.parts)
	return m.partThere(core.TransferID(part))
}

// partThere says whether a part has not ended.
func (m *Machine) partThere(part core.TransferID) (core.Code, string) {
	if m.halves.Offer(half.ID(part)) == nil {
		return core.Refused, fmt.Sprintf("transfer %q has ended already; each request needs a transfer_id of its own", string(part))
	}
	return core.OK, ""
}

// halfOf is P's half of a transfer, or the parts of it that have not ended.
func (m *Machine) halfOf(id core.TransferID) (out []*half.Offer) {
	ids := []core.TransferID{id}
	if f := m.fans.offers[id]; f != nil {
		ids = f.parts
	}
	for _, part := range ids {
		if of := m.halves.Offer(half.ID(part)); of != nil {
			out = append(out, of)
		}
	}
	return out
}

// noteOfferOfParts notes, if several ranks load the transfer, when and what the engine has
// offered: all parts have one report.
func (m *Machine) noteOfferOfParts(now time.Time, r *core.OfferRequest) {
	if f := m.fans.offers[r.ID]; f != nil {
		f.offered, f.token, f.blocks = now, r.Token, r.Count()
	}
}

// OfferEnded takes an offer's end to the engine. If the offer is a part, the engine's
// blocks are free when all parts have ended. If the engine has not offered, nobody waits
// for a report.
func (m above) OfferEnded(now time.Time, of *half.Offer) {
	r := of.Report(now)
	switch {
	case !isPart(r.ID) && of.Offered().IsZero():
		m.reportDemand(r.ID, r.Code, r.Reason, 0)
		return
	case !isPart(r.ID):
		m.halves.Act(r)
		return
	}
	f := m.fans.offers[nameOf(r.ID)]
	f.add(&r)
	if f.left--; f.left > 0 && !(fault.On("first-share-ends") && f.left >= f.of-1) {
		m.demanded(f.id)
		return
	}
	delete(m.fans.offers, f.id)
	m.reportDemand(f.id, f.code, f.reason, 0)
	m.halves.Remember(of, half.ID(f.id), half.Tombstone{Code: f.code, Reason: f.reason, Offered: !f.offered.IsZero(), Stats: f.stats})
	if !f.offered.IsZero() {
		m.halves.Act(core.Report{ID: f.id, Parts: f.parts, Side: core.SideOffer, Token: f.token, Code: f.code, Reason: f.reason, Blocks: f.blocks,
			Wait: f.wait, Elapsed: now.Sub(f.offered), State: f.state, Peer: f.peer, Stats: f.stats})
	}
}
