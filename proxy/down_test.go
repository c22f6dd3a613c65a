package proxy

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvconn/kvconn/rig/leaktest"
)

// fails has a server count as down.
func (r router) fails(s *server) { r.noteDown(s, s.times(), errors.New("connection reset")) }

// A request has servers asked that count as down. Those that have the other role by now do not get it.
func TestSGLangTurnedWhileDown(t *testing.T) {
	leaktest.Check(t)
	const p, d = prefillRole, decodeRole
	for what, c := range map[string]struct {
		turn, p, d int // servers that turn, and all by their first roles
		role       string
		want       int
	}{
		"a P": {1, 1, 1, p, 503}, "one P of two": {1, 2, 1, p, 200}, "both": {2, 2, 1, p, 503}, "two P of three": {2, 3, 1, p, 200},
		"a D": {1, 1, 1, d, 503}, "one D of two": {1, 1, 2, d, 200}, "both D": {2, 1, 2, d, 503}, "two D of three": {2, 1, 3, d, 200},
	} {
		cfg := Config{Contract: SGLang, RefreshInterval: time.Hour}
		servers := map[string][]*turning{}
		for range c.p {
			servers[p] = append(servers[p], newTurning(t, p, 9001, ok))
		}
		for range c.d {
			servers[d] = append(servers[d], newTurning(t, d, 9002, ok))
		}
		for _, e := range servers[p] {
			cfg.Prefill = append(cfg.Prefill, Prefill{URL: e.URL})
		}
		for _, e := range servers[d] {
			cfg.Decode = append(cfg.Decode, e.URL)
		}
		r := newRouter(t, cfg)
		r.waitAllUp(t)
		for i, e := range servers[c.role] {
			r.fails(r.as(c.role, e))
			if i < c.turn {
				e.turn(map[string]string{p: d, d: p}[c.role])
			}
		}
		if resp, body := r.post(t, `{"prompt":"a"}`); resp.StatusCode != c.want {
			t.Errorf("%s: %s %s", what, resp.Status, body)
		}
		for _, e := range servers[c.role][:c.turn] {
			if len(e.calls) != 0 {
				t.Errorf("%s: a server that has turned got a request", what)
			}
		}
	}
}

// A server that has turned, and does not tell its role for a moment, does not count by the role that it began with.
func TestSGLangTurnedAndSilent(t *testing.T) {
	leaktest.Check(t)
	a, b := newTurning(t, prefillRole, 9001, ok), newTurning(t, decodeRole, 9002, ok)
	rest := a.Config.Handler
	var silent atomic.Bool
	a.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if silent.Load() && r.URL.Path == "/model_info" {
			w.WriteHeader(http.StatusTooManyRequests)
			return
		}
		rest.ServeHTTP(w, r)
	})
	r := newRouter(t, Config{Contract: SGLang, RefreshInterval: time.Hour, Prefill: []Prefill{{URL: a.URL}}, Decode: []string{b.URL}})
	r.waitAllUp(t)
	s := r.as(prefillRole, a)
	says := func(want bool) {
		t.Helper()
		r.look(t.Context(), s)
		if _, up, reason, _ := s.state(); up != want {
			t.Errorf("it is up: %v (%s)", up, reason)
		}
	}
	a.turn(decodeRole)
	says(false)
	silent.Store(true)
	says(false)
	silent.Store(false)
	says(false)
	a.turn(prefillRole)
	says(true)
	silent.Store(true)
	says(true)
}

// A server that never tells its role by /model_info counts by the one that it began with, each time that it is asked. So one that was
// started in the wrong role comes up when it is started again in the right one.
func TestSGLangSilentAndStartedAgain(t *testing.T) {
	leaktest.Check(t)
	a, b := newTurning(t, prefillRole, 9001, ok), newTurning(t, decodeRole, 9002, ok)
	rest := a.Config.Handler
	var mode atomic.Value
	mode.Store(prefillRole)
	a.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/model_info":
			w.WriteHeader(http.StatusNotFound)
		case "/server_info":
			fmt.Fprintf(w, `{"disaggregation_mode":%q}`, mode.Load())
		default:
			rest.ServeHTTP(w, r)
		}
	})
	r := newRouter(t, Config{Contract: SGLang, RefreshInterval: time.Hour, Prefill: []Prefill{{URL: a.URL}}, Decode: []string{b.URL}})
	r.waitAllUp(t)
	s := r.as(prefillRole, a)
	r.fails(s)
	mode.Store(decodeRole)
	for range 3 {
		r.look(t.Context(), s)
		if _, up, reason, _ := s.state(); up || !strings.Contains(reason, "its disaggregation_mode is decode") {
			t.Errorf("it is up: %v (%s)", up, reason)
		}
	}
	mode.Store(prefillRole)
	r.look(t.Context(), s)
	if _, up, reason, _ := s.state(); !up {
		t.Errorf("it is not up: %s", reason)
	}
}

// A failure of what began before a server came up again is not that server's.
func TestLateFailure(t *testing.T) {
	leaktest.Check(t)
	hold := make(chan struct{})
	dies := func(_ http.ResponseWriter, r *http.Request) {
		select {
		case <-hold:
		case <-r.Context().Done():
		}
		panic(http.ErrAbortHandler)
	}
	a, b := newTurning(t, prefillRole, 9001, dies), newTurning(t, decodeRole, 9002, hang)
	r := newRouter(t, Config{Contract: SGLang, RefreshInterval: time.Hour, Prefill: []Prefill{{URL: a.URL}}, Decode: []string{b.URL}})
	r.waitAllUp(t)
	s := r.as(prefillRole, a)
	up := func(when string, want bool) {
		t.Helper()
		if _, up, reason, _ := s.state(); up != want {
			t.Errorf("%s: it is up: %v (%s)", when, up, reason)
		}
	}
	comes := func() {
		t.Helper()
		if err := r.ask(t.Context(), s); err != nil {
			t.Fatal(err)
		}
		up("it has come back", true)
	}
	r.fails(s)
	h, looked := a.hold(), make(chan struct{})
	go func() {
		defer close(looked)
		r.look(t.Context(), s)
	}()
	recv(t, h.come, "question for its health")
	comes()
	a.ready.Store(false)
	close(h.on)
	recv(t, looked, "an end of the probe")
	up("a probe of the former one has failed", true)
	a.ready.Store(true)
	answered := make(chan string, 1)
	go func() {
		resp, err := r.send(t.Context(), `{"prompt":"a"}`)
		if err != nil {
			answered <- err.Error()
			return
		}
		resp.Body.Close()
		answered <- resp.Status
	}()
	a.next(t)
	r.fails(s)
	comes()
	close(hold)
	recv(t, answered, "an answer")
	up("a request to the former one has failed", true)
	r.fails(s)
	up("it has failed itself", false)
}
