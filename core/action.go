package core

import (
	"iter"
	"time"

	"github.com/kvconn/kvconn/kv"
)

// Action is what a Machine wants of its user after an event. The concrete types follow.
type Action interface{ action() }

// The answers to an event. An answer is the first action of its step. The user gives it to whoever told the event.
type (
	// Refuse answers an event of the engine that the machine does not accept. Without a Refuse the machine has accepted the event.
	Refuse struct{ Err error }
	// AnswerLoad answers a LoadMessage: it is what P tells D of the load.
	AnswerLoad struct {
		Code   Code
		Reason string
	}
	// AnswerRenew answers a RenewMessage: first for each of its Loads, then for each of its Claims.
	AnswerRenew struct{ Answers []Answer }
)

// Split separates the answer from the other actions of a step. If the step has no answer, answer is nil.
func Split(actions []Action) (answer Action, rest []Action) {
	if len(actions) > 0 {
		switch actions[0].(type) {
		case Refuse, AnswerLoad, AnswerRenew:
			return actions[0], actions[1:]
		}
	}
	return nil, actions
}

// OfMemory says whether an action begins or ends the use of an engine's blocks by a transport. The user begins these actions
// in their order, and beside them the others in theirs.
func OfMemory(act Action) bool {
	switch act.(type) {
	case Expect, Revoke, Write, StopWrite:
		return true
	}
	return false
}

// What the user is to do, in the order of a step's actions, see OfMemory. If the comment of an action names an event, the user
// tells the outcome by that event, once.
type (
	// Resolve: find the target and make it known. The outcome is Resolved or, if the half has
	// several parts, ResolvedParts. Fresh says that the remembered agent of this target
	// was found to be wrong. Seq comes back with the outcome, since an id may be in use again
	// by then.
	Resolve struct {
		ID    TransferID
		Seq   uint64
		From  Target
		Part  bool // From is one rank, so the outcome is Resolved
		Fresh bool
	}
	// Expect: arm the transport for these blocks. The outcome is Expecting.
	Expect struct {
		ID   TransferID
		Peer AgentID
		kv.Selection
	}
	// SendLoad: send the load to P. If no answer comes, send it again, for less than
	// Options.PeerTimeout. The outcome is LoadAnswered.
	SendLoad struct {
		ID    TransferID
		Seq   uint64
		Peer  AgentID
		Grant []byte
		kv.Selection
		Prompt uint64
		Lease  time.Duration
	}
	// SendRenew: renew these transfers at one P. Loads are those that P has a load of; Claims
	// are those that D has only claimed. The outcome is RenewReplied.
	SendRenew struct {
		Peer          AgentID
		Loads, Claims []TransferID
		More          bool // this is a part of a renewal, whose answer is told in parts, and further parts follow
	}
	// SendProbe: ask a D whose connections broke whether it lives. The outcome is
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
	// as the peer, so the user need not ask it anything more.
	Forget struct {
		Peer AgentID
		Gone bool
	}
	// Revoke: fence a load's blocks. The outcome is Revoked.
	Revoke struct{ ID TransferID }
	// Write: send blocks; the transport answers with Written. Src has the blocks that hold
	// what Dst, the load's Selection, asks for. Begin and End are those of kv.Match.PairsBetween.
	// If there is an End, further Writes follow that extend this one.
	Write struct {
		ID    TransferID
		Peer  AgentID
		Grant []byte
		Src   kv.Selection
		Dst   kv.Selection
		Match *kv.Match

		Begin, End []uint32
		Extends    bool // it extends a write that has begun, unless that has ended
	}
	// Await: tell MomentPassed when this moment has passed, or MomentFailed if it cannot pass
	// any more. The machine wants one Await as long as any half waits for the moment. If no half
	// waits any more, the event does nothing.
	Await struct{ Moment Moment }
	// Yield: let others have the machine, and then tell Resume at once. One step ends only some of the offers that are to end.
	Yield struct{}
	// StopWrite: end a Write early; its Written still comes.
	StopWrite struct{ ID TransferID }
	// Report: tell the engine, once, how its half ended. The half's blocks are free.
	Report struct {
		ID        TransferID
		Parts     []TransferID // the ids by which the transports knew its parts, if it had parts
		Side      Side
		Transport string // the one that moved the bytes; set by the user of the Machine
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

func (Refuse) action()      {}
func (AnswerLoad) action()  {}
func (AnswerRenew) action() {}
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
func (Yield) action()       {}
func (StopWrite) action()   {}
func (Report) action()      {}

// MaxLocked is how many transfers of a peer's message a user with a lock should give at a
// time, so that the engine's calls get in between.
const MaxLocked = 8

// Parts cuts a renewal and its answers into parts, for a user with a lock: see MaxLocked. If there are not as many
// answers as transfers, Parts gives them whole, and the machine refuses them.
func (r SendRenew) Parts(answers []Answer) iter.Seq2[SendRenew, []Answer] {
	return func(yield func(SendRenew, []Answer) bool) {
		if len(answers) != len(r.Loads)+len(r.Claims) {
			yield(r, answers)
			return
		}
		for rest := r; ; {
			part := SendRenew{Peer: r.Peer, Loads: rest.Loads[:min(MaxLocked, len(rest.Loads))]}
			part.Claims = rest.Claims[:min(MaxLocked-len(part.Loads), len(rest.Claims))]
			rest.Loads, rest.Claims = rest.Loads[len(part.Loads):], rest.Claims[len(part.Claims):]
			part.More = len(rest.Loads)+len(rest.Claims) > 0
			n := len(part.Loads) + len(part.Claims)
			if !yield(part, answers[:n]) || !part.More {
				return
			}
			answers = answers[n:]
		}
	}
}
