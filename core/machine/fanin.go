// D's fan-in: a claim or load of a transfer that several P ranks have. Each part is a
// claim or load of its own, with one peer. The engine knows only the transfer.

package machine

import (
	"cmp"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/core/half"
	"github.com/kvconn/kvconn/internal/fault"
)

// parts has what the fan-ins of claims and of loads have in common.
type parts struct {
	id    core.TransferID
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
	p.left = len(p.ids)
	return &loadFanIn{p, started, sum{core.Report{ID: p.id, Parts: p.ids, Side: core.SideLoad, Token: token, Blocks: blocks}}}
}

// Divided makes a fan-in of a claim or load that was found to have parts.
func (m above) Divided(now time.Time, whole core.Report, ids []core.TransferID, found []core.FoundPart) {
	p := parts{whole.ID, whole.From, found, ids, len(ids)}
	if whole.Side == core.SideClaim {
		m.fans.claims[p.id] = &p
	} else {
		m.fans.loads[p.id] = loadOf(p, whole.Token, whole.Blocks, now.Add(-whole.Elapsed))
	}
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
	delete(m.fans.claims, r.ID)
	m.fans.loads[r.ID] = loadOf(*c, r.Token, r.Count(), now)
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
	delete(m.fans.claims, id)
	for _, part := range f.ids {
		m.halves.DropClaim(half.ID(part), guard, end)
	}
	return true
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
	failed := f.sum.Code == core.OK && r.Code != core.OK
	f.sum.decide(&r)
	if failed && !fault.On("others-go-on") {
		undo := m.halves.Because("PartFails")
		m.endLoad(now, f.id, half.Ending{Code: core.Cancelled, Reason: f.sum.Reason})
		undo()
	}
	if !over {
		return
	}
	f.sum.add(&r)
	if f.left--; f.left > fault.Pick("first-source-ends", 0, len(f.ids)-1) {
		return
	}
	delete(m.fans.loads, f.id)
	all := f.sum.Report
	all.Elapsed = now.Sub(f.started)
	all.Wait = max(all.Elapsed-time.Duration(all.Stats.Nanos), 0)
	m.halves.Act(all)
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
			delete(m.fans.claims, f.id)
		}
		return
	case whole:
		defer m.halves.Because("Lost")()
	default:
		defer m.halves.Because("PartFails")()
		r.ID, r.From = f.id, f.from
		if fault.On("lost-twice") {
			m.halves.Act(r)
		}
	}
	m.dropClaim(r.ID, half.Always, half.Ending{Code: core.Cancelled, Reason: r.Reason})
	m.halves.Count.ClaimsLost++
	if !fault.On("lost-forgotten") {
		m.lost.Put(r.ID, r)
	}
	m.halves.Act(r)
}
