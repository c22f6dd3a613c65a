package core

import (
	"cmp"
	"slices"
	"time"

	"github.com/kvconn/kvconn/internal/fault"
)

// With Options.ReportClaims a claim that a load could only fail with has a Report
// of SideClaim, one for all of its parts, and is no more: an engine that queues a
// request for want of blocks need not have them to hear that its P is gone. A Load
// that follows all the same comes to the same.

// loseClaim is the end of a claim, or of a part of one, that can come to nothing.
// Unreported, it is kept for the load that may follow.
func (m *Machine) loseClaim(now time.Time, ld *load, code Code, reason string) {
	state := ld.state
	ld.state, ld.code, ld.reason = loadClaimed, code, reason
	if m.opt.ReportClaims && code != OK {
		m.tellLost(now, ld, state, code, reason)
	}
}

// tellLost tells P of what it does not know to have ended, and the engine of the rest.
func (m *Machine) tellLost(now time.Time, ld *load, state loadState, code Code, reason string) {
	r := Report{ID: ld.id, Side: SideClaim, Token: ld.token, Code: code, Reason: reason, Elapsed: now.Sub(ld.since), State: state.String(),
		Peer: cmp.Or(ld.peer, ld.tried), From: ld.from}
	j := ld.join
	if j == nil {
		m.endLoad(now, ld, Cancelled, reason, true)
		m.reportClaim(r)
		return
	}
	r.ID = j.id
	if fault.On("lost-twice") {
		m.act(r)
	} else if j.lost != nil {
		return // by another part, while they were being begun
	}
	if j.found != nil {
		r.From = j.of
	}
	if j.lost = &r; !j.adding {
		m.tellPartsLost(now, j)
	}
}

// tellPartsLost ends the parts that are left: a load would, with the first that fails.
func (m *Machine) tellPartsLost(now time.Time, j *join) {
	if fault.On("lost-others-untold") {
		for _, id := range j.parts {
			if ld := m.loads[id]; ld != nil && ld.join == j {
				m.reportLoad(now, ld)
			}
		}
	}
	m.endParts(now, j, Cancelled, j.lost.Reason)
	m.reportClaim(*j.lost)
}

func (m *Machine) reportClaim(r Report) {
	m.count.ClaimsLost++
	if !fault.On("lost-forgotten") {
		m.lost.put(r.ID, r)
	}
	m.act(r)
}

// wasLost says whether the newest claim of an id was reported.
func (m *Machine) wasLost(id TransferID) bool { return m.lost.byID[id].Code != OK }

// claimAnew forgets what an earlier claim of the same id came to.
func (m *Machine) claimAnew(id TransferID) {
	if m.wasLost(id) {
		m.lost.put(id, Report{})
	}
}

// loadLost reports a load of what was claimed and lost, if it is one. To let go
// never fails.
func (m *Machine) loadLost(r *LoadRequest, blocks int) bool {
	lost := m.lost.byID[r.ID]
	if lost.Code == OK || lost.From != r.From && !slices.ContainsFunc(r.Parts, func(p LoadPart) bool { return p.From == lost.From }) {
		return false
	}
	lost.Side, lost.Token, lost.Blocks, lost.Elapsed = SideLoad, r.Token, blocks, 0
	if blocks == 0 {
		lost.Code, lost.Reason = OK, nothingToLoad
	}
	m.act(lost)
	return true
}

// Untold is how many Reports of claims may still come without a further call of the
// engine: one for each claim that it has made and that has not ended, with
// Options.ReportClaims.
func (m *Machine) Untold() int {
	if !m.opt.ReportClaims {
		return 0
	}
	return m.claims
}

// checkLost checks what was reported; only in builds with the tag "invariants".
func (m *Machine) checkLost(must func(ok bool, format string, args ...any)) {
	for id, ld := range m.loads {
		must(!m.opt.ReportClaims || !ld.claim || ld.code == OK, "claim %q is lost (%v) and not reported", id, ld.code)
	}
	for id := range m.lost.byID {
		ld := m.loads[id]
		must(!m.wasLost(id) || (ld == nil || !ld.claim) && (m.joins[id] == nil || !m.joins[id].claim), "claim %q was reported as lost and is under way", id)
	}
}
