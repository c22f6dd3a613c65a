// D's side of the engine's calls: which claim or load may begin, and what becomes of one of a transfer that several P ranks have
// (fan-in). Each part of such a one is a claim or load of its own, with one peer. The engine knows only the transfer. Also claims whose load
// could only fail.

package machine

import (
	"cmp"
	"fmt"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/core/half"
	"github.com/kvconn/kvconn/internal/fault"
)

// parts has what the fan-ins of claims and of loads have in common.
type parts struct {
	fan
	from  core.Target      // the engine whose ranks the parts are with
	found []core.FoundPart // these ranks
	ids   []core.TransferID
	left  int // how many parts have not ended
}

type loadFanIn struct {
	parts
	started time.Time
	sum     sum
}

// sum is the report of one half, made of the reports of those of its parts that have ended so far.
type sum struct{ core.Report }

// decide notes how a part has ended. The first part that fails decides how the half ends.
func (s *sum) decide(r *core.Report) {
	if s.Code == core.OK {
		s.Code, s.Reason, s.State, s.Peer, s.From = r.Code, r.Reason, r.State, r.Peer, r.From
	}
}

func (s *sum) add(r *core.Report) {
	s.decide(r)
	s.Wait = max(s.Wait, r.Wait)
	s.Stats.Bytes += r.Stats.Bytes
	s.Stats.Segments += r.Stats.Segments
	s.Stats.Nanos = max(s.Stats.Nanos, r.Stats.Nanos)
	s.Stats.Via = cmp.Or(s.Stats.Via, r.Stats.Via)
}

func loadOf(p parts, token uint64, blocks int, started time.Time) *loadFanIn {
	p.fan, p.left = fan{kind: loadFan, id: p.id}, len(p.ids)
	return &loadFanIn{p, started, sum{core.Report{ID: p.id, Parts: p.ids, Side: core.SideLoad, Token: token, Blocks: blocks}}}
}

// Divided makes a fan-in of a claim or load that was found to have parts.
func (m above) Divided(now time.Time, whole core.Report, ids []core.TransferID, found []core.FoundPart) {
	p := parts{fan{kind: claimFan, id: whole.ID}, whole.From, found, ids, len(ids)}
	if whole.Side == core.SideClaim {
		m.fans.claims[p.id] = &p
		m.fanTo(&p.fan, "Divided", half.Always, fanGoing)
		return
	}
	f := loadOf(p, whole.Token, whole.Blocks, now.Add(-whole.Elapsed))
	m.fans.loads[p.id] = f
	m.fanTo(&f.fan, "Divided", half.Always, fanGoing)
}

// mayClaim says whether a claim of this id is to begin. If it is not and there is no error, the engine has claimed or loads the
// transfer already.
func (m *Machine) mayClaim(id core.TransferID) (bool, error) {
	claimed, loading, _ := m.halves.Decodes(half.ID(id))
	switch {
	case claimed, loading, m.fans.claims[id] != nil, m.fans.loads[id] != nil:
		return false, nil
	case m.namedClaims() >= m.opt.MaxTransfers:
		return false, m.overload("claims")
	}
	return true, nil
}

// mayLoad says why a load must not begin. Cancelled loads that P must still hear of have a place too, but one of this
// id gives its place up. A load without blocks lets go of the transfer: it is never refused because there is no room.
func (m *Machine) mayLoad(r *core.LoadRequest) error {
	_, loading, pendingFinish := m.halves.Decodes(half.ID(r.ID))
	if loading || m.fans.loads[r.ID] != nil {
		return fmt.Errorf("%w: transfer %q is being loaded already; give each request a transfer_id of its own", core.ErrDuplicate, string(r.ID))
	}
	n := m.halves.WholeLoads() + len(m.fans.loads)
	if pendingFinish {
		n--
	}
	if n >= m.opt.MaxTransfers && r.Count() > 0 {
		return m.overload("loads")
	}
	return nil
}

func (m *Machine) namedClaims() int { return m.halves.WholeClaims() + len(m.fans.claims) }

// With Options.ReportClaims, if a load of a claim could only fail, the engine gets a Report of
// SideClaim for the claim, one for all parts. Then the machine forgets the claim. So an engine
// that queues a request until it has blocks hears earlier that its P is gone. If a LoadRequest
// follows all the same, it ends as the claim did.

// wasLost says whether the newest claim of an id was reported.
func (m *Machine) wasLost(id core.TransferID) bool { return m.lost.Get(id).Code != core.OK }

// loadOfLost reports a load whose claim was lost, with the end of the claim, and says whether it has
// reported one. A load without blocks never fails.
func (m *Machine) loadOfLost(r *core.LoadRequest) bool {
	lost := m.lost.Get(r.ID)
	if lost.Code == core.OK || lost.From != r.From {
		return false
	}
	lost.Side, lost.Token, lost.Blocks, lost.Elapsed = core.SideLoad, r.Token, r.Count(), 0
	if lost.Blocks == 0 {
		lost.Code, lost.Reason = core.OK, half.NothingToLoad
	}
	m.halves.Act(lost)
	return true
}

// Untold is how many Reports of claims may still come without a further call of the
// engine: with Options.ReportClaims, one for each claim that has not ended.
func (m *Machine) Untold() int {
	if !m.opt.ReportClaims {
		return 0
	}
	return m.namedClaims()
}

// loadClaimedParts begins a load of a transfer whose claim has parts, and says whether it
// did. A claim of another engine ends.
func (m *Machine) loadClaimedParts(now time.Time, r core.LoadRequest) bool {
	c := m.fans.claims[r.ID]
	if c == nil {
		return false
	}
	if c.from != r.From || fault.On("found-claim-lost") {
		m.dropClaim(r.ID, half.WhenOther, half.Ending{Code: core.Cancelled, Reason: "the decode engine loads it otherwise"})
		return false
	}
	m.fanTo(&c.fan, "", whenSame, fanNone)
	f := loadOf(*c, r.Token, r.Count(), now)
	m.fans.loads[r.ID] = f
	m.fanTo(&f.fan, "", half.Always, fanGoing)
	for i := range c.found {
		m.halves.Load(now, core.LoadRequest{ID: c.ids[i], From: c.found[i].From, Selection: r.Cut(m.layout, c.found[i].Regions), Prompt: fault.Pick("parts-of-any-prompt", r.Prompt, 0), After: fault.Pick("parts-at-once", r.After, 0)}, true)
	}
	return true
}

// endLoad ends a load, or the parts of one that have not ended, and says whether there is one. P is told the same end.
func (m *Machine) endLoad(now time.Time, id core.TransferID, end half.Ending) bool {
	f := m.fans.loads[id]
	if f == nil {
		return m.halves.EndLoad(now, half.ID(id), end)
	}
	for _, part := range f.ids {
		m.halves.EndLoad(now, half.ID(part), end)
	}
	return true
}

// dropClaim ends a claim, or the parts of one, and says whether there was one.
func (m *Machine) dropClaim(id core.TransferID, guard half.Guard, end half.Ending) bool {
	f := m.fans.claims[id]
	if f == nil {
		return m.halves.DropClaim(half.ID(id), guard, end)
	}
	m.fanTo(&f.fan, "", guard, fanNone)
	m.dropParts(f, guard, end)
	return true
}

func (m *Machine) dropParts(f *parts, guard half.Guard, end half.Ending) {
	for _, part := range f.ids {
		m.halves.DropClaim(half.ID(part), guard, end)
	}
}

// LoadEnded takes a load's end to the engine. If the load is a part, the first part that
// fails ends the other parts, also while it is fenced itself. The engine's blocks are free
// when no byte of any part can land.
func (m above) LoadEnded(now time.Time, r core.Report, over bool) {
	if !isPart(r.ID) {
		if over {
			m.halves.Act(r)
		}
		return
	}
	f := m.fans.loads[nameOf(r.ID)]
	if f == nil {
		return // the engine has its Report
	}
	f.sum.decide(&r)
	if f.state == fanGoing && r.Code != core.OK {
		m.fanTo(&f.fan, partTells(over), whenFailed, fanFailing)
		if !fault.On("others-go-on") {
			m.halves.Word(f.kind, half.ID(f.id), "PartFails")
			undo := m.halves.Because("PartFails")
			m.endLoad(now, f.id, half.Ending{Code: core.Cancelled, Reason: f.sum.Reason})
			undo()
		}
	}
	if !over {
		return
	}
	f.sum.add(&r)
	if f.left--; f.left > fault.Pick("first-source-ends", 0, len(f.ids)-1) {
		return
	}
	all := f.sum.Report
	all.Elapsed = now.Sub(f.started)
	all.Wait = max(all.Elapsed-time.Duration(all.Stats.Nanos), 0)
	m.fanTo(&f.fan, partTells(over), whenLast, fanNone, all)
}

// ClaimEnded takes a claim's end. If the claim was lost and the engine wants to hear of it, the engine is told, and so is P
// unless P knows it. If the claim is a part, the other parts end too, as those of a load do
// when the first fails.
func (m above) ClaimEnded(r core.Report, over bool) {
	whole := !isPart(r.ID)
	f := m.fans.claims[nameOf(r.ID)] // nil: all parts have been dropped already
	switch {
	case whole && over, !whole && f == nil, !over && (!m.opt.ReportClaims || fault.On("lost-untold") && r.Code == core.PeerLost):
		return
	case over:
		if f.left--; f.left == 0 {
			m.fanTo(&f.fan, partTells(over), whenLast, fanNone)
		}
		return
	}
	end := half.Ending{Code: core.Cancelled, Reason: r.Reason}
	if whole {
		undo := m.halves.Because("Lost")
		m.halves.DropClaim(half.ID(r.ID), half.Always, end)
		undo()
		m.halves.Act(r)
	} else {
		r.ID, r.From = f.id, f.from
		if fault.On("lost-twice") {
			m.halves.Act(r)
		}
		undo := m.halves.Because("PartFails")
		m.dropParts(f, half.Always, end)
		undo()
		m.fanTo(&f.fan, partTells(over), whenTold, fanNone, r)
		m.halves.Word(f.kind, half.ID(f.id), "PartFails")
	}
	m.halves.Count.ClaimsLost++
	if !fault.On("lost-forgotten") {
		m.lost.Put(r.ID, r)
	}
}
