package proxy

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/kvconn/kvconn/rig/leaktest"
)

// nixlPair is a ready router by the NIXL contract, of a P without bootstrap port.
func nixlPair(t *testing.T, p, d http.HandlerFunc) (router, *engine, *engine) {
	t.Helper()
	pe, de := newEngine(t, p), newEngine(t, d)
	r := newRouter(t, Config{Contract: NIXL, Prefill: []Prefill{{URL: pe.URL}}, Decode: []string{de.URL}})
	r.waitReady(t)
	return r, pe, de
}

// P is asked first. D gets its parameters to the letter.
func TestNIXLContract(t *testing.T) {
	leaktest.Check(t)
	const params = `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2],[9007199254740993]],"remote_engine_id":"é","x":{"y":1.0}}`
	answered := make(chan struct{})
	r, p, d := nixlPair(t,
		func(w http.ResponseWriter, q *http.Request) {
			status(200, `{"choices":[{"finish_reason":"length"}],"kv_transfer_params": `+params+`}`)(w, q)
			close(answered)
		},
		func(w http.ResponseWriter, q *http.Request) {
			select {
			case <-answered:
			default:
				t.Error("D was asked before P had answered")
			}
			ok(w, q)
		})
	resp, _ := r.post(t, `{"prompt":"a","max_tokens":9,"stream":true,"kv_transfer_params":{"remote_host":"evil"}}`, "Authorization", "Bearer k")
	if resp.StatusCode != 200 {
		t.Fatal(resp.Status)
	}
	pc, dc := p.next(t), d.next(t)
	want := map[string]any{"do_remote_decode": true, "do_remote_prefill": false}
	for name, v := range pc.params(t) {
		if v != want[name] {
			t.Errorf("P gets %s: %v", name, v)
		}
	}
	if string(pc.body["max_tokens"]) != "1" || string(pc.body["stream"]) != "false" || pc.header.Get("X-Data-Parallel-Rank") != "" {
		t.Errorf("P gets %s %v", pc.body, pc.header)
	}
	if string(dc.body["kv_transfer_params"]) != params || string(dc.body["max_tokens"]) != "9" || string(dc.body["stream"]) != "true" {
		t.Errorf("D gets %s", dc.body)
	}
	if pc.header.Get("Authorization") != "Bearer k" || dc.header.Get("Authorization") != "Bearer k" {
		t.Error("Authorization is lost")
	}
}

// A prompt without a whole block has no parameters: D computes it, and the client's own
// parameters do not take their place.
func TestNIXLWithoutParams(t *testing.T) {
	leaktest.Check(t)
	for _, answer := range []string{`{"choices":[]}`, `{"kv_transfer_params":null}`} {
		r, _, d := nixlPair(t, status(200, answer), ok)
		if resp, _ := r.post(t, `{"prompt":"a","kv_transfer_params":{"remote_host":"evil"}}`); resp.StatusCode != 200 {
			t.Fatal(resp.Status)
		}
		if got := d.next(t).body; got["kv_transfer_params"] != nil {
			t.Errorf("D gets %s", got)
		}
		if _, text := r.get(t, "/metrics"); !strings.Contains(text, "kvconn_proxy_prefills_without_params_total 1") {
			t.Error("it is not counted")
		}
	}
}

// P's error is the answer, and D hears nothing of the request.
func TestNIXLPrefillFailures(t *testing.T) {
	leaktest.Check(t)
	for name, tt := range map[string]struct {
		prefill http.HandlerFunc
		code    int
		reason  string
	}{
		"refusal": {status(400, `{"error":{"message":"too long"}}`), 400, "too long"},
		"failure": {status(500, "out of memory"), 503, "out of memory"},
		"reset":   {reset, 503, "EOF"},
		"error":   {status(200, `{"error":"no room"}`), 503, "no room"},
		"params":  {status(200, `{"kv_transfer_params":{"error":{"message":"lease over","code":503}}}`), 503, "lease over"},
		"large":   {func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(make([]byte, maxSmallAnswer+1)) }, 503, "larger than"},
	} {
		t.Run(name, func(t *testing.T) {
			leaktest.Check(t)
			r, p, d := nixlPair(t, tt.prefill, ok)
			resp, body := r.post(t, `{}`)
			var e apiError
			if err := json.Unmarshal([]byte(body), &e); err != nil || resp.StatusCode != tt.code || !strings.Contains(e.Error.Message, tt.reason) {
				t.Errorf("%s %s (%v)", resp.Status, body, err)
			}
			if tt.code == 503 && !strings.Contains(body, p.URL) {
				t.Errorf("%s does not name P", body)
			}
			if len(d.calls) > 0 {
				t.Error("D was asked")
			}
		})
	}
}

// D may compute what P cannot give. If it does not, the client hears P's reason.
func TestPrefillRefuses(t *testing.T) {
	leaktest.Check(t)
	const answer = `{"choices":[{"finish_reason":"length"}],"kv_transfer_params":{"do_remote_prefill":true,"kvconn_error":"kv_role is kv_consumer"}}`
	counted := func(r router) bool {
		w := httptest.NewRecorder()
		r.Proxy.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
		return strings.Contains(w.Body.String(), "kvconn_proxy_prefill_refusals_total 1")
	}
	for _, contract := range []Contract{NIXL, Mooncake} {
		for name, tt := range map[string]struct {
			decode http.HandlerFunc
			code   int
			says   string
		}{
			"D computes it": {ok, 200, `{"text":"ok"}`},
			"D fails it":    {status(500, `{"error":{"message":"Internal server error"}}`), 503, "kv_role is kv_consumer"},
			"D refuses it":  {status(400, "too long"), 400, "too long"},
		} {
			t.Run(string(contract)+" "+name, func(t *testing.T) {
				leaktest.Check(t)
				p := newPrefill(t, status(200, answer), "engine-0")
				routers := make(chan router, 1)
				d := newEngine(t, func(w http.ResponseWriter, q *http.Request) {
					at := <-routers // D, too, hears of it when P's client does, or later
					for end := time.Now().Add(patience); !counted(at); time.Sleep(time.Millisecond) {
						if time.Now().After(end) {
							t.Error("the refusal is not counted")
							break
						}
					}
					tt.decode(w, q)
				})
				r := newRouter(t, Config{Contract: contract, Prefill: []Prefill{p.prefill(t)}, Decode: []string{d.URL}})
				r.waitReady(t)
				routers <- r
				resp, body := r.post(t, `{}`)
				if resp.StatusCode != tt.code || !strings.Contains(body, tt.says) || tt.code == 503 && !strings.Contains(body, p.URL) {
					t.Errorf("%s %s", resp.Status, body)
				}
			})
		}
	}
}

// A dead D is not P's fault, whatever P says: the other D may compute the prompt.
func TestPrefillRefusesAndDecodeIsDead(t *testing.T) {
	leaktest.Check(t)
	p := newPrefill(t, status(200, `{"choices":[],"kv_transfer_params":{"kvconn_error":"no room"}}`), "a")
	dead, alive := newEngine(t, reset), newEngine(t, ok)
	r := newRouter(t, Config{Contract: NIXL, Prefill: []Prefill{p.prefill(t)}, Decode: []string{dead.URL, alive.URL},
		Balance: RoundRobin, Retries: 1, RefreshInterval: time.Hour})
	r.waitAllUp(t)
	for range 2 { // one of them goes to the dead one first
		if resp, body := r.post(t, `{}`); resp.StatusCode != 200 {
			t.Errorf("%s %s", resp.Status, body)
		}
	}
	if len(dead.calls) == 0 {
		t.Error("the dead one was not asked")
	}
}

// A client that goes ends whichever half is under way.
func TestNIXLClientDisconnects(t *testing.T) {
	leaktest.Check(t)
	for name, engines := range map[string]struct{ p, d http.HandlerFunc }{
		"during the prefill": {hang, ok},
		"during the decode":  {status(200, `{"kv_transfer_params":{}}`), hangAfterHeaders},
	} {
		t.Run(name, func(t *testing.T) {
			leaktest.Check(t)
			r, p, d := nixlPair(t, engines.p, engines.d)
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				if resp, err := r.send(ctx, `{}`); err == nil {
					_, _ = io.Copy(io.Discard, resp.Body)
					resp.Body.Close()
				}
			}()
			c := p.next(t)
			if name == "during the decode" {
				c = d.next(t)
			}
			cancel()
			recv(t, c.ctx.Done(), "end of the half")
			recv(t, ended, "end of the client")
			eventually(t, "the place is free", func() bool { return len(r.Proxy.places) == 0 })
		})
	}
}

// With a bootstrap port P's ranks are known by this contract too.
func TestNIXLRanks(t *testing.T) {
	leaktest.Check(t)
	p, d := newPrefill(t, status(200, `{"kv_transfer_params":{"a":1}}`), "a0", "a1"), newEngine(t, ok)
	r := newRouter(t, Config{Contract: NIXL, Balance: RoundRobin, Prefill: []Prefill{p.prefill(t)}, Decode: []string{d.URL}})
	r.waitReady(t)
	got := map[string]bool{}
	for range 2 {
		r.post(t, `{}`)
		got[p.next(t).header.Get("X-Data-Parallel-Rank")] = true
	}
	if !got["0"] || !got["1"] {
		t.Errorf("ranks %v", got)
	}
}
