package natsbus

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/seed"
)

var nopLog = zap.NewNop()

// unboundMessage came over no connection: its answer goes nowhere.
func unboundMessage(data []byte) *nats.Msg { return &nats.Msg{Data: data} }

// TestReplays: a number is taken once. One that overtook a thousand others keeps none of them out.
func TestReplays(t *testing.T) {
	var r replays
	for n := range uint64(3000) {
		if a := r.take(n); a != arrivalNew {
			t.Fatalf("%d is %v", n, a)
		}
		if a := r.take(n); a != arrivalSeen {
			t.Fatalf("%d again is %v", n, a)
		}
	}
	if a := r.take(0); a != arrivalOld {
		t.Errorf("0 again is %v", a)
	}
	r.take(100_000)
	for n := uint64(100_000 - 1024); n < 100_000; n++ {
		if a := r.take(n); a != arrivalNew {
			t.Fatalf("%d, overtaken by 100000, is %v", n, a)
		}
	}
	for _, n := range []uint64{100_000, 99_999, 99_000} {
		if a := r.take(n); a != arrivalSeen {
			t.Errorf("%d again is %v", n, a)
		}
	}
	if a := r.take(2999); a != arrivalOld {
		t.Errorf("2999 after 100000 is %v", a)
	}
	rnd := seed.Rand(t)
	for range 100 { // in any order, each once, whatever the window
		var r replays
		seen := map[uint64]bool{}
		for range 2000 {
			n := rnd.Uint64N(5000)
			a := r.look(n)
			if b := r.take(n); a != b || a == arrivalNew && seen[n] || a == arrivalSeen && !seen[n] {
				t.Fatalf("%d is %v and then %v; taken before: %v", n, a, b, seen[n])
			}
			seen[n] = seen[n] || a == arrivalNew
		}
	}
	if a := r.take(^uint64(0)); a != arrivalNew {
		t.Errorf("the last number is %v", a)
	}
	if a := r.take(^uint64(0)); a != arrivalSeen {
		t.Errorf("the last number again is %v", a)
	}
}

// stub is a session of the table's own kind, without keys.
func stub(id uint64, key byte) *responderSession {
	s := &responderSession{sealSession: &sealSession{id: id, peer: core.AgentID(fmt.Sprint("D", key)), began: time.Now()}}
	s.key[0] = key
	for i := range 8 {
		s.open[i] = byte(id >> (8 * i))
	}
	return s
}

// TestResponderSessions: opens that are sent again, and those that nobody uses, put none out that is
// in use. If all places are in use, the key that has the most makes room, by its least recently used.
func TestResponderSessions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newResponderSessions()
		has := func(id uint64) bool {
			v, _ := s.find(id, 0, time.Now())
			return v != nil
		}
		honest := stub(1, 1)
		if !s.add(honest) || s.use(honest, 0) != arrivalNew {
			t.Fatal("an honest session is not taken")
		}
		if again := stub(1, 1); s.add(again) {
			t.Error("a number is given twice")
		}
		if again := stub(2, 1); func() bool { again.open = honest.open; return s.add(again) }() {
			t.Error("an open makes a second session")
		}
		for id := range uint64(maxUnused + 10) {
			if !s.add(stub(100+id, 2)) {
				t.Fatal("a session is not taken")
			}
		}
		if !has(1) || has(100) || !has(100+maxUnused+9) || s.unused.Len() != maxUnused || len(s.by) != 1+maxUnused || len(s.opens) != len(s.by) {
			t.Errorf("%d sessions, %d unused", len(s.by), s.unused.Len())
		}
		time.Sleep(unusedLife)
		s.add(stub(50, 2))
		if !has(1) || !has(50) || s.unused.Len() != 1 || len(s.by) != 2 {
			t.Errorf("%d sessions after %v, %d unused", len(s.by), unusedLife, s.unused.Len())
		}
		s.drop(s.by[50])
		// One key takes all places that there are. Then others come.
		use := func(id uint64, key byte) {
			v := stub(id, key)
			if !s.add(v) || s.use(v, 3) != arrivalNew || s.use(v, 3) != arrivalSeen {
				t.Fatalf("session %d is not taken", id)
			}
		}
		for id := range uint64(maxSessions) {
			use(10_000+id, 3)
		}
		if !has(1) || has(10_000) || s.used.Len() != maxSessions {
			t.Errorf("a key with all places keeps %d, and the other's is there: %v", s.used.Len(), has(1))
		}
		for id := range uint64(100) {
			use(50_000+id, byte(10+id))
		}
		if !has(1) || !has(50_000) || !has(50_099) || has(10_100) || !has(10_101) || s.used.Len() != maxSessions {
			t.Errorf("newcomers have put out others than the key that has the most")
		}
		if s.each[[32]byte{3}].sessions.Len() != maxSessions-101 || len(s.heap) != len(s.each) || len(s.each) != 102 {
			t.Errorf("%d of the key, %d keys", s.each[[32]byte{3}].sessions.Len(), len(s.each))
		}
		gone := s.by[50_000]
		s.drop(gone)
		if s.use(gone, 4) != arrivalNew || has(50_000) || s.used.Len() != maxSessions-1 {
			t.Error("a request of a session that has given way meanwhile brings it back")
		}
		time.Sleep(responderLife)
		if has(1) {
			t.Error("a session is used after its life")
		}
		s.add(stub(7, 7))
		if len(s.by) != 1 || len(s.opens) != 1 || len(s.each) != 0 {
			t.Errorf("%d sessions, %d opens, %d keys after %v", len(s.by), len(s.opens), len(s.each), responderLife)
		}
	})
}

// TestRequesterSessions: requests to one agent that come at a time wait for one attempt to open a session. A session
// that the agent has forgotten, or that needs a rekey, is opened anew, once.
func TestRequesterSessions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newRequesterSessions()
		get := func(peer core.AgentID, stale *sealSession) (*sealSession, *attempt, bool) {
			return o.get(peer, stale, time.Now())
		}
		end := func(peer core.AgentID, a *attempt, err error) (s *sealSession) {
			if err == nil {
				s = &sealSession{began: time.Now()}
				s.requests.next.Store(1)
			}
			o.ended(peer, a, s, err)
			<-a.done
			return s
		}
		s, a, first := get("P", nil)
		if s != nil || a == nil || !first {
			t.Fatal(s, a, first)
		}
		if s, b, first := get("P", nil); s != nil || b != a || first {
			t.Error("a second request makes an attempt of its own")
		}
		end("P", a, errClosed)
		if a.err != errClosed || len(o.by) != 0 {
			t.Errorf("%v, %d agents", a.err, len(o.by))
		}
		_, a, _ = get("P", nil)
		s = end("P", a, nil)
		if got, _, _ := get("P", nil); got != s || a.session != s {
			t.Error("a session is not kept")
		}
		got, a, first := get("P", s)
		if got != nil || !first {
			t.Error("a session that P has forgotten is used")
		}
		end("P", a, errClosed)
		if got, _, _ := get("P", nil); got != s { // perhaps it was another's word
			t.Error("a session is lost by an attempt that failed")
		}
		_, a, _ = get("P", s)
		next := end("P", a, nil)
		if got, _, _ := get("P", s); got != next {
			t.Error("a session is opened for each request that had the previous one")
		}
		pass := func(d time.Duration) { // with a request now and then, so that the session is not idle
			for end := time.Now().Add(d); ; get("P", nil) {
				left := time.Until(end)
				if time.Sleep(min(left, requesterIdle/2)); left <= requesterIdle/2 {
					return
				}
			}
		}
		pass(sessionLife)
		if got, _, first := get("P", nil); got != next || !first {
			t.Errorf("a session of %v is not used while another is opened", sessionLife)
		}
		if got, _, first := get("P", nil); got != next || first {
			t.Error("two others are opened")
		}
		pass(sessionLife / 2)
		if got, _, _ := get("P", nil); got != nil {
			t.Errorf("a session is used after %v", sessionLife*3/2)
		}
		// A session that was opened beside one that needs a rekey is not used for a while: the old one goes on.
		_, a, _ = get("W", nil)
		expiring := end("W", a, nil)
		expiring.requests.next.Store(sessionRequests)
		if got, _, first := get("W", nil); got != expiring || !first {
			t.Error("a session that needs a rekey is not used while another is opened")
		}
		fresh := &sealSession{began: time.Now()}
		o.ended("W", o.by["W"].attempt, fresh, nil)
		if got, _, _ := get("W", nil); got != fresh {
			t.Error("a fresh session is not used")
		}
		time.Sleep(unusedLife / 2)
		if got, _, first := get("W", nil); got != expiring || !first {
			t.Error("a session that waited for too long ends the one before it too")
		}
		o.ended("W", o.by["W"].attempt, nil, errClosed)
		if got, _, _ := get("W", fresh); got == expiring {
			t.Error("an agent that has forgotten a session is asked by the one before it")
		}
		fresh.requests.next.Store(1)
		fresh = &sealSession{began: time.Now()}
		o.ended("W", o.by["W"].attempt, fresh, nil)
		time.Sleep(unusedLife / 2)
		if got, _, first := get("W", nil); got != nil || !first {
			t.Error("a session that an agent has forgotten is used when the one after it has waited for too long")
		}
		o.ended("W", o.by["W"].attempt, nil, errClosed)
		o.forget("W", fresh)
		_, a, _ = get("Q", nil)
		s = end("Q", a, nil)
		s.requests.next.Store(sessionRequests)
		if got, _, first := get("Q", nil); got != s || !first {
			t.Errorf("a session of %d requests is not used while another is opened", sessionRequests)
		}
		s.requests.next.Store(2 * sessionRequests)
		if got, _, first := get("Q", nil); got != nil || first {
			t.Errorf("a session is used after %d requests", 2*sessionRequests)
		}
		for i := range maxSessions + 5 {
			peer := core.AgentID(fmt.Sprint(i))
			_, a, _ := get(peer, nil)
			end(peer, a, nil)
		}
		if len(o.by) != maxSessions || o.order.Len() != maxSessions || o.by["P"] == nil || o.by["Q"] == nil || o.by["6"] != nil || o.by["7"] == nil {
			t.Errorf("%d agents have sessions; those with an attempt under way: %v, %v", len(o.by), o.by["P"], o.by["Q"])
		}
	})
}
