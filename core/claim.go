package core

import (
	"cmp"
	"fmt"
	"time"

	"github.com/kvconn/kvconn/internal/fault"
)

// claimState: doc.go has the table of transitions.
type claimState uint8

const (
	claimNone       claimState = iota // before its begin and after its end
	claimResolving                    // P's agent is being looked up
	claimBackoff                      // no agent was found; it is looked up again at retryAt
	claimAsked                        // P's agent is known; it has not answered the claim
	claimKept                         // P keeps the transfer
	claimRelocating                   // P's agent is gone; the agent in its place is being looked up
	claimVoid                         // P has given the transfer up; a load comes to the same end
)

func (s claimState) String() string {
	return [...]string{"-", "resolving", "backoff", "asked", "kept", "relocating", "void"}[s]
}

// atPeer says whether the claim is renewed at a P agent.
func (s claimState) atPeer() bool { return s == claimAsked || s == claimKept }

// lookedUp says whether the claim waits for Resolved.
func (s claimState) lookedUp() bool { return s == claimResolving || s == claimRelocating }

// claim is D's wish that P keeps a transfer until D has blocks for it.
type claim struct {
	id    TransferID
	seq   uint64
	state claimState
	token uint64
	from  Target
	agents
	since     time.Time  // the engine's word
	until     time.Time  // end of a claim that no load follows
	retryAt   time.Time  // in claimBackoff
	replaceBy time.Time  // Options.ReportClaims, with P gone: when another agent must have been found in its place; zero: no bound
	end       ending     // how the claim ended: in claimVoid, or when it was lost
	lostIn    claimState // the state in which the claim was lost, if that is to be reported
}

// agents are the P agents that a claim or load has been with.
type agents struct {
	peer   AgentID   // the agent it is with; "" while P is looked up
	former AgentID   // the agent before P was looked up once more; "": P was looked up once
	keeper AgentID   // the agent that has answered the claim; no other agent knows the request
	nameBy time.Time // if the agent opened after the request: until when its engine must name the request; zero: the agent was open before
}

// ending is how a half ends.
type ending struct {
	code   Code
	reason string
}

// replaced says why the agent that took another's place cannot have the request; "" if it
// can. younger says that this agent opened after the request.
func (a *agents) replaced(by AgentID, younger bool) string {
	switch {
	case a.keeper != "" && a.keeper != by:
		return fmt.Sprintf("prefill agent %s was replaced by agent %s, and only %s had the request: send the request again", a.keeper, by, a.keeper)
	case a.former != "" && a.former != by && younger && !fault.On("to-the-successor"):
		return fmt.Sprintf("prefill agent %s was replaced by agent %s, which was opened after the request was made: send the request again", a.former, by)
	}
	return ""
}

func (a *agents) noSuccessor() string {
	return fmt.Sprintf("prefill agent %s is gone, and no agent was found in its place: send the request again when its engine is up", a.former)
}

func (m *Machine) stepClaim(now time.Time, r ClaimRequest) error {
	if err := m.checkLoad(r.ID, r.From); err != nil {
		return err
	}
	if m.claimed(r.ID) || m.loading(r.ID) {
		return nil
	}
	if m.namedClaims() >= m.opt.MaxTransfers {
		return m.overload("claims")
	}
	m.count.Claimed++
	m.forgetLost(r.ID)
	m.begin(now)
	m.seq++
	c := &claim{id: r.ID, seq: m.seq, token: r.Token, from: r.From, since: now, until: now.Add(m.opt.Claim)}
	m.claimTo(c, claimResolving, lookUp(c.id, c.seq, c.from, false))
	return nil
}

// claimTo is one row of the table: the claim's next state, and what is to be done.
func (m *Machine) claimTo(c *claim, next claimState, does ...Action) {
	switch claimNone {
	case next:
		m.claims.drop(c.id)
	case c.state:
		m.farewells.drop(c.id)
		m.claims.put(c.id, c)
	}
	m.moved("claim", c.id, c.state, next)
	c.state = next
	m.act(does...)
}

// claimResolved takes the outcome of a claim's look-up.
func (m *Machine) claimResolved(now time.Time, c *claim, peer AgentID, opened time.Time, end ending) {
	switch {
	case end.code == Unreachable && fault.On("claim-dropped"):
		m.dropClaim(c, end)
		return
	case end.code == Unreachable: // P's agent may not be up yet
		m.claimLater(now, c)
		return
	case end.code != OK:
		m.loseClaim(c, end)
		return
	}
	c.replaceBy = time.Time{}
	younger := m.found(now, &c.agents, c.since, peer, opened)
	if reason := c.replaced(peer, younger); reason != "" {
		m.loseClaim(c, ending{PeerLost, reason})
		return
	}
	m.claimTo(c, claimAsked)
	m.watch(now, peer)
	if p := m.peers[peer]; !p.fresh {
		p.fresh = true // a thousand claims that come one by one make two messages
		if !p.asking {
			m.tickPeers(now)
		}
	}
}

// claimLater has a claim wait for its next look-up: no agent was found for it.
func (m *Machine) claimLater(now time.Time, c *claim) {
	m.claimTo(c, claimBackoff)
	c.peer, c.retryAt = "", now.Add(m.opt.PeerTimeout)
}

// claimAgain looks P's agent up again.
func (m *Machine) claimAgain(c *claim) {
	state := claimResolving
	if c.former != "" {
		state = claimRelocating
	}
	c.peer = ""
	m.claimTo(c, state, lookUp(c.id, c.seq, c.from, true))
}

// claimAnswered takes P's answer to a renewal. If P has no place for the claim now,
// the next renewal asks again.
func (m *Machine) claimAnswered(now time.Time, c *claim, a Answer) {
	if kept, end := a.ofClaim(c.id); kept {
		m.claimTo(c, claimKept)
		c.keeper = c.peer
	} else if end.code != OK {
		m.loseClaim(c, end)
	}
}

// ofClaim says whether P keeps a claim, or how the claim has ended. If it says neither, P
// has no place for the claim.
func (a *Answer) ofClaim(id TransferID) (kept bool, end ending) {
	switch a.Status {
	case StatusEnded:
		return false, ending{peerFailure(a.Code), a.Reason}
	case StatusSent:
		return false, ending{Refused, fmt.Sprintf("transfer %q has ended already; each request needs a transfer_id of its own", string(id))}
	case StatusEarly, StatusPrefill, StatusOffered, StatusSending:
		return true, ending{}
	}
	return false, ending{}
}

// claimPeerGone: P's agent does not answer any more. absent: nobody listens there.
func (m *Machine) claimPeerGone(now time.Time, c *claim, heard time.Time, absent bool, reason string) {
	switch {
	case c.state == claimKept || c.former != "" && m.opt.ReportClaims: // as a load would end
		if !absent {
			m.act(SendFinish{Peer: c.peer, ID: c.id, Code: PeerLost, Reason: reason})
		}
		m.loseClaim(c, ending{PeerLost, reason})
	case c.former != "":
		c.former = c.peer
		m.claimLater(now, c)
	default:
		c.former = c.peer
		m.count.Retries++
		m.act(Forget{Peer: c.peer, Gone: true})
		if m.opt.ReportClaims {
			// After a silence hardly any time is left: the claim gets as much as it takes to
			// find and ask an agent.
			c.replaceBy = later(later(heard, c.since).Add(m.patience()), now.Add(m.opt.PeerTimeout/4))
		}
		m.claimAgain(c)
	}
}

// loseClaim ends a claim that cannot succeed any more. Without Options.ReportClaims the
// claim stays, void, for the load that may follow.
func (m *Machine) loseClaim(c *claim, end ending) {
	if m.opt.ReportClaims && !(fault.On("lost-untold") && end.code == PeerLost) {
		m.claimLost(c, end)
	}
	c.end = end
	m.claimTo(c, claimVoid)
}

// claimLost tells that a claim cannot succeed any more.
func (m *Machine) claimLost(c *claim, end ending) {
	c.lostIn, c.end = c.state, end
	m.outcomes = append(m.outcomes, outcome{claim: c})
}

func (c *claim) report(now time.Time) Report {
	return Report{ID: c.id, Side: SideClaim, Token: c.token, Code: c.end.code, Reason: c.end.reason, Elapsed: now.Sub(c.since),
		State: c.lostIn.String(), Peer: cmp.Or(c.peer, c.former), From: c.from}
}

// dropClaim ends a claim. If P is known or being looked up, P is told.
func (m *Machine) dropClaim(c *claim, end ending) {
	switch {
	case c.state.atPeer() && !fault.On("no-finish-of-claims"):
		m.claimTo(c, claimNone, SendFinish{Peer: c.peer, ID: c.id, Code: end.code, Reason: end.reason})
	case c.state.lookedUp() && end.code == Cancelled:
		m.claimTo(c, claimNone)
		m.farewells.put(c.id, &farewell{id: c.id, seq: c.seq, end: end})
	default:
		m.claimTo(c, claimNone)
	}
	m.restPeers()
	m.outcomes = append(m.outcomes, outcome{claim: c, over: true})
}

// tickClaim ends a claim that no load has followed, or whose P is gone without a
// successor. It looks again for a P that was not found.
func (m *Machine) tickClaim(now time.Time, c *claim) {
	switch {
	case c.isLost(now):
		m.claimLost(c, ending{PeerLost, c.noSuccessor()})
	case now.Before(c.until):
		m.claimAgain(c)
	default:
		reason := fmt.Sprintf("the decode engine has claimed transfer %q and not loaded it for %v", string(c.id), m.opt.Claim)
		if m.opt.ReportClaims {
			m.claimLost(c, ending{Expired, reason})
			return
		}
		m.dropClaim(c, ending{Cancelled, reason})
	}
}

// due says whether tickClaim has something to do.
func (c *claim) due(now time.Time) bool {
	return !now.Before(c.until) && !fault.On("claim-for-ever") || c.state == claimBackoff && !now.Before(c.retryAt) || c.isLost(now)
}

// isLost: no agent has taken the place of the agent that the claim was for.
func (c *claim) isLost(now time.Time) bool {
	return !c.replaceBy.IsZero() && !now.Before(c.replaceBy)
}
