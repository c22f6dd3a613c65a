package proxy

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/kvconn/kvconn/rig/leaktest"
)

// withFallback is a router of one prefill and one decode server. The test may wait for a
// server that is not up yet.
func withFallback(t *testing.T, contract Contract, retries int, p, d http.HandlerFunc) (r router, pe, de *engine, logged *observer.ObservedLogs) {
	t.Helper()
	pe, de = newPrefill(t, p, "engine-0"), newEngine(t, d)
	core, logged := observer.New(zap.WarnLevel)
	r = newRouter(t, Config{Prefill: []Prefill{pe.prefill(t)}, Decode: []string{de.URL}, Contract: contract, Retries: retries,
		FallbackDecode: true, Logger: zap.New(core)})
	r.waitAllUp(t)
	return r, pe, de, logged
}

// alone checks that the decode server got a request just as the client sent it.
func alone(t *testing.T, c call) {
	t.Helper()
	if raw, found := c.body[paramsName]; found {
		t.Errorf("D was told %s", raw)
	}
	if string(c.body["max_tokens"]) != "7" {
		t.Errorf("D's max_tokens is %s, the client's was 7", c.body["max_tokens"])
	}
}

func fallbacks(t *testing.T, r router, want string) {
	t.Helper()
	if _, text := r.get(t, "/metrics"); !strings.Contains(text, "kvconn_proxy_fallbacks_total "+want+"\n") {
		t.Errorf("want %s fallbacks: %s", want, text)
	}
}

// A decode server serves alone while no prefill server is up, and no longer.
func TestFallbackWhilePrefillIsDown(t *testing.T) {
	leaktest.Check(t)
	for _, contract := range []Contract{Mooncake, NIXL} {
		r, pe, de, logged := withFallback(t, contract, 2, ok, ok)
		pe.ready.Store(false)
		eventually(t, "P is down", func() bool { return len(r.balancer.missing()) == 1 })
		if code, body := r.get(t, "/health"); code != 200 || !strings.Contains(body, "degraded") {
			t.Errorf("health: %d %s", code, body)
		}
		// The client's own parameters choose no address here either.
		resp, body := r.post(t, `{"max_tokens":7,"kv_transfer_params":{"remote_bootstrap_addr":"http://evil"}}`)
		if resp.StatusCode != 200 || body != `{"text":"ok"}` {
			t.Fatalf("%s %s", resp.Status, body)
		}
		alone(t, de.next(t))
		if len(pe.calls) != 0 {
			t.Error("P was asked")
		}
		fallbacks(t, r, "1")
		if e := logged.FilterMessage("a decode server computes the prompt itself").All(); len(e) != 1 ||
			!strings.Contains(e[0].ContextMap()["reason"].(string), "prefill server "+pe.URL) || e[0].ContextMap()["decode"] != de.URL {
			t.Errorf("logged %+v", logged.All())
		}
		began := time.Now()
		for range 30 { // each is counted; the log has a burst, and then a line each second
			r.post(t, `{"max_tokens":7}`)
			de.next(t)
		}
		fallbacks(t, r, "31")
		if lines, most := logged.FilterMessageSnippet("a decode server computes the prompt itself").Len(), 11+int(time.Since(began).Seconds()); lines > most {
			t.Errorf("%d lines of the log, want at most %d", lines, most)
		}
		pe.ready.Store(true)
		r.waitAllUp(t)
		if resp, body := r.post(t, `{"max_tokens":7}`); resp.StatusCode != 200 {
			t.Fatalf("%s %s", resp.Status, body)
		}
		pe.next(t)
		fallbacks(t, r, "31")
	}
}

// A small request goes to D alone, whatever P does. If D fails it, it goes to a pair.
func TestDecodeBelow(t *testing.T) {
	leaktest.Check(t)
	const body = `{"max_tokens":7,"prompt":"hello"}`
	for _, contract := range []Contract{Mooncake, NIXL} {
		calls := 0
		once := func(w http.ResponseWriter, r *http.Request) { // fails the second
			if calls++; calls == 2 {
				status(500, `{"error":{"message":"no"}}`)(w, r)
				return
			}
			ok(w, r)
		}
		pe, de := newPrefill(t, ok, "engine-0"), newEngine(t, once)
		r := newRouter(t, Config{Prefill: []Prefill{pe.prefill(t)}, Decode: []string{de.URL}, Contract: contract, DecodeBelow: int64(len(body)) + 1})
		r.waitAllUp(t)
		short := func(want string) {
			t.Helper()
			if _, text := r.get(t, "/metrics"); !strings.Contains(text, "kvconn_proxy_short_requests_total "+want+"\n") {
				t.Errorf("want %s short requests: %s", want, text)
			}
		}
		if resp, got := r.post(t, body); resp.StatusCode != 200 || got != `{"text":"ok"}` {
			t.Fatalf("%s %s", resp.Status, got)
		}
		if c := de.next(t); string(c.body[paramsName]) != `{"kvconn_alone":true}` || string(c.body["max_tokens"]) != "7" {
			t.Errorf("D gets %s", c.body)
		}
		if len(pe.calls) != 0 {
			t.Error("P was asked")
		}
		short("1")
		if resp, got := r.post(t, body); resp.StatusCode != 200 { // D fails it once
			t.Fatalf("%s %s", resp.Status, got)
		}
		pe.next(t)
		de.next(t)
		if c := de.next(t); strings.Contains(string(c.body[paramsName]), "kvconn_alone") {
			t.Errorf("D gets %s from a pair", c.body)
		}
		short("2")
		if resp, got := r.post(t, body+" "); resp.StatusCode != 200 { // as long as the threshold
			t.Fatalf("%s %s", resp.Status, got)
		}
		pe.next(t)
		short("2")
		fallbacks(t, r, "0")
	}
}

// A prefill server whose ranks were never heard of counts as down.
func TestFallbackBeforePrefillIsSeen(t *testing.T) {
	leaktest.Check(t)
	de := newEngine(t, ok)
	for _, fallback := range []bool{false, true} {
		r := newRouter(t, Config{Prefill: []Prefill{{URL: "http://" + freeAddr(t)}}, Decode: []string{de.URL}, FallbackDecode: fallback})
		eventually(t, "D is up", r.balancer.decode.anyUp)
		resp, body := r.post(t, `{"max_tokens":7}`)
		if fallback {
			if resp.StatusCode != 200 {
				t.Errorf("%s %s", resp.Status, body)
			}
			alone(t, de.next(t))
		} else if resp.StatusCode != 503 || len(de.calls) != 0 {
			t.Errorf("without the option: %s %s", resp.Status, body)
		}
	}
}

// When the retries are spent D gets the request once more, alone.
func TestFallbackAfterTheRetries(t *testing.T) {
	leaktest.Check(t)
	for retries := range 2 {
		// There is one pair, so a second attempt has nowhere to go.
		r, pe, de, _ := withFallback(t, NIXL, retries, status(500, "out of memory"), ok)
		resp, body := r.post(t, `{"max_tokens":7}`, "X-Request-Id", "mine")
		if resp.StatusCode != 200 || body != `{"text":"ok"}` {
			t.Fatalf("%s %s", resp.Status, body)
		}
		c := de.next(t)
		alone(t, c)
		if c.header.Get("X-Request-Id") != "mine-retry1" || len(de.calls) != 0 || len(pe.calls) != 1 {
			t.Errorf("request id %q, %d further calls of D, %d of P", c.header.Get("X-Request-Id"), len(de.calls), len(pe.calls))
		}
		fallbacks(t, r, "1")
	}
}

// D may have failed because P did. So D is asked again, alone, but not for ever.
func TestFallbackAfterDecodeFailed(t *testing.T) {
	leaktest.Check(t)
	r, _, de, _ := withFallback(t, Mooncake, 0, ok, status(500, "the load failed"))
	resp, body := r.post(t, `{"max_tokens":7}`)
	if resp.StatusCode != 500 || body != "the load failed" {
		t.Errorf("%s %s", resp.Status, body)
	}
	if c := de.next(t); c.params(t)["do_remote_prefill"] != true {
		t.Errorf("D was told %s first", c.body[paramsName])
	}
	alone(t, de.next(t))
	if len(de.calls) != 0 {
		t.Error("D was asked a third time")
	}
}

// If every engine refuses a request, no fallback mends it.
func TestNoFallbackOfBadRequests(t *testing.T) {
	leaktest.Check(t)
	refusal := `{"error":{"message":"prompt too long","code":400}}`
	r, _, de, _ := withFallback(t, NIXL, 2, status(400, refusal), ok)
	if resp, body := r.post(t, `{}`); resp.StatusCode != 400 || body != refusal || len(de.calls) != 0 {
		t.Errorf("%s %s, %d calls of D", resp.Status, body, len(de.calls))
	}
	fallbacks(t, r, "0")
}

// Further prefill servers are asked as often as the retries say, and not more.
func TestFallbackInsteadOfMoreRetries(t *testing.T) {
	leaktest.Check(t)
	de := newEngine(t, ok)
	var all []*engine
	var prefills []Prefill
	for range 4 {
		e := newPrefill(t, status(500, "out of memory"), "e")
		all, prefills = append(all, e), append(prefills, e.prefill(t))
	}
	r := newRouter(t, Config{Prefill: prefills, Decode: []string{de.URL}, Contract: NIXL, Retries: 1, FallbackDecode: true})
	r.waitAllUp(t)
	if resp, body := r.post(t, `{"max_tokens":7}`); resp.StatusCode != 200 {
		t.Fatalf("%s %s", resp.Status, body)
	}
	alone(t, de.next(t))
	asked := 0
	for _, e := range all {
		asked += len(e.calls)
	}
	if asked != 2 {
		t.Errorf("%d prefill servers were asked, want 2", asked)
	}
}
