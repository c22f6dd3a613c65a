package proxy

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/rig/leaktest"
)

func TestNotReady(t *testing.T) {
	leaktest.Check(t)
	p, d := newPrefill(t, ok), newEngine(t, ok) // P has no ranks yet
	p.ready.Store(false)
	d.ready.Store(false)
	r := newRouter(t, Config{Prefill: []Prefill{p.prefill(t)}, Decode: []string{d.URL}})

	expect := func(reasons ...string) {
		t.Helper()
		eventually(t, "the reasons "+strings.Join(reasons, ", "), func() bool {
			code, body := r.get(t, "/health")
			for _, reason := range reasons {
				if code != 503 || !strings.Contains(body, reason) {
					return false
				}
			}
			return true
		})
		if resp, body := r.post(t, `{}`); resp.StatusCode != 503 || !strings.Contains(body, "not ready") {
			t.Fatalf("a request before ready: %s %s", resp.Status, body)
		}
	}
	expect("prefill server "+p.URL+": GET "+p.URL+"/health answered 503", "decode server "+d.URL)
	p.ready.Store(true)
	expect("no rank has registered yet")
	p.register(t, "engine-0")
	d.ready.Store(true)
	r.waitReady(t)
	if resp, body := r.post(t, `{}`); resp.StatusCode != 200 {
		t.Fatalf("a request when ready: %s %s", resp.Status, body)
	}
}

func TestModelsComeFromDecode(t *testing.T) {
	leaktest.Check(t)
	r, _, _ := pairOf(t, ok, ok)
	req, err := http.NewRequest("GET", r.Server.URL+"/v1/models", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer k")
	resp, err := r.Server.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if want := `{"data":[{"id":"m"}],"auth":"Bearer k"}`; err != nil || resp.StatusCode != 200 || string(body) != want {
		t.Fatalf("got %s %s (%v), want %s", resp.Status, body, err, want)
	}
}

func TestChatEndpoint(t *testing.T) {
	leaktest.Check(t)
	r, p, d := pairOf(t, ok, ok)
	resp, err := r.Server.Client().Post(r.Server.URL+"/v1/chat/completions", "application/json", strings.NewReader(`{}`))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != 200 || p.next(t).path != "/v1/chat/completions" || d.next(t).path != "/v1/chat/completions" {
		t.Fatal(resp.Status)
	}
}

// Bad requests reach no engine.
func TestRefusals(t *testing.T) {
	leaktest.Check(t)
	p, d := newPrefill(t, ok, "engine-0"), newEngine(t, ok)
	r := newRouter(t, Config{Prefill: []Prefill{p.prefill(t)}, Decode: []string{d.URL}, MaxBody: 1000})
	r.waitReady(t)
	for _, tt := range []struct {
		method, path, body string
		status             int
	}{
		{"POST", "/v1/completions", ``, 400},
		{"POST", "/v1/completions", `{"a":`, 400},
		{"POST", "/v1/completions", `{} {}`, 400},
		{"POST", "/v1/completions", `null`, 400},
		{"POST", "/v1/completions", `[]`, 400},
		{"POST", "/v1/completions", `"a"`, 400},
		{"POST", "/v1/completions", `{"a":"` + strings.Repeat("x", 1000) + `"}`, 413},
		{"GET", "/v1/completions", ``, 405},
		{"POST", "/health", ``, 405},
		{"POST", "/metrics", ``, 405},
		{"GET", "//v1/models", ``, 404},
		{"GET", "/v1/../admin", ``, 404},
		{"POST", "/v1/embeddings", `{"a":"` + strings.Repeat("x", 1000) + `"}`, 413},
		{"POST", "/inference/v1/generate", `{"kv_transfer_params":{"remote_bootstrap_addr":"http://evil"}}`, 400},
		{"POST", "/inference/v1/generate", `{"a":[{"sampling_params":{"extra_args":{"kv_transfer_params" : {}}}}]}`, 400},
		{"POST", "/v1/responses", `{"kv_transfer\u005fparams":{}}`, 400},
		{"POST", "/v1/responses", `[{"a":"\\","kv_transfer_params":{}}]`, 400},
		// Python takes these for JSON.
		{"POST", "/v1/responses", `{"x":NaN,"kv_transfer_params":{}}`, 400},
		{"POST", "/v1/responses", "\ufeff" + `{"kv_transfer_params":{}}`, 400},
	} {
		req, err := http.NewRequest(tt.method, r.Server.URL+tt.path, strings.NewReader(tt.body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		resp, err := r.Server.Client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != tt.status || resp.Header.Get("Content-Type") != "application/json" {
			t.Errorf("%s %s %.20q: %s %s, want %d", tt.method, tt.path, tt.body, resp.Status, resp.Header.Get("Content-Type"), tt.status)
		}
	}
	if len(p.calls) != 0 || len(d.calls) != 0 {
		t.Errorf("%d requests reached P, %d reached D", len(p.calls), len(d.calls))
	}
}

// A client has a bound for its body. An engine has none for its answer.
func TestBodyIsAwaitedInBounds(t *testing.T) {
	leaktest.Check(t)
	const limit = 3 * time.Second // {} comes within it, on a slow machine too
	slow := func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		select {
		case <-time.After(limit):
			ok(w, r)
		case <-r.Context().Done():
		}
	}
	p := newPrefill(t, ok, "engine-0")
	d := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/health" {
			slow(w, r)
		}
	}))
	t.Cleanup(d.Close)
	r := newRouter(t, Config{Prefill: []Prefill{p.prefill(t)}, Decode: []string{d.URL}, BodyTimeout: limit})
	r.waitReady(t)
	if resp, body := r.post(t, `{}`); resp.StatusCode != 200 {
		t.Errorf("an answer that took longer than a body may: %s %s", resp.Status, body)
	}
	conns := map[string]net.Conn{}
	for _, head := range []string{
		"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 10",
		"POST /v1/embeddings HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 10",
		"POST /v1/audio/transcriptions HTTP/1.1\r\nContent-Type: multipart/form-data; boundary=x\r\nTransfer-Encoding: chunked",
	} {
		c, err := net.Dial("tcp", strings.TrimPrefix(r.Server.URL, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(patience))
		fmt.Fprintf(c, "%s\r\nHost: r\r\n\r\n", head)
		conns[head] = c
	}
	for head, c := range conns { // all wait at the same time
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			t.Fatalf("%.30s: %v", head, err)
		}
		if text, _ := io.ReadAll(resp.Body); resp.StatusCode != http.StatusRequestTimeout || !strings.Contains(string(text), limit.String()) {
			t.Errorf("%.30s: %s %s", head, resp.Status, text)
		}
		resp.Body.Close()
	}
	eventually(t, "the places are free", func() bool { return len(r.Proxy.places) == 0 })
}

// TestHostsThatVanish: the router notices a host that takes no bytes any more, as well as a
// host that says nothing.
func TestHostsThatVanish(t *testing.T) {
	leaktest.Check(t)
	e := newEngine(t, ok)
	c, err := dialer.DialContext(t.Context(), "tcp", strings.TrimPrefix(e.URL, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var got int
	if failed := raw.Control(func(fd uintptr) { got, err = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT) }); failed != nil || err != nil {
		t.Fatal(failed, err)
	}
	if want := int(hostGone.Milliseconds()); got != want {
		t.Errorf("bytes may be unacknowledged for %d ms, want %d", got, want)
	}
}

func TestRequestsInFlightAreBounded(t *testing.T) {
	leaktest.Check(t)
	p, d := newPrefill(t, hang, "engine-0"), newEngine(t, hang)
	r := newRouter(t, Config{Prefill: []Prefill{p.prefill(t)}, Decode: []string{d.URL}, MaxRequests: 1})
	r.waitReady(t)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if resp, err := r.send(ctx, `{}`); err == nil {
			resp.Body.Close()
		}
	}()
	p.next(t)
	if resp, body := r.post(t, `{}`); resp.StatusCode != 503 || !strings.Contains(body, "1 requests are in flight") {
		t.Errorf("second of one request: %s %s", resp.Status, body)
	}
	cancel()
	recv(t, ended, "end of the client")
	eventually(t, "the place is free", func() bool { return len(r.Proxy.places) == 0 })
}

// Requests go to every rank of every P and to every D in turn. A server that is down is
// skipped until it is up again.
func TestRoundRobin(t *testing.T) {
	leaktest.Check(t)
	p1, p2 := newPrefill(t, ok, "a0", "a1"), newPrefill(t, ok, "b0")
	d1, d2 := newEngine(t, ok), newEngine(t, ok)
	r := newRouter(t, Config{Prefill: []Prefill{p1.prefill(t), p2.prefill(t)}, Decode: []string{d1.URL, d2.URL}, Balance: RoundRobin})
	r.waitAllUp(t)

	// send posts n requests and returns how often each engine id was named to D, and each D asked.
	send := func(n int) (ids map[string]int, atD1, atD2 int) {
		t.Helper()
		for range n {
			if resp, body := r.post(t, `{}`); resp.StatusCode != 200 {
				t.Fatalf("%s %s", resp.Status, body)
			}
		}
		ids = map[string]int{}
		atD1, atD2 = len(d1.calls), len(d2.calls)
		for _, d := range []*engine{d1, d2} {
			for range len(d.calls) {
				ids[d.next(t).params(t)["remote_engine_id"].(string)]++
			}
		}
		return ids, atD1, atD2
	}
	ids, atD1, atD2 := send(12)
	if ids["a0"] != 4 || ids["a1"] != 4 || ids["b0"] != 4 || atD1 != 6 || atD2 != 6 {
		t.Errorf("12 requests went to %v and %d, %d; want 4 each and 6 each", ids, atD1, atD2)
	}
	ranks := map[string]int{}
	eventually(t, "P1 has its requests", func() bool { return len(p1.calls) == 8 })
	for range 8 {
		ranks[p1.next(t).header.Get("X-Data-Parallel-Rank")]++
	}
	if ranks["0"] != 4 || ranks["1"] != 4 {
		t.Errorf("dp ranks at P1: %v, want 4 each", ranks)
	}

	isUp := func(s *server) bool { _, up, _, _ := s.state(); return up }
	p1.ready.Store(false)
	d2.ready.Store(false)
	eventually(t, "P1 and D2 are down", func() bool {
		return !isUp(r.balancer.prefill.servers[0]) && !isUp(r.balancer.decode.servers[1])
	})
	if ids, atD1, _ := send(6); ids["b0"] != 6 || atD1 != 6 {
		t.Errorf("6 requests went to %v and %d to D1; want all to b0 and D1", ids, atD1)
	}
	if code, body := r.get(t, "/health"); code != 200 || !strings.Contains(body, "degraded") || !strings.Contains(body, p1.URL) {
		t.Errorf("health with two servers down: %d %s", code, body)
	}
	p1.ready.Store(true)
	eventually(t, "P1 is back", func() bool { return isUp(r.balancer.prefill.servers[0]) })
	if ids, _, _ := send(6); ids["a0"] != 2 || ids["a1"] != 2 || ids["b0"] != 2 {
		t.Errorf("6 requests went to %v; want 2 each", ids)
	}
}

// The failure of a request takes its server out before the next probe does.
func TestFailedServerIsSkippedAtOnce(t *testing.T) {
	leaktest.Check(t)
	p1, p2, d := newPrefill(t, ok, "a"), newPrefill(t, ok, "b"), newEngine(t, ok)
	r := newRouter(t, Config{Prefill: []Prefill{p1.prefill(t), p2.prefill(t)}, Decode: []string{d.URL},
		RefreshInterval: time.Hour, Balance: RoundRobin})
	r.waitAllUp(t)
	p1.Server.Close()
	r.post(t, `{}`) // one of two goes to P1
	r.post(t, `{}`)
	eventually(t, "P1 is out", func() bool { _, up, _, _ := r.balancer.prefill.servers[0].state(); return !up })
	for range 4 {
		if resp, body := r.post(t, `{}`); resp.StatusCode != 200 {
			t.Fatalf("%s %s", resp.Status, body)
		}
		p2.next(t)
	}
}

// A restarted P has a new engine id, which D must be told.
func TestRestartedPrefillHasANewEngineID(t *testing.T) {
	leaktest.Check(t)
	r, p, d := pairOf(t, ok, ok)
	for i := range 3 {
		id := "engine-" + strconv.Itoa(i)
		p.register(t, id)
		eventually(t, "the router knows "+id, func() bool {
			_, _, _, ranks := r.balancer.prefill.servers[0].state()
			return ranks[0].engineID == id
		})
		r.post(t, `{}`)
		if got := d.next(t).params(t)["remote_engine_id"]; got != id {
			t.Errorf("engine id %v, want %s", got, id)
		}
	}
}

// A rank that joins a P at work gets its share.
func TestRankThatJoins(t *testing.T) {
	leaktest.Check(t)
	p, d := newPrefill(t, ok, "zero"), newEngine(t, ok)
	r := newRouter(t, Config{Prefill: []Prefill{p.prefill(t)}, Decode: []string{d.URL}, Balance: RoundRobin})
	r.waitReady(t)
	r.post(t, `{}`)
	p.next(t)
	p.register(t, "zero", "one")
	eventually(t, "the router knows both", func() bool {
		_, _, _, ranks := r.balancer.prefill.servers[0].state()
		return len(ranks) == 2
	})
	got := map[string]bool{}
	for range 2 {
		r.post(t, `{}`)
		got[p.next(t).header.Get("X-Data-Parallel-Rank")] = true
	}
	if !got["0"] || !got["1"] {
		t.Errorf("the ranks %v got requests", got)
	}
}

// A request that comes before the next probe of a P that was down must not name
// the engine id that P had before.
func TestRestartedPrefillIsAskedBeforeItIsUsed(t *testing.T) {
	leaktest.Check(t)
	p, d := newPrefill(t, ok, "old"), newEngine(t, ok)
	r := newRouter(t, Config{Prefill: []Prefill{p.prefill(t)}, Decode: []string{d.URL}, RetryInterval: time.Hour, RefreshInterval: time.Hour})
	r.waitReady(t)
	p.register(t, "new")
	r.fails(r.balancer.prefill.servers[0])
	r.post(t, `{}`)
	if got := d.next(t).params(t)["remote_engine_id"]; got != "new" {
		t.Errorf("engine id %v", got)
	}
}

func TestParseQuery(t *testing.T) {
	leaktest.Check(t)
	for in, want := range map[string]string{
		`{}`:                         "no rank",
		`[]`:                         "not a table",
		`{"x":{"engine_id":"e"}}`:    `"x"`,
		`{"-1":{"engine_id":"e"}}`:   `"-1"`,
		`{"0":{"worker_addr":{}}}`:   "no engine_id",
		`{"0":{"engine_id":7}}`:      "not a table",
		`{"0":{"engine_id":"e"}} {}`: "not a table",
	} {
		if _, err := parseQuery([]byte(in)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v; want an error with %q", in, err, want)
		}
	}
	ranks, err := parseQuery([]byte(`{"10":{"engine_id":"k"},"2":{"engine_id":"c","worker_addr":{"0":{"0":"a"}}}}`))
	if err != nil || len(ranks) != 2 || ranks[0] != (rank{dp: 2, engineID: "c"}) || ranks[1] != (rank{dp: 10, engineID: "k"}) {
		t.Errorf("got %v, %v", ranks, err)
	}
}
