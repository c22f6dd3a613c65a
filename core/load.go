package core

import (
	"errors"
	"fmt"
	"time"

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

// armed says whether the transport may put bytes into the blocks: it was asked to, and
// nothing has ended that.
func (s loadState) armed() bool {
	return s == loadExpecting || s == loadRequesting || s == loadWaiting
}

// load is D's half of a transfer.
type load struct {
	id    TransferID
	seq   uint64
	state loadState
	token uint64
	from  Target
	kv.Selection
	prompt uint64 // of LoadRequest
	after  Moment // of LoadRequest; 0 when it has passed
	agents
	started time.Time
	endBy   time.Time // whatever P says
	since   time.Time // the engine's first word of it: its claim, if there was one
	begun   time.Time // when P's agent became known: it is asked for the load since then
	until   time.Time // in loadRelocating, and in loadMoving: when another agent must have been found
	held    time.Time // by this agent's own memory since then, in loadExpecting and loadRestarting
	grant   []byte    // of the transport
	sent    int       // renewals that said "sent" while bytes were missing
	endedIn string    // state in which the end began
	end     ending
	stats   TransferStats
}

func (m *Machine) stepLoad(now time.Time, r LoadRequest) error {
	if err := m.checkLoad(r.ID, r.From); err != nil {
		return err
	}
	if err := r.CheckLoad(m.layout); err != nil {
		return fmt.Errorf("%w: load %q: %w", ErrInvalid, string(r.ID), err)
	}
	if m.loading(r.ID) {
		return fmt.Errorf("%w: transfer %q is being loaded already; give each request a transfer_id of its own", ErrDuplicate, string(r.ID))
	}
	// A load without blocks lets go of the transfer: it is never refused because there is no
	// room.
	if m.namedLoads(r.ID) >= m.opt.MaxTransfers && r.Count() > 0 {
		return m.overload("loads")
	}
	m.count.Loaded++
	defer m.settle(now)
	if m.loadOfLost(&r) || m.loadClaimedParts(now, r) {
		return nil
	}
	m.beginLoad(now, &load{id: r.ID, token: r.Token, from: r.From, Selection: r.Selection, prompt: r.Prompt, after: r.After})
	return nil
}

// loadTo is one row of the table: the load's next state, and what is to be done.
func (m *Machine) loadTo(ld *load, next loadState, does ...Action) {
	switch loadNone {
	case next:
		m.loads.drop(ld.id)
		m.awaitNot(ld.after)
	case ld.state:
		m.farewells.drop(ld.id)
		m.loads.put(ld.id, ld)
	}
	m.moved("load", ld.id, ld.state, next)
	ld.state = next
	m.act(does...)
}

// beginLoad begins a load, in place of the transfer's claim if there is one.
func (m *Machine) beginLoad(now time.Time, ld *load) {
	if ld.First == nil {
		ld.First = make([]uint32, len(ld.Blocks))
	}
	m.begin(now)
	m.seq++ // a cancelled half of the id is void: P hears of the id by this load
	ld.seq, ld.started, ld.since, ld.endBy = m.seq, now, now, now.Add(m.opt.Load)
	m.loadAfter(now, ld, ld.after)
	c := m.claims.get(ld.id)
	switch {
	case c != nil && c.from == ld.from:
		m.continueClaim(now, ld, c)
		return
	case c != nil:
		m.dropClaim(c, ending{Cancelled, "the decode engine loads it from another engine"})
	}
	m.loadTo(ld, loadResolving, lookUp(ld.id, ld.seq, ld.from, false))
}

// continueClaim begins a load at the point that its claim has reached.
func (m *Machine) continueClaim(now time.Time, ld *load, c *claim) {
	was := c.state
	m.claimTo(c, claimNone)
	ld.agents, ld.end = c.agents, c.end
	ld.since, ld.until = c.since, now.Add(m.patience())
	if !ld.nameBy.IsZero() {
		ld.nameBy = later(ld.nameBy, now.Add(m.opt.PeerTimeout/3))
	}
	switch {
	case was.atPeer():
		ld.endedIn = "claimed"
		m.proceed(now, ld)
	case was == claimVoid:
		ld.endedIn = "claimed"
		if ld.Count() == 0 { // P has let go of it already
			ld.end = ending{OK, nothingToLoad}
		}
		m.reportLoad(ld)
	case ld.former == "":
		m.loadTo(ld, loadResolving, lookUp(ld.id, ld.seq, ld.from, false))
	default:
		m.loadTo(ld, loadRelocating, lookUp(ld.id, ld.seq, ld.from, false))
	}
}

const nothingToLoad = "nothing to load"

// proceed goes on with a load whose P is known.
func (m *Machine) proceed(now time.Time, ld *load) {
	if ld.Count() == 0 {
		ld.end = ending{OK, nothingToLoad}
		m.reportLoad(ld, SendFinish{Peer: ld.peer, ID: ld.id, Code: OK, Reason: nothingToLoad})
		return
	}
	m.watch(now, ld.peer)
	ld.begun, ld.endedIn = now, ""
	if ld.after != 0 && !fault.On("written-before-its-moment") {
		m.loadTo(ld, loadAwaiting)
		return
	}
	ld.held = now
	m.loadTo(ld, loadExpecting, Expect{ID: ld.id, Peer: ld.peer, Selection: ld.Selection})
}

// loadResolved takes the outcome of a load's look-up.
func (m *Machine) loadResolved(now time.Time, ld *load, peer AgentID, opened time.Time, end ending) {
	if end.code == OK {
		younger := m.found(now, &ld.agents, ld.since, peer, opened)
		reason := ld.replaced(peer, younger)
		if reason == "" {
			m.proceed(now, ld)
			return
		}
		end = ending{PeerLost, reason}
	}
	ld.end = end
	m.reportLoad(ld)
}

func (m *Machine) stepExpecting(now time.Time, e Expecting) {
	ld := m.loads.get(e.ID)
	if ld == nil || ld.state != loadExpecting {
		return
	}
	defer m.settle(now)
	switch {
	case e.Err != nil && ld.former == "" && !errors.Is(e.Err, ErrMemory):
		m.move(ld, now.Add(m.patience()), false) // what is remembered of P is out of date, most likely
		return
	case e.Err != nil:
		m.endLoad(now, ld, ending{Failed, e.Err.Error()}, true)
		return
	}
	ld.grant = e.Grant
	m.loadTo(ld, loadRequesting, SendLoad{ID: ld.id, Seq: ld.seq, Peer: ld.peer, Grant: ld.grant, Selection: ld.Selection, Prompt: ld.prompt, Lease: m.opt.Lease})
}

func (m *Machine) stepLoadAnswered(now time.Time, e LoadAnswered) {
	ld := m.loads.get(e.ID)
	if ld == nil || ld.seq != e.Seq && !fault.On("stale-reply") || ld.state != loadRequesting {
		return
	}
	defer m.settle(now)
	switch {
	case e.Answer == LoadAccepted:
		m.loadTo(ld, loadWaiting)
		m.watch(now, ld.peer)
		m.peers[ld.peer].heard = now
	case e.Answer == LoadAbsent && ld.former == "" && ld.keeper == "":
		m.move(ld, ld.begun.Add(m.patience()), true)
	case e.Answer == LoadAbsent:
		m.endLoad(now, ld, ending{PeerLost, e.Reason}, false)
	case e.Answer == LoadSayHello && ld.former == "":
		m.move(ld, now.Add(m.patience()), false)
	case e.Answer == LoadSayHello:
		m.endLoad(now, ld, ending{Failed, e.Reason}, false)
	default: // without an answer P may have the load all the same
		code := peerFailure(e.Code)
		m.endLoad(now, ld, ending{code, e.Reason}, code == PeerLost)
	}
}

// move looks P's agent up once more for a load. Another agent may have taken its place, and
// must be found by until. gone says that nobody listens as the former agent.
func (m *Machine) move(ld *load, until time.Time, gone bool) {
	ld.former, ld.until = ld.peer, until
	m.count.Retries++
	m.act(Forget{Peer: ld.peer, Gone: gone})
	if fault.On("no-fence-again") {
		ld.peer = ""
		m.loadTo(ld, loadRelocating, lookUp(ld.id, ld.seq, ld.from, true))
		return
	}
	m.fence(ld, loadMoving)
}

// restartLoad takes P's word that it has withdrawn the blocks of the load whose grant has
// this digest.
func (m *Machine) restartLoad(now time.Time, ld *load, which string) {
	if (ld.state != loadRequesting && ld.state != loadWaiting) || digest(ld.grant) != which && !fault.On("anew-at-every-word") {
		return
	}
	m.count.Retries++
	m.seq++
	ld.seq = m.seq // P's words about the old load are void
	if fault.On("anew-without-fence") {
		m.proceed(now, ld)
		return
	}
	ld.held = now
	m.fence(ld, loadRestarting)
}

func (m *Machine) stepReceived(now time.Time, e Received) {
	ld := m.loads.get(e.ID)
	if ld == nil || !ld.state.armed() {
		return
	}
	defer m.settle(now)
	ld.stats = e.Stats
	if e.Err != nil {
		// P may live, though its connections broke, and hold blocks for this load.
		m.endLoad(now, ld, ending{transportCode(e.Err), "receiving from prefill agent " + string(ld.peer) + ": " + e.Err.Error()}, true)
		return
	}
	// The bytes are all here: the transport has nothing left to fence.
	m.reportLoad(ld, SendFinish{Peer: ld.peer, ID: ld.id, Code: OK})
}

func (m *Machine) stepRevoked(now time.Time, e Revoked) {
	ld := m.loads.get(e.ID)
	if ld == nil {
		return
	}
	defer m.settle(now)
	switch ld.state {
	case loadRestarting:
		m.proceed(now, ld)
	case loadMoving:
		ld.peer, ld.endedIn = "", "" // the old agent's last words do not count
		m.loadTo(ld, loadRelocating, lookUp(ld.id, ld.seq, ld.from, true))
	case loadEnding:
		m.reportLoad(ld)
	}
}

// loadRenewed takes P's answer to a renewal.
func (m *Machine) loadRenewed(now time.Time, ld *load, a Answer) {
	switch a.Status {
	case StatusEarly:
		if !ld.nameBy.IsZero() && !now.Before(ld.nameBy) { // the agent took the place of the one that had the request
			m.endLoad(now, ld, ending{NotOffered, fmt.Sprintf("prefill agent %s was opened after this load was made, and its engine has not named transfer %q", ld.peer, string(ld.id))}, true)
		}
	case StatusUnknown:
		m.endLoad(now, ld, ending{PeerLost, fmt.Sprintf("prefill agent %s does not know transfer %q any more", ld.peer, string(ld.id))}, false)
	case StatusEnded:
		m.endLoad(now, ld, ending{peerFailure(a.Code), a.Reason}, false)
	case StatusRestart:
		m.restartLoad(now, ld, a.Reason)
	case StatusSent:
		// The last bytes may be on their way, but not for several rounds.
		if fault.On("word-alone") {
			m.endLoad(now, ld, ending{}, false)
			return
		}
		if ld.sent++; ld.sent >= 3 {
			m.endLoad(now, ld, ending{Failed, fmt.Sprintf("prefill agent %s has sent transfer %q, but bytes are missing", ld.peer, string(ld.id))}, false)
		}
	}
}

// endLoad brings D's half to an end other than success; tell says whether P must be told.
// A load that is ending already keeps its first end.
func (m *Machine) endLoad(now time.Time, ld *load, end ending, tell bool) {
	switch ld.state {
	case loadEnding:
		return
	case loadResolving, loadRelocating:
		ld.end = end
		if tell && !fault.On("farewell-forgotten") { // the engine gets its blocks back now; P must still hear of it
			m.farewells.put(ld.id, &farewell{id: ld.id, seq: ld.seq, end: end})
		}
		m.reportLoad(ld)
		return
	case loadMoving:
		tell = false // nobody is there
	}
	ld.end = end
	if tell && !(fault.On("no-finish") && end.code == Cancelled) {
		m.act(SendFinish{Peer: ld.peer, ID: ld.id, Code: end.code, Reason: end.reason})
	}
	switch {
	case ld.state == loadAwaiting: // nothing is armed
		m.reportLoad(ld)
		return
	case !ld.state.armed():
		m.loadTo(ld, loadEnding)
	default:
		m.fence(ld, loadEnding)
		if fault.On("no-fence") {
			m.reportLoad(ld)
			return
		}
	}
	m.outcomes = append(m.outcomes, outcome{load: ld})
}

// fence has the transport give up the load's blocks; next is the state that follows.
func (m *Machine) fence(ld *load, next loadState) {
	ld.endedIn = ld.state.String()
	m.loadTo(ld, next, Revoke{ID: ld.id})
}

// reportLoad is the only way out of the map of loads.
func (m *Machine) reportLoad(ld *load, does ...Action) {
	if ld.endedIn == "" {
		ld.endedIn = ld.state.String()
	}
	m.loadTo(ld, loadNone, does...)
	m.restPeers()
	m.outcomes = append(m.outcomes, outcome{load: ld, over: true})
}

func (ld *load) report(now time.Time) Report {
	elapsed := now.Sub(ld.started)
	return Report{ID: ld.id, Side: SideLoad, Token: ld.token, Code: ld.end.code, Reason: ld.end.reason,
		Blocks: ld.Count(), Wait: max(elapsed-time.Duration(ld.stats.Nanos), 0), Elapsed: elapsed,
		State: ld.endedIn, Peer: ld.peer, From: ld.from, Stats: ld.stats}
}
