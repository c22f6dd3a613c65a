// What P's engine says of a transfer reaches the transfer's offer or, if it has shares, all of them.

package machine

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/core/half"
	"github.com/kvconn/kvconn/internal/fault"
)

func (m *Machine) stepAnnounce(now time.Time, id core.TransferID) error {
	if err := m.check(id); err != nil {
		return err
	}
	t, gone := m.halves.Ended.Get(half.ID(id)) // D gave up first; the OfferRequest will tell so
	if !gone {
		named := func(of *half.Offer) bool { return !of.Early() }
		if m.opt.ReportDemands && (m.demands[id] || slices.ContainsFunc(m.halfOf(id), named)) {
			return fmt.Errorf("%w: transfer %q is announced or offered already; give each request a transfer_id of its own", core.ErrDuplicate, string(id))
		}
		if err := m.announce(now, id); err != nil {
			return err
		}
	}
	if !m.opt.ReportDemands {
		return nil
	}
	m.demands[id] = true
	switch {
	case !gone:
		m.demanded(id)
	case t.Offered:
		m.reportDemand(id, core.Refused, ended(id, t), 0)
	default:
		m.reportDemand(id, t.Code, t.Reason, 0)
	}
	return nil
}

// ended says why a transfer that has ended cannot be offered again.
func ended(id core.TransferID, t half.Tombstone) string {
	return fmt.Sprintf("transfer %q was offered before and has ended (%s); give each request a transfer_id of its own", string(id), t.Code)
}

// announce notes that the engine has announced a transfer. D may have begun the half before.
func (m *Machine) announce(now time.Time, id core.TransferID) error {
	early, err := m.backEarly(id)
	if err != nil {
		return err
	}
	for _, of := range early {
		m.halves.Announced(now, of)
	}
	if m.halfOf(id) == nil {
		m.halves.NewOffer(now, half.ID(id))
	}
	return nil
}

// backEarly finds room for a transfer that a call of the engine backs from now on,
// and lists those of its offers that no call has backed yet.
func (m *Machine) backEarly(id core.TransferID) (early []*half.Offer, err error) {
	list := m.halfOf(id)
	early = slices.DeleteFunc(list, func(of *half.Offer) bool { return !of.Early() })
	more := len(early)
	if len(list) == 0 {
		more = 1
	}
	if more > 0 && m.halves.Backed()+more > m.opt.MaxTransfers {
		return nil, m.overload("offers")
	}
	for _, of := range early {
		m.halves.LeaveEarly(of)
	}
	return early, nil
}

func (m *Machine) stepOffer(now time.Time, r core.OfferRequest) error {
	if err := m.check(r.ID); err != nil {
		return err
	}
	if err := r.Check(m.layout); err != nil {
		return fmt.Errorf("%w: offer %q: %w", core.ErrInvalid, string(r.ID), err)
	}
	list := m.halfOf(r.ID)
	for _, of := range list {
		if !of.Offered().IsZero() {
			return fmt.Errorf("%w: transfer %q is offered already; give each request a transfer_id of its own", core.ErrDuplicate, string(r.ID))
		}
		if err := of.CheckPartial(&r); err != nil {
			return fmt.Errorf("%w: offer %q: %w", core.ErrInvalid, string(r.ID), err)
		}
	}
	m.reportDemand(r.ID, core.OK, "", 0) // the engine did not wait for it
	if t, gone := m.halves.Ended.Get(half.ID(r.ID)); gone && list == nil {
		if t.Offered {
			return fmt.Errorf("%w: %s", core.ErrDuplicate, ended(r.ID, t))
		}
		m.halves.Ended.Add(half.ID(r.ID), half.Tombstone{Code: t.Code, Reason: t.Reason, Offered: true})
		m.halves.Count.Offered++
		m.halves.Act(core.Report{ID: r.ID, Side: core.SideOffer, Token: r.Token, Code: t.Code, Reason: t.Reason, Blocks: r.Count(), State: "ended", Stats: t.Stats})
		return nil
	}
	if _, err := m.backEarly(r.ID); err != nil {
		return err
	}
	m.halves.Count.Offered++
	if f := m.fans.offers[r.ID]; f != nil { // all parts have one report
		f.offered, f.Token, f.Blocks = now, r.Token, r.Count()
		m.fanTo(&f.fan, "", half.Always, fanOffered)
	}
	if list == nil {
		list = []*half.Offer{m.halves.NewOffer(now, half.ID(r.ID))}
	}
	for _, of := range list {
		m.halves.Ready(now, of, &r)
		m.halves.Settle(now)
	}
	return nil
}

func (m *Machine) stepPartialOffer(now time.Time, r core.PartialOffer) error {
	if err := m.check(r.ID); err != nil {
		return err
	}
	if _, gone := m.halves.Ended.Get(half.ID(r.ID)); gone {
		return nil
	}
	var before *half.Offer // the first part's offer: all parts of a transfer get the same blocks
	for _, of := range m.halfOf(r.ID) {
		if err := of.MayGrow(half.ID(r.ID)); err != nil {
			return err
		}
		before = cmp.Or(before, of)
	}
	if err := m.halves.CheckPartialOffer(before, &r); err != nil {
		return fmt.Errorf("%w: transfer %q: %w", core.ErrInvalid, string(r.ID), err)
	}
	if err := m.announce(now, r.ID); err != nil {
		return err
	}
	m.reportDemand(r.ID, core.OK, "", 0) // the engine did not wait for it
	for _, of := range m.halfOf(r.ID) {
		m.halves.Grow(now, of, &r)
		m.halves.Settle(now)
	}
	return nil
}

func (m *Machine) stepWithdraw(now time.Time, id core.TransferID) error {
	if err := checkID(id); err != nil {
		return err
	}
	for i, of := range m.halfOf(id) {
		if fault.On("forgets-shares") && i > 0 {
			break
		}
		if !of.Offered().IsZero() {
			return fmt.Errorf("%w: transfer %q is offered already, and an offer cannot be withdrawn: cancel the transfer; its blocks are free when its report has come", core.ErrInvalid, string(id))
		}
		m.halves.Withdraw(of)
	}
	return nil
}

// Reading says whether blocks that were given before a Withdraw may still be read.
func (m *Machine) Reading(id core.TransferID) bool {
	return slices.ContainsFunc(m.halfOf(id), (*half.Offer).Reading)
}

// cancelOffer ends P's half. If the half is not here yet, its end is remembered.
func (m *Machine) cancelOffer(now time.Time, id core.TransferID, reason string) {
	list := m.halfOf(id)
	if _, gone := m.halves.Ended.Get(half.ID(id)); list == nil && !gone {
		m.halves.Ended.Add(half.ID(id), half.Tombstone{Code: core.Cancelled, Reason: reason})
	}
	for i, of := range list {
		if fault.On("cancel-one-share") && i > 0 {
			break
		}
		m.halves.EndOffer(now, of, half.Always, half.Ending{Code: core.Cancelled, Reason: reason})
	}
}
