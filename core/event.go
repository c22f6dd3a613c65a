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

// SayHello answers a load of an agent that P does not know: it must say hello
// first. It never ends a transfer.
const SayHello Code = 99

// StartOver ends no transfer either: P has taken back what it had begun to send, and
// D is to load again. The reason names the load's grant.
const StartOver Code = 98

var codeNames = map[Code]string{
	OK: "ok", Cancelled: "cancelled", PeerCancelled: "peer-cancelled", PeerLost: "peer-lost", NotOffered: "not-offered",
	Expired: "expired", Refused: "refused", Unreachable: "unreachable", Failed: "failed", Closed: "closed", SayHello: "say-hello", StartOver: "start-over",
}

func (c Code) String() string {
	if s, ok := codeNames[c]; ok {
		return s
	}
	return "code-" + strconv.Itoa(int(c))
}

// Target names the prefill engine that a load is from; in parts, a rank of it.
type Target struct {
	Bootstrap      string // as the router gave it, "http://host:port"
	EngineID       string
	DPRank         int // -1: whichever has that EngineID
	TPRank, PPRank int // of a part
	// Engine, in a part, is how many ranks the engine must have; zero: it is not
	// compared.
	Engine Ranks
}

// OfferRequest is the engine's word that blocks hold a transfer. Blocks has one
// list per KV cache group, in the prompt's order.
type OfferRequest struct {
	ID     TransferID
	First  []uint32 // per group: position in the prompt of the first block; those before it are not there; nil = 0
	Blocks [][]BlockID
	Token  uint64 // given back in the Report
	Prompt uint64 // fingerprint of what the blocks are the cache of; 0: not said
}

// GrowRequest is the engine's word that a part of a transfer is there.
type GrowRequest struct {
	ID     TransferID
	First  []uint32    // per group, with its first blocks: as of OfferRequest
	Blocks [][]BlockID // per group: those that follow what was given before
	// Ready is, per group, how many blocks of the prompt, from its start, are there.
	Ready []uint32
	// Regions in which they are, in growing order; nil: in all.
	Regions []uint32
	Prompt  uint64 // as of OfferRequest, with the first part at the latest; what is said once holds
	// Computing is as Ready, of what the engine's step computes: a later GrowRequest
	// says in which regions it is there. Here it is only checked.
	Computing []uint32
}

// ClaimRequest is the engine's word that it knows a request and will load the
// transfer when it has blocks for it. From which ranks of the prefill engine this
// agent loads is found out, unless Parts say so.
type ClaimRequest struct {
	ID    TransferID
	From  Target
	Parts []ClaimPart // in place of From
	Token uint64      // given back in the Report, if there is one
}

// ClaimPart is what will be loaded from one P agent.
type ClaimPart struct {
	From  Target
	Share Share
}

// LoadRequest is the engine's word that it wants a transfer in its blocks. From
// which ranks of the prefill engine, and what from each, is found out, unless
// Parts say so.
type LoadRequest struct {
	ID     TransferID
	From   Target
	First  []uint32    // per group: position in the prompt of the first block; nil = 0
	Blocks [][]BlockID // per group; all empty = only tell P that nothing is needed
	// Tokens of the prompt, per group, from its start: what lies in the blocks
	// behind them is not copied. nil, 0, and any of a group of opaque blocks: all
	// that the blocks have room for.
	Tokens []uint32
	Token  uint64
	Prompt uint64     // fingerprint of what it is to be the cache of; 0: not said. P refuses if it has another
	Parts  []LoadPart // in place of From, First and Blocks
}

// LoadPart is what is loaded from one P agent. The parts of a load write no byte
// twice.
type LoadPart struct {
	From   Target
	Share  Share
	First  []uint32
	Blocks [][]BlockID
	// Regions that are loaded from it, in growing order; nil is all that both have.
	// Of each come the heads that the P agent holds.
	Regions []uint32
}

// FoundPart is a rank of a prefill engine that this agent loads from, when there
// are several of them, or several agents that load from one.
type FoundPart struct {
	From    Target // that rank
	Share   Share
	Regions []uint32 // that are loaded from it, in growing order; none: nothing is needed of it
	Peer    AgentID
	Opened  time.Time // as of Machine.Resolved
}

// Side tells the halves of a transfer apart.
type Side uint8

// The two sides.
const (
	SideLoad  Side = 1
	SideOffer Side = 2
	SideWant  Side = 3 // no half: an announced transfer is wanted, or needs no work; see Options.ReportWants
	SideClaim Side = 4 // no half: a claim can come to nothing any more; see Options.ReportClaims
)

func (s Side) String() string { return [...]string{"", "load", "offer", "want", "claim"}[s] }

// Status is P's answer to a renewal, per transfer.
type Status uint8

// The statuses of a Renew reply.
const (
	StatusUnknown Status = 0 // never heard of, forgotten, or another agent's
	StatusEarly   Status = 1 // your claim or load is here, the engine has not named the request yet
	StatusPrefill Status = 2 // the engine works on it
	StatusOffered Status = 3 // blocks hold it
	StatusSending Status = 4
	StatusSent    Status = 5 // ended well
	StatusEnded   Status = 6 // ended otherwise, as Code and Reason say
)

// Answer is P's word on one transfer of a renewal.
type Answer struct {
	Status Status
	Code   Code   // with StatusEnded
	Reason string // with StatusEnded
}

// LoadMessage is D's load as P's machine sees it.
type LoadMessage struct {
	ID      TransferID
	Peer    AgentID
	Grant   []byte
	First   []uint32
	Blocks  [][]BlockID
	Tokens  []uint32
	Regions []uint32 // of D; nil: all that both have
	Prompt  uint64   // as of LoadRequest
	Lease   time.Duration
	Match   *Match // of this agent's caches with D's; nil: they are alike
}

// Action is what a Machine wants done. The concrete types follow.
type Action interface{ action() }

type (
	// Resolve: find the target and make it known; answer with Resolved, or, if
	// the load falls into parts, with ResolvedParts. Fresh says that what is
	// remembered of this target was found to be wrong. Seq comes back with the
	// answer: an id may be in use again by then.
	Resolve struct {
		ID    TransferID
		Seq   uint64
		From  Target
		Part  bool // From is a rank, and falls into no parts
		Fresh bool
	}
	// Expect: arm the transport for these blocks; answer with Expecting.
	Expect struct {
		ID      TransferID
		Peer    AgentID
		First   []uint32
		Blocks  [][]BlockID
		Tokens  []uint32
		Regions []uint32
	}
	// SendLoad: send the load to P, again if no answer comes, for less than
	// Options.PeerTimeout; answer with LoadReplied.
	SendLoad struct {
		ID      TransferID
		Seq     uint64
		Peer    AgentID
		Grant   []byte
		First   []uint32
		Blocks  [][]BlockID
		Tokens  []uint32
		Regions []uint32
		Prompt  uint64
		Lease   time.Duration
	}
	// SendRenew: renew these transfers at one P, those that it has a load of and
	// those that are only claimed; answer with RenewReplied.
	SendRenew struct {
		Peer          AgentID
		Loads, Claims []TransferID
	}
	// SendProbe: ask a D whose connections broke whether it lives; answer with
	// ProbeReplied.
	SendProbe struct{ Peer AgentID }
	// SendFinish: tell the peer how a transfer ended here. No answer: the peer
	// learns it by a renewal or a lease if this is lost.
	SendFinish struct {
		Peer   AgentID
		ID     TransferID
		Code   Code
		Reason string
	}
	// Forget: look the peer's target up again next time. Gone says that nobody
	// listens there, so that nothing more need be asked of it.
	Forget struct {
		Peer AgentID
		Gone bool
	}
	// Revoke: fence a load's blocks; answer with Revoked.
	Revoke struct{ ID TransferID }
	// Write: send blocks; the transport answers with Written. Src are those that
	// hold the load's, which Dst and the rest says as it came. Begin and End are as
	// of Match.PairsBetween; until there is no End, Writes that extend this one follow.
	Write struct {
		ID       TransferID
		Peer     AgentID
		Grant    []byte
		SrcFirst []uint32
		Src      [][]BlockID
		DstFirst []uint32
		Dst      [][]BlockID
		Tokens   []uint32
		Regions  []uint32
		Match    *Match

		Begin, End []uint32
		Extends    bool // a write that has begun, unless it has ended
	}
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
		Blocks    int           // of all groups; of a want: the first block of group 0 that is wanted
		Wait      time.Duration // from the engine's call to the first byte asked for or sent
		Elapsed   time.Duration // from the engine's call to this report
		State     string        // in which the half ended: "waiting", "sending" …
		Peer      AgentID       // the other side's agent, as far as it was known
		From      Target        // of a load
		Stats     TransferStats
	}
)

func (Resolve) action()    {}
func (Expect) action()     {}
func (SendLoad) action()   {}
func (Forget) action()     {}
func (SendRenew) action()  {}
func (SendProbe) action()  {}
func (SendFinish) action() {}
func (Revoke) action()     {}
func (Write) action()      {}
func (StopWrite) action()  {}
func (Report) action()     {}
