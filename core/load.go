package core

import (
	"fmt"
	"time"

	"github.com/kvconn/kvconn/internal/fault"
)

// The states of D's half.
type loadState uint8

const (
	loadResolving  loadState = iota // P's agent is being looked up; no byte can come
	loadClaimed                     // P keeps it for us, or has given it up; the engine has no blocks for it yet
	loadExpecting                   // the transport is being armed
	loadRequesting                  // P has been asked
	loadWaiting                     // P knows; bytes come when it has them
	loadFencing                     // it ends; bytes may land until Revoked
)

func (s loadState) String() string {
	return [...]string{"resolving", "claimed", "expecting", "requesting", "waiting", "fencing"}[s]
}

type load struct {
	id      TransferID
	seq     uint64
	state   loadState
	token   uint64
	from    Target
	first   []uint32
	blocks  [][]BlockID
	tokens  []uint32
	regions []uint32 // that it is of; nil: all
	prompt  uint64   // of LoadRequest
	join    *join    // whose part it is, or nil
	peer    AgentID
	started time.Time
	since   time.Time // the engine's first word of it: its claim, if there was one
	begun   time.Time // when P's agent was known: what is asked of it is asked since then
	until   time.Time // end of a claim that no load follows, or of a load's second look-up
	retryAt time.Time // of a claim whose P was not found: when it is looked up again
	lostBy  time.Time // of a claim that is reported and whose P is gone: when another must have been found in its place
	claim   bool      // no load yet: nothing is owed to the engine
	known   AgentID   // the agent that has answered the claim: one in its place knows nothing of it
	tried   AgentID   // the agent that it was with before P was looked up again
	nameBy  time.Time // when an agent that opened after the request was made must have named it; zero: it was there before
	again   bool      // fencing in order to start over
	anew    bool      // with the same agent: it has taken back what it had begun to send
	grant   []byte    // of the transport
	given   bool      // reported already; only P must still be told
	sent    int       // renewals that said "sent" while bytes were missing
	code    Code      // of the end, while fencing, or of a claim that P has given up
	reason  string
	ended   loadState // in which it was when its end began
	stats   TransferStats
}

// empty: the engine needs nothing of it, P is only told to free its blocks.
func (ld *load) empty() bool { return countBlocks(ld.blocks) == 0 }

// owes says whether the engine waits for a Report.
func (ld *load) owes() bool { return !ld.given && !ld.claim }

// Claim tells P that the engine will load a transfer as soon as it has blocks
// for it: P keeps it for as long. A claim ends by Load, by Cancel, or after
// Options.Claim, and has no Report unless Options.ReportClaims is set. One that is
// known already is no error.
func (m *Machine) Claim(now time.Time, r ClaimRequest) error {
	if len(r.Parts) > 0 {
		return m.claimParts(now, r)
	}
	if err := m.checkLoad(r.ID, r.From); err != nil {
		return err
	}
	old := m.loads[r.ID]
	switch {
	case old != nil && !old.given || m.joins[r.ID] != nil:
		return nil // claimed or loaded already
	case m.claims >= m.opt.MaxTransfers:
		return m.overload("claims")
	}
	m.count.Claimed++
	m.claimAnew(r.ID)
	m.addClaim(now, &load{id: r.ID, from: r.From, token: r.Token})
	return nil
}

func (m *Machine) addClaim(now time.Time, ld *load) {
	m.begin(now)
	m.seq++
	ld.seq, ld.claim, ld.started, ld.since, ld.until = m.seq, true, now, now, now.Add(m.opt.Claim)
	m.keepLoad(ld)
	if ld.join == nil {
		m.claims++
	}
	m.act(Resolve{ID: ld.id, Seq: ld.seq, From: ld.from, Part: ld.join != nil})
}

// keepLoad puts a half into the map of loads, in place of the one that there may be.
func (m *Machine) keepLoad(ld *load) {
	if old := m.loads[ld.id]; old != nil && old.join != nil {
		m.parts--
	}
	if ld.join != nil {
		m.parts++
	}
	m.loads[ld.id] = ld
}

func (m *Machine) dropLoad(ld *load) {
	if delete(m.loads, ld.id); ld.join != nil {
		m.parts--
	}
}

// named is how many loads the engine has named; one of several parts counts once.
func (m *Machine) named() int { return len(m.loads) - m.parts + len(m.joins) - m.claims }

func (m *Machine) checkLoad(id TransferID, from Target) error {
	switch err := checkID(id); {
	case err != nil:
		return err
	case m.closed:
		return ErrClosed
	case from.Bootstrap == "" && from.EngineID == "":
		return fmt.Errorf("%w: load %q names neither a bootstrap address nor an engine_id", ErrInvalid, string(id))
	}
	return nil
}

// Load asks for a transfer in the engine's blocks. They belong to the transfer
// until its Report.
func (m *Machine) Load(now time.Time, r LoadRequest) error {
	if len(r.Parts) > 0 {
		return m.loadParts(now, r)
	}
	if err := m.checkLoad(r.ID, r.From); err != nil {
		return err
	}
	if err := m.checkBlocks(r.First, r.Blocks, r.Tokens); err != nil {
		return fmt.Errorf("%w: load %q: %w", ErrInvalid, string(r.ID), err)
	}
	old, j := m.loads[r.ID], m.joins[r.ID]
	if old != nil && old.owes() || j != nil && !j.claim {
		return duplicateLoad(r.ID)
	}
	others := m.named()
	if old != nil && !old.claim {
		others--
	}
	// To let go of a transfer is never refused for want of room.
	if others >= m.opt.MaxTransfers && countBlocks(r.Blocks) > 0 {
		return m.overload("loads")
	}
	m.count.Loaded++
	if m.loadLost(&r, countBlocks(r.Blocks)) {
		return nil
	}
	if j != nil && j.found != nil && j.of == r.From {
		m.loadFound(now, j, r)
		return nil
	}
	if j != nil {
		m.endParts(now, j, Cancelled, otherEngine)
	}
	m.addLoad(now, &load{id: r.ID, token: r.Token, from: r.From, first: r.First, blocks: r.Blocks, tokens: r.Tokens, prompt: r.Prompt})
	return nil
}

func (m *Machine) checkBlocks(first []uint32, blocks [][]BlockID, tokens []uint32) error {
	err := m.layout.CheckBlocks(blocks)
	if err == nil {
		err = m.layout.CheckUnique(blocks)
	}
	if err == nil && first != nil && len(first) != len(blocks) {
		err = fmt.Errorf("first blocks of %d groups, block ids of %d", len(first), len(blocks))
	}
	if err == nil && tokens != nil && len(tokens) != len(blocks) {
		err = fmt.Errorf("tokens of %d groups, block ids of %d", len(tokens), len(blocks))
	}
	if err != nil {
		return err
	}
	for g, n := range tokens {
		// Whatever P's blocks are like, there is then something to copy.
		if begin := uint64(at(first, g)) * uint64(m.layout.Groups[g].Tokens); n != 0 && len(blocks[g]) > 0 && begin >= uint64(n) {
			return fmt.Errorf("the prompt has %d tokens in group %d, but the first block is that of token %d", n, g, begin)
		}
	}
	return nil
}

// addLoad begins a load, in place of the claim that there may be.
func (m *Machine) addLoad(now time.Time, ld *load) {
	old := m.loads[ld.id]
	if ld.first == nil {
		ld.first = make([]uint32, len(ld.blocks))
	}
	m.begin(now)
	m.seq++ // an old one that was cancelled is void: P hears of the id by this load
	ld.seq, ld.started, ld.since = m.seq, now, now
	m.keepLoad(ld)
	if old != nil && old.claim {
		if old.join == nil {
			m.claims--
		}
		if old.from == ld.from {
			ld.since, ld.tried, ld.until = old.since, old.tried, now.Add(m.patience())
		}
	}
	if old == nil || !old.claim || old.state != loadClaimed || old.from != ld.from {
		if old != nil && old.state == loadClaimed && old.code == OK {
			m.act(SendFinish{Peer: old.peer, ID: ld.id, Code: Cancelled, Reason: "the decode engine loads it from another engine"})
		}
		m.act(Resolve{ID: ld.id, Seq: ld.seq, From: ld.from, Part: ld.join != nil})
		return
	}
	ld.state, ld.peer, ld.known = loadClaimed, old.peer, old.known
	ld.code, ld.reason = old.code, old.reason
	if !old.nameBy.IsZero() {
		ld.nameBy = later(old.nameBy, now.Add(m.opt.PeerTimeout/3))
	}
	m.proceed(now, ld)
}

const nothingToLoad = "nothing to load"

// proceed goes on with a load whose P is known.
func (m *Machine) proceed(now time.Time, ld *load) {
	switch {
	case ld.empty():
		if ld.code == OK {
			m.act(SendFinish{Peer: ld.peer, ID: ld.id, Code: OK, Reason: nothingToLoad})
		}
		ld.code, ld.reason = OK, nothingToLoad
		m.reportLoad(now, ld)
	case ld.code != OK:
		m.reportLoad(now, ld)
	default:
		m.watch(now, ld.peer)
		ld.state, ld.begun = loadExpecting, now
		m.act(Expect{ID: ld.id, Peer: ld.peer, First: ld.first, Blocks: ld.blocks, Tokens: ld.tokens, Regions: ld.regions})
	}
}

// Resolved answers Resolve. A code other than OK says why P's agent was not
// found or refused this one. opened is an instant, on this machine's clock,
// before which that agent was not open for certain; zero if nothing is known.
func (m *Machine) Resolved(now time.Time, id TransferID, seq uint64, peer AgentID, opened time.Time, code Code, reason string) {
	ld := m.loads[id]
	if ld == nil || ld.seq != seq && !fault.On("stale-answer") || ld.state != loadResolving {
		return
	}
	switch {
	case code == OK:
	case ld.claim && code == Unreachable:
		if fault.On("claim-dropped") {
			m.reportLoad(now, ld)
			return
		}
		m.resolveLater(now, ld)
		return
	case ld.claim:
		m.loseClaim(now, ld, code, reason)
		return
	default:
		ld.code, ld.reason = code, reason
		m.reportLoad(now, ld)
		return
	}
	ld.peer, ld.nameBy, ld.lostBy = peer, time.Time{}, time.Time{}
	older := ld.since.Before(opened)
	if older { // so that it is reported within PeerTimeout of its beginning, with the next renewal
		ld.nameBy = later(ld.since.Add(m.patience()-m.renewInterval()), now.Add(m.opt.PeerTimeout/3))
	}
	switch {
	case ld.given:
		m.act(SendFinish{Peer: peer, ID: id, Code: ld.code, Reason: ld.reason})
		m.reportLoad(now, ld)
	case ld.known != "" && ld.known != peer:
		ld.code, ld.reason = PeerLost, fmt.Sprintf("prefill agent %s, which had the request, was replaced by %s", ld.known, peer)
		m.reportLoad(now, ld)
	case ld.tried != "" && ld.tried != peer && older && !fault.On("to-the-successor"):
		// The request is older than this agent, so its engine cannot know it.
		reason = fmt.Sprintf("prefill agent %s, which the request was for, was replaced by %s", ld.tried, peer)
		if ld.claim {
			m.loseClaim(now, ld, PeerLost, reason)
			return
		}
		ld.code, ld.reason = PeerLost, reason
		m.reportLoad(now, ld)
	case ld.claim:
		ld.state = loadClaimed
		m.watch(now, peer)
		if p := m.peers[peer]; !p.fresh {
			p.fresh = true // a thousand that come one by one are two messages
			if !p.asking {
				m.tickPeers(now)
			}
		}
	default:
		m.proceed(now, ld)
	}
}

// Expecting answers Expect.
func (m *Machine) Expecting(now time.Time, id TransferID, grant []byte, err error) {
	ld := m.loads[id]
	if ld == nil || ld.state != loadExpecting {
		return
	}
	switch {
	case err != nil && ld.tried == "":
		m.lookAgain(now, ld, time.Time{}) // what is remembered of P is out of date, most likely
		return
	case err != nil:
		m.endLoad(now, ld, Failed, err.Error(), true)
		return
	}
	ld.state, ld.grant = loadRequesting, grant
	m.act(SendLoad{ID: id, Seq: ld.seq, Peer: ld.peer, Grant: grant, First: ld.first, Blocks: ld.blocks, Tokens: ld.tokens, Regions: ld.regions, Prompt: ld.prompt, Lease: m.opt.Lease})
}

// LoadReplied answers SendLoad. absent says that nobody listens at the peer's
// address any more: the agent was restarted, or is gone.
func (m *Machine) LoadReplied(now time.Time, id TransferID, seq uint64, absent bool, code Code, reason string) {
	ld := m.loads[id]
	if ld == nil || ld.seq != seq && !fault.On("stale-reply") || ld.state != loadRequesting {
		return
	}
	hello := code == SayHello
	code = peerCode(code)
	switch {
	case absent && ld.tried == "" && ld.known == "":
		m.lookAgain(now, ld, ld.begun)
	case hello && ld.tried == "":
		m.lookAgain(now, ld, time.Time{})
	case absent:
		m.endLoad(now, ld, PeerLost, reason, false)
	case code != OK: // without an answer P may have it all the same
		m.endLoad(now, ld, code, reason, code == PeerLost)
	default:
		ld.state = loadWaiting
		m.watch(now, ld.peer)
		m.peers[ld.peer].heard = now
	}
}

// lookAgain starts over, once: a new agent may have taken P's place. What was under
// way with one that is gone must end within PeerTimeout of its death, which came
// after alive; zero says that it is not gone.
func (m *Machine) lookAgain(now time.Time, ld *load, alive time.Time) {
	gone := !alive.IsZero()
	ld.tried = ld.peer
	m.count.Retries++
	m.act(Forget{Peer: ld.peer, Gone: gone})
	if ld.claim {
		if m.opt.ReportClaims {
			// After a silence there is hardly time left: as much as it takes to find and ask one.
			ld.lostBy = later(alive.Add(m.patience()), now.Add(m.opt.PeerTimeout/4))
		}
		m.resolveAgain(ld)
		return
	}
	if ld.until = now.Add(m.patience()); gone {
		ld.until = alive.Add(m.patience())
	}
	if fault.On("no-fence-again") {
		m.resolveAgain(ld)
		return
	}
	ld.again = true
	m.fence(ld)
}

// resolveLater: P's agent may not be up yet.
func (m *Machine) resolveLater(now time.Time, ld *load) {
	ld.state, ld.peer, ld.retryAt = loadResolving, "", now.Add(m.opt.PeerTimeout)
}

func (m *Machine) resolveAgain(ld *load) {
	ld.state, ld.peer, ld.retryAt = loadResolving, "", time.Time{} // the old agent's last words do not count
	m.act(Resolve{ID: ld.id, Seq: ld.seq, From: ld.from, Part: ld.join != nil, Fresh: true})
}

// Received takes the transport's outcome of an Expect.
func (m *Machine) Received(now time.Time, id TransferID, s TransferStats, err error) {
	ld := m.loads[id]
	if ld == nil || ld.state < loadExpecting || ld.state == loadFencing {
		return
	}
	ld.stats = s
	if err != nil {
		// P may live, though its connections broke, and hold blocks for this.
		m.endLoad(now, ld, transportCode(err), "receiving from prefill agent "+string(ld.peer)+": "+err.Error(), true)
		return
	}
	// The bytes are all here: the transport has nothing left to fence.
	m.act(SendFinish{Peer: ld.peer, ID: id, Code: OK})
	m.reportLoad(now, ld)
}

// FinishArrived takes the other side's word that its half has ended.
func (m *Machine) FinishArrived(now time.Time, from AgentID, id TransferID, code Code, reason string) {
	if ld := m.loads[id]; ld != nil && ld.peer == from {
		if code == StartOver {
			m.loadAnew(ld, reason)
		} else if code != OK { // of success the bytes themselves are the sign
			m.peerEnded(now, ld, peerCode(code), reason)
		}
		return
	}
	if code != StartOver { // else it is late: D has all, or has given it up
		m.finishOffer(now, from, id, code, reason)
	}
}

// peerEnded takes P's word that it has given a transfer up. A claim keeps it
// for the load that may follow.
func (m *Machine) peerEnded(now time.Time, ld *load, code Code, reason string) {
	switch {
	case ld.state != loadClaimed:
		m.endLoad(now, ld, code, reason, false)
	case ld.code == OK && !fault.On("claim-forgets-end"):
		m.loseClaim(now, ld, code, reason)
	}
}

// Revoked answers Revoke: no byte of the load can land any more.
func (m *Machine) Revoked(now time.Time, id TransferID) {
	ld := m.loads[id]
	if ld == nil || ld.state != loadFencing {
		return
	}
	switch {
	case ld.anew && ld.again:
		ld.again, ld.anew = false, false
		m.proceed(now, ld)
	case ld.again:
		ld.again = false
		m.resolveAgain(ld)
	default:
		m.reportLoad(now, ld)
	}
}

// endLoad brings D's half to an end other than success; tell says whether P
// must be told.
func (m *Machine) endLoad(now time.Time, ld *load, code Code, reason string, tell bool) {
	switch ld.state {
	case loadResolving:
		if ld.given {
			if code == Closed {
				m.reportLoad(now, ld)
			}
			return
		}
		ld.code, ld.reason = code, reason
		if code != Cancelled || !ld.retryAt.IsZero() { // nobody was found who must be told
			m.reportLoad(now, ld)
			return
		}
		// The engine has its blocks back now; P must still hear of it.
		owes := ld.owes()
		m.dropClaim(ld)
		if ld.given = !fault.On("given-twice"); owes {
			m.giveReport(now, ld)
		}
	case loadClaimed:
		if tell && (ld.code == OK) != fault.On("no-finish-of-claims") { // else P has ended it
			m.act(SendFinish{Peer: ld.peer, ID: ld.id, Code: code, Reason: reason})
		}
		m.reportLoad(now, ld)
	case loadFencing:
		if ld.again {
			if ld.anew && tell { // P lives, and knows it
				m.act(SendFinish{Peer: ld.peer, ID: ld.id, Code: code, Reason: reason})
			}
			ld.again, ld.code, ld.reason = false, code, reason
			m.partFails(now, ld)
		}
	default:
		ld.code, ld.reason = code, reason
		if tell && !(fault.On("no-finish") && code == Cancelled) {
			m.act(SendFinish{Peer: ld.peer, ID: ld.id, Code: code, Reason: reason})
		}
		m.fence(ld)
		if fault.On("no-fence") {
			m.reportLoad(now, ld)
		}
		m.partFails(now, ld)
	}
}

func (m *Machine) fence(ld *load) {
	ld.ended, ld.state = ld.state, loadFencing
	m.act(Revoke{ID: ld.id})
}

// reportLoad is the only way out of the map of loads.
func (m *Machine) reportLoad(now time.Time, ld *load) {
	m.dropLoad(ld)
	if len(m.loads) == 0 {
		clear(m.peers) // nobody may call Tick now, which drops them one by one
	}
	if ld.owes() {
		m.giveReport(now, ld)
	}
	m.dropClaim(ld)
}

// dropClaim: the engine wants nothing of it any more.
func (m *Machine) dropClaim(ld *load) {
	if ld.claim {
		ld.claim = false
		if ld.join != nil {
			m.claimEnded(ld.join)
		} else {
			m.claims--
		}
	}
}

func (m *Machine) giveReport(now time.Time, ld *load) {
	elapsed := now.Sub(ld.started)
	state := ld.state
	if state == loadFencing {
		state = ld.ended
	}
	r := Report{ID: ld.id, Side: SideLoad, Token: ld.token, Code: ld.code, Reason: ld.reason,
		Blocks: countBlocks(ld.blocks), Wait: max(elapsed-time.Duration(ld.stats.Nanos), 0), Elapsed: elapsed,
		State: state.String(), Peer: ld.peer, From: ld.from, Stats: ld.stats}
	if ld.join != nil {
		m.partLoaded(now, ld.join, &r)
		return
	}
	m.act(r)
}
