package core

import (
	"fmt"
	"slices"
	"time"

	"github.com/kvconn/kvconn/internal/fault"
)

// peer is a P agent that claims and loads wait for. One message renews them all
// and tells at the same time that P lives and knows them.
type peer struct {
	heard  time.Time // last sign of life
	next   time.Time // next renewal of all
	fresh  bool      // there are claims that P has not heard of
	asking bool      // a renewal is under way
}

// probe is a D agent whose connections broke: P asks whether it lives.
type probe struct {
	since  time.Time // its connections broke, or it was heard of
	absent int       // answers in a row that nobody listens as it, one for each tick
	asking bool
}

// renewInterval leaves room for three renewals within either bound.
func (m *Machine) renewInterval() time.Duration {
	return min(m.opt.PeerTimeout, m.opt.Lease) / 3
}

// patience is the silence after which a peer counts as gone, so that its loads
// are reported within PeerTimeout: two ticks less.
func (m *Machine) patience() time.Duration {
	return fault.Pick("gone-unnoticed", m.opt.PeerTimeout-2*TickInterval, 1000*m.opt.PeerTimeout)
}

// noticePause makes up for a time in which this process did not run: it was
// stopped, or its machine slept. Nobody was silent then, and no lease ran.
func (m *Machine) noticePause(now time.Time) {
	gap := now.Sub(m.awake)
	m.awake = now
	if gap < fault.Pick("pause-is-silence", maxGap, 1000*maxGap) {
		return
	}
	gap -= TickInterval // who is starved and not stopped still sees a death
	// Not further than if it began now: some of it may have, after the pause.
	for _, p := range m.peers {
		p.heard = earlier(p.heard.Add(gap), now)
	}
	for _, p := range m.probes {
		p.since = earlier(p.since.Add(gap), now)
	}
	for _, ld := range m.loads {
		if !ld.claim {
			ld.until = earlier(ld.until.Add(gap), now.Add(m.patience()))
		}
		for _, by := range []*time.Time{&ld.nameBy, &ld.lostBy} {
			if !by.IsZero() {
				*by = earlier(by.Add(gap), now.Add(m.patience()))
			}
		}
	}
	for _, of := range m.offers {
		if !of.deadline.IsZero() {
			most := m.lease(of)
			if of.state == offerEarly {
				most = m.opt.EarlyLoad
			}
			of.deadline = earlier(of.deadline.Add(gap), now.Add(most))
		}
	}
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

func later(a, b time.Time) time.Time {
	if a.Before(b) {
		return b
	}
	return a
}

// maxGap between two ticks is what a busy machine explains.
const maxGap = 10 * TickInterval

func (m *Machine) watch(now time.Time, id AgentID) {
	if m.peers[id] == nil {
		m.peers[id] = &peer{heard: now, next: now.Add(m.renewInterval())}
	}
}

func (m *Machine) tickPeers(now time.Time) {
	m.noticePause(now) // before anyone counts as silent: events come before the first tick
	if len(m.peers) == 0 {
		return
	}
	renewals := make(map[AgentID]*SendRenew, len(m.peers))
	used := make(map[AgentID]bool, len(m.peers))
	due := func(id AgentID) bool { return !now.Before(m.peers[id].next) }
	of := func(id AgentID) *SendRenew {
		r := renewals[id]
		if r == nil {
			r = &SendRenew{Peer: id}
			renewals[id] = r
		}
		return r
	}
	for id, ld := range m.loads {
		used[ld.peer] = true
		switch {
		case ld.state == loadWaiting:
			r := of(ld.peer)
			r.Loads = append(r.Loads, id)
		case ld.state == loadClaimed && ld.code == OK:
			r := of(ld.peer)
			if ld.known == "" || due(ld.peer) && !fault.On("claim-not-renewed") {
				r.Claims = append(r.Claims, id)
			}
		}
	}
	for _, id := range sortedKeys(m.peers) {
		p, r := m.peers[id], renewals[id]
		switch {
		case p == nil: // the last load went with another peer
		case !used[id]:
			if !p.asking {
				delete(m.peers, id)
			}
		case r == nil:
			p.heard = now // SendLoad has a bound of its own
		case now.Sub(p.heard) >= m.patience() && !fault.On("silence-unasked"):
			m.peerGone(now, id, false, "no answer")
		case p.asking || !due(id) && !p.fresh:
		default:
			if due(id) {
				p.next = now.Add(m.renewInterval())
			} else {
				r.Loads = nil // only what is new, and at once
			}
			p.fresh = false
			if len(r.Loads)+len(r.Claims) == 0 {
				continue // loaded or cancelled meanwhile
			}
			p.asking = true
			slices.Sort(r.Loads) // one order, so that a run can be told again
			slices.Sort(r.Claims)
			if fault.On("never-renews") {
				p.asking, p.heard = false, now
				continue
			}
			m.act(*r)
		}
	}
}

// RenewReplied answers SendRenew. absent says that nobody listens at the peer's
// address; err that no answer came.
func (m *Machine) RenewReplied(now time.Time, r SendRenew, answers []Answer, absent bool, err error) {
	p := m.peers[r.Peer]
	if p == nil {
		return
	}
	p.asking = false
	m.noticePause(now)
	if err == nil && !absent && len(answers) != len(r.Loads)+len(r.Claims) {
		err = fmt.Errorf("malformed reply: %d answers for %d transfers", len(answers), len(r.Loads)+len(r.Claims))
	}
	if err != nil || absent {
		if absent || now.Sub(p.heard) >= m.patience() {
			m.peerGone(now, r.Peer, absent, fmt.Sprint(err))
			return
		}
		p.next = now // with the next tick
		return
	}
	p.heard = now
	for i, id := range r.Loads {
		if ld := m.loads[id]; ld != nil && ld.peer == r.Peer && ld.state == loadWaiting {
			m.answered(now, ld, answers[i])
		}
	}
	for i, id := range r.Claims {
		if ld := m.loads[id]; ld != nil && ld.peer == r.Peer && ld.state == loadClaimed {
			m.claimAnswered(now, ld, answers[len(r.Loads)+i])
		}
	}
	if p.fresh || !now.Before(p.next) { // they came while this was under way
		m.tickPeers(now)
	}
}

func (m *Machine) answered(now time.Time, ld *load, a Answer) {
	switch a.Status {
	case StatusEarly:
		if !ld.nameBy.IsZero() && !now.Before(ld.nameBy) { // a successor of the one that had the request
			m.endLoad(now, ld, NotOffered, fmt.Sprintf("the engine of prefill agent %s, which was opened after this load was made, has not named transfer %q", ld.peer, string(ld.id)), true)
		}
	case StatusUnknown:
		m.endLoad(now, ld, PeerLost, fmt.Sprintf("prefill agent %s does not know transfer %q any more", ld.peer, string(ld.id)), false)
	case StatusEnded:
		if a.Code == StartOver {
			m.loadAnew(ld, a.Reason)
			return
		}
		m.endLoad(now, ld, peerCode(a.Code), a.Reason, false)
	case StatusSent:
		if fault.On("word-alone") {
			m.endLoad(now, ld, OK, "", false)
			return
		}
		// The last bytes may be on their way; not for several rounds.
		if ld.sent++; ld.sent >= 3 {
			m.endLoad(now, ld, Failed, fmt.Sprintf("prefill agent %s has sent transfer %q, but bytes are missing", ld.peer, string(ld.id)), false)
		}
	}
}

// claimAnswered: a claim that P has no place for now is asked again at the next
// renewal.
func (m *Machine) claimAnswered(now time.Time, ld *load, a Answer) {
	switch a.Status {
	case StatusUnknown:
	case StatusEnded:
		m.loseClaim(now, ld, peerCode(a.Code), a.Reason)
	case StatusSent:
		m.loseClaim(now, ld, Refused, fmt.Sprintf("transfer %q has ended already; each request needs a transfer_id of its own", string(ld.id)))
	default:
		ld.known = ld.peer
	}
}

// tickLoads ends claims that no load has followed, looks again for the P of those
// that were made before it could be found, and ends loads whose P is gone and
// has no successor.
func (m *Machine) tickLoads(now time.Time) {
	var due []TransferID
	for id, ld := range m.loads {
		late := !now.Before(ld.until)
		if ld.claim && (late && !fault.On("claim-for-ever") || !ld.retryAt.IsZero() && !now.Before(ld.retryAt)) || ld.isLost(now) ||
			late && ld.tried != "" && ld.state == loadResolving && ld.owes() && !fault.On("waits-for-successor") {
			due = append(due, id)
		}
	}
	slices.Sort(due)
	for _, id := range due {
		switch ld := m.loads[id]; {
		case ld == nil, ld.given: // another part of the same load took it along
		case ld.isLost(now):
			m.tellLost(now, ld, ld.state, PeerLost, ld.noSuccessor())
		case now.Before(ld.until):
			m.resolveAgain(ld)
		case !ld.claim:
			m.endLoad(now, ld, PeerLost, ld.noSuccessor(), false)
		default:
			reason := fmt.Sprintf("the decode engine has claimed transfer %q and not loaded it for %v", string(id), m.opt.Claim)
			if m.opt.ReportClaims {
				m.tellLost(now, ld, ld.state, Expired, reason)
				continue
			}
			m.endLoad(now, ld, Cancelled, reason, true)
		}
	}
}

// isLost: nobody has taken the place of the agent that a claim was for.
func (ld *load) isLost(now time.Time) bool {
	return ld.claim && !ld.lostBy.IsZero() && !now.Before(ld.lostBy)
}

func (ld *load) noSuccessor() string {
	return fmt.Sprintf("no agent was found in the place of prefill agent %s, which the request was for", ld.tried)
}

// PeerDown takes a transport's word that the way to a peer broke. Whether the
// peer is gone too is asked at once.
func (m *Machine) PeerDown(now time.Time, id AgentID) {
	if p := m.peers[id]; p != nil {
		p.next = now
		m.tickPeers(now)
	}
	if m.probes[id] == nil && len(m.offersOf(id)) > 0 && !fault.On("no-probe") {
		m.probes[id] = &probe{since: now, asking: true}
		m.act(SendProbe{Peer: id})
	}
}

// peerGone ends what waits for a P agent. absent: nobody listens there; else it
// may live and be told when it listens again.
func (m *Machine) peerGone(now time.Time, id AgentID, absent bool, cause string) {
	heard := m.peers[id].heard
	silent := now.Sub(heard).Round(time.Millisecond)
	reason := fmt.Sprintf("prefill agent %s is gone: silent for %v: %s", id, silent, cause)
	delete(m.peers, id)
	m.act(Forget{Peer: id, Gone: true})
	for _, tid := range sortedKeys(m.loads) {
		ld := m.loads[tid]
		switch {
		case ld == nil || ld.peer != id:
		case ld.state == loadWaiting:
			m.endLoad(now, ld, PeerLost, reason, !absent)
		case ld.state != loadClaimed || ld.code != OK:
			// What has not been asked yet learns it by its own SendLoad, and may find
			// the agent that took the place.
		case ld.known != "" || ld.tried != "" && m.opt.ReportClaims: // as a load would end
			if !absent {
				m.act(SendFinish{Peer: id, ID: tid, Code: PeerLost, Reason: reason})
			}
			if fault.On("lost-untold") {
				ld.code, ld.reason = PeerLost, reason
				continue
			}
			m.loseClaim(now, ld, PeerLost, reason)
		case ld.tried != "":
			ld.tried = id
			m.resolveLater(now, ld)
		default:
			m.lookAgain(now, ld, later(heard, ld.since))
		}
	}
}

// offersOf lists what P keeps for a D agent.
func (m *Machine) offersOf(id AgentID) (ids []TransferID) {
	for tid, of := range m.offers {
		if of.peer == id {
			ids = append(ids, tid)
		}
	}
	slices.Sort(ids)
	return ids
}

// tickProbes asks again those that have not answered. Without any answer the
// lease decides.
func (m *Machine) tickProbes(now time.Time) {
	for _, id := range sortedKeys(m.probes) {
		switch p := m.probes[id]; {
		case p.asking:
		case now.Sub(p.since) >= 2*m.opt.PeerTimeout, len(m.offersOf(id)) == 0:
			delete(m.probes, id)
		default:
			p.asking = true
			m.act(SendProbe{Peer: id})
		}
	}
}

// ProbeReplied answers SendProbe. absent says that nobody listens at the peer's
// address, which one that lives and connects again does not either for a moment,
// or, with away, for as long as it takes to find another server; err that no
// answer came.
func (m *Machine) ProbeReplied(now time.Time, id AgentID, absent, away bool, err error) {
	p := m.probes[id]
	if p == nil {
		return
	}
	p.asking = false // again with the next tick
	switch {
	case absent:
		// The first was asked between two ticks.
		if p.absent++; p.absent < fault.Pick("gone-at-once", 2+int(m.absence(away)/TickInterval), 1) {
			return
		}
		delete(m.probes, id)
		for _, tid := range m.offersOf(id) {
			m.endOffer(now, m.offers[tid], PeerLost, fmt.Sprintf("decode agent %s is gone", id), false)
		}
	case err != nil:
		p.absent = 0 // somebody listens, most likely
	default:
		delete(m.probes, id)
	}
}

// absence is for how long nobody must have listened as a D before it counts as
// gone: the time in which its link comes back, with much to spare. It is counted in
// ticks, since nobody can connect to a process that does not run.
func (m *Machine) absence(away bool) time.Duration {
	if away || fault.On("gone-late") {
		return m.patience()
	}
	return m.opt.PeerTimeout / 3
}
