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
		open := func(peer core.AgentID, id uint64) (asks *sealSession, answers *held) {
			_, a, first := s.opened.get(peer, nil, time.Now())
			if !first {
				t.Fatalf("no session with %s is opened", peer)
			}
			asks, answers = &sealSession{began: time.Now()}, stub(id, byte(id))
			s.opened.ended(peer, a, asks, nil)
			s.served.add(answers)
			s.kept()
			return asks, answers
		}
		numbers := uint64(0)
		use := func(peer core.AgentID, asks *sealSession, answers *held) bool {
			got, _, _ := s.opened.get(peer, nil, time.Now())
			if got != asks {
				return false
			}
			asks.requests.next.Add(1)
			v, _ := s.served.find(answers.id, numbers, time.Now())
			numbers++
			return v == answers && s.served.use(v, numbers) == arrivalNew
		}
		has := func(answers *held) bool {
			v, _ := s.served.find(answers.id, numbers+1, time.Now())
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
			time.Sleep(askedIdle - 1)
		}
		if has(unused) || len(s.served.by) != 1 || len(s.served.opens) != 1 || s.opened.by["Q"] != nil {
			t.Errorf("sessions that nobody used are there: %d and %d", len(s.served.by), len(s.opened.by))
		}
		if !use("P", asks, answers) {
			t.Fatal("a session in use is forgotten")
		}
		time.Sleep(askedIdle)
		got, a, first := s.opened.get("P", nil, time.Now())
		if got != nil || !first || !has(answers) {
			t.Fatalf("the asker uses an idle session: %v; the answerer has it: %v", got != nil, has(answers))
		}
		s.opened.ended("P", a, nil, errClosed)
		if got, again, first := s.opened.get("P", nil, time.Now()); got != nil || !first {
			t.Error("the asker uses an idle session when it could open no other")
		} else {
			s.opened.ended("P", again, nil, errClosed)
		}
		time.Sleep(servedIdle - askedIdle)
		if has(answers) {
			t.Errorf("the answerer uses a session after %v", servedIdle)
		}
		time.Sleep(sweepEvery)
		synctest.Wait()
		if n := len(s.served.by) + len(s.served.opens) + len(s.served.each) + s.served.used.Len() + len(s.opened.by) + s.opened.order.Len(); n != 0 || sweeps() {
			t.Errorf("%d of them are left; they are still looked for: %v", n, sweeps())
		}
		// The next ones are looked for again, also those that an attempt to open another holds.
		asks, _ = open("P", 3)
		_, a, _ = s.opened.get("P", asks, time.Now())
		time.Sleep(servedIdle + sweepEvery)
		synctest.Wait()
		if len(s.opened.by) != 1 || len(s.served.by) != 0 || !sweeps() {
			t.Errorf("%d agents, of which one is asked, and %d sessions", len(s.opened.by), len(s.served.by))
		}
		s.opened.ended("P", a, nil, errClosed)
		open("Q", 4)
		s.close()
		s.kept()
		time.Sleep(servedIdle + sweepEvery)
		synctest.Wait()
		if s.mu.Lock(); s.sweeper == nil {
			t.Error("a bus that is closed looks for idle sessions")
		}
		s.mu.Unlock()
		if s.served.add(stub(5, 5)) || len(s.served.by)+len(s.served.opens)+len(s.served.each)+len(s.opened.by) != 0 {
			t.Errorf("a bus that is closed keeps %d sessions and %d agents", len(s.served.by), len(s.opened.by))
		}
		_, a, _ = s.opened.get("R", nil, time.Now())
		if s.opened.ended("R", a, &sealSession{began: time.Now()}, nil); len(s.opened.by) != 0 {
			t.Error("a bus that is closed keeps a session that was opened late")
		}
	})
}

// TestSessionThatWasNotUsed: the answerer may forget a session of which it has got no request, so the asker begins with none
// that was opened a while ago.
func TestSessionThatWasNotUsed(t *testing.T) {
	s := &sealSession{began: time.Now()}
	if s.spent(s.began.Add(unusedLife/2 - 1)) {
		t.Error("a new session is not used")
	}
	if !s.spent(s.began.Add(unusedLife / 2)) {
		t.Errorf("a session is used for the first time after %v", unusedLife/2)
	}
	s.requests.next.Store(1)
	if s.spent(s.began.Add(sessionLife)) {
		t.Error("a session that was used is not used again")
	}
}
