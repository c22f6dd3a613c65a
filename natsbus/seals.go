package natsbus

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/safe"
)

// seals are what an agent of a cluster seals and opens messages with.
type seals struct {
	self      *Identity
	responder *responderSessions
	requester *requesterSessions
	refusals
	accepted atomic.Int64 // sessions that others have opened

	mu      sync.Mutex
	sweeper *time.Timer // nil while there is no session
	closed  bool
}

func newSeals(self *Identity) *seals {
	return &seals{self: self, responder: newResponderSessions(), requester: newRequesterSessions()}
}

// pending makes what waits for the answer of an agent.
func (s *seals) pending(to core.AgentID, of requestTag) *pendingAnswer {
	return &pendingAnswer{self: s.self, invalid: &s.invalid, to: to, requestTag: of, absent: make(chan *nats.Msg, 1)}
}

const sweepEvery = time.Minute // how much longer than requesterIdle and responderIdle a session's keys may lie in memory

// startSweeper says that there is a session: the idle ones are looked for until there is none.
func (s *seals) startSweeper() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sweeper == nil && !s.closed {
		s.sweeper = time.AfterFunc(sweepEvery, s.sweep)
	}
}

// sweep forgets idle sessions. It runs on the timer's goroutine, and waits for nothing but locks.
func (s *seals) sweep() {
	defer safe.Recover("natsbus.seals.sweep")
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || s.sweeper == nil { // the one before it took longer than sweepEvery
		return
	}
	s.sweeper.Reset(sweepEvery) // first, in case of a fault
	now := time.Now()
	if served, opened := s.responder.sweep(now), s.requester.sweep(now); served+opened == 0 {
		s.sweeper.Stop()
		s.sweeper = nil
	}
}

// close ends the sweeping, and forgets all sessions. If a sweep goes on at this moment, close waits for it.
func (s *seals) close() {
	s.mu.Lock()
	s.closed = true
	if s.sweeper != nil {
		s.sweeper.Stop()
	}
	s.mu.Unlock()
	s.responder.close()
	s.requester.close()
}
