package proxy

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/kvconn/kvconn/rig/leaktest"
)

// turning is an SGLang server that may change its role while it runs.
type turning struct {
	*engine
	role atomic.Pointer[string]
	port string // of its bootstrap
	// asked counts the questions for its role.
	asked atomic.Int32
	// held, if set, has /health wait.
	held atomic.Pointer[holding]
}

// holding is a question that waits for its answer: it has come, it may go on.
type holding struct{ come, on chan struct{} }

// hold has the next /health wait.
func (e *turning) hold() *holding {
	h := &holding{make(chan struct{}), make(chan struct{})}
	e.held.Store(h)
	return h
}

// newTurning says its role at /model_info, and goes on to say the first one at /server_info, as SGLang does.
func newTurning(t *testing.T, role string, port int, answer http.HandlerFunc) *turning {
	t.Helper()
	e := &turning{port: strconv.Itoa(port)}
	e.engine = newSGLang(t, fmt.Sprintf(`{"disaggregation_mode":%q,"disaggregation_bootstrap_port":%d}`, role, port), answer)
	e.role.Store(&role)
	rest := e.Config.Handler
	e.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/model_info" {
			e.asked.Add(1)
		}
		if r.URL.Path == "/model_info" && e.ready.Load() {
			_, _ = io.WriteString(w, fmt.Sprintf(`{"model_path":"m","disaggregation_mode":%q}`, *e.role.Load()))
			return
		}
		if h := e.held.Load(); h != nil && r.URL.Path == "/health" && e.held.CompareAndSwap(h, nil) {
			close(h.come)
			select {
			case <-h.on:
			case <-r.Context().Done():
			}
		}
		rest.ServeHTTP(w, r)
	})
	return e
}

func (e *turning) turn(role string) { e.role.Store(&role) }

// inBoth is a router that has been given each server in both roles.
func inBoth(t *testing.T, servers ...*turning) router {
	t.Helper()
	return inBothBy(t, Config{Contract: SGLang, Retries: 2}, servers...)
}

func inBothBy(t *testing.T, cfg Config, servers ...*turning) router {
	t.Helper()
	for _, e := range servers {
		cfg.Prefill = append(cfg.Prefill, Prefill{URL: e.URL})
		cfg.Decode = append(cfg.Decode, e.URL)
	}
	r := newRouter(t, cfg)
	r.waitAllUp(t)
	return r
}

// roles waits until the router knows these, and nothing else.
func (r router) roles(t *testing.T, want map[*turning]string) {
	t.Helper()
	eventually(t, "the roles are known", func() bool {
		_, text := r.get(t, "/metrics")
		for e, role := range want {
			if !strings.Contains(text, fmt.Sprintf("kvconn_proxy_server_up{role=%q,url=%q} 1\n", role, e.URL)) {
				return false
			}
		}
		return strings.Count(text, "\nkvconn_proxy_server_up{") == len(want)
	})
	if code, body := r.get(t, "/health"); code != 200 || !strings.Contains(body, `"missing":[]`) {
		t.Errorf("health: %d %s", code, body)
	}
}

// prefilledBy asks, and says which of two engines has prefilled; the other one has decoded.
func (r router) prefilledBy(t *testing.T, a, b *turning) *turning {
	t.Helper()
	if code, body := r.generate(t, `{"text":"a"}`); code != 200 {
		t.Fatalf("%d %s", code, body)
	}
	calls := []call{a.next(t), b.next(t)}
	for _, c := range calls {
		if string(c.body["bootstrap_port"]) != string(calls[0].body["bootstrap_port"]) {
			t.Fatalf("the engines get %s and %s", calls[0].body, calls[1].body)
		}
	}
	if string(calls[0].body["bootstrap_port"]) == a.port {
		return a
	}
	return b
}

// as is a server where it is given in a role.
func (r router) as(role string, e *turning) *server {
	for _, s := range r.balancer.servers() {
		if s.role == role && s.url == e.URL {
			return s
		}
	}
	return nil
}

// Two servers change their roles, and change them back.
func TestSGLangRolesAreFollowed(t *testing.T) {
	leaktest.Check(t)
	a, b := newTurning(t, prefillRole, 9001, ok), newTurning(t, decodeRole, 9002, ok)
	r := inBoth(t, a, b)
	for range 3 {
		r.roles(t, map[*turning]string{a: prefillRole, b: decodeRole})
		if r.prefilledBy(t, a, b) != a {
			t.Fatal("b has prefilled, which decodes")
		}
		a.turn(decodeRole)
		b.turn(prefillRole)
		r.roles(t, map[*turning]string{b: prefillRole, a: decodeRole})
		if r.prefilledBy(t, a, b) != b {
			t.Fatal("a has prefilled, which decodes by now")
		}
		a.turn(prefillRole)
		b.turn(decodeRole)
	}
}

// once is hang for the first request, and ok for all others.
func once() http.HandlerFunc {
	var asked atomic.Bool
	return func(w http.ResponseWriter, r *http.Request) {
		if asked.CompareAndSwap(false, true) {
			hang(w, r)
			return
		}
		ok(w, r)
	}
}

// A request that a server got in its former role waits for nothing: it goes to another one when the router sees the change.
func TestSGLangTurnsUnderARequest(t *testing.T) {
	leaktest.Check(t)
	for _, turns := range []string{prefillRole, decodeRole} {
		to := map[string]string{prefillRole: decodeRole, decodeRole: prefillRole}[turns]
		first, second := newTurning(t, turns, 9001, once()), newTurning(t, turns, 9002, ok)
		steady := newTurning(t, to, 9003, once()) // its first request is that of the pair with the server that turns
		r := inBoth(t, first, second, steady)
		done := make(chan string, 1)
		go func() {
			resp, err := r.send(t.Context(), `{"prompt":"a"}`)
			if err != nil {
				done <- err.Error()
				return
			}
			defer resp.Body.Close()
			text, _ := io.ReadAll(resp.Body)
			done <- resp.Status + string(text)
		}()
		c := first.next(t)
		steady.next(t)
		first.turn(to)
		recv(t, c.ctx.Done(), "end of the request at the server that has turned")
		if got := recv(t, done, "an answer"); got != `200 OK{"text":"ok"}` {
			t.Errorf("%s: %s", turns, got)
		}
	}
}

// A server that has another role is not tried, also if there is no other one; it says so.
func TestSGLangTurnsAway(t *testing.T) {
	leaktest.Check(t)
	p, d := newTurning(t, prefillRole, 9001, ok), newTurning(t, decodeRole, 9002, ok)
	r := newRouter(t, Config{Contract: SGLang, Retries: 2, Prefill: []Prefill{{URL: p.URL}}, Decode: []string{d.URL}})
	r.waitAllUp(t)
	p.turn(decodeRole)
	says := "its disaggregation_mode is decode, but it is given as a prefill server"
	eventually(t, "/health says so", func() bool {
		code, body := r.get(t, "/health")
		return code == 503 && strings.Contains(body, says)
	})
	if resp, body := r.post(t, `{"prompt":"a"}`); resp.StatusCode != 503 || !strings.Contains(body, says) {
		t.Errorf("%s %s", resp.Status, body)
	}
	if len(p.calls)+len(d.calls) != 0 {
		t.Error("an engine was asked")
	}
	p.turn(prefillRole)
	r.waitAllUp(t)
	if resp, body := r.post(t, `{"prompt":"a"}`); resp.StatusCode != 200 {
		t.Errorf("%s %s", resp.Status, body)
	}
}

// A server that turned before the router began counts by the role that it has by now.
func TestSGLangTurnedBefore(t *testing.T) {
	leaktest.Check(t)
	a, b := newTurning(t, prefillRole, 9001, ok), newTurning(t, decodeRole, 9002, ok)
	a.turn(decodeRole)
	b.turn(prefillRole)
	r := newRouter(t, Config{Contract: SGLang, Prefill: []Prefill{{URL: b.URL}}, Decode: []string{a.URL}})
	r.waitAllUp(t)
	if r.prefilledBy(t, a, b) != b {
		t.Error("a has prefilled")
	}
}

// A server that does not tell its role cannot be given in both.
func TestSGLangRoleIsNotTold(t *testing.T) {
	leaktest.Check(t)
	a, b := newSGLang(t, "", ok), newTurning(t, decodeRole, 9002, ok)
	r := newRouter(t, Config{Contract: SGLang, Prefill: []Prefill{{URL: a.URL}, {URL: b.URL}}, Decode: []string{a.URL, b.URL}})
	eventually(t, "/health says so", func() bool {
		code, body := r.get(t, "/health")
		return code == 503 && strings.Count(body, a.URL+"/model_info does not tell its role") == 2
	})
}

// A probe that has heard a role before the server told another one says nothing any more. Here it is of the server in its other role,
// and would end the request that the server has by now.
func TestSGLangProbeIsOvertaken(t *testing.T) {
	leaktest.Check(t)
	answer := make(chan struct{})
	waits := func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-answer:
			ok(w, r)
		case <-r.Context().Done():
		}
	}
	a, b := newTurning(t, prefillRole, 9001, waits), newTurning(t, decodeRole, 9002, waits)
	r := inBothBy(t, Config{Contract: SGLang, RefreshInterval: time.Hour}, a, b) // the test itself has them asked
	r.roles(t, map[*turning]string{a: prefillRole, b: decodeRole})
	h, asked := a.hold(), make(chan error, 1)
	a.turn(decodeRole)
	go func() { asked <- r.ask(t.Context(), r.as(decodeRole, a)) }()
	recv(t, h.come, "question for its health")
	a.turn(prefillRole)
	if err := r.ask(t.Context(), r.as(prefillRole, a)); err != nil {
		t.Fatal(err)
	}
	got := make(chan string, 1)
	go func() {
		resp, err := r.send(t.Context(), `{"prompt":"a"}`)
		if err != nil {
			got <- err.Error()
			return
		}
		defer resp.Body.Close()
		got <- resp.Status
	}()
	a.next(t)
	b.next(t)
	close(h.on)
	if err := recv(t, asked, "an end of the probe"); !errors.Is(err, errOvertaken) {
		t.Errorf("the probe ends with %v", err)
	}
	r.roles(t, map[*turning]string{a: prefillRole, b: decodeRole})
	close(answer)
	if status := recv(t, got, "an answer"); status != "200 OK" {
		t.Error(status)
	}
}

// A server that is given in one role is asked twice at once: by its probe, and for a request.
func TestSGLangProbeIsOvertakenByARequest(t *testing.T) {
	leaktest.Check(t)
	a, b := newTurning(t, prefillRole, 9001, ok), newTurning(t, decodeRole, 9002, ok)
	r := newRouter(t, Config{Contract: SGLang, RefreshInterval: time.Hour, Prefill: []Prefill{{URL: a.URL}}, Decode: []string{b.URL}})
	r.waitAllUp(t)
	s := r.as(prefillRole, a)
	r.fails(s)
	h, asked := a.hold(), make(chan error, 1)
	go func() { asked <- r.ask(t.Context(), s) }()
	recv(t, h.come, "question for its health")
	a.turn(decodeRole)
	if resp, body := r.post(t, `{"prompt":"a"}`); resp.StatusCode != 503 || !strings.Contains(body, "its disaggregation_mode is decode") {
		t.Errorf("%s %s", resp.Status, body)
	}
	close(h.on)
	if err := recv(t, asked, "an end of the probe"); !errors.Is(err, errOvertaken) {
		t.Errorf("the probe ends with %v", err)
	}
	if _, up, reason, _ := s.state(); up {
		t.Errorf("it is up as a prefill server (%s)", reason)
	}
	if len(a.calls)+len(b.calls) != 0 {
		t.Error("an engine was asked")
	}
}

// A server that is given in both roles and has died is one row, and one reason.
func TestSGLangDeadServerIsOneRow(t *testing.T) {
	leaktest.Check(t)
	a, b := newTurning(t, prefillRole, 9001, ok), newTurning(t, decodeRole, 9002, ok)
	r := inBoth(t, a, b)
	r.roles(t, map[*turning]string{a: prefillRole, b: decodeRole})
	a.ready.Store(false)
	dead := fmt.Sprintf("kvconn_proxy_server_up{role=%q,url=%q} 0\n", prefillRole, a.URL)
	eventually(t, "it is down in its last role", func() bool {
		_, text := r.get(t, "/metrics")
		return strings.Contains(text, dead)
	})
	if _, text := r.get(t, "/metrics"); strings.Count(text, "\nkvconn_proxy_server_up{") != 2 {
		t.Error("the dead server has two rows")
	}
	if got := r.balancer.missing(); len(got) != 1 || !strings.HasPrefix(got[0], "prefill server "+a.URL) {
		t.Errorf("missing: %q", got)
	}
}

// A server that has the other role than the given one is asked as often as one that is up. Another one, which is down, is asked often.
func TestSGLangOtherRoleIsNoFailure(t *testing.T) {
	leaktest.Check(t)
	a, b, down := newTurning(t, prefillRole, 9001, ok), newTurning(t, decodeRole, 9002, ok), newTurning(t, decodeRole, 9003, ok)
	down.ready.Store(false)
	newRouter(t, Config{Contract: SGLang, RefreshInterval: time.Hour, Prefill: []Prefill{{URL: a.URL}}, Decode: []string{a.URL, b.URL, down.URL}})
	eventually(t, "the one that is down is asked", func() bool { return down.asked.Load() > 100 })
	// On a starved machine a probe may fail, and is repeated.
	if n := a.asked.Load(); n < 2 || n > 20 {
		t.Errorf("the server in its two roles was asked %d times", n)
	}
}

// A server that turns is lost only if it is given in one role.
func TestSGLangTurnIsLogged(t *testing.T) {
	leaktest.Check(t)
	for _, lost := range []bool{true, false} {
		a, b := newTurning(t, prefillRole, 9001, ok), newTurning(t, decodeRole, 9002, ok)
		core, logged := observer.New(zap.InfoLevel)
		cfg := Config{Contract: SGLang, Logger: zap.New(core), Prefill: []Prefill{{URL: a.URL}}, Decode: []string{b.URL}}
		if !lost {
			cfg.Decode = append(cfg.Decode, a.URL)
		}
		r := newRouter(t, cfg)
		r.waitAllUp(t)
		a.turn(decodeRole)
		says := func() []observer.LoggedEntry { return logged.FilterMessage("server has changed its role").All() }
		eventually(t, "the log says so", func() bool { return len(says()) > 0 })
		want := map[bool]zapcore.Level{true: zap.WarnLevel, false: zap.InfoLevel}[lost]
		if got := says()[0].Level; got != want {
			t.Errorf("lost %v: it is logged as %v, want %v", lost, got, want)
		}
	}
}
