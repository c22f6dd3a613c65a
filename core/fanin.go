package core

import (
	"cmp"
	"time"

	"github.com/kvconn/kvconn/internal/fault"
)

// D's fan-in: a claim or load of a transfer that several P ranks have. Each part is a
// claim or load of its own, of one peer. The engine knows only the transfer.

// parts are what the fan-ins of claims and of loads have in common.
type parts struct {
	id    TransferID
	from  Target      // the engine that they were found to be ranks of
	found []FoundPart // the ranks
	ids   []TransferID
	left  int // parts that have not ended
}

func newParts(id TransferID, from Target, found []FoundPart) parts {
	p := parts{id: id, from: from, found: found, left: len(found)}
	for i := range found {
		p.ids = append(p.ids, PartID(id, found[i].Share))
	}
	return p
}

type claimFanIn struct{ parts }

type loadFanIn struct {
	parts
	token   uint64
	started time.Time
	blocks  int
	sum     sum
}

// sum is what the parts of one half have come to so far.
type sum struct {
	code   Code
	reason string
	state  string // the state in which the part ended that the code is from
	peer   AgentID
	from   Target
	wait   time.Duration
	stats  TransferStats
}

// decide takes how a part ends; the first part that failed decides.
func (s *sum) decide(r *Report) {
	if s.code == OK {
		s.code, s.reason, s.state, s.peer, s.from = r.Code, r.Reason, r.State, r.Peer, r.From
	}
}

// add takes a part's report.
func (s *sum) add(r *Report) {
	s.decide(r)
	s.wait = max(s.wait, r.Wait)
	s.stats.Bytes += r.Stats.Bytes
	s.stats.Segments += r.Stats.Segments
	s.stats.Nanos = max(s.stats.Nanos, r.Stats.Nanos)
	s.stats.Via = cmp.Or(s.stats.Via, r.Stats.Via)
}

func (m *Machine) stepResolvedParts(now time.Time, r ResolvedParts) {
	defer m.settle(now)
	if isPart(r.ID) {
		return
	}
	if f := m.farewells.get(r.ID); f != nil && f.seq == r.Seq {
		for i := range r.Found {
			if fault.On("found-not-told") || fault.On("found-first-told") && i > 0 {
				break
			}
			m.act(SendFinish{Peer: r.Found[i].Peer, ID: PartID(r.ID, r.Found[i].Share), Code: f.end.code, Reason: f.end.reason})
		}
		m.dropFarewell(f)
	}
	if c := m.claims.get(r.ID); c != nil && c.seq == r.Seq && c.state.lookedUp() {
		m.fanInClaim(now, c, r.Found)
	}
	if ld := m.loads.get(r.ID); ld != nil && ld.seq == r.Seq && ld.state.lookedUp() {
		m.fanInLoad(now, ld, r.Found)
	}
}

func (m *Machine) fanInClaim(now time.Time, c *claim, found []FoundPart) {
	f := &claimFanIn{parts: newParts(c.id, c.from, found)}
	was := c.state
	m.claimTo(c, claimNone)
	m.fans.claims[f.id] = f
	for i := range found {
		m.seq++
		part := *c // what was tried before
		part.id, part.seq, part.from = f.ids[i], m.seq, found[i].From
		m.claimTo(&part, was)
		m.resolved(now, part.id, part.seq, found[i].Peer, found[i].Opened, ending{})
	}
}

func (m *Machine) fanInLoad(now time.Time, ld *load, found []FoundPart) {
	f := &loadFanIn{parts: newParts(ld.id, ld.from, found), token: ld.token, started: ld.started, blocks: ld.Count()}
	was, after := ld.state, ld.after
	ld.after = 0 // its moment is awaited until the parts await it
	m.loadTo(ld, loadNone)
	m.fans.loads[f.id] = f
	for i := range found {
		m.seq++
		part := *ld // what was claimed or tried before
		part.id, part.seq, part.from, part.Selection = f.ids[i], m.seq, found[i].From, ld.Cut(m.layout, found[i].Regions)
		m.loadAfter(now, &part, fault.Pick("found-parts-at-once", after, 0))
		m.loadTo(&part, was)
		m.resolved(now, part.id, part.seq, found[i].Peer, found[i].Opened, ending{})
	}
	m.awaitNot(after)
}

// loadClaimedParts begins a load of a transfer whose claim has parts, and says whether it
// did. A claim of another engine ends.
func (m *Machine) loadClaimedParts(now time.Time, r LoadRequest) bool {
	c := m.fans.claims[r.ID]
	if c == nil {
		return false
	}
	if c.from != r.From || fault.On("found-claim-lost") {
		m.dropClaimFanIn(c, ending{Cancelled, "the decode engine loads it otherwise"})
		return false
	}
	f := &loadFanIn{parts: newParts(r.ID, c.from, c.found), token: r.Token, started: now, blocks: r.Count()}
	delete(m.fans.claims, r.ID)
	m.fans.loads[r.ID] = f
	for i := range f.found {
		m.beginLoad(now, &load{id: f.ids[i], from: f.found[i].From, Selection: r.Cut(m.layout, f.found[i].Regions), prompt: fault.Pick("parts-of-any-prompt", r.Prompt, 0), after: fault.Pick("parts-at-once", r.After, 0)})
	}
	return true
}

// endOthers ends the other parts of a fan-in of which one has failed.
func (m *Machine) endOthers(now time.Time, f *loadFanIn) {
	defer m.because("PartFails")()
	m.endLoadFanIn(now, f, ending{Cancelled, f.sum.reason})
}

// endLoadFanIn ends the parts that have not ended. P is told the same end.
func (m *Machine) endLoadFanIn(now time.Time, f *loadFanIn, end ending) {
	for _, id := range f.ids {
		if ld := m.loads.get(id); ld != nil {
			if fault.On("others-not-fenced") {
				ld.end = end
				m.act(Revoke{ID: id})
				m.reportLoad(ld)
				continue
			}
			m.endLoad(now, ld, end, true)
		}
	}
}

func (m *Machine) dropClaimFanIn(f *claimFanIn, end ending) {
	delete(m.fans.claims, f.id)
	for _, id := range f.ids {
		if c := m.claims.get(id); c != nil {
			m.dropClaim(c, end)
		}
	}
}

// loadEnded takes a load's end to the engine. If the load is a part, the first part that
// fails ends the other parts, also while it is fenced itself. The engine's blocks are free
// when no byte of any part can land.
func (m *Machine) loadEnded(now time.Time, ld *load, over bool) {
	r := ld.report(now)
	if !isPart(r.ID) {
		if over {
			m.act(r)
		}
		return
	}
	f := m.fans.loads[nameOf(r.ID)]
	if f == nil {
		return // the engine has its Report
	}
	failed := f.sum.code == OK && r.Code != OK
	f.sum.decide(&r)
	if failed && !fault.On("others-go-on") {
		m.endOthers(now, f)
	}
	if !over {
		return
	}
	f.sum.add(&r)
	if f.left--; f.left > fault.Pick("first-source-ends", 0, len(f.ids)-1) {
		return
	}
	delete(m.fans.loads, f.id)
	elapsed, s := now.Sub(f.started), &f.sum
	m.act(Report{ID: f.id, Parts: f.ids, Side: SideLoad, Token: f.token, Code: s.code, Reason: s.reason, Blocks: f.blocks,
		Wait: max(elapsed-time.Duration(s.stats.Nanos), 0), Elapsed: elapsed, State: s.state, Peer: s.peer, From: s.from, Stats: s.stats})
}

// claimEnded takes a claim's end. If the claim was lost, the engine is told, and so is P
// unless P knows it. If the claim is a part, the other parts end too, as those of a load do
// when the first fails.
func (m *Machine) claimEnded(now time.Time, c *claim, over bool) {
	r, whole := c.report(now), !isPart(c.id)
	f := m.fans.claims[nameOf(c.id)] // nil: all parts have been dropped already
	switch {
	case whole && over, !whole && f == nil:
		return
	case whole:
		m.dropClaim(c, ending{Cancelled, r.Reason})
	case over:
		if f.left--; f.left == 0 {
			delete(m.fans.claims, f.id)
		}
		return
	default:
		defer m.because("PartFails")()
		r.ID, r.From = f.id, f.from
		if fault.On("lost-twice") {
			m.act(r)
		}
		if fault.On("lost-others-untold") {
			for _, id := range f.ids {
				if c := m.claims.get(id); c != nil {
					m.claimTo(c, claimNone)
				}
			}
		}
		m.dropClaimFanIn(f, ending{Cancelled, r.Reason})
	}
	m.reportLost(r)
}
