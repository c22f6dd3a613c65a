package core

import (
	"strconv"
	"time"
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

// Target names the prefill engine that a load is from, or, in a part, a rank of it.
type Target struct {
	Bootstrap      string // as the router gave it, "http://host:port"
	EngineID       string
	DPRank         int // -1: whichever has that EngineID
	TPRank, PPRank int // of a part
	// Engine, in a part, is how many ranks the engine must have; zero: it is not
	// compared.
	Engine Ranks
}

// OfferRequest is the engine's word that blocks hold a transfer. Of its Selection only
// First and Blocks count. P has no blocks before First.
type OfferRequest struct {
	ID TransferID
	Selection
	Token  uint64 // given back in the Report
	Prompt uint64 // fingerprint of the prompt that the blocks are the cache of; 0: not said
	After  Moment // from which on the blocks hold the transfer; 0: they hold it
}

// ClaimRequest is the engine's word that it knows a request and will load the
// transfer when it has blocks for it.
type ClaimRequest struct {
	ID    TransferID
	From  Target
	Token uint64 // given back in the Report, if there is one
}

// LoadRequest is the engine's order to put a transfer into its blocks. The machine finds
// out which ranks of the prefill engine have it. A Selection without blocks only tells P
// that D needs nothing.
type LoadRequest struct {
	ID   TransferID
	From Target
	Selection
	Token  uint64
	Prompt uint64 // fingerprint of the prompt that it is to be the cache of; 0: not said. P refuses a load of another prompt
	After  Moment // from which on the blocks may be written, since nothing uses their old content any more; 0: they may be written
}

// FoundPart is one rank of a prefill engine that this agent loads from, where the transfer
// has several parts.
type FoundPart struct {
	From    Target // that rank
	Share   Share
	Regions []uint32 // that are loaded from it, ascending; none: D needs nothing of it
	Peer    AgentID
	Opened  time.Time // as of Machine.Resolved
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

// LoadMessage is D's load as P's machine sees it.
type LoadMessage struct {
	ID        TransferID
	Peer      AgentID
	Grant     []byte
	Selection        // of D's blocks and regions
	Prompt    uint64 // as of LoadRequest
	Lease     time.Duration
	Match     *Match // of this agent's caches with D's; nil: they are alike
}

// Action is an order of a Machine to its user. The concrete types follow.
type Action interface{ action() }

type (
	// Resolve: find the target and make it known. Answer with Resolved or, if the half has
	// several parts, with ResolvedParts. Fresh says that the remembered agent of this target
	// was found to be wrong. Seq comes back with the answer: an id may be in use again by
	// then.
	Resolve struct {
		ID    TransferID
		Seq   uint64
		From  Target
		Part  bool // From is a rank, and has no parts
		Fresh bool
	}
	// Expect: arm the transport for these blocks; answer with Expecting.
	Expect struct {
		ID   TransferID
		Peer AgentID
		Selection
	}
	// SendLoad: send the load to P. If no answer comes, send it again, for less than
	// Options.PeerTimeout. Answer with LoadAnswered.
	SendLoad struct {
		ID    TransferID
		Seq   uint64
		Peer  AgentID
		Grant []byte
		Selection
		Prompt uint64
		Lease  time.Duration
	}
	// SendRenew: renew these transfers at one P: those of which it has a load, and those
	// that are only claimed. Answer with RenewReplied.
	SendRenew struct {
		Peer          AgentID
		Loads, Claims []TransferID
		More          bool // of a part of the answer: others of the same renewal follow
	}
	// SendProbe: ask a D whose connections broke whether it lives; answer with
	// ProbeReplied.
	SendProbe struct{ Peer AgentID }
	// SendFinish: tell the peer how a transfer ended here. There is no answer. If the
	// message is lost, the peer learns the end by a renewal or a lease.
	SendFinish struct {
		Peer   AgentID
		ID     TransferID
		Code   Code
		Reason string
	}
	// SendRestart: tell D that P has withdrawn the blocks of the load whose grant has this
	// digest. There is no answer, as with SendFinish.
	SendRestart struct {
		Peer   AgentID
		ID     TransferID
		Digest string
	}
	// Forget: look the peer's target up again next time. Gone says that nobody listens
	// there, so that nothing more need be asked of it.
	Forget struct {
		Peer AgentID
		Gone bool
	}
	// Revoke: fence a load's blocks; answer with Revoked.
	Revoke struct{ ID TransferID }
	// Write: send blocks; the transport answers with Written. Src has the blocks that hold
	// what Dst, the load's Selection, asks for. Begin and End are as of Match.PairsBetween.
	// While there is an End, Writes that extend this one follow.
	Write struct {
		ID    TransferID
		Peer  AgentID
		Grant []byte
		Src   Selection
		Dst   Selection
		Match *Match

		Begin, End []uint32
		Extends    bool // it extends a write that has begun, unless that has ended
	}
	// Await: say when this moment has passed, by MomentPassed, or that it cannot pass any
	// more, by MomentFailed. It is asked once for as long as something waits for it. If
	// nothing does any more, the answer is of no account.
	Await struct{ Moment Moment }
	// StopWrite: end a Write early; its Written still comes.
	StopWrite struct{ ID TransferID }
	// Report: tell the engine, once, how its half ended; its blocks are free.
	Report struct {
		ID        TransferID
		Parts     []TransferID // as the transports knew them, if it had any
		Side      Side
		Transport string // that moved the bytes; set by the user of the Machine
		Token     uint64
		Code      Code
		Reason    string
		Blocks    int           // of all groups; of a demand: the first block of group 0 that is demanded
		Wait      time.Duration // of a load: Elapsed without Stats.Nanos; of an offer: until the sending begins
		Elapsed   time.Duration // from the engine's call to this report
		State     string        // in which the half ended: "waiting", "sending" …
		Peer      AgentID       // the other side's agent, if it was known
		From      Target        // of a load
		Stats     TransferStats
	}
)

func (Resolve) action()     {}
func (Expect) action()      {}
func (SendLoad) action()    {}
func (Forget) action()      {}
func (SendRenew) action()   {}
func (SendProbe) action()   {}
func (SendFinish) action()  {}
func (SendRestart) action() {}
func (Revoke) action()      {}
func (Write) action()       {}
func (Await) action()       {}
func (StopWrite) action()   {}
func (Report) action()      {}
