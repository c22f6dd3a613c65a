// The words that events and actions have in common: how a half ended, which side it is on, what P answers, under which
// account a peer counts.

package core

import (
	"strconv"
	"time"

	"github.com/kvconn/kvconn/kv"
)

// Code says how a half of a transfer ended; it is the code of the C API too.
type Code int

// The codes of a transfer's end. 0 is success; calls use the lower numbers
// (package status of the C header), transfers those from 20 on.
const (
	OK            Code = 0
	Cancelled     Code = 20 // this side cancelled
	PeerCancelled Code = 21 // the other side cancelled
	PeerLost      Code = 22 // the other side is gone, stopped or was restarted
	NotOffered    Code = 23 // nobody offered the transfer in time
	Expired       Code = 24 // nobody loaded the offer while its lease ran
	Refused       Code = 25 // the other side refused: limits, layouts, a second load
	Unreachable   Code = 26 // the bootstrap address or the registry entry was not found
	Failed        Code = 27 // the bytes could not be moved
	Closed        Code = 28 // the agent was closed
)

var codeNames = map[Code]string{
	OK: "ok", Cancelled: "cancelled", PeerCancelled: "peer-cancelled", PeerLost: "peer-lost", NotOffered: "not-offered",
	Expired: "expired", Refused: "refused", Unreachable: "unreachable", Failed: "failed", Closed: "closed",
}

func (c Code) String() string {
	if s, ok := codeNames[c]; ok {
		return s
	}
	return "code-" + strconv.Itoa(int(c))
}

// AtPeer returns the code by which one side's end is told on the other side. It also turns a
// number from the network that is no code into one.
func (c Code) AtPeer() Code {
	switch _, known := codeNames[c]; {
	case c == Cancelled:
		return PeerCancelled
	case c == Closed:
		return PeerLost
	case !known:
		return Failed
	}
	return c
}

// Target names the prefill engine that a load is from. In a part it names one rank of that engine.
type Target struct {
	Bootstrap      string // as the router gave it, "http://host:port"
	EngineID       string
	DPRank         int // -1: whichever has that EngineID
	TPRank, PPRank int // only in a part
	// Engine, only in a part, is how many ranks the engine must have. If it is zero, nobody
	// compares it.
	Engine kv.Ranks
}

// FoundPart is one rank of a prefill engine that this agent loads from, if the transfer
// has several parts.
type FoundPart struct {
	From    Target // that rank
	Share   kv.Share
	Regions []uint32 // the regions to load from it, ascending; none: D needs nothing of it
	Peer    AgentID
	Opened  time.Time // as in Resolved
}

// Side tells the halves of a transfer apart.
type Side uint8

// The two sides.
const (
	SideLoad   Side = 1
	SideOffer  Side = 2
	SideDemand Side = 3 // no half: a D demands an announced transfer, or the transfer needs no work; see Options.ReportDemands
	SideClaim  Side = 4 // no half: a claim cannot succeed any more; see Options.ReportClaims
)

func (s Side) String() string { return [...]string{"", "load", "offer", "demand", "claim"}[s] }

// Status is P's answer to a renewal, per transfer.
type Status uint8

// The statuses of a Renew reply.
const (
	StatusUnknown Status = 0 // never heard of, forgotten, or another agent's
	StatusEarly   Status = 1 // D's claim or load is here, P's engine has not named the request yet
	StatusPrefill Status = 2 // P's engine works on it
	StatusOffered Status = 3 // blocks hold it
	StatusSending Status = 4
	StatusSent    Status = 5 // ended well
	StatusEnded   Status = 6 // ended otherwise, as Code and Reason say
	StatusRestart Status = 7 // P has withdrawn the blocks that it had begun to send; D is to load anew. Reason is the void grant's digest
)

// Answer is P's word on one transfer of a renewal.
type Answer struct {
	Status Status
	Code   Code   // with StatusEnded
	Reason string // with StatusEnded and StatusRestart
}

// LoadAnswer is P's word on a load.
type LoadAnswer uint8

// The answers to a load. Only LoadRefused comes with a Code other than OK.
const (
	LoadAccepted LoadAnswer = iota
	LoadRefused             // as Code and Reason say; PeerLost: no answer came
	LoadSayHello            // P does not know this agent: say hello first
	LoadAbsent              // nobody listens at P's address: the agent was restarted, or is gone
)

func (a LoadAnswer) String() string {
	return [...]string{"accepted", "refused", "say-hello", "absent"}[a]
}

// Account is what a D agent's places count under: see package natsbus, which knows what an agent has proved. Agents cost nothing
// to make, so those of one account share what the account gets. The empty Account is one like any other.
type Account string

// Moment is a point in the work that the engine has queued on a device; the engine's agent
// numbers the moments. A moment passes when all work that was queued before it is done. A machine
// knows nothing else of a moment, and no order of moments. Moment 0 has always passed.
type Moment uint64
