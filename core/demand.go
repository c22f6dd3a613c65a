package core

import (
	"fmt"
	"math"
	"slices"

	"github.com/kvconn/kvconn/kv"
)

// With Options.ReportDemands each announced transfer gets a Report of SideDemand before
// its offer. It says that D's load is here, so that D has room for the transfer, or that
// the transfer has ended, so that the engine can spare the work. An engine that begins on
// D's demand never fills its memory with caches that no D can take yet.

// checkDemand: the engine announces a transfer once.
func (m *Machine) checkDemand(id TransferID) error {
	if !m.opt.ReportDemands {
		return nil
	}
	if m.demands[id] || slices.ContainsFunc(m.halfOf(id), func(of *offer) bool { return of.state != offerEarly }) {
		return fmt.Errorf("%w: transfer %q is announced or offered already; give each request a transfer_id of its own", ErrDuplicate, string(id))
	}
	return nil
}

// demanded reports an announced transfer when all the loads that it waits for are here. While the engine's cancel or Close ends
// the shares of one, the last of them reports it.
func (m *Machine) demanded(id TransferID) {
	half := m.halfOf(id)
	if !m.demands[id] || m.closed || len(half) == 0 {
		return
	}
	first := uint32(math.MaxUint32)
	for _, of := range half {
		if of.load == nil {
			return
		}
		first = min(first, kv.OrZero(of.load.First, 0))
	}
	m.reportDemand(id, OK, "", first)
}

// reportDemand is the only way out of the set of demands.
func (m *Machine) reportDemand(id TransferID, code Code, reason string, first uint32) {
	if m.demands[id] {
		delete(m.demands, id)
		m.act(Report{ID: id, Side: SideDemand, Code: code, Reason: reason, Blocks: int(first), State: offerPrefill.String()})
	}
}

// demandGone reports a transfer that had ended when the engine announced it.
func (m *Machine) demandGone(id TransferID, t tombstone) {
	if !m.opt.ReportDemands {
		return
	}
	m.demands[id] = true
	if t.offered {
		t.code, t.reason = Refused, fmt.Sprintf("transfer %q was offered before and has ended (%s); give each request a transfer_id of its own", string(id), t.code)
	}
	m.reportDemand(id, t.code, t.reason, 0)
}

// checkDemands checks the set; only in builds with the tag "invariants".
func (m *Machine) checkDemands() {
	for id := range m.demands {
		list := m.halfOf(id)
		must(len(list) > 0 && !slices.ContainsFunc(list, func(of *offer) bool { return !of.offered.IsZero() }), "transfer %q is demanded and is not announced", id)
		if of := m.offers[id]; of != nil {
			must(of.state == offerPrefill, "transfer %q is demanded in state %v", id, of.state)
		}
	}
}
