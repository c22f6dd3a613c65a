// D loads a transfer into its engine's blocks. Once the transport is armed, every end but success waits for the fence,
// unless the transports are closed.

package half

import (
	"errors"
	"fmt"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/kv"
)

// loadState: doc.go has the table of transitions.
type loadState uint8

const (
	loadNone       loadState = iota // before its begin and after its end
	loadResolving                   // P's agent is being looked up; no byte can come
	loadRelocating                  // likewise, for the second and last time
	loadAwaiting                    // P is known; the moment has not passed after which the engine's blocks may be written, and the transport is not armed
	loadExpecting                   // the transport is being armed
	loadRequesting                  // P's answer to the load is awaited
	loadWaiting                     // P has accepted; its bytes are awaited
	loadMoving                      // fenced, to look up the agent in P's place
	loadRestarting                  // fenced, to begin anew with the same agent: P has withdrawn the blocks that it had begun to send
	loadEnding                      // fenced, to be reported; bytes may land until Revoked
)

func (s loadState) String() string {
	return [...]string{"-", "resolving", "relocating", "awaiting", "expecting", "requesting", "waiting", "moving", "restarting", "ending"}[s]
}

// lookedUp says whether the load waits for Resolved.
func (s loadState) lookedUp() bool { return s == loadResolving || s == loadRelocating }

// armed says whether the transport may put bytes into the blocks, since the machine has wanted
// Expect and has not wanted Revoke yet.
func (s loadState) armed() bool {
	return s == loadExpecting || s == loadRequesting || s == loadWaiting
}

// load is D's half of a transfer.
type load struct {
	asked
	state loadState
	kv.Selection
	prompt  uint64      // of LoadRequest
	after   core.Moment // of LoadRequest; 0 when it has passed
	started time.Time
	endBy   time.Time // whatever P says
	begun   time.Time // when P's agent became known: it is asked for the load since then
	until   time.Time // in loadRelocating, and in loadMoving: when another agent must have been found
	held    time.Time // by this agent's own memory since then, in loadExpecting and loadRestarting
	grant   []byte    // of the transport
	sent    int       // renewals that said "sent" while bytes were missing
	endedIn string    // state in which the end began
	stats   core.TransferStats
}

// loadTo performs one row of the table, that of the load's state, of the event and of the guard: it sets the load's next state,
// and wants the row's actions.
func (h *Set) loadTo(ld *load, guard Guard, next loadState, does ...core.Action) {
	switch loadNone {
	case next:
		h.loads.drop(ld.id)
		h.awaitNot(ld.after)
	case ld.state:
		h.voidPendingFinish(ld.id)
		h.loads.put(ld.id, ld)
	}
	h.taken.row("load", ld.id, guard, ld.state, next, does)
	ld.state = next
	h.actions = append(h.actions, does...)
}

// Load begins a load, in place of the transfer's claim if there is one. rank says that it is from a rank of an engine, beside others.
func (h *Set) Load(now time.Time, r core.LoadRequest, rank bool) {
	if r.First == nil {
		r.First = make([]uint32, len(r.Blocks))
	}
	h.begin(now)
	h.seq++ // a cancelled half of the id is void: P hears of the id by this load
	ld := &load{asked: asked{id: ID(r.ID), seq: h.seq, from: r.From, rank: rank, token: r.Token, since: now},
		Selection: r.Selection, prompt: r.Prompt, started: now, endBy: now.Add(h.opt.Load)}
	h.loadAfter(now, ld, r.After)
	c := h.claims.byID[ld.id]
	switch {
	case c != nil && c.from == ld.from:
		h.continueClaim(now, ld, c)
		return
	case c != nil:
		h.DropClaim(c.id, WhenOther, Ending{core.Cancelled, "the decode engine loads it from another engine"})
	}
	h.loadTo(ld, whenFresh, loadResolving, ld.lookUp(false))
}

// continueClaim begins a load at the point that its claim has reached.
func (h *Set) continueClaim(now time.Time, ld *load, c *claim) {
	was, seq, token := c.state, ld.seq, ld.token
	h.claimTo(c, whenSame, claimNone)
	ld.asked, ld.until = c.asked, now.Add(h.patience())
	ld.seq, ld.token = seq, token
	h.nameLater(now, ld)
	switch {
	case was.atPeer():
		ld.endedIn = "claimed"
		h.proceed(now, ld)
	case was == claimVoid:
		ld.endedIn = "claimed"
		if ld.Count() == 0 { // P has let go of it already
			ld.end = Ending{core.OK, NothingToLoad}
		}
		h.reportLoad(ld, whenVoid)
	case was == claimResolving, was == claimBackoff:
		h.loadTo(ld, whenResolving, loadResolving, ld.lookUp(false))
	default:
		h.loadTo(ld, whenRelocating, loadRelocating, ld.lookUp(false))
	}
}

// nameLater gives the engine of P's new agent some time to name what goes on only now.
func (h *Set) nameLater(now time.Time, ld *load) {
	if !ld.nameBy.IsZero() {
		ld.nameBy = later(ld.nameBy, now.Add(h.opt.PeerTimeout/3))
	}
}

// NothingToLoad is why a load of no blocks has ended.
const NothingToLoad = "nothing to load"

// proceed goes on with a load whose P is known.
func (h *Set) proceed(now time.Time, ld *load) {
	if ld.Count() == 0 {
		ld.end = Ending{core.OK, NothingToLoad}
		h.reportLoad(ld, whenEmpty, core.SendFinish{Peer: ld.peer, ID: core.TransferID(ld.id), Code: core.OK, Reason: NothingToLoad})
		return
	}
	h.watch(now, ld.peer)
	ld.begun, ld.endedIn = now, ""
	if ld.after != 0 && !fault.On("written-before-its-moment") {
		h.loadTo(ld, whenMoment, loadAwaiting)
		return
	}
	ld.held = now
	h.loadTo(ld, whenReady, loadExpecting, core.Expect{ID: core.TransferID(ld.id), Peer: ld.peer, Selection: ld.Selection})
}

func (h *Set) loadResolved(now time.Time, ld *load, e core.Resolved) {
	end, guard := Ending{e.Code, e.Reason}, whenUnresolved
	if e.Code == core.OK {
		reason := h.found(now, &ld.asked, e)
		if reason == "" {
			h.proceed(now, ld)
			return
		}
		end, guard = Ending{core.PeerLost, reason}, whenReplaced
	}
	ld.end = end
	h.reportLoad(ld, guard)
}

func (h *Set) StepExpecting(now time.Time, e core.Expecting) {
	ld := h.loads.byID[ID(e.ID)]
	if ld == nil || ld.state != loadExpecting {
		return
	}
	switch {
	case e.Err != nil && ld.previousPeer == "" && !errors.Is(e.Err, core.ErrMemory):
		h.move(ld, whenOutdated, now.Add(h.patience()), false) // what is remembered of P is out of date, most likely
	case e.Err != nil:
		h.endLoad(now, ld, whenBroken, Ending{core.Failed, e.Err.Error()}, true)
	default:
		ld.grant = e.Grant
		h.loadTo(ld, whenArmed, loadRequesting, core.SendLoad{ID: core.TransferID(ld.id), Seq: ld.seq, Peer: ld.peer, Grant: ld.grant, Selection: ld.Selection, Prompt: ld.prompt, Lease: h.opt.Lease})
	}
}

func (h *Set) StepLoadAnswered(now time.Time, e core.LoadAnswered) {
	ld := h.loads.byID[ID(e.ID)]
	if ld == nil || ld.seq != e.Seq && !fault.On("stale-reply") || ld.state != loadRequesting {
		return
	}
	switch {
	case e.Answer == core.LoadAccepted:
		h.loadTo(ld, whenAccepted, loadWaiting)
		h.watch(now, ld.peer).heard = now
	case e.Answer == core.LoadAbsent && ld.previousPeer == "" && ld.confirmedBy == "":
		h.move(ld, whenAbsent, ld.begun.Add(h.patience()), true)
	case e.Answer == core.LoadAbsent:
		h.endLoad(now, ld, whenAbsentAgain, Ending{core.PeerLost, e.Reason}, false)
	case e.Answer == core.LoadSayHello && ld.previousPeer == "":
		h.move(ld, whenHello, now.Add(h.patience()), false)
	case e.Answer == core.LoadSayHello:
		h.endLoad(now, ld, whenHelloAgain, Ending{core.Failed, e.Reason}, false)
	default: // without an answer P may have the load all the same
		code, guard := peerFailure(e.Code), whenRefused
		if code == core.PeerLost {
			guard = whenUnanswered
		}
		h.endLoad(now, ld, guard, Ending{code, e.Reason}, guard == whenUnanswered)
	}
}

// move looks P's agent up once more for a load. Another agent may have taken its place, and
// must be found by until. gone says that nobody listens as the previous agent.
func (h *Set) move(ld *load, guard Guard, until time.Time, gone bool) {
	ld.previousPeer, ld.until = ld.peer, until
	h.Count.Retries++
	forget := core.Forget{Peer: ld.peer, Gone: gone}
	if fault.On("no-fence-again") {
		ld.peer = ""
		h.loadTo(ld, guard, loadRelocating, forget, ld.lookUp(true))
		return
	}
	h.fence(ld, guard, loadMoving, forget)
}

// restartLoad handles P's message that P has withdrawn the blocks of the load whose grant has
// this digest.
func (h *Set) restartLoad(now time.Time, ld *load, which string) {
	if (ld.state != loadRequesting && ld.state != loadWaiting) || digest(ld.grant) != which && !fault.On("anew-at-every-word") {
		return
	}
	h.Count.Retries++
	h.seq++
	ld.seq = h.seq // P's words about the old load are void
	if fault.On("anew-without-fence") {
		h.proceed(now, ld)
		return
	}
	ld.held = now
	h.fence(ld, whenRestart, loadRestarting)
}

func (h *Set) StepReceived(now time.Time, e core.Received) {
	ld := h.loads.byID[ID(e.ID)]
	if ld == nil || !ld.state.armed() {
		return
	}
	ld.stats = e.Stats
	if e.Err != nil {
		// P may live, though its connections broke, and hold blocks for this load.
		h.endLoad(now, ld, whenBroken, Ending{transportCode(e.Err), "receiving from prefill agent " + string(ld.peer) + ": " + e.Err.Error()}, true)
		return
	}
	// The bytes are all here: the transport has nothing left to fence.
	h.reportLoad(ld, whenWhole, core.SendFinish{Peer: ld.peer, ID: core.TransferID(ld.id), Code: core.OK})
}

func (h *Set) StepRevoked(now time.Time, e core.Revoked) {
	ld := h.loads.byID[ID(e.ID)]
	if ld == nil {
		return
	}
	switch ld.state {
	case loadRestarting:
		h.proceed(now, ld)
	case loadMoving:
		ld.peer, ld.endedIn = "", "" // the old agent's last words do not count
		h.loadTo(ld, Always, loadRelocating, ld.lookUp(true))
	case loadEnding:
		h.reportLoad(ld, Always)
	}
}

func (h *Set) loadRenewed(now time.Time, ld *load, a core.Answer) {
	switch a.Status {
	case core.StatusEarly:
		if passed(now, ld.nameBy) { // the agent took the place of the one that had the request
			h.endLoad(now, ld, whenUnnamed, Ending{core.NotOffered, fmt.Sprintf("prefill agent %s was opened after this load was made, and its engine has not named transfer %q", ld.peer, h.name(ld.id))}, !fault.On("unnamed-untold"))
		}
	case core.StatusUnknown:
		h.endLoad(now, ld, whenUnknown, Ending{core.PeerLost, fmt.Sprintf("prefill agent %s does not know transfer %q any more", ld.peer, h.name(ld.id))}, false)
	case core.StatusEnded:
		h.endLoad(now, ld, whenOver, Ending{peerFailure(a.Code), a.Reason}, false)
	case core.StatusRestart:
		h.restartLoad(now, ld, a.Reason)
	case core.StatusSent:
		// The last bytes may be on their way, but not for several rounds.
		if fault.On("word-alone") {
			h.endLoad(now, ld, whenMissing, Ending{}, false)
			return
		}
		if ld.sent++; ld.sent >= 3 {
			h.endLoad(now, ld, whenMissing, Ending{core.Failed, fmt.Sprintf("prefill agent %s has sent transfer %q, but bytes are missing", ld.peer, h.name(ld.id))}, false)
		}
	}
}

// EndLoad ends a load and tells P, if there is a load of this id. It says whether there was one.
func (h *Set) EndLoad(now time.Time, id ID, end Ending) bool {
	ld := h.loads.byID[id]
	switch {
	case ld == nil:
		return false
	case ld.rank && fault.On("others-not-fenced"):
		ld.end = end
		h.reportLoad(ld, Always, core.Revoke{ID: core.TransferID(id)})
	default:
		h.endLoad(now, ld, Always, end, true)
	}
	return true
}

// endLoad brings D's half to an end other than success; tell says whether P must be told.
// A load that is ending already keeps its first end.
func (h *Set) endLoad(now time.Time, ld *load, guard Guard, end Ending, tell bool) {
	if ld.state == loadEnding {
		return
	}
	ld.end = end
	var does []core.Action
	keepFinish := false
	switch {
	case !tell, ld.state == loadMoving: // nobody is there
	case ld.state.lookedUp(): // the engine gets its blocks back now; P must still hear of it
		keepFinish = !fault.On("pending-finish-forgotten")
	case !(fault.On("no-finish") && end.Code == core.Cancelled):
		does = append(does, core.SendFinish{Peer: ld.peer, ID: core.TransferID(ld.id), Code: end.Code, Reason: end.Reason})
	}
	switch {
	case ld.state.lookedUp(), ld.state == loadAwaiting: // nothing is armed
		h.leaveLoad(ld, guard, does...)
		if keepFinish {
			h.keepFinish("load", ld.asked, end)
		}
		h.restPeers()
		return
	case !ld.state.armed():
		h.loadTo(ld, guard, loadEnding, does...)
	default:
		h.fence(ld, guard, loadEnding, does...)
		if fault.On("no-fence") {
			h.reportLoad(ld, guard)
			return
		}
	}
	h.tell("load", ld.id, outcome{load: ld})
}

// fence has the transport give up the load's blocks; next is the state that follows.
func (h *Set) fence(ld *load, guard Guard, next loadState, does ...core.Action) {
	ld.endedIn = ld.state.String()
	h.loadTo(ld, guard, next, append(does, core.Revoke{ID: core.TransferID(ld.id)})...)
}

// reportLoad ends a load, of which nothing more is to be said to P.
func (h *Set) reportLoad(ld *load, guard Guard, does ...core.Action) {
	h.leaveLoad(ld, guard, does...)
	h.restPeers()
}

// leaveLoad is the only way out of the map of loads.
func (h *Set) leaveLoad(ld *load, guard Guard, does ...core.Action) {
	if ld.endedIn == "" {
		ld.endedIn = ld.state.String()
	}
	h.loadTo(ld, guard, loadNone, does...)
	h.tell("load", ld.id, outcome{load: ld, over: true})
}

func (ld *load) report(now time.Time) core.Report {
	elapsed := now.Sub(ld.started)
	return core.Report{ID: core.TransferID(ld.id), Side: core.SideLoad, Token: ld.token, Code: ld.end.Code, Reason: ld.end.Reason,
		Blocks: ld.Count(), Wait: max(elapsed-time.Duration(ld.stats.Nanos), 0), Elapsed: elapsed,
		State: ld.endedIn, Peer: ld.peer, From: ld.from, Stats: ld.stats}
}
