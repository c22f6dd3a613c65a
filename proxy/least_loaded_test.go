package proxy

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/rig/leaktest"
)

// The rank with the least under way gets the next request. A prompt weighs by its length.
func TestLeastLoaded(t *testing.T) {
	leaktest.Check(t)
	p, d1, d2 := newPrefill(t, hang, "a0", "a1"), newEngine(t, hang), newEngine(t, hang)
	r := newRouter(t, Config{Prefill: []Prefill{p.prefill(t)}, Decode: []string{d1.URL, d2.URL}})
	r.waitAllUp(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan struct{}, 4)
	start := func(body string) {
		go func() {
			if resp, err := r.send(ctx, body); err == nil {
				resp.Body.Close()
			}
			ended <- struct{}{}
		}()
	}
	start(`{"prompt":"` + strings.Repeat("x", 20<<10) + `"}`)
	busy := p.next(t).header.Get("X-Data-Parallel-Rank")
	for range 3 { // three short ones weigh less than the long one
		start(`{"prompt":"x"}`)
		if got := p.next(t).header.Get("X-Data-Parallel-Rank"); got == busy {
			t.Errorf("a request goes to the busy rank %s", got)
		}
	}
	eventually(t, "each D has two", func() bool { return len(d1.calls) == 2 && len(d2.calls) == 2 })
	cancel()
	for range 4 {
		recv(t, ended, "end of a client")
	}
	eventually(t, "nothing is under way", func() bool {
		var units int64
		for _, s := range r.balancer.servers() {
			units += s.inFlight()
		}
		return units == 0 && len(r.Proxy.places) == 0
	})
}

func TestPick(t *testing.T) {
	leaktest.Check(t)
	newServer := func(url string, up bool, dps ...int) *server {
		s := &server{role: prefillRole, url: url}
		var ranks []rank
		for _, dp := range dps {
			ranks = append(ranks, rank{dp: dp, engineID: url})
		}
		s.setUp(ranks)
		if !up {
			s.setDown(s.times(), "gone")
		}
		return s
	}
	up, down, never := newServer("up", true, 0, 1), newServer("down", false, 0), &server{role: prefillRole, url: "never"}
	s := side{servers: []*server{never, down, up}}
	is := func(want *server) func(target) bool { return func(t target) bool { return t.server == want } }
	for range 4 {
		if got, ok := s.pick(RoundRobin, nil, nil); !ok || got.server != up {
			t.Errorf("picked %+v", got)
		}
		if got, ok := s.pick(LeastLoaded, is(up), nil); !ok || got.server != down {
			t.Errorf("without the one that is up: %+v", got)
		}
		if got, ok := s.pick(LeastLoaded, nil, func(t target) bool { return t.dp == 0 }); !ok || got.dp != 1 {
			t.Errorf("avoiding rank 0: %+v", got)
		}
		if got, ok := s.pick(LeastLoaded, nil, is(up)); !ok || got.server != up {
			t.Errorf("avoiding the only one that is up: %+v", got)
		}
	}
	if got, ok := s.pick(RoundRobin, func(target) bool { return true }, nil); ok {
		t.Errorf("picked %+v of none", got)
	}
}

// Requests that are not completions are D's, as they are.
func TestPassedOn(t *testing.T) {
	leaktest.Check(t)
	var p *engine
	type seen struct {
		r    *http.Request
		body string
	}
	got := make(chan seen, 1)
	d := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/health" {
			return
		}
		body, _ := io.ReadAll(r.Body)
		got <- seen{r, string(body)}
		w.Header().Set("X-Engine", "d")
		w.Header().Set("Connection", "X-Own")
		w.Header().Set("X-Own", "1")
		w.WriteHeader(http.StatusTeapot)
		io.WriteString(w, "tea")
	}))
	t.Cleanup(d.Close)
	p = newPrefill(t, ok, "a")
	r := newRouter(t, Config{Prefill: []Prefill{p.prefill(t)}, Decode: []string{d.URL}})
	r.waitReady(t)
	for _, tt := range []struct{ method, path, kind, body string }{
		{"POST", "/tokenize?a=b%20c", "application/json", `{"prompt": "x"}`},
		{"POST", "/v1/embeddings", "application/json", `{"input": ["kv_transfer_params", "a\"kv_transfer_params", {}]}`},
		{"POST", "/v1/embeddings", "", `[]`},
		{"GET", "/v1/models", "", ""},
		{"DELETE", "/a%2Fb/", "", ""},
		{"POST", "/v1/audio/transcriptions", "multipart/form-data; boundary=x", "--x\r\n\r\n" + `{"kv_transfer_params":1}` + "\r\n--x--\r\n"},
	} {
		req, err := http.NewRequest(tt.method, r.Server.URL+tt.path, strings.NewReader(tt.body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer k")
		req.Header.Set("X-Data-Parallel-Rank", "1")
		req.Header["Connection"] = []string{"keep-alive, X-Hop", "X-Hip"}
		req.Header.Set("X-Hop", "1")
		req.Header.Set("X-Hip", "1")
		if tt.kind != "" {
			req.Header.Set("Content-Type", tt.kind)
		}
		resp, err := r.Server.Client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		text, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		s := recv(t, got, "the request at D")
		if resp.StatusCode != http.StatusTeapot || string(text) != "tea" || resp.Header.Get("X-Engine") != "d" || resp.Header.Get("X-Own") != "" {
			t.Errorf("%s: %s %s %v", tt.path, resp.Status, text, resp.Header)
		}
		h := s.r.Header
		if s.r.Method != tt.method || s.r.RequestURI != tt.path || s.body != tt.body || h.Get("Authorization") != "Bearer k" ||
			h.Get("Content-Type") != tt.kind || h.Get("X-Hop") != "" || h.Get("X-Hip") != "" || h.Get("X-Data-Parallel-Rank") != "1" {
			t.Errorf("D got %s %s %q %v", s.r.Method, s.r.RequestURI, s.body, h)
		}
	}
	if len(p.calls) > 0 {
		t.Error("P was asked")
	}
}
