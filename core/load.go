package core

import (
	"fmt"
	"time"
)

// The states of D's half.
type loadState uint8

const (
	loadResolving  loadState = iota // P's agent is being looked up; no byte can come
	loadExpecting                   // the transport is being armed
	loadRequesting                  // P has been asked
	loadWaiting                     // P knows; bytes come when it has them
	loadFencing                     // it ends; bytes may land until Revoked
)

type load struct {
	id      TransferID
	seq     uint64
	state   loadState
	token   uint64
	from    Target
	first   []uint32
	blocks  [][]BlockID
	peer    AgentID
	started time.Time
	retried bool // found again after P's agent had been replaced
	again   bool // fencing in order to start over
	given   bool // reported already; only P must still be told
	sent    int  // renewals that said "sent" while bytes were missing
	ended   int  // renewals that said "ended" before the Finish that says why
	code    Code // of the end, while fencing
	reason  string
	stats   TransferStats
}

// empty: the engine needs nothing of it, P is only told to free its blocks.
func (ld *load) empty() bool { return countBlocks(ld.blocks) == 0 }

// Load asks for a transfer in the engine's blocks. They belong to the transfer
// until its Report.
func (m *Machine) Load(now time.Time, r LoadRequest) error {
	if err := checkID(r.ID); err != nil {
		return err
	}
	if m.closed {
		return ErrClosed
	}
	if r.From.Bootstrap == "" && r.From.EngineID == "" {
		return fmt.Errorf("%w: load %q names neither a bootstrap address nor an engine_id", ErrInvalid, string(r.ID))
	}
	err := m.layout.CheckBlocks(r.Blocks)
	if err == nil {
		err = m.layout.CheckUnique(r.Blocks)
	}
	if err == nil && r.First != nil && len(r.First) != len(r.Blocks) {
		err = fmt.Errorf("first blocks of %d groups, block ids of %d", len(r.First), len(r.Blocks))
	}
	if err != nil {
		return fmt.Errorf("%w: load %q: %w", ErrInvalid, string(r.ID), err)
	}
	old := m.loads[r.ID]
	if old != nil && !old.given {
		return fmt.Errorf("%w: transfer %q is being loaded already; give each request a transfer_id of its own", ErrDuplicate, string(r.ID))
	}
	if old == nil && len(m.loads) >= m.opt.MaxTransfers {
		return m.overload("loads")
	}
	first := r.First
	if first == nil {
		first = make([]uint32, len(r.Blocks))
	}
	m.seq++ // an old one that was cancelled is void: P hears of the id by this load
	ld := &load{id: r.ID, seq: m.seq, token: r.Token, from: r.From, first: first, blocks: r.Blocks, started: now}
	m.loads[r.ID] = ld
	m.act(Resolve{ID: ld.id, Seq: ld.seq, From: ld.from})
	return nil
}

// Resolved answers Resolve. A code other than OK says why P's agent was not
// found or refused this one.
func (m *Machine) Resolved(now time.Time, id TransferID, seq uint64, peer AgentID, code Code, reason string) {
	ld := m.loads[id]
	if ld == nil || ld.seq != seq || ld.state != loadResolving {
		return
	}
	if code != OK {
		ld.code, ld.reason = code, reason
		m.reportLoad(now, ld)
		return
	}
	ld.peer = peer
	if ld.given || ld.empty() {
		if !ld.given {
			ld.reason = "nothing to load"
		}
		m.act(SendFinish{Peer: peer, ID: id, Code: ld.code, Reason: ld.reason})
		m.reportLoad(now, ld)
		return
	}
	m.watch(now, peer)
	ld.state = loadExpecting
	m.act(Expect{ID: id, Peer: peer, Blocks: ld.blocks})
}

// Expecting answers Expect.
func (m *Machine) Expecting(now time.Time, id TransferID, grant []byte, err error) {
	ld := m.loads[id]
	if ld == nil || ld.state != loadExpecting {
		return
	}
	switch {
	case err != nil && !ld.retried:
		m.lookAgain(ld) // what is remembered of P is out of date, most likely
		return
	case err != nil:
		m.endLoad(now, ld, Failed, err.Error())
		return
	}
	ld.state = loadRequesting
	m.act(SendLoad{ID: id, Seq: ld.seq, Peer: ld.peer, Grant: grant, First: ld.first, Blocks: ld.blocks, Lease: m.opt.Lease})
}

// LoadReplied answers SendLoad. absent says that nobody listens at the peer's
// address any more: the agent was restarted, or is gone.
func (m *Machine) LoadReplied(now time.Time, id TransferID, seq uint64, absent bool, code Code, reason string) {
	ld := m.loads[id]
	if ld == nil || ld.seq != seq || ld.state != loadRequesting {
		return
	}
	code = peerCode(code)
	switch {
	case absent && !ld.retried:
		m.lookAgain(ld)
	case absent:
		m.endLoad(now, ld, PeerLost, reason)
	case code != OK:
		m.endLoad(now, ld, code, reason)
	default:
		ld.state = loadWaiting
		m.watch(now, ld.peer)
		m.peers[ld.peer].heard = now
	}
}

// lookAgain starts over, once, before anything has moved: a new agent may have
// taken P's place.
func (m *Machine) lookAgain(ld *load) {
	ld.retried, ld.again = true, true
	m.act(Forget{Peer: ld.peer})
	m.fence(ld)
}

// Received takes the transport's outcome of an Expect.
func (m *Machine) Received(now time.Time, id TransferID, s TransferStats, err error) {
	ld := m.loads[id]
	if ld == nil || ld.state < loadExpecting || ld.state == loadFencing {
		return
	}
	ld.stats = s
	if err != nil {
		code, reason := transportCode(err), "receiving from prefill agent "+string(ld.peer)+": "+err.Error()
		if code == PeerLost { // only the connection, for all that is known: P may live and hold blocks
			m.act(SendFinish{Peer: ld.peer, ID: id, Code: code, Reason: reason})
		}
		m.endLoad(now, ld, code, reason)
		return
	}
	// The bytes are all here: the transport has nothing left to fence.
	m.act(SendFinish{Peer: ld.peer, ID: id, Code: OK})
	m.reportLoad(now, ld)
}

// FinishArrived takes the other side's word that its half has ended.
func (m *Machine) FinishArrived(now time.Time, from AgentID, id TransferID, code Code, reason string) {
	if ld := m.loads[id]; ld != nil && ld.peer == from {
		if code != OK { // of success the bytes themselves are the sign
			m.endLoad(now, ld, peerCode(code), reason)
		}
		return
	}
	m.finishOffer(now, from, id, code, reason)
}

// Revoked answers Revoke: no byte of the load can land any more.
func (m *Machine) Revoked(now time.Time, id TransferID) {
	ld := m.loads[id]
	if ld == nil || ld.state != loadFencing {
		return
	}
	if ld.again {
		ld.again = false
		ld.state, ld.peer = loadResolving, "" // the old agent's last words do not count
		m.act(Resolve{ID: id, Seq: ld.seq, From: ld.from, Fresh: true})
		return
	}
	m.reportLoad(now, ld)
}

// endLoad brings D's half to an end other than success.
func (m *Machine) endLoad(now time.Time, ld *load, code Code, reason string) {
	switch ld.state {
	case loadResolving:
		if ld.given {
			if code == Closed {
				m.reportLoad(now, ld)
			}
			return
		}
		ld.code, ld.reason = code, reason
		if code != Cancelled {
			m.reportLoad(now, ld)
			return
		}
		// The engine has its blocks back now; P must still hear of it.
		m.giveReport(now, ld)
		ld.given = true
	case loadFencing:
		if ld.again {
			ld.again, ld.code, ld.reason = false, code, reason
		}
	default:
		ld.code, ld.reason = code, reason
		if code != PeerLost && code != PeerCancelled {
			m.act(SendFinish{Peer: ld.peer, ID: ld.id, Code: code, Reason: reason})
		}
		m.fence(ld)
	}
}

func (m *Machine) fence(ld *load) {
	ld.state = loadFencing
	m.act(Revoke{ID: ld.id})
}

// reportLoad is the only way out of the map of loads.
func (m *Machine) reportLoad(now time.Time, ld *load) {
	delete(m.loads, ld.id)
	if len(m.loads) == 0 {
		clear(m.peers) // nobody may call Tick now, which drops them one by one
	}
	if !ld.given {
		m.giveReport(now, ld)
	}
}

func (m *Machine) giveReport(now time.Time, ld *load) {
	wait := now.Sub(ld.started) - time.Duration(ld.stats.Nanos)
	m.act(Report{ID: ld.id, Side: SideLoad, Token: ld.token, Code: ld.code, Reason: ld.reason,
		Blocks: countBlocks(ld.blocks), Wait: max(wait, 0), Stats: ld.stats})
}
