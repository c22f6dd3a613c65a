package proxy

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kvconn/kvconn/rig/leaktest"
)

// newSGLang is an engine with SGLang's own routes: its word on itself, and /generate
// beside the completions.
func newSGLang(t *testing.T, info string, answer http.HandlerFunc) *engine {
	t.Helper()
	e := newEngine(t, answer)
	rest := e.Config.Handler
	mux := http.NewServeMux()
	mux.HandleFunc("GET /server_info", func(w http.ResponseWriter, _ *http.Request) {
		if info == "" {
			w.WriteHeader(http.StatusUnauthorized)
		}
		_, _ = io.WriteString(w, info)
	})
	mux.HandleFunc("GET /model_info", func(w http.ResponseWriter, _ *http.Request) {
		if !e.ready.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	})
	mux.HandleFunc("POST /generate", func(w http.ResponseWriter, r *http.Request) {
		c := call{path: r.URL.Path, header: r.Header, ctx: r.Context()}
		if err := json.NewDecoder(r.Body).Decode(&c.body); err != nil {
			t.Errorf("the engine cannot read its request: %v", err)
		}
		_, _ = io.Copy(io.Discard, r.Body)
		e.calls <- c
		answer(w, r)
	})
	mux.Handle("/", rest)
	e.Config.Handler = mux
	return e
}

// generate posts to /generate.
func (r router) generate(t *testing.T, body string) (int, string) {
	t.Helper()
	resp, err := r.Server.Client().Post(r.Server.URL+"/generate", "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

// A server names its bootstrap port and how many dp ranks it has. The router takes the
// least loaded rank and tells both engines.
func TestSGLangServerInfo(t *testing.T) {
	leaktest.Check(t)
	p := newSGLang(t, `{"disaggregation_mode":"prefill","disaggregation_bootstrap_port":9111,"dp_size":3}`, ok)
	d := newSGLang(t, `{"disaggregation_mode":"decode","disaggregation_bootstrap_port":9222,"dp_size":2}`, ok)
	r := newRouter(t, Config{Contract: SGLang, Prefill: []Prefill{{URL: p.URL}}, Decode: []string{d.URL}})
	r.waitReady(t)
	ranks := map[int64]bool{}
	for range 12 {
		if code, body := r.generate(t, `{"text":"a"}`); code != 200 {
			t.Fatalf("%d %s", code, body)
		}
		pc, dc := p.next(t), d.next(t)
		room, err := strconv.ParseInt(string(pc.body["bootstrap_room"]), 10, 64)
		if err != nil || string(dc.body["bootstrap_room"]) != string(pc.body["bootstrap_room"]) || string(pc.body["bootstrap_port"]) != "9111" {
			t.Fatalf("P gets %s, D %s (%v)", pc.body, dc.body, err)
		}
		k := string(pc.body["routed_dp_rank"])
		if k != strconv.FormatInt(room%3, 10) || string(pc.body["disagg_prefill_dp_rank"]) != k || string(dc.body["disagg_prefill_dp_rank"]) != k ||
			dc.body["routed_dp_rank"] != nil || pc.header.Get("X-Data-Parallel-Rank") != "" {
			t.Fatalf("room %d: P gets %s, D %s", room, pc.body, dc.body)
		}
		ranks[room%3] = true
	}
	if len(ranks) != 3 {
		t.Errorf("ranks %v of 3", ranks)
	}
	// A client that chooses for itself is not overruled.
	for _, own := range []string{"routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank"} {
		if code, body := r.generate(t, `{"text":"a","`+own+`":1}`); code != 200 {
			t.Fatalf("%d %s", code, body)
		}
		for _, c := range []call{p.next(t), d.next(t)} {
			n := 0
			for _, name := range rankMembers {
				if c.body[name] != nil {
					n++
				}
			}
			if n != 1 || string(c.body[own]) != "1" {
				t.Errorf("%s: an engine gets %s", own, c.body)
			}
		}
	}
}

// A server of the other role, or one that says nonsense, is not used, and /health says
// why. A server that tells unauthenticated clients nothing is used.
func TestSGLangServersThatDoNotFit(t *testing.T) {
	leaktest.Check(t)
	for info, says := range map[string]string{
		`{"disaggregation_mode":"decode"}`:                                        "its disaggregation_mode is decode",
		`{"disaggregation_mode":"null"}`:                                          "its disaggregation_mode is null",
		`{"disaggregation_mode":"prefill","disaggregation_bootstrap_port":70000}`: "70000",
		`{"dp_size":1000000000}`:                                                  "1000000000",
		`[`:                                                                       "server_info",
	} {
		p, d := newSGLang(t, info, ok), newSGLang(t, "", ok)
		r := newRouter(t, Config{Contract: SGLang, Prefill: []Prefill{{URL: p.URL}}, Decode: []string{d.URL}})
		eventually(t, "/health says "+says, func() bool {
			code, body := r.get(t, "/health")
			return code == 503 && strings.Contains(body, says)
		})
	}
	p, d := newSGLang(t, "", ok), newSGLang(t, "", ok)
	r := newRouter(t, Config{Contract: SGLang, Prefill: []Prefill{{URL: p.URL}}, Decode: []string{d.URL}})
	r.waitReady(t)
	if code, body := r.generate(t, `{"text":"a"}`); code != 200 {
		t.Fatalf("%d %s", code, body)
	}
	if c := p.next(t); string(c.body["bootstrap_port"]) != "null" || c.body["routed_dp_rank"] != nil {
		t.Errorf("P gets %s", c.body)
	}
}

// A server that is up is not asked to compute a token each second: a long prompt
// would make it look dead.
func TestSGLangBusyServer(t *testing.T) {
	leaktest.Check(t)
	p, d := newSGLang(t, `{"disaggregation_bootstrap_port":9111}`, ok), newSGLang(t, "", ok)
	var asked, lives atomic.Int32
	for _, e := range []*engine{p, d} {
		rest := e.Config.Handler
		e.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			switch r.URL.Path {
			case "/health":
				asked.Add(1)
			case "/model_info":
				lives.Add(1)
			}
			rest.ServeHTTP(w, r)
		})
	}
	r := newRouter(t, Config{Contract: SGLang, Prefill: []Prefill{{URL: p.URL}}, Decode: []string{d.URL}})
	r.waitAllUp(t)
	before := lives.Load()
	eventually(t, "both are asked again", func() bool { return lives.Load() > before+10 })
	// On a starved machine a probe may fail, and /health is asked again.
	if n := asked.Load(); n < 2 || n > lives.Load()/4 {
		t.Errorf("/health of the two was asked %d times, /model_info %d times", n, lives.Load())
	}
	p.ready.Store(false)
	eventually(t, "P is down", func() bool { code, _ := r.get(t, "/health"); return code == 503 })
	p.ready.Store(true)
	r.waitAllUp(t)
}

// /generate with return_logprob: the prompt's logprobs are P's, the answer's logprobs D's.
func TestSGLangLogprobs(t *testing.T) {
	leaktest.Check(t)
	one := func(text, prompt string) string {
		return `{"text":"` + text + `","meta_info":{"id":"x","input_token_logprobs":` + prompt + `,"output_token_logprobs":[[-0.1,7,null]],"cached":1e2}}`
	}
	events := func(list ...string) string {
		return "data: " + strings.Join(list, "\n\ndata: ") + "\n\ndata: [DONE]\n\n"
	}
	const prompt = `[[null,1,null],[-1.50,2,"é"]]`
	for name, c := range map[string]struct{ request, kind, p, d, want string }{
		"one":          {`{"text":"a","return_logprob":true}`, "application/json", one("p", prompt), one("d", `[]`), one("d", prompt)},
		"D has a part": {`{"text":"a","return_logprob":true}`, "application/json", one("p", prompt), one("d", `[[-2,3,null]]`), one("d", `[[null,1,null],[-1.50,2,"é"],[-2,3,null]]`)},
		"P has none":   {`{"text":"a","return_logprob":true}`, "application/json", one("p", `[]`), one("d", `[[-2,3,null]]`), one("d", `[[-2,3,null]]`)},
		"a batch": {`{"text":["a","b"],"return_logprob":[true,false]}`, "application/json", "[" + one("p", prompt) + "," + one("q", `[[-9,9,null]]`) + "]",
			"[" + one("d", `[]`) + "," + one("e", `[]`) + "]", "[" + one("d", prompt) + "," + one("e", `[[-9,9,null]]`) + "]"},
		"a stream":         {`{"text":"a","stream":true,"return_logprob":true}`, "text/event-stream", events(one("p", prompt)), events(one("d", "[]"), one("de", "[]")), events(one("d", prompt), one("de", prompt))},
		"not asked for":    {`{"text":"a","return_logprob":false}`, "application/json", one("p", prompt), one("d", `[]`), one("d", `[]`)},
		"P says something": {`{"text":"a","return_logprob":true}`, "application/json", `{"text":"p"}`, one("d", `[]`), one("d", `[]`)},
		"D does":           {`{"text":"a","return_logprob":true}`, "application/json", one("p", prompt), `{"text":"d"}`, `{"text":"d"}`},
		"a streamed batch": {`{"text":["a","b"],"stream":true,"return_logprob":true}`, "text/event-stream",
			events(`{"index":1,"meta_info":{"input_token_logprobs":[[1]]}}`, `{"index":0,"meta_info":{"input_token_logprobs":[[0]]}}`),
			events(`{"index":0,"meta_info":{"input_token_logprobs":[]}}`, `{"index":1,"meta_info":{"input_token_logprobs":[]}}`),
			events(`{"index":0,"meta_info":{"input_token_logprobs":[[0]]}}`, `{"index":1,"meta_info":{"input_token_logprobs":[[1]]}}`)},
	} {
		t.Run(name, func(t *testing.T) {
			answer := func(body string) http.HandlerFunc {
				return func(w http.ResponseWriter, _ *http.Request) {
					w.Header().Set("Content-Type", c.kind)
					_, _ = io.WriteString(w, body)
				}
			}
			p, d := newSGLang(t, "", answer(c.p)), newSGLang(t, "", answer(c.d))
			r := newRouter(t, Config{Contract: SGLang, Prefill: []Prefill{{URL: p.URL}}, Decode: []string{d.URL}})
			r.waitReady(t)
			code, got := r.generate(t, c.request)
			if code != 200 || !same(got, c.want) {
				t.Errorf("%d %s\nwant %s", code, got, c.want)
			}
			if strings.Contains(c.want, "1.50") && !strings.Contains(got, "1.50") || strings.Contains(c.want, "1e2") && !strings.Contains(got, "1e2") {
				t.Errorf("the engine's numbers are written anew: %s", got)
			}
		})
	}
}

// same compares answers, but for the order of members.
func same(a, b string) bool {
	as, bs := strings.Split(a, "\n\n"), strings.Split(b, "\n\n")
	if len(as) != len(bs) {
		return false
	}
	for i := range as {
		var av, bv any
		at, bt := strings.TrimPrefix(as[i], "data: "), strings.TrimPrefix(bs[i], "data: ")
		if json.Unmarshal([]byte(at), &av) != nil || json.Unmarshal([]byte(bt), &bv) != nil {
			if as[i] != bs[i] {
				return false
			}
			continue
		}
		x, _ := json.Marshal(av)
		y, _ := json.Marshal(bv)
		if string(x) != string(y) {
			return false
		}
	}
	return true
}

// A batch in which P aborts one request fails, with P's reason.
func TestSGLangBatchAborted(t *testing.T) {
	leaktest.Check(t)
	p := newSGLang(t, "", status(200, `[{"text":"","meta_info":{"finish_reason":{"type":"length"}}},{"text":"","meta_info":{"finish_reason":{"type":"abort","message":"no memory"}}}]`))
	d := newSGLang(t, "", hang)
	r := newRouter(t, Config{Contract: SGLang, Prefill: []Prefill{{URL: p.URL}}, Decode: []string{d.URL}})
	r.waitReady(t)
	if code, body := r.generate(t, `{"text":["a","b"]}`); code != 503 || !strings.Contains(body, "no memory") {
		t.Errorf("%d %s", code, body)
	}
}

// A client that goes takes both engines' requests with it, here too.
func TestSGLangClientGoes(t *testing.T) {
	leaktest.Check(t)
	p, d := newSGLang(t, "", hang), newSGLang(t, "", hangAfterHeaders)
	r := newRouter(t, Config{Contract: SGLang, Prefill: []Prefill{{URL: p.URL}}, Decode: []string{d.URL}})
	r.waitReady(t)
	for _, body := range []string{`{"text":"a"}`, `{"text":"a","stream":true,"return_logprob":true}`} {
		req, err := http.NewRequest(http.MethodPost, r.Server.URL+"/generate", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		done := make(chan struct{})
		go func() {
			defer close(done)
			if resp, err := r.Server.Client().Do(req.WithContext(ctx)); err == nil {
				resp.Body.Close()
			}
		}()
		pc, dc := p.next(t), d.next(t)
		cancel()
		recv(t, pc.ctx.Done(), "end of P's request")
		recv(t, dc.ctx.Done(), "end of D's request")
		<-done
	}
}
