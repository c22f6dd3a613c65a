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
	id        TransferID
	from      Target      // the engine that they were found to be ranks of
	found     []FoundPart // the ranks
	ids       []TransferID
	left      int  // parts that have not ended
	beginning bool // the parts are being begun one by one: none is ended for another's failure
}

func newParts(id TransferID, from Target, found []FoundPart) parts {
	p := parts{id: id, from: from, found: found, left: len(found), beginning: true}
	for i := range found {
		p.ids = append(p.ids, found[i].Share.Part(id))
	}
	return p
}

type claimFanIn struct {
	parts
	lost *Report // how the claim ended, while its parts are begun or ended
}

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
	state  string // in which the part ended that the code is from
	peer   AgentID
	from   Target
	wait   time.Duration
	stats  TransferStats
}

// add takes a part's report; the first part that failed decides.
func (s *sum) add(r *Report) {
	if s.code == OK {
		s.code, s.reason, s.state, s.peer, s.from = r.Code, r.Reason, r.State, r.Peer, r.From
	}
	s.wait = max(s.wait, r.Wait)
	s.stats.Bytes += r.Stats.Bytes
	s.stats.Segments += r.Stats.Segments
	s.stats.Nanos = max(s.stats.Nanos, r.Stats.Nanos)
	s.stats.Via = cmp.Or(s.stats.Via, r.Stats.Via)
}

// ResolvedParts answers Resolve if this agent loads from the engine in parts. From then on
// the half is a fan-in of one part for each rank found.
func (m *Machine) ResolvedParts(now time.Time, id TransferID, seq uint64, found []FoundPart) {
	m.event("ResolvedParts")
	if isPart(id) {
		return
	}
	if f := m.farewells.get(id); f != nil && f.seq == seq {
		for i := range found {
			if fault.On("found-not-told") || fault.On("found-first-told") && i > 0 {
				break
			}
			m.act(SendFinish{Peer: found[i].Peer, ID: found[i].Share.Part(id), Code: f.end.code, Reason: f.end.reason})
		}
		m.dropFarewell(f)
	}
	if c := m.claims.get(id); c != nil && c.seq == seq && c.state.lookedUp() {
		m.fanInClaim(now, c, found)
	}
	if ld := m.loads.get(id); ld != nil && ld.seq == seq && ld.state.lookedUp() {
		m.fanInLoad(now, ld, found)
	}
}

func (m *Machine) fanInClaim(now time.Time, c *claim, found []FoundPart) {
	f := &claimFanIn{parts: newParts(c.id, c.from, found)}
	m.forgetClaim(c)
	m.claimFanIns[f.id] = f
	for i := range found {
		m.seq++
		part := *c // what was tried before
		part.id, part.seq, part.from = f.ids[i], m.seq, found[i].From
		m.keepClaim(&part)
		m.resolved(now, part.id, part.seq, found[i].Peer, found[i].Opened, ending{})
	}
	f.beginning = false
	if f.lost != nil {
		m.claimFanInLost(f)
	}
}

func (m *Machine) fanInLoad(now time.Time, ld *load, found []FoundPart) {
	f := &loadFanIn{parts: newParts(ld.id, ld.from, found), token: ld.token, started: ld.started, blocks: ld.Count()}
	m.forgetLoad(ld)
	m.loadFanIns[f.id] = f
	for i := range found {
		m.seq++
		part := *ld // what was claimed or tried before
		part.id, part.seq, part.from, part.Selection = f.ids[i], m.seq, found[i].From, ld.cut(m.layout, found[i].Regions)
		m.keepLoad(&part)
		m.resolved(now, part.id, part.seq, found[i].Peer, found[i].Opened, ending{})
	}
	m.partsBegun(now, f)
}

// loadClaimedParts begins a load of a transfer whose claim has parts, and says whether it
// did. A claim of another engine ends.
func (m *Machine) loadClaimedParts(now time.Time, r LoadRequest) bool {
	c := m.claimFanIns[r.ID]
	if c == nil {
		return false
	}
	if c.from != r.From || fault.On("found-claim-lost") {
		m.dropClaimFanIn(c, ending{Cancelled, "the decode engine loads it otherwise"})
		return false
	}
	f := &loadFanIn{parts: newParts(r.ID, c.from, c.found), token: r.Token, started: now, blocks: r.Count()}
	delete(m.claimFanIns, r.ID)
	m.loadFanIns[r.ID] = f
	for i := range f.found {
		m.beginLoad(now, &load{id: f.ids[i], from: f.found[i].From, Selection: r.cut(m.layout, f.found[i].Regions), prompt: fault.Pick("parts-of-any-prompt", r.Prompt, 0)})
	}
	m.partsBegun(now, f)
	return true
}

// partsBegun ends the other parts if one has failed while they were begun.
func (m *Machine) partsBegun(now time.Time, f *loadFanIn) {
	f.beginning = false
	if f.sum.code != OK {
		m.endOthers(now, f)
	}
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
				m.reportLoad(now, ld)
				continue
			}
			m.endLoad(now, ld, end, true)
		}
	}
}

func (m *Machine) dropClaimFanIn(f *claimFanIn, end ending) {
	for _, id := range f.ids {
		if c := m.claims.get(id); c != nil {
			m.dropClaim(c, end)
		}
	}
}

// loadFails: the first part that fails ends the others, while it is fenced itself.
func (m *Machine) loadFails(now time.Time, ld *load) {
	f := m.loadFanIns[nameOf(ld.id)]
	if !isPart(ld.id) || f.sum.code != OK {
		return
	}
	f.sum.code, f.sum.reason, f.sum.state, f.sum.peer, f.sum.from = ld.end.code, ld.end.reason, ld.endedIn, ld.peer, ld.from
	if !f.beginning && !fault.On("others-go-on") {
		m.endOthers(now, f)
	}
}

// loadReported takes a load's end to the engine. If it is a part's, the engine's
// blocks are free when no byte of any part can land.
func (m *Machine) loadReported(now time.Time, r Report) {
	f := m.loadFanIns[nameOf(r.ID)]
	if !isPart(r.ID) {
		m.act(r)
		return
	}
	failed := f.sum.code == OK && r.Code != OK
	f.left--
	f.sum.add(&r)
	if failed && !f.beginning {
		m.endOthers(now, f)
	}
	if f.left > fault.Pick("first-source-ends", 0, len(f.ids)-1) || m.loadFanIns[f.id] != f {
		return
	}
	delete(m.loadFanIns, f.id)
	elapsed, s := now.Sub(f.started), &f.sum
	m.act(Report{ID: f.id, Parts: f.ids, Side: SideLoad, Token: f.token, Code: s.code, Reason: s.reason, Blocks: f.blocks,
		Wait: max(elapsed-time.Duration(s.stats.Nanos), 0), Elapsed: elapsed, State: s.state, Peer: s.peer, From: s.from, Stats: s.stats})
}

// claimDropped forgets a fan-in when the last of its claims is gone.
func (m *Machine) claimDropped(c *claim) {
	if !isPart(c.id) {
		return
	}
	f := m.claimFanIns[nameOf(c.id)]
	if f.left--; f.left == 0 {
		delete(m.claimFanIns, f.id)
	}
}

// claimLost tells P of the end of a claim, if P does not know it, and tells the engine. If
// the claim is a part, the other parts end too, as those of a load do with the first that
// fails. was is the state in which the claim was lost.
func (m *Machine) claimLost(now time.Time, c *claim, was claimState, end ending) {
	r := Report{ID: c.id, Side: SideClaim, Token: c.token, Code: end.code, Reason: end.reason, Elapsed: now.Sub(c.since), State: was.String(),
		Peer: cmp.Or(c.peer, c.former), From: c.from}
	if !isPart(c.id) {
		m.dropClaim(c, ending{Cancelled, end.reason})
		m.reportLost(r)
		return
	}
	f := m.claimFanIns[nameOf(c.id)]
	if f.lost != nil {
		return // another part was lost first, while they were begun
	}
	r.ID, r.From = f.id, f.from
	if fault.On("lost-twice") {
		m.act(r)
	}
	if f.lost = &r; !f.beginning {
		m.claimFanInLost(f)
	}
}

func (m *Machine) claimFanInLost(f *claimFanIn) {
	defer m.because("PartFails")()
	if fault.On("lost-others-untold") {
		for _, id := range f.ids {
			if c := m.claims.get(id); c != nil {
				m.forgetClaim(c)
				m.claimDropped(c)
			}
		}
	}
	m.dropClaimFanIn(f, ending{Cancelled, f.lost.Reason})
	m.reportLost(*f.lost)
}
