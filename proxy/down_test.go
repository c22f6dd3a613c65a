package proxy

import (
	"errors"
	"net/http"
	"testing"
	"time"

	"github.com/kvconn/kvconn/rig/leaktest"
)

// fails has a server count as down.
func (r router) fails(s *server) { r.noteDown(s, s.times(), errors.New("connection reset")) }

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
