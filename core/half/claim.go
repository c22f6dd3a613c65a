// D claims a transfer as long as its engine has no blocks for it: P is looked up, and is asked to keep the transfer.

package half

import (
	"cmp"
	"fmt"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
)

// claimState: doc.go has the table of transitions.
type claimState uint8

const (
	claimNone         claimState = iota // before its begin and after its end
	claimResolving                      // P's agent is being looked up
	claimBackoff                        // no agent was found; it is looked up again at retryAt
	claimAsked                          // P's agent is known; it has not answered the claim
	claimKept                           // P keeps the transfer
	claimRelocating                     // P's agent is gone; the agent in its place is being looked up
	claimBackoffAgain                   // no agent was found in its place; one is looked up again at retryAt
	claimAskedAgain                     // the agent in its place is known; it has not answered the claim
	claimVoid                           // P has given the transfer up; a load comes to the same end
)

func (s claimState) String() string {
	return [...]string{"-", "resolving", "backoff", "asked", "kept", "relocating", "backoff-again", "asked-again", "void"}[s]
}

// atPeer says whether the claim is renewed at a P agent.
func (s claimState) atPeer() bool { return s.unanswered() || s == claimKept }

// unanswered says whether the P agent that the claim is with has not answered it.
func (s claimState) unanswered() bool { return s == claimAsked || s == claimAskedAgain }

// backsOff says whether the claim waits for its next look-up.
func (s claimState) backsOff() bool { return s == claimBackoff || s == claimBackoffAgain }

// lookedUp says whether the claim waits for Resolved.
func (s claimState) lookedUp() bool { return s == claimResolving || s == claimRelocating }

// claim is D's wish that P keeps a transfer until D has blocks for it.
type claim struct {
	asked
	state     claimState
	until     time.Time  // end of a claim that no load follows
	retryAt   time.Time  // in claimBackoff and claimBackoffAgain
	replaceBy time.Time  // Options.ReportClaims, with P gone: when another agent must have been found in its place; zero: no bound
	lostIn    claimState // the state in which the claim was lost, if that is to be reported
}

// Ending is how a half ends.
type Ending struct {
	Code   core.Code
	Reason string
}

// Claim begins a claim.
func (h *Set) Claim(now time.Time, r core.ClaimRequest) {
	h.Count.Claimed++
	h.begin(now)
	h.seq++
	c := &claim{asked: asked{id: ID(r.ID), seq: h.seq, from: r.From, token: r.Token, since: now}, until: now.Add(h.opt.Claim)}
	h.claimTo(c, Always, claimResolving, c.lookUp(false))
}

// claimTo performs one row of the table, that of the claim's state, of the event and of the guard: it sets the claim's next state,
// and wants the row's actions.
func (h *Set) claimTo(c *claim, guard Guard, next claimState, does ...core.Action) {
	switch claimNone {
	case next:
		h.claims.drop(c.id)
	case c.state:
		h.voidPendingFinish(c.id)
		h.claims.put(c.id, c)
	}
	h.taken.row("claim", c.id, guard, c.state, next, does)
	c.state = next
	h.actions = append(h.actions, does...)
}

func (h *Set) claimResolved(now time.Time, c *claim, e core.Resolved) {
	switch {
	case e.Code == core.Unreachable && fault.On("claim-dropped"):
		h.DropClaim(c.id, whenNotFound, Ending{e.Code, e.Reason})
		return
	case e.Code == core.Unreachable: // P's agent may not be up yet
		h.claimLater(now, c, whenNotFound)
		return
	case e.Code != core.OK:
		h.loseClaim(c, whenUnusable, Ending{e.Code, e.Reason})
		return
	}
	c.replaceBy = time.Time{}
	if reason := h.found(now, &c.asked, e); reason != "" {
		h.loseClaim(c, whenReplaced, Ending{core.PeerLost, reason})
		return
	}
	next := claimAsked
	if c.state == claimRelocating {
		next = claimAskedAgain
	}
	h.claimTo(c, whenFound, next)
	if p := h.watch(now, c.peer); !p.state.fresh() {
		h.peerTo(c.peer, p, Always, p.state.freshened()) // a thousand claims that come one by one make two messages
		if !p.state.asking() {
			h.tickPeers(now)
		}
	}
}

// claimLater has a claim wait for its next look-up: no agent was found for it.
func (h *Set) claimLater(now time.Time, c *claim, guard Guard) {
	next := claimBackoffAgain
	if c.state == claimResolving {
		next = claimBackoff
	}
	h.claimTo(c, guard, next)
	c.peer, c.retryAt = "", now.Add(h.opt.PeerTimeout)
}

// claimAnswered handles P's answer to the renewal of a claim, or of a load that P keeps like a claim. If P has no place
// for the claim now, the next renewal asks again.
func (h *Set) claimAnswered(now time.Time, peer core.AgentID, id ID, a core.Answer) {
	var end Ending
	switch a.Status {
	case core.StatusEnded:
		end = Ending{peerFailure(a.Code), a.Reason}
	case core.StatusSent:
		end = Ending{core.Refused, fmt.Sprintf("transfer %q has ended already; each request needs a transfer_id of its own", h.name(id))}
	case core.StatusEarly, core.StatusPrefill, core.StatusOffered, core.StatusSending: // P keeps it
	default:
		return
	}
	c, ld := h.claims.byID[id], h.loads.byID[id]
	switch {
	case c != nil && (c.peer != peer || !c.state.atPeer()), ld != nil && (ld.peer != peer || !ld.state.kept()): // it is old
	case c != nil && end.Code != core.OK:
		h.loseClaim(c, whenOver, end)
	case c != nil:
		h.claimTo(c, whenKept, claimKept)
		c.confirmedBy = c.peer
	case ld != nil && end.Code != core.OK:
		h.endLoad(now, ld, whenOver, end, false)
	case ld != nil:
		ld.confirmedBy = ld.peer
	}
}

// claimPeerGone: P's agent does not answer any more. absent: nobody listens there.
func (h *Set) claimPeerGone(now time.Time, c *claim, heard time.Time, absent bool, reason string) {
	end := Ending{core.PeerLost, reason}
	switch {
	case c.state == claimAsked:
		h.Count.Retries++
		if h.opt.ReportClaims {
			// After a silence hardly any time is left: the claim gets as much as it takes to
			// find and ask an agent.
			c.replaceBy = later(later(heard, c.since).Add(h.patience()), now.Add(h.opt.PeerTimeout/4))
		}
		c.previousPeer, c.peer = c.peer, ""
		h.claimTo(c, Always, claimRelocating, core.Forget{Peer: c.previousPeer, Gone: true}, c.lookUp(true))
	case c.state == claimAskedAgain && !h.opt.ReportClaims:
		c.previousPeer = c.peer
		if fault.On("claim-looks-at-once") {
			c.peer = ""
			h.claimTo(c, whenRetried, claimRelocating, c.lookUp(true))
			return
		}
		h.claimLater(now, c, whenRetried)
	case absent: // as a load would end
		h.loseClaim(c, whenAbsent, end)
	case fault.On("silent-untold"):
		h.loseClaim(c, whenSilent, end)
	default:
		h.loseClaim(c, whenSilent, end, core.SendFinish{Peer: c.peer, ID: core.TransferID(c.id), Code: core.PeerLost, Reason: reason})
	}
}

// loseClaim ends a claim that cannot succeed any more. Unless who stands above drops it, the claim stays, void, for the
// load that may follow.
func (h *Set) loseClaim(c *claim, guard Guard, end Ending, does ...core.Action) {
	h.claimLost(c, guard, claimVoid, end, does...)
}

// claimLost performs a row that tells that a claim cannot succeed any more.
func (h *Set) claimLost(c *claim, guard Guard, next claimState, end Ending, does ...core.Action) {
	c.lostIn, c.end = c.state, end
	h.claimTo(c, guard, next, does...)
	h.tell("claim", c.id, outcome{claim: c})
}

func (c *claim) report(now time.Time) core.Report {
	return core.Report{ID: core.TransferID(c.id), Side: core.SideClaim, Token: c.token, Code: c.end.Code, Reason: c.end.Reason, Elapsed: now.Sub(c.since),
		State: c.lostIn.String(), Peer: cmp.Or(c.peer, c.previousPeer), From: c.from}
}

// DropClaim ends a claim, and says whether there was one. If P is known or being looked up, P is told.
func (h *Set) DropClaim(id ID, guard Guard, end Ending) bool {
	c := h.claims.byID[id]
	if c == nil {
		return false
	}
	was, finish := c.state, core.SendFinish{Peer: c.peer, ID: core.TransferID(c.id), Code: end.Code, Reason: end.Reason}
	if was.atPeer() && fault.On("claims-finished-twice") {
		h.claimTo(c, guard, claimNone, finish, finish)
	} else if was.atPeer() && !fault.On("no-finish-of-claims") && !(fault.On("lost-others-untold") && h.taken.event == "PartFails") {
		h.claimTo(c, guard, claimNone, finish)
	} else {
		h.claimTo(c, guard, claimNone)
	}
	h.tell("claim", id, outcome{claim: c, over: true})
	if was.lookedUp() && end.Code == core.Cancelled {
		h.keepFinish("claim", c.asked, end)
	}
	h.restPeers()
	return true
}

// tickClaim ends a claim that no load has followed, or whose P is gone without a
// successor. It looks again for a P that was not found.
func (h *Set) tickClaim(now time.Time, c *claim) {
	switch {
	case passed(now, c.replaceBy):
		h.claimLost(c, whenNoSuccessor, c.state, Ending{core.PeerLost, c.noSuccessor()})
	case now.Before(c.until):
		next := claimResolving
		if c.state == claimBackoffAgain {
			next = claimRelocating
		}
		h.claimTo(c, whenDue, next, c.lookUp(true))
	default:
		reason := fmt.Sprintf("the decode engine has claimed transfer %q and not loaded it for %v", h.name(c.id), h.opt.Claim)
		if h.opt.ReportClaims {
			h.claimLost(c, whenTold, c.state, Ending{core.Expired, reason})
			return
		}
		h.DropClaim(c.id, whenExpired, Ending{core.Cancelled, reason})
	}
}

// due says whether tickClaim has something to do.
func (c *claim) due(now time.Time) bool {
	return !now.Before(c.until) && !fault.On("claim-for-ever") || c.state.backsOff() && !now.Before(c.retryAt) || passed(now, c.replaceBy)
}
