package proxy

import (
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kvconn/kvconn/rig/leaktest"
)

// sglangPair is a ready router by the SGLang contract.
func sglangPair(t *testing.T, p, d http.HandlerFunc) (router, *engine, *engine) {
	t.Helper()
	pe, de := newEngine(t, p), newEngine(t, d)
	r := newRouter(t, Config{Contract: SGLang, Retries: 2, Prefill: []Prefill{{URL: pe.URL, BootstrapPort: 9000}}, Decode: []string{de.URL}})
	r.waitReady(t)
	return r, pe, de
}

// Both servers get the same request with the same room. Each request has another room.
func TestSGLangContract(t *testing.T) {
	leaktest.Check(t)
	r, p, d := sglangPair(t, stream(`{"text":"x"}`, "[DONE]"), ok)
	rooms := map[string]bool{}
	for range 2 {
		resp, _ := r.post(t, `{"prompt":"a","stream":true,"max_tokens":9,"bootstrap_host":"evil","bootstrap_room":1,"kv_transfer_params":{}}`)
		if resp.StatusCode != 200 {
			t.Fatal(resp.Status)
		}
		pc, dc := p.next(t), d.next(t)
		u, err := url.Parse(p.URL)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range []call{pc, dc} {
			room, err := strconv.ParseInt(string(c.body["bootstrap_room"]), 10, 64)
			if err != nil || room < 0 || string(c.body["bootstrap_port"]) != "9000" || string(c.body["bootstrap_host"]) != strconv.Quote(u.Hostname()) ||
				string(c.body["stream"]) != "true" || string(c.body["max_tokens"]) != "9" || c.body["kv_transfer_params"] != nil {
				t.Errorf("an engine gets %s (%v)", c.body, err)
			}
		}
		if string(pc.body["bootstrap_room"]) != string(dc.body["bootstrap_room"]) {
			t.Error("two rooms")
		}
		rooms[string(pc.body["bootstrap_room"])] = true
	}
	if len(rooms) != 2 {
		t.Errorf("rooms %v", rooms)
	}
}

// /generate is a completion by this contract, and only by this one.
func TestSGLangGenerate(t *testing.T) {
	leaktest.Check(t)
	e, d := newEngine(t, ok), newEngine(t, ok)
	generate := func(r router) int {
		resp, err := r.Server.Client().Post(r.Server.URL+"/generate", "application/json", strings.NewReader(`{"text":["a","b"]}`))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		return resp.StatusCode
	}
	var seen atomic.Int32
	for _, engine := range []*engine{e, d} {
		rest := engine.Config.Handler
		engine.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/generate" {
				seen.Add(1)
				ok(w, r)
				return
			}
			rest.ServeHTTP(w, r)
		})
	}
	r := newRouter(t, Config{Contract: SGLang, Prefill: []Prefill{{URL: e.URL}}, Decode: []string{d.URL}})
	r.waitReady(t)
	if code := generate(r); code != 200 {
		t.Errorf("answered %d", code)
	}
	eventually(t, "nothing is under way", func() bool { return len(r.Proxy.places) == 0 })
	if seen.Load() != 2 {
		t.Errorf("%d engines were asked, want both", seen.Load())
	}
}

// P's errors end D's request here too, also those in a stream.
func TestSGLangPrefillFailures(t *testing.T) {
	leaktest.Check(t)
	for name, prefill := range map[string]http.HandlerFunc{
		"status": status(500, `{"error":{"message":"no memory"}}`),
		"abort":  status(200, `{"text":"","meta_info":{"finish_reason":{"type":"abort","message":"no memory"}}}`),
		"stream": stream(`{"error":{"message":"no memory","code":500}}`, "[DONE]"),
	} {
		r, p, d := sglangPair(t, prefill, hang)
		resp, body := r.post(t, `{}`)
		if resp.StatusCode != 503 || !strings.Contains(body, "no memory") || !strings.Contains(body, p.URL) {
			t.Errorf("%s: %s %s", name, resp.Status, body)
		}
		for len(d.calls) > 0 { // if it had got that far
			recv(t, d.next(t).ctx.Done(), "end of D's request")
		}
	}
}

func TestSGLangRoomOfIPv6(t *testing.T) {
	leaktest.Check(t)
	base, err := baseURL("http://[fd00::1]:30000")
	if err != nil {
		t.Fatal(err)
	}
	a := &attempt{transferID: "7", prefill: target{server: &server{base: base}}}
	got := string(fields(nil).flat(a.room()))
	if want := `{"bootstrap_host":"[fd00::1]","bootstrap_port":null,"bootstrap_room":7}`; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}
