package natsbus

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvconn/kvconn/core"
)

// TestIdleSessions: the keys of a session that is not used are forgotten, first by who asks. A session in use stays. While
// there is none, nothing looks for idle ones.
func TestIdleSessions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSeals(NewIdentity())
		defer s.close()
		sweeps := func() bool {
			s.mu.Lock()
			defer s.mu.Unlock()
			return s.sweeper != nil
		}
		open := func(peer core.AgentID, id uint64) (asks *sealSession, answers *responderSession) {
			_, a, first := s.requester.get(peer, nil, time.Now())
			if !first {
				t.Fatalf("no session with %s is opened", peer)
			}
			asks, answers = &sealSession{began: time.Now()}, stub(id, byte(id))
			s.requester.ended(peer, a, asks, nil)
			s.responder.add(answers)
			s.startSweeper()
			return asks, answers
		}
		numbers := uint64(0)
		use := func(peer core.AgentID, asks *sealSession, answers *responderSession) bool {
			got, _, _ := s.requester.get(peer, nil, time.Now())
			if got != asks {
				return false
			}
			asks.requests.next.Add(1)
			v, _ := s.responder.find(answers.id, numbers, time.Now())
			numbers++
			return v == answers && s.responder.use(v, numbers) == arrivalNew
		}
		has := func(answers *responderSession) bool {
			v, _ := s.responder.find(answers.id, numbers+1, time.Now())
			return v == answers
		}
		if sweeps() {
			t.Error("without a session idle ones are looked for")
		}
		asks, answers := open("P", 1)
		_, unused := open("Q", 2)
		for range 5 {
			if !use("P", asks, answers) {
				t.Fatal("a session in use is forgotten")
			}
			time.Sleep(requesterIdle - 1)
		}
		if has(unused) || len(s.responder.by) != 1 || len(s.responder.opens) != 1 || s.requester.by["Q"] != nil {
			t.Errorf("sessions that nobody used are there: %d and %d", len(s.responder.by), len(s.requester.by))
		}
		if !use("P", asks, answers) {
			t.Fatal("a session in use is forgotten")
		}
		time.Sleep(requesterIdle)
		got, a, first := s.requester.get("P", nil, time.Now())
		if got != nil || !first || !has(answers) {
			t.Fatalf("the requester uses an idle session: %v; the responder has it: %v", got != nil, has(answers))
		}
		s.requester.ended("P", a, nil, errClosed)
		if got, again, first := s.requester.get("P", nil, time.Now()); got != nil || !first {
			t.Error("the requester uses an idle session when it could open no other")
		} else {
			s.requester.ended("P", again, nil, errClosed)
		}
		time.Sleep(responderIdle - requesterIdle)
		if has(answers) {
			t.Errorf("the responder uses a session after %v", responderIdle)
		}
		time.Sleep(sweepEvery)
		synctest.Wait()
		if n := len(s.responder.by) + len(s.responder.opens) + len(s.responder.each) + s.responder.used.Len() + len(s.requester.by) + s.requester.order.Len(); n != 0 || sweeps() {
			t.Errorf("%d of them are left; they are still looked for: %v", n, sweeps())
		}
		// The next ones are looked for again, also those that an attempt to open another holds.
		asks, _ = open("P", 3)
		_, a, _ = s.requester.get("P", asks, time.Now())
		time.Sleep(responderIdle + sweepEvery)
		synctest.Wait()
		if len(s.requester.by) != 1 || len(s.responder.by) != 0 || !sweeps() {
			t.Errorf("%d agents, of which one is asked, and %d sessions", len(s.requester.by), len(s.responder.by))
		}
		s.requester.ended("P", a, nil, errClosed)
		open("Q", 4)
		s.close()
		s.startSweeper()
		time.Sleep(responderIdle + sweepEvery)
		synctest.Wait()
		if s.mu.Lock(); s.sweeper == nil {
			t.Error("a bus that is closed looks for idle sessions")
		}
		s.mu.Unlock()
		if s.responder.add(stub(5, 5)) || len(s.responder.by)+len(s.responder.opens)+len(s.responder.each)+len(s.requester.by) != 0 {
			t.Errorf("a bus that is closed keeps %d sessions and %d agents", len(s.responder.by), len(s.requester.by))
		}
		_, a, _ = s.requester.get("R", nil, time.Now())
		if s.requester.ended("R", a, &sealSession{began: time.Now()}, nil); len(s.requester.by) != 0 {
			t.Error("a bus that is closed keeps a session that was opened late")
		}
	})
}

// TestSessionThatWasNotUsed: the responder may forget a session of which it has got no request, so the requester begins with none
// that was opened a while ago.
func TestSessionThatWasNotUsed(t *testing.T) {
	s := &sealSession{began: time.Now()}
	if s.expired(s.began.Add(unusedLife/2 - 1)) {
		t.Error("a new session is not used")
	}
	if !s.expired(s.began.Add(unusedLife / 2)) {
		t.Errorf("a session is used for the first time after %v", unusedLife/2)
	}
	s.requests.next.Store(1)
	if s.expired(s.began.Add(sessionLife)) {
		t.Error("a session that was used is not used again")
	}
}
