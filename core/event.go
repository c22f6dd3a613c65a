package core

import (
	"time"

	"github.com/kvconn/kvconn/kv"
)

// Event is what has happened, as the user of a Machine tells it to machine.Machine.Step. The concrete types follow.
// Requests, Announce, Cancel and Withdraw are the engine's: the machine may refuse them. Messages are a peer's. The
// others are outcomes of actions, words of the agent, and the time.
type Event interface{ event() }

// OfferRequest is the engine's word that blocks hold a transfer. They belong to the transfer until
// its Report. Of its Selection only First and Blocks count. P has no blocks before First.
type OfferRequest struct {
	ID TransferID
	kv.Selection
	Token  uint64 // given back in the Report
	Prompt uint64 // fingerprint of the prompt whose cache the blocks hold; 0: not said
	After  Moment // from this moment on the blocks hold the transfer; 0: they hold it already
}

// PartialOffer is the engine's word that some blocks of a transfer are ready, while it
// computes the rest. Meanwhile the ready blocks that a D has asked for move. An OfferRequest must follow,
// with these blocks and the others, or a Withdraw. If the transfer was given up meanwhile, a PartialOffer
// is still no error; the Report of the OfferRequest tells how the transfer ended.
type PartialOffer struct {
	ID     TransferID
	First  []uint32       // per group, with its first blocks: as in Selection
	Blocks [][]kv.BlockID // per group: the blocks that follow those given before
	// Ready is, per group, how many blocks of the prompt, from its start, are ready.
	Ready []uint32
	// Regions in which they are ready, ascending; nil: all.
	Regions []uint32
	Prompt  uint64 // as in OfferRequest; said with the first partial offer at the latest, it holds for the later ones
	// After is the moment from which on they are ready; 0: they are ready already.
	After Moment
	// Computing is like Ready, but for the blocks that the engine's step is computing. A later
	// PartialOffer says in which regions they are ready. The machine only checks it.
	Computing []uint32
}

// ClaimRequest is the engine's word that it knows a request and will load the transfer when it has
// blocks for it. P is asked to keep the transfer until then. A claim ends by a LoadRequest, by Cancel,
// or after Options.Claim. Only with Options.ReportClaims can it have a Report. A second claim of a
// transfer is no error.
type ClaimRequest struct {
	ID    TransferID
	From  Target
	Token uint64 // given back in the Report, if there is one
}

// LoadRequest is the engine's order to put a transfer into its blocks. They belong to the transfer
// until its Report. The machine finds out which ranks of the prefill engine have it. A Selection
// without blocks only tells P that D needs nothing.
type LoadRequest struct {
	ID   TransferID
	From Target
	kv.Selection
	Token  uint64
	Prompt uint64 // fingerprint of the prompt whose cache D wants; 0: not said. P refuses a load if its own cache is of another prompt
	After  Moment // from this moment on the blocks may be written, since nothing uses their old content any more; 0: they may be already
}

// Announce is the engine's word that it knows the request and works on it: D may wait.
type Announce struct{ ID TransferID }

// Cancel ends this agent's half or halves of a transfer; each half still gets its Report. If
// the id is not known here yet, the machine remembers the cancel: it refuses
// a peer's load that comes later at once.
type Cancel struct {
	ID     TransferID
	Reason string
}

// Withdraw gives the blocks of PartialOffers back to the engine, for instance because the engine
// preempts the request. The blocks are the engine's again when Reading says no. The request is
// still known. When the engine offers blocks of it again, D loads it from the beginning.
type Withdraw struct{ ID TransferID }

// Remapped says that the memory of a transfer that is in use has changed: its blocks do not hold what was
// offered, and what a load asks for must not come into them. So these halves fail, with this reason at
// both sides. Halves without blocks go on.
type Remapped struct {
	ID     TransferID
	Reason string
}

// LoadMessage is D's load as P's machine sees it.
type LoadMessage struct {
	ID           TransferID
	Peer         AgentID
	Account      Account
	Grant        []byte
	kv.Selection        // of D's blocks and regions
	Prompt       uint64 // as in LoadRequest
	Lease        time.Duration
	Match        *kv.Match // of this agent's caches with D's; nil: they are alike
}

// RenewMessage is D's renewal of its loads and claims. P answers by AnswerRenew.
type RenewMessage struct {
	From          AgentID
	Account       Account
	Loads, Claims []TransferID
}

// FinishMessage is a peer's word that its half has ended.
type FinishMessage struct {
	From    AgentID
	Account Account
	ID      TransferID
	Code    Code
	Reason  string
}

// RestartMessage is P's word that it has withdrawn the blocks of the load whose grant
// has this digest.
type RestartMessage struct {
	From   AgentID
	ID     TransferID
	Digest string
}

// Outcomes of actions, and what else the agent tells.
type (
	// Resolved is the outcome of Resolve. A Code other than OK says why P's agent was not
	// found, or why it refused this one. Opened is an instant on this machine's clock: before it
	// that agent was certainly not open. If nothing is known, it is zero.
	Resolved struct {
		ID     TransferID
		Seq    uint64 // of the Resolve
		Peer   AgentID
		Opened time.Time
		Code   Code
		Reason string
	}
	// ResolvedParts is the outcome of Resolve if this agent loads from the engine in parts. From then on
	// the half is a fan-in of one part for each rank found.
	ResolvedParts struct {
		ID    TransferID
		Seq   uint64 // of the Resolve
		Found []FoundPart
	}
	// Expecting is the outcome of Expect: the transport is armed and has given this grant, or Err says why not.
	Expecting struct {
		ID    TransferID
		Grant []byte
		Err   error
	}
	// LoadAnswered is the outcome of SendLoad. Code counts only with LoadRefused. Reason counts also with
	// LoadAbsent and LoadSayHello.
	LoadAnswered struct {
		ID     TransferID
		Seq    uint64 // of the SendLoad
		Answer LoadAnswer
		Code   Code
		Reason string
	}
	// RenewReplied is the outcome of SendRenew, or of a part of it: see SendRenew.Parts. Absent says that nobody
	// listens at the peer's address. Err says that no answer came.
	RenewReplied struct {
		Renewal SendRenew
		Answers []Answer
		Absent  bool
		Err     error
	}
	// ProbeReplied is the outcome of SendProbe. Absent says that nobody listens at the peer's address. A
	// peer that lives is absent too for a moment while it connects again. If Away is set, it may be
	// absent for as long as it needs to find another server. Err says that no answer came.
	ProbeReplied struct {
		Peer         AgentID
		Absent, Away bool
		Err          error
	}
	// MomentPassed is the outcome of Await.
	MomentPassed struct{ Moment Moment }
	// MomentFailed is the outcome of Await if the moment cannot pass any more: its device is lost, or its
	// engine's work has failed. The halves that wait for the moment end with this reason.
	MomentFailed struct {
		Moment Moment
		Err    error
	}
	// Received is the transport's outcome of an Expect.
	Received struct {
		ID    TransferID
		Stats TransferStats
		Err   error
	}
	// Revoked is the outcome of Revoke: no byte of the load can land any more.
	Revoked struct{ ID TransferID }
	// Written is the transport's outcome of a Write.
	Written struct {
		ID    TransferID
		Stats TransferStats
		Err   error
	}
	// PeerDown is a transport's word that its connection to a peer broke. The machine asks at once
	// whether the peer itself is gone.
	PeerDown struct{ Peer AgentID }
	// Tick is the time. It ends claims, loads and offers that have waited too long, and renews leases.
	Tick struct{}
	// Resume is the outcome of Yield.
	Resume struct{}
	// Close ends every transfer. When Busy says no, the agent may end.
	Close struct{}
	// Abandon reports all halves that Close could not bring to an end. The user may tell it
	// only when the transports are closed, so that no byte can move.
	Abandon struct{}
)

func (Announce) event()       {}
func (PartialOffer) event()   {}
func (OfferRequest) event()   {}
func (ClaimRequest) event()   {}
func (LoadRequest) event()    {}
func (Cancel) event()         {}
func (Withdraw) event()       {}
func (Remapped) event()       {}
func (LoadMessage) event()    {}
func (RenewMessage) event()   {}
func (FinishMessage) event()  {}
func (RestartMessage) event() {}
func (Resolved) event()       {}
func (ResolvedParts) event()  {}
func (Expecting) event()      {}
func (LoadAnswered) event()   {}
func (RenewReplied) event()   {}
func (ProbeReplied) event()   {}
func (MomentPassed) event()   {}
func (MomentFailed) event()   {}
func (Received) event()       {}
func (Revoked) event()        {}
func (Written) event()        {}
func (PeerDown) event()       {}
func (Tick) event()           {}
func (Resume) event()         {}
func (Close) event()          {}
func (Abandon) event()        {}
