package core

import (
	"fmt"
	"math"
)

// With Options.ReportWants each announced transfer gets a Report of SideWant
// before its offer: D's load is here, so that D has room for it, or it has come
// to an end that spares the engine the work. An engine that begins on D's word
// never fills its memory with what no D can take yet.

// want is Announce's duty to report once.
func (m *Machine) want(id TransferID) error {
	if !m.opt.ReportWants {
		return nil
	}
	of, w := m.offers[id], m.wholes[id]
	if m.wants[id] || of != nil && of.state >= offerPrefill || w != nil && len(m.earlyOf(w)) < len(m.live(w)) {
		return fmt.Errorf("%w: transfer %q is announced or offered already; give each request a transfer_id of its own", ErrDuplicate, string(id))
	}
	return nil
}

// wanted reports if all loads are here that an announced transfer waits for.
func (m *Machine) wanted(id TransferID) {
	if !m.wants[id] {
		return
	}
	var waiting []*offer
	if w := m.wholes[id]; w != nil {
		waiting = m.live(w)
	} else {
		waiting = []*offer{m.offers[id]}
	}
	first := uint32(math.MaxUint32)
	for _, of := range waiting {
		if of.load == nil {
			return
		}
		first = min(first, at(of.load.First, 0))
	}
	m.reportWant(id, OK, "", first)
}

// reportWant is the only way out of the set of wants.
func (m *Machine) reportWant(id TransferID, code Code, reason string, first uint32) {
	if m.wants[id] {
		delete(m.wants, id)
		m.act(Report{ID: id, Side: SideWant, Code: code, Reason: reason, Blocks: int(first), State: offerPrefill.String()})
	}
}

// wantGone reports for a transfer that had ended when the engine announced it.
func (m *Machine) wantGone(id TransferID, t tombstone) {
	if !m.opt.ReportWants {
		return
	}
	m.wants[id] = true
	if t.offered {
		t.code, t.reason = Refused, fmt.Sprintf("transfer %q was offered before and has ended (%s); give each request a transfer_id of its own", string(id), t.code)
	}
	m.reportWant(id, t.code, t.reason, 0)
}

// nameOf is the id that the engine knows an offer by.
func (m *Machine) nameOf(of *offer) TransferID {
	if of.whole != nil {
		return of.whole.id
	}
	return of.id
}

// checkWants checks the set; only in builds with the tag "invariants".
func (m *Machine) checkWants(must func(ok bool, format string, args ...any)) {
	for id := range m.wants {
		of, w := m.offers[id], m.wholes[id]
		must(of != nil && of.state == offerPrefill || w != nil && w.offered.IsZero(), "transfer %q is wanted and is not announced", id)
	}
}
