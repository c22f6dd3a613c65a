package proxy

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/kvconn/kvconn/rig/leaktest"
)

// reset closes the connection without an answer, as the end of an engine does.
func reset(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }

// stream answers events as vLLM does, each data of one.
func stream(events ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		for _, e := range events {
			io.WriteString(w, "data: "+e+"\n\n")
			w.(http.Flusher).Flush()
		}
	}
}

// cutChunk answers a part of a chunk: the router reads the part and the end at once.
func cutChunk(kind, part string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		c, buf, err := w.(http.Hijacker).Hijack()
		if err != nil {
			panic(err)
		}
		defer c.Close()
		fmt.Fprintf(buf, "HTTP/1.1 200 OK\r\nContent-Type: %s\r\nTransfer-Encoding: chunked\r\n\r\n1000\r\n%s", kind, part)
		buf.Flush()
	}
}

// twoOfEach is a ready router, in turn, of two prefill and two decode servers,
// of which the first ones answer as given.
func twoOfEach(t *testing.T, retries int, p, d http.HandlerFunc) (r router, p1, p2, d1, d2 *engine) {
	t.Helper()
	p1, p2 = newPrefill(t, p, "a"), newPrefill(t, ok, "b")
	d1, d2 = newEngine(t, d), newEngine(t, ok)
	r = newRouter(t, Config{Prefill: []Prefill{p1.prefill(t), p2.prefill(t)}, Decode: []string{d1.URL, d2.URL}, Balance: RoundRobin,
		Retries: retries, RefreshInterval: time.Hour})
	r.waitAllUp(t)
	return r, p1, p2, d1, d2
}

// If another engine can mend a failure, it gets the request with a new transfer id and
// request id, and the client sees only its answer.
func TestRetries(t *testing.T) {
	leaktest.Check(t)
	for name, engines := range map[string]struct{ p, d http.HandlerFunc }{
		"P resets":                    {reset, hang},
		"P resets, D streams no text": {reset, hangAfterHeaders},
		"P fails":                     {status(500, "dead"), hang},
		"P answers an error":          {status(200, `{"error":{"message":"no KV","code":500}}`), hang},
		"P aborts":                    {status(200, `{"choices":[{"finish_reason":"abort"}]}`), hang},
		"P's parameters are an error": {status(200, `{"choices":[{"finish_reason":"length"}],"kv_transfer_params":{"error":"no room"}}`), hang},
		"D resets":                    {ok, reset},
		"D resets, P hangs":           {hang, reset},
		"D fails":                     {ok, status(500, "load failed")},
		"D is overloaded":             {ok, status(503, "later")},
		"D answers nothing":           {ok, status(200, "")},
		"D breaks off before the answer": {ok, func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(200)
			w.(http.Flusher).Flush()
			reset(w, nil)
		}},
		"D breaks off in its first bytes": {ok, cutChunk("application/json", `{"text":"`)},
		"D breaks off in its first event": {ok, cutChunk("text/event-stream", `data: {"er`)},
		"D streams an error":              {ok, stream(`{"error":{"message":"Internal server error","type":"InternalServerError","code":500}}`, "[DONE]")},
	} {
		t.Run(name, func(t *testing.T) {
			leaktest.Check(t)
			r, p1, p2, d1, d2 := twoOfEach(t, 2, engines.p, engines.d)
			resp, body := r.post(t, `{"stream":true}`, "X-Request-Id", "mine")
			if resp.StatusCode != 200 || body != `{"text":"ok"}` || resp.Header.Get("X-Request-Id") != "mine" {
				t.Fatalf("%s %s %s", resp.Status, resp.Header, body)
			}
			ids, transfers := map[string]int{}, map[any]int{}
			for _, e := range []*engine{p1, p2, d1, d2} {
				for len(e.calls) > 0 {
					c := e.next(t)
					ids[c.header.Get("X-Request-Id")]++
					transfers[c.params(t)["transfer_id"]]++
				}
			}
			// The first attempt's other half may have been cut off before it got
			// there, and the second's may still be on its way.
			if ids["mine-retry1"] < 1 || ids["mine"] < 1 || len(ids) != 2 || len(transfers) != 2 {
				t.Errorf("request ids %v, transfer ids %v", ids, transfers)
			}
			if code, text := r.get(t, "/metrics"); code != 200 || !strings.Contains(text, "kvconn_proxy_retries_total{role=") ||
				!strings.Contains(text, `kvconn_proxy_requests_total{endpoint="/v1/completions",outcome="200"} 1`) {
				t.Errorf("metrics: %d %s", code, text)
			}
		})
	}
}

// The engine ends while the router looks for an error in the first event.
func TestAnswerCutWhileItIsLookedAt(t *testing.T) {
	leaktest.Check(t)
	parts := io.MultiReader(strings.NewReader(`data: {"er`), iotest.ErrReader(io.ErrUnexpectedEOF))
	d := readFirst(&http.Response{StatusCode: 200, Header: http.Header{"Content-Type": {"text/event-stream"}}, Body: io.NopCloser(parts)})
	defer d.close()
	if f := new(Proxy).checkBegin(&attempt{decode: target{server: &server{role: decodeRole}}}, &d); f == nil || !errors.Is(f, io.ErrUnexpectedEOF) {
		t.Errorf("%v, want the end of the answer", f)
	}
}

// If the request itself is at fault, it goes to no second engine.
func TestNoRetryOfBadRequests(t *testing.T) {
	leaktest.Check(t)
	refusal := `{"error":{"message":"prompt too long","code":400}}`
	for name, engines := range map[string]struct{ p, d http.HandlerFunc }{
		"P refuses":           {status(400, refusal), hang},
		"P refuses with 200":  {status(200, refusal), hang},
		"D refuses":           {hang, status(400, refusal)},
		"D refuses in stream": {hang, stream(refusal)},
	} {
		r, _, p2, _, d2 := twoOfEach(t, 9, engines.p, engines.d)
		if resp, body := r.post(t, `{}`); resp.StatusCode != 400 || body != refusal {
			t.Errorf("%s: %s %s", name, resp.Status, body)
		}
		if len(p2.calls)+len(d2.calls) > 0 {
			t.Errorf("%s: another engine was asked", name)
		}
	}
}

// The number of attempts has a bound, and the last failure's reason is the answer.
func TestRetriesAreBounded(t *testing.T) {
	leaktest.Check(t)
	for retries, want := range map[int]int{0: 1, 1: 2, 9: 3} { // there are three
		var prefills []Prefill
		var engines []*engine
		for range 3 {
			e := newPrefill(t, status(500, "out of memory"), "e")
			engines, prefills = append(engines, e), append(prefills, e.prefill(t))
		}
		d := newEngine(t, hang)
		r := newRouter(t, Config{Prefill: prefills, Decode: []string{d.URL}, Retries: retries})
		r.waitAllUp(t)
		resp, body := r.post(t, `{}`)
		var e apiError
		if err := json.Unmarshal([]byte(body), &e); err != nil || resp.StatusCode != 503 || e.Error.Code != 503 ||
			!strings.Contains(e.Error.Message, "out of memory") {
			t.Errorf("%d retries: %s %s (%v)", retries, resp.Status, body, err)
		}
		got := 0
		for _, e := range engines {
			got += len(e.calls)
		}
		if got != want {
			t.Errorf("%d retries: %d attempts, want %d", retries, got, want)
		}
	}
}

// After the first byte an answer belongs to the client: no second attempt.
func TestNoRetryAfterTheFirstByte(t *testing.T) {
	leaktest.Check(t)
	r, _, p2, _, d2 := twoOfEach(t, 9, ok, func(w http.ResponseWriter, q *http.Request) {
		stream(`{"choices":[]}`)(w, q)
		reset(w, q)
	})
	resp, err := r.send(t.Context(), `{}`)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if body, err := io.ReadAll(resp.Body); err == nil || !strings.Contains(string(body), "choices") {
		t.Errorf("the client read %q, %v", body, err)
	}
	if len(p2.calls)+len(d2.calls) > 0 {
		t.Error("another engine was asked")
	}
}

// TestRetryWithARestartedEngine: the only P has been restarted since it was last asked, so
// that D was told an old engine id. After P is asked again the request goes well.
func TestRetryWithARestartedEngine(t *testing.T) {
	leaktest.Check(t)
	p := newPrefill(t, ok, "old")
	var ids []any
	d := newEngine(t, nil)
	d.Config.Handler = decoderThatKnows(t, "new", d.Config.Handler, &ids, stream(`{"error":{"message":"Internal server error","code":500}}`))
	r := newRouter(t, Config{Prefill: []Prefill{p.prefill(t)}, Decode: []string{d.URL}, RefreshInterval: time.Hour, Retries: 2})
	r.waitReady(t)
	p.register(t, "new")
	if resp, body := r.post(t, `{}`); resp.StatusCode != 200 {
		t.Fatalf("%s %s", resp.Status, body)
	}
	if len(ids) != 2 || ids[0] != "old" || ids[1] != "new" {
		t.Errorf("D was told of %v", ids)
	}
}

// If a D answers an error, it may lack the bytes of a P that failed. So another P is worth
// the attempt, even with the same and only D.
func TestRetryWithTheSameDecoder(t *testing.T) {
	leaktest.Check(t)
	for name, refusal := range map[string]http.HandlerFunc{
		"status": status(500, "load failed"),
		"stream": stream(`{"error":{"message":"Internal server error","code":500}}`),
	} {
		p1, p2 := newPrefill(t, ok, "a"), newPrefill(t, ok, "b")
		var ids []any
		d := newEngine(t, nil)
		d.Config.Handler = decoderThatKnows(t, "b", d.Config.Handler, &ids, refusal)
		r := newRouter(t, Config{Prefill: []Prefill{p1.prefill(t), p2.prefill(t)}, Decode: []string{d.URL}, Retries: 1, Balance: RoundRobin})
		r.waitAllUp(t)
		if resp, body := r.post(t, `{}`); resp.StatusCode != 200 || len(ids) != 2 || ids[1] != "b" {
			t.Errorf("%s: %s %s, D was told of %v", name, resp.Status, body, ids)
		}
	}
}

// A 200 without a byte is no answer, and the client is told so.
func TestEmptyAnswer(t *testing.T) {
	leaktest.Check(t)
	r, _, d := pairOf(t, ok, status(200, ""))
	if resp, body := r.post(t, `{}`); resp.StatusCode != 503 || !strings.Contains(body, d.URL) || !strings.Contains(body, "with an empty body") {
		t.Errorf("%s %s", resp.Status, body)
	}
}

// decoderThatKnows is a D whose loads fail unless they are from one engine.
func decoderThatKnows(t *testing.T, engineID string, rest http.Handler, told *[]any, refusal http.HandlerFunc) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodPost {
			rest.ServeHTTP(w, r)
			return
		}
		var body struct {
			Params map[string]any `json:"kv_transfer_params"`
		}
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
			t.Error(err)
		}
		*told = append(*told, body.Params["remote_engine_id"])
		if body.Params["remote_engine_id"] == engineID {
			ok(w, r)
			return
		}
		refusal(w, r)
	})
}

// A client that goes while the router tries again takes the new attempt with it.
func TestClientDisconnectsDuringARetry(t *testing.T) {
	leaktest.Check(t)
	p1, p2, d := newPrefill(t, reset, "a"), newPrefill(t, hang, "b"), newEngine(t, hang)
	r := newRouter(t, Config{Prefill: []Prefill{p1.prefill(t), p2.prefill(t)}, Decode: []string{d.URL}, Retries: 2, Balance: RoundRobin, RefreshInterval: time.Hour})
	r.waitAllUp(t)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if resp, err := r.send(ctx, `{}`); err == nil {
			resp.Body.Close()
		}
	}()
	second := p2.next(t)
	cancel()
	recv(t, second.ctx.Done(), "end of the second attempt")
	recv(t, ended, "end of the client")
	eventually(t, "it is counted", func() bool {
		_, text := r.get(t, "/metrics")
		return strings.Contains(text, `outcome="client_gone"} 1`)
	})
}
