package natsbus

import (
	"container/list"
	"time"

	"github.com/kvconn/kvconn/internal/safe"
)

// A session's keys read what was said in it, so they are not kept for long after its last use. The asker is the first to
// forget an idle session, so that it sends no request over one that the answerer has forgotten.
const (
	askedIdle  = 10 * time.Minute
	servedIdle = 2 * askedIdle
	sweepEvery = time.Minute // how much longer than that its keys may lie in memory
)

// kept says that there is a session: the idle ones are looked for until there is none.
func (s *seals) kept() {
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
	if s.closed {
		return
	}
	now := time.Now()
	served, opened := s.served.sweep(now), s.opened.sweep(now)
	if served+opened > 0 {
		s.sweeper.Reset(sweepEvery)
		return
	}
	s.sweeper = nil
}

// close ends the sweeping. If it goes on at this moment, close waits for it.
func (s *seals) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	if s.sweeper != nil {
		s.sweeper.Stop()
	}
}

// idle says that a session was not used for too long; mu is held.
func (v *sealSession) idle(now time.Time) bool { return now.Sub(v.in.last) >= servedIdle }

// sweep forgets idle sessions, and says how many are left.
func (s *served) sweep(now time.Time) (left int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range []*list.List{s.unused, s.used} { // both in the order of last
		for e := l.Front(); e != nil && e.Value.(*sealSession).idle(now); e = l.Front() {
			s.drop(e.Value.(*sealSession))
		}
	}
	return len(s.by)
}

// sweep forgets idle sessions, and says how many agents are left.
func (o *openSessions) sweep(now time.Time) (left int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for e := o.order.Front(); e != nil && e.Value.(*asking).idle(now); {
		a := e.Value.(*asking)
		if e = e.Next(); a.attempt == nil {
			o.drop(a)
		}
	}
	return len(o.by)
}

// idle says that the session with an agent was not used for too long; mu is held.
func (a *asking) idle(now time.Time) bool { return now.Sub(a.used) >= askedIdle }
