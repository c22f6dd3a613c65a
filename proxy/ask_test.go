package proxy

import (
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvconn/kvconn/rig/leaktest"
)

// TestOneQuestionForAll: requests that wait for a server that counts as down and is silent ask it once together, and those that come a
// moment later do not ask. When it answers again, the next one hears it.
func TestOneQuestionForAll(t *testing.T) {
	leaktest.Check(t)
	a, b := newTurning(t, prefillRole, 9001, ok), newTurning(t, decodeRole, 9002, ok)
	rest := b.Config.Handler
	var silent atomic.Bool
	questions := make(chan struct{}, 100)
	b.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if silent.Load() && r.Method == http.MethodGet {
			questions <- struct{}{}
			<-r.Context().Done()
			return
		}
		rest.ServeHTTP(w, r)
	})
	r := newRouter(t, Config{Contract: SGLang, RefreshInterval: time.Hour, RetryInterval: time.Hour, Prefill: []Prefill{{URL: a.URL}}, Decode: []string{b.URL}})
	r.waitAllUp(t)
	s := r.as(decodeRole, b)
	r.askTimeout = 100 * time.Millisecond
	r.fails(s)
	silent.Store(true)
	ask := func(n int) (differs int32) {
		var all sync.WaitGroup
		var yes atomic.Int32
		for range n {
			r.wg.Add(1) // as a place does
			all.Go(func() {
				defer r.wg.Done()
				if r.askAgain(t.Context(), s) {
					yes.Add(1)
				}
			})
		}
		all.Wait()
		return yes.Load()
	}
	if n := ask(50); n != 0 || len(questions) > 1 {
		t.Errorf("50 requests asked a silent server %d times, and %d heard something", len(questions), n)
	}
	if n := ask(50); n != 0 || len(questions) > 1 {
		t.Errorf("with 50 more they asked %d times, and %d heard something", len(questions), n)
	}
	silent.Store(false)
	r.askTimeout = patience
	s.again.silentUntil = time.Now() // RetryInterval is over
	if n := ask(50); n != 50 {
		t.Errorf("%d of 50 heard that it is back", n)
	}
	if _, up, reason, _ := s.state(); !up {
		t.Errorf("it is not up: %s", reason)
	}
}
