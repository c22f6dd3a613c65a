package proxy

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/rig/leaktest"
)

// Each half carries the contract's parameters, and the client's fields as they were
// written.
func TestWhatBothHalvesCarry(t *testing.T) {
	leaktest.Check(t)
	r, p, d := pairOf(t, ok, ok)
	const body = `{"prompt":["a<b","é"],"n":2,"seed":12345678901234567890,"temperature":0.10,"stream":true,` +
		`"stream_options":{"include_usage":true},"max_tokens":7,"max_completion_tokens":8,"min_tokens":5,` +
		`"kv_transfer_params":{"do_remote_prefill":true,"remote_bootstrap_addr":"http://evil"}}`
	resp, got := r.post(t, body, "Authorization", "Bearer k", "X-Request-Id", "req-1", "X-Data-Parallel-Rank", "9", "Cookie", "c")
	if resp.StatusCode != 200 || got != `{"text":"ok"}` || resp.Header.Get("X-Request-Id") != "req-1" {
		t.Fatalf("answer: %s %v %s", resp.Status, resp.Header, got)
	}
	pc, dc := p.next(t), d.next(t)

	id, _ := pc.params(t)["transfer_id"].(string)
	if !regexp.MustCompile(`^xfer-[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`).MatchString(id) {
		t.Errorf("transfer id %q", id)
	}
	wantP := map[string]any{"do_remote_decode": true, "do_remote_prefill": false, "transfer_id": id}
	wantD := map[string]any{"do_remote_decode": false, "do_remote_prefill": true, "transfer_id": id,
		"remote_engine_id": "engine-0", "remote_bootstrap_addr": p.boot.URL}
	if got := pc.params(t); !reflect.DeepEqual(got, wantP) {
		t.Errorf("to P: %v, want %v", got, wantP)
	}
	if got := dc.params(t); !reflect.DeepEqual(got, wantD) {
		t.Errorf("to D: %v, want %v", got, wantD)
	}

	check := func(name string, c call, want map[string]string) {
		t.Helper()
		delete(c.body, "kv_transfer_params")
		got := map[string]string{}
		for k, v := range c.body {
			got[k] = string(v)
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("fields to %s: %v\nwant %v", name, got, want)
		}
		for h, want := range map[string]string{"Authorization": "Bearer k", "X-Request-Id": "req-1",
			"Content-Type": "application/json", "Cookie": ""} {
			if got := c.header.Get(h); got != want {
				t.Errorf("%s to %s: %q, want %q", h, name, got, want)
			}
		}
	}
	check("P", pc, map[string]string{"prompt": `["a<b","é"]`, "n": "1", "seed": "12345678901234567890",
		"temperature": "0.10", "stream": "false", "max_tokens": "1", "max_completion_tokens": "1", "min_tokens": "1"})
	check("D", dc, map[string]string{"prompt": `["a<b","é"]`, "n": "2", "seed": "12345678901234567890",
		"temperature": "0.10", "stream": "true", "stream_options": `{"include_usage":true}`,
		"max_tokens": "7", "max_completion_tokens": "8", "min_tokens": "5"})
	if got := pc.header.Get("X-Data-Parallel-Rank"); got != "0" {
		t.Errorf("dp rank to P: %q, want 0", got)
	}
	if got := dc.header.Get("X-Data-Parallel-Rank"); got != "" {
		t.Errorf("dp rank to D: %q, want none", got)
	}
}

// Fields that the client did not send are not made up, and ids are minted.
func TestMinimalRequest(t *testing.T) {
	leaktest.Check(t)
	r, p, d := pairOf(t, ok, ok)
	var ids []string
	for range 2 {
		resp, _ := r.post(t, `{"prompt":"a","min_tokens":0}`)
		pc, dc := p.next(t), d.next(t)
		if _, ok := pc.body["max_completion_tokens"]; ok || string(pc.body["min_tokens"]) != "0" {
			t.Errorf("to P: %s", pc.body)
		}
		if len(dc.body) != 3 {
			t.Errorf("to D: %s", dc.body)
		}
		id := resp.Header.Get("X-Request-Id")
		if len(id) != 36 || pc.header.Get("X-Request-Id") != id || dc.header.Get("X-Request-Id") != id {
			t.Errorf("request ids: client %q, P %q, D %q", id, pc.header.Get("X-Request-Id"), dc.header.Get("X-Request-Id"))
		}
		ids = append(ids, id, pc.params(t)["transfer_id"].(string))
	}
	if ids[0] == ids[2] || ids[1] == ids[3] {
		t.Errorf("ids come twice: %v", ids)
	}
}

// Each half waits for the other to have arrived: one after the other would hang.
func TestBothHalvesAtTheSameTime(t *testing.T) {
	leaktest.Check(t)
	atP, atD := make(chan struct{}), make(chan struct{})
	r, _, _ := pairOf(t,
		func(w http.ResponseWriter, q *http.Request) { close(atP); <-atD; ok(w, q) },
		func(w http.ResponseWriter, q *http.Request) { close(atD); <-atP; ok(w, q) })
	if resp, _ := r.post(t, `{}`); resp.StatusCode != 200 {
		t.Fatal(resp.Status)
	}
}

// Each event reaches the client before D goes on to the next.
func TestStreamsAsItArrives(t *testing.T) {
	leaktest.Check(t)
	next := make(chan string)
	r, _, _ := pairOf(t, ok, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		w.Header().Set("X-Engine", "d")
		for event := range next {
			io.WriteString(w, event)
			w.(http.Flusher).Flush()
		}
	})
	events := []string{"data: one\n", "data: two\n", "data: [DONE]\n"}
	sent := make(chan struct{})
	go func() { next <- events[0]; close(sent) }()
	resp, err := r.send(t.Context(), `{"stream":true}`)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	<-sent
	if resp.Header.Get("Content-Type") != "text/event-stream; charset=utf-8" || resp.Header.Get("X-Engine") != "d" {
		t.Errorf("headers %v", resp.Header)
	}
	lines := bufio.NewReader(resp.Body)
	for i, want := range events {
		if got, err := lines.ReadString('\n'); got != want || err != nil {
			t.Fatalf("event %d: %q, %v; want %q", i, got, err, want)
		}
		if i+1 < len(events) {
			next <- events[i+1]
		}
	}
	close(next)
	if _, err := lines.ReadByte(); err != io.EOF {
		t.Fatalf("after the last event: %v, want EOF", err)
	}
}

// The client gets D's errors. P need not go on.
func TestDecodeErrorsPassThrough(t *testing.T) {
	leaktest.Check(t)
	for _, code := range []int{400, 404, 422, 429, 500, 503} {
		body := `{"error":{"message":"no such model"}}`
		atP := make(chan struct{})
		r, p, _ := pairOf(t,
			func(w http.ResponseWriter, q *http.Request) { close(atP); hang(w, q) },
			func(w http.ResponseWriter, q *http.Request) { <-atP; status(code, body)(w, q) })
		resp, got := r.post(t, `{}`)
		if resp.StatusCode != code || got != body || resp.Header.Get("Content-Type") != "application/json" {
			t.Errorf("%d: got %s %s", code, resp.Status, got)
		}
		recv(t, p.next(t).ctx.Done(), "end of P's request")
	}
}

// A P that fails ends D's request, which would wait for ever.
func TestPrefillFailures(t *testing.T) {
	leaktest.Check(t)
	clientsBody := `{"error":{"message":"prompt too long"}}`
	tests := []struct {
		name    string
		prefill http.HandlerFunc
		status  int
		body    string // all of it, if P's
		reason  string
	}{
		{"4xx", status(400, clientsBody), 400, clientsBody, ""},
		{"429", status(429, clientsBody), 429, clientsBody, ""},
		{"5xx", status(500, "out of memory"), 503, "", "answered 500 Internal Server Error: out of memory"},
		{"redirect", status(302, ""), 503, "", "answered 302"},
		{"breaks off", func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, 503, "", "EOF"},
	}
	for _, tt := range tests {
		for name, decode := range map[string]http.HandlerFunc{"silent D": hang, "D with headers": hangAfterHeaders} {
			t.Run(tt.name+" "+name, func(t *testing.T) {
				leaktest.Check(t)
				atD := make(chan struct{})
				r, p, d := pairOf(t,
					func(w http.ResponseWriter, q *http.Request) { <-atD; tt.prefill(w, q) },
					func(w http.ResponseWriter, q *http.Request) { close(atD); decode(w, q) })
				resp, got := r.post(t, `{}`)
				if resp.StatusCode != tt.status {
					t.Errorf("status %s, want %d", resp.Status, tt.status)
				}
				if tt.body != "" && got != tt.body {
					t.Errorf("body %s, want %s", got, tt.body)
				}
				if tt.body == "" {
					var e apiError
					if err := json.Unmarshal([]byte(got), &e); err != nil || e.Error.Code != 503 ||
						!strings.Contains(e.Error.Message, p.URL) || !strings.Contains(e.Error.Message, tt.reason) {
						t.Errorf("body %s (%v); want an error with %q and %q", got, err, p.URL, tt.reason)
					}
				}
				recv(t, d.next(t).ctx.Done(), "end of D's request")
			})
		}
	}
}

func TestPrefillRefusesConnections(t *testing.T) {
	leaktest.Check(t)
	r, p, _ := pairOf(t, ok, hang)
	p.Server.Close()
	r.waitRefused(t, r.balancer.prefill.servers[0])
	resp, got := r.post(t, `{}`)
	if resp.StatusCode != 503 || !strings.Contains(got, p.URL) || !strings.Contains(got, "refused") {
		t.Fatalf("got %s %s; want 503 with %s", resp.Status, got, p.URL)
	}
}

func TestDecodeRefusesConnections(t *testing.T) {
	leaktest.Check(t)
	r, p, d := pairOf(t, hang, ok)
	d.Server.Close()
	r.waitRefused(t, r.balancer.decode.servers[0])
	resp, got := r.post(t, `{}`)
	if resp.StatusCode != 503 || !strings.Contains(got, d.URL) || !strings.Contains(got, "refused") {
		t.Fatalf("got %s %s; want 503 with %s", resp.Status, got, d.URL)
	}
	select {
	case c := <-p.calls: // if it had got that far
		recv(t, c.ctx.Done(), "end of P's request")
	default:
	}
}

// Once D has begun to answer, it has all that it needs from P.
func TestPrefillFailsAfterDecodeHasBegun(t *testing.T) {
	leaktest.Check(t)
	begun, failed, answered := make(chan struct{}), make(chan struct{}), make(chan struct{})
	r, _, _ := pairOf(t,
		func(w http.ResponseWriter, q *http.Request) {
			<-begun
			status(500, "late")(w, q)
			close(answered)
		},
		func(w http.ResponseWriter, _ *http.Request) {
			io.WriteString(w, "first ")
			w.(http.Flusher).Flush()
			<-failed
			io.WriteString(w, "last")
		})
	resp, err := r.send(t.Context(), `{}`)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	close(begun) // the client has D's headers, so that the router has its first bytes
	recv(t, answered, "P's answer")
	// Only here is it visible from outside that the router ends P's half.
	eventually(t, "P's half has ended", func() bool { return r.balancer.prefill.servers[0].inFlight() == 0 })
	close(failed)
	if body, err := io.ReadAll(resp.Body); string(body) != "first last" || err != nil {
		t.Fatalf("body %q, %v", body, err)
	}
}

// P may answer a little after D without being cut off.
func TestPrefillMayEndAfterDecode(t *testing.T) {
	leaktest.Check(t)
	release, cut := make(chan struct{}), make(chan error, 1)
	r, _, _ := pairOf(t, func(w http.ResponseWriter, q *http.Request) {
		<-release
		cut <- q.Context().Err()
		ok(w, q)
	}, ok)
	for range 2 {
		if resp, _ := r.post(t, `{}`); resp.StatusCode != 200 {
			t.Fatal(resp.Status)
		}
	}
	close(release)
	for range 2 {
		if err := recv(t, cut, "end of P's half"); err != nil {
			t.Errorf("P's half was cut off: %v", err)
		}
	}
	eventually(t, "both places are free", func() bool { return len(r.Proxy.places) == 0 })
}

// A client that goes takes both halves with it, before and within the answer.
func TestClientDisconnects(t *testing.T) {
	leaktest.Check(t)
	for name, decode := range map[string]http.HandlerFunc{
		"before the answer": hang,
		"within the answer": func(w http.ResponseWriter, r *http.Request) {
			io.WriteString(w, "data: one\n")
			w.(http.Flusher).Flush()
			hang(w, r)
		},
	} {
		t.Run(name, func(t *testing.T) {
			leaktest.Check(t)
			r, p, d := pairOf(t, hang, decode)
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			begun := make(chan struct{})
			go func() {
				resp, err := r.send(ctx, `{}`)
				if err == nil {
					close(begun)
					_, err = io.ReadAll(resp.Body)
					resp.Body.Close()
				}
				ended <- err
			}()
			pc, dc := p.next(t), d.next(t)
			if name == "within the answer" {
				recv(t, begun, "begin of the answer")
			}
			cancel()
			if err := recv(t, ended, "end of the client"); !errors.Is(err, context.Canceled) {
				t.Errorf("client: %v", err)
			}
			recv(t, pc.ctx.Done(), "end of P's request")
			recv(t, dc.ctx.Done(), "end of D's request")
			eventually(t, "the place is free", func() bool { return len(r.Proxy.places) == 0 })
		})
	}
}

// A stream that D breaks off must not look complete.
func TestDecodeBreaksOff(t *testing.T) {
	leaktest.Check(t)
	r, _, _ := pairOf(t, ok, func(w http.ResponseWriter, _ *http.Request) {
		io.WriteString(w, "data: one\n")
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	})
	resp, err := r.send(t.Context(), `{"stream":true}`)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if body, err := io.ReadAll(resp.Body); err == nil {
		t.Fatalf("the client read %q to its end", body)
	}
}
