package core

import (
	"fmt"
	"time"

	"github.com/kvconn/kvconn/internal/fault"
)

// farewell is an end of which P must still be told: the engine has cancelled the claim or
// load while P's agent was being looked up. It is kept until P is found. A new claim or load
// of the id voids it: P then hears of the id by the new one.
type farewell struct {
	id  TransferID
	seq uint64
	end ending
}

// restPeers forgets all P agents when nothing waits for one. Tick forgets them one by one,
// but perhaps nobody tells it then.
func (m *Machine) restPeers() {
	if len(m.loads.byID)+len(m.claims.byID)+len(m.farewells.byID) == 0 {
		clear(m.peers)
	}
}

// lookUp is how P's agent is looked up for a half.
func lookUp(id TransferID, seq uint64, from Target, fresh bool) Resolve {
	return Resolve{ID: id, Seq: seq, From: from, Part: isPart(id), Fresh: fresh}
}

func (m *Machine) stepResolved(now time.Time, e Resolved) {
	m.resolved(now, e.ID, e.Seq, e.Peer, e.Opened, ending{e.Code, e.Reason})
	m.settle(now)
}

func (m *Machine) resolved(now time.Time, id TransferID, seq uint64, peer AgentID, opened time.Time, end ending) {
	if f := m.farewells.get(id); f != nil && f.seq == seq {
		if end.code == OK {
			m.act(SendFinish{Peer: peer, ID: id, Code: f.end.code, Reason: f.end.reason})
		}
		m.dropFarewell(f)
	}
	if c := m.claims.get(id); c != nil && (c.seq == seq || fault.On("stale-answer")) && c.state.lookedUp() {
		m.claimResolved(now, c, peer, opened, end)
	}
	if ld := m.loads.get(id); ld != nil && (ld.seq == seq || fault.On("stale-answer")) && ld.state.lookedUp() {
		m.loadResolved(now, ld, peer, opened, end)
	}
}

func (m *Machine) dropFarewell(f *farewell) {
	m.farewells.drop(f.id)
	m.restPeers()
}

// found notes the agent that was found for a request that was made at since, and
// says whether the agent is younger than the request.
func (m *Machine) found(now time.Time, a *agents, since time.Time, peer AgentID, opened time.Time) (younger bool) {
	a.peer, a.nameBy = peer, time.Time{}
	if younger = since.Before(opened); younger { // so that it is reported within PeerTimeout of its beginning, with the next renewal
		a.nameBy = later(since.Add(m.patience()-m.renewInterval()), now.Add(m.opt.PeerTimeout/3))
	}
	return younger
}

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
