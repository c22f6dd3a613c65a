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
// shares of other P agents' offers. Each part is an offer of its own, with one peer. The
// engine knows only the transfer, and the transfer's blocks are free when all parts have ended.
type fanOut struct {
	fan
	sum
	of      int // how many shares the offer has
	source  int
	left    int       // how many parts have not ended
	offered time.Time // zero: the engine has not offered
}

// Meet makes sure that a part that a peer names belongs to the transfer as this machine knows it.
// The first part to come says how many there are. The code is the answer to the peer. If the id
// is not that of a part, there is nothing to do.
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
		return t.Answer(string(id), "")
	}
	base := m.halves.Offer(half.ID(id))
	peer, _ := m.halves.At(core.SideOffer, half.ID(id))
	switch {
	case peer != "":
		return core.Refused, fmt.Sprintf("transfer %q is being loaded by decode agent %s already", string(id), peer)
	case !m.halves.RoomToDivide(now, base, who, share.Of):
		return core.Refused, fmt.Sprintf("%d shares of transfer %q do not fit beside %d others", share.Of, string(id), m.halves.Offers())
	}
	f := &fanOut{fan: fan{kind: offerFan, id: id}, sum: sum{core.Report{ID: id, Side: core.SideOffer}}, of: share.Of, source: share.Source, left: share.Of}
	for k := range share.Of {
		f.Parts = append(f.Parts, PartID(id, kv.Share{K: k, Of: share.Of, Source: share.Source}))
	}
	if base != nil {
		r := base.Report(now)
		f.offered, f.Token, f.Blocks = base.Offered(), r.Token, r.Blocks
	}
	m.fans.offers[id] = f
	if f.offered.IsZero() {
		m.fanTo(&f.fan, "FanOut", whenUnoffered, fanUnoffered)
	} else {
		m.fanTo(&f.fan, "FanOut", whenOffered, fanOffered)
	}
	m.halves.Divide(now, base, who, f.Parts)
	return m.partThere(core.TransferID(part))
}

// partThere says whether a part has not ended.
func (m *Machine) partThere(part core.TransferID) (core.Code, string) {
	if m.halves.Offer(half.ID(part)) == nil {
		return core.Refused, fmt.Sprintf("transfer %q has ended already; each request needs a transfer_id of its own", string(nameOf(part)))
	}
	return core.OK, ""
}

// shares are the parts of a transfer at P, or itself.
func (m *Machine) shares(id core.TransferID) []core.TransferID {
	if f := m.fans.offers[id]; f != nil {
		return f.Parts
	}
	return []core.TransferID{id}
}

// halfOf is P's half of a transfer, or the parts of it that have not ended.
func (m *Machine) halfOf(id core.TransferID) (out []*half.Offer) {
	for _, part := range m.shares(id) {
		if of := m.halves.Offer(half.ID(part)); of != nil {
			out = append(out, of)
		}
	}
	return out
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
	m.reportDemand(f.id, f.Code, f.Reason, 0)
	m.halves.Remember(of, half.ID(f.id), half.Tombstone{Code: f.Code, Reason: f.Reason, Offered: f.state == fanOffered, Stats: f.Stats})
	if f.state == fanUnoffered {
		m.fanTo(&f.fan, "Ended", whenLast, fanNone)
		return
	}
	f.Elapsed = now.Sub(f.offered)
	m.fanTo(&f.fan, "Ended", whenLast, fanNone, f.Report)
}
