package proxy

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvconn/kvconn/bootstrap"
	"github.com/kvconn/kvconn/internal/freeport"
)

// patience bounds every wait; none takes nearly as long unless it fails.
const patience = 30 * time.Second

// call is one request as an engine saw it.
type call struct {
	path   string
	header http.Header
	body   map[string]json.RawMessage
	ctx    context.Context
}

func (c call) params(t *testing.T) map[string]any {
	t.Helper()
	var params map[string]any
	if err := json.Unmarshal(c.body["kv_transfer_params"], &params); err != nil {
		t.Fatalf("kv_transfer_params %s: %v", c.body["kv_transfer_params"], err)
	}
	return params
}

// engine is a real HTTP server in the place of a prefill or decode engine.
type engine struct {
	*httptest.Server
	calls chan call
	boot  *httptest.Server
	table atomic.Pointer[bootstrap.Table]
	ready atomic.Bool
}

// newEngine serves /health, /v1/models and, through answer, completions.
func newEngine(t *testing.T, answer http.HandlerFunc) *engine {
	t.Helper()
	e := &engine{calls: make(chan call, 1000)}
	e.ready.Store(true)
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) {
		if !e.ready.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	})
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, `{"data":[{"id":"m"}],"auth":%q}`, r.Header.Get("Authorization"))
	})
	mux.HandleFunc("POST /v1/", func(w http.ResponseWriter, r *http.Request) {
		c := call{path: r.URL.Path, header: r.Header, ctx: r.Context()}
		raw, err := io.ReadAll(r.Body)
		if err == nil {
			err = json.Unmarshal(raw, &c.body)
		}
		if err != nil {
			t.Errorf("the engine cannot read its request %q: %v", raw, err)
		}
		e.calls <- c
		answer(w, r)
	})
	e.Server = httptest.NewServer(mux)
	t.Cleanup(e.Close)
	return e
}

// newPrefill is an engine with a bootstrap port.
func newPrefill(t *testing.T, answer http.HandlerFunc, engineIDs ...string) *engine {
	t.Helper()
	e := newEngine(t, answer)
	e.boot = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		bootstrap.NewHandler(e.table.Load(), nil, nil).ServeHTTP(w, r)
	}))
	t.Cleanup(e.boot.Close)
	e.register(t, engineIDs...)
	return e
}

// register replaces what the engine's ranks have registered.
func (e *engine) register(t *testing.T, engineIDs ...string) {
	t.Helper()
	table := new(bootstrap.Table)
	for dp, id := range engineIDs {
		if err := table.Register(bootstrap.Registration{EngineID: id, DPRank: dp, Addr: "tcp://x:1"}); err != nil {
			t.Fatal(err)
		}
	}
	e.table.Store(table)
}

func (e *engine) prefill(t *testing.T) Prefill {
	t.Helper()
	u, err := url.Parse(e.boot.URL)
	if err != nil {
		t.Fatal(err)
	}
	port, err := strconv.Atoi(u.Port())
	if err != nil {
		t.Fatal(err)
	}
	return Prefill{e.URL, port}
}

// next is the engine's next request.
func (e *engine) next(t *testing.T) call {
	t.Helper()
	return recv(t, e.calls, "a request at "+e.URL)
}

func recv[T any](t *testing.T, c <-chan T, what string) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(patience):
		t.Fatalf("no %s within %v", what, patience)
		panic("unreachable")
	}
}

// eventually polls until cond holds.
func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !cond(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", patience, what)
		}
	}
}

// Answers of engines.

func ok(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	io.WriteString(w, `{"text":"ok"}`)
}

func status(code int, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(code)
		io.WriteString(w, body)
	}
}

// hang answers nothing until its client has gone, as D does without P.
func hang(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }

// hangAfterHeaders is hang of a stream: engines send its headers at once.
func hangAfterHeaders(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "text/event-stream")
	w.WriteHeader(http.StatusOK)
	w.(http.Flusher).Flush()
	<-r.Context().Done()
}

// router is a Proxy behind a real HTTP server.
type router struct {
	*Proxy
	*httptest.Server
}

// newRouter starts a router. It is not necessarily ready.
func newRouter(t *testing.T, cfg Config) router {
	t.Helper()
	if cfg.RetryInterval == 0 {
		cfg.RetryInterval = 5 * time.Millisecond
	}
	if cfg.RefreshInterval == 0 {
		cfg.RefreshInterval = 10 * time.Millisecond
	}
	p, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	p.askTimeout = patience
	r := router{p, httptest.NewServer(p.Handler())}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := p.Close(ctx); err != nil {
			t.Error(err)
		}
		r.Server.Close()
	})
	return r
}

// pairOf is a ready router of one prefill and one decode server.
func pairOf(t *testing.T, p, d http.HandlerFunc) (router, *engine, *engine) {
	t.Helper()
	pe, de := newPrefill(t, p, "engine-0"), newEngine(t, d)
	r := newRouter(t, Config{Prefill: []Prefill{pe.prefill(t)}, Decode: []string{de.URL}})
	r.waitReady(t)
	return r, pe, de
}

func (r router) waitReady(t *testing.T) {
	t.Helper()
	eventually(t, "the router is ready", func() bool {
		code, _ := r.get(t, "/health")
		return code == 200
	})
}

// waitAllUp waits until every server is up.
func (r router) waitAllUp(t *testing.T) {
	t.Helper()
	eventually(t, "every server is up", func() bool { return len(r.balancer.missing()) == 0 })
}

// waitRefused waits until a probe has found a server's port closed. Before that
// a connection left over from an earlier probe may break with an EOF instead.
func (r router) waitRefused(t *testing.T, s *server) {
	t.Helper()
	eventually(t, s.url+" is refused", func() bool {
		_, _, reason, _ := s.state()
		return strings.Contains(reason, "refused")
	})
}

func (r router) get(t *testing.T, path string) (int, string) {
	t.Helper()
	resp, err := r.Server.Client().Get(r.Server.URL + path)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(body)
}

// send posts a completion. The response's body is left open.
func (r router) send(ctx context.Context, body string, header ...string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.Server.URL+"/v1/completions", strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	return r.Server.Client().Do(req)
}

// post is send with the whole answer.
func (r router) post(t *testing.T, body string, header ...string) (*http.Response, string) {
	t.Helper()
	resp, err := r.send(t.Context(), body, header...)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(raw)
}

// freeAddr is the address of a port where nobody listens, and that no outgoing connection gets.
func freeAddr(t *testing.T) string {
	t.Helper()
	ports, err := freeport.Take(1)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprint("127.0.0.1:", ports[0])
}
