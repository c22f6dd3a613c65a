package proxy

import (
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/kvconn/kvconn/rig/leaktest"
)

// counted checks the lines of /metrics about computed prompts, without those of 0.
func counted(t *testing.T, r router, want ...string) {
	t.Helper()
	got := func() (lines []string) {
		_, text := r.get(t, "/metrics")
		for line := range strings.Lines(text) {
			if name, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "kvconn_proxy_computed_"); ok && !strings.HasSuffix(name, " 0") {
				lines = append(lines, name)
			}
		}
		return lines
	}
	slices.Sort(want)
	// P's answer may come after the client has D's.
	deadline := time.Now().Add(patience)
	for !slices.Equal(got(), want) {
		if time.Now().After(deadline) {
			t.Fatalf("counted %q, want %q", got(), want)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// vllm answers as vLLM does: python/tests/test_vllm_answers.py holds these files to vLLM.
func vllm(t *testing.T, name string) http.HandlerFunc {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", "vllm", name))
	if err != nil {
		t.Fatal(err)
	}
	return func(w http.ResponseWriter, r *http.Request) {
		if !strings.HasSuffix(name, ".sse") {
			status(200, string(text))(w, r)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		for event := range strings.SplitAfterSeq(string(text), "\n\n") {
			if _, err := io.WriteString(w, event); err != nil {
				return
			}
			w.(http.Flusher).Flush()
		}
	}
}

// turns answers each request with the next answer.
func turns(answers ...http.HandlerFunc) http.HandlerFunc {
	var n atomic.Int64
	return func(w http.ResponseWriter, r *http.Request) { answers[n.Add(1)-1](w, r) }
}

// Each line is there from the start, so that a rate sees the first prompt.
func TestComputedFromTheStart(t *testing.T) {
	leaktest.Check(t)
	r := newRouter(t, Config{Decode: []string{newEngine(t, ok).URL}, Prefill: []Prefill{newPrefill(t, ok, "engine-0").prefill(t)}})
	_, text := r.get(t, "/metrics")
	for _, reason := range []string{fellBack, belowLimit, withoutParams, wasRefused} {
		for _, line := range []string{`prompts_total{reason="` + reason + `",tokens="known"} 0`, `prompts_total{reason="` + reason + `",tokens="unknown"} 0`, `tokens_total{reason="` + reason + `"} 0`} {
			if !strings.Contains(text, "\nkvconn_proxy_computed_"+line+"\n") {
				t.Errorf("no line %s", line)
			}
		}
	}
}

// A decode server that serves alone says how long the prompt is, in a stream only if the client wants to know.
func TestComputedAlone(t *testing.T) {
	leaktest.Check(t)
	for reason, cfg := range map[string]Config{fellBack: {FallbackDecode: true}, belowLimit: {DecodeBelow: 1000}} {
		pe := newPrefill(t, ok, "engine-0")
		de := newEngine(t, turns(vllm(t, "completion.json"), vllm(t, "completion-usage.sse"), vllm(t, "completion.sse"),
			ok, status(400, `{"error":{"message":"too long","code":400}}`)))
		core, logged := observer.New(zap.WarnLevel)
		cfg.Prefill, cfg.Decode, cfg.Logger = []Prefill{pe.prefill(t)}, []string{de.URL}, zap.New(core)
		r := newRouter(t, cfg)
		r.waitAllUp(t)
		if cfg.FallbackDecode {
			pe.ready.Store(false)
			eventually(t, "P is down", func() bool { return len(r.balancer.missing()) == 1 })
		}
		counted(t, r)
		prompts, tokens := `prompts_total{reason="`+reason+`",tokens=`, `tokens_total{reason="`+reason+`"} `
		for i, want := range [][]string{
			{prompts + `"known"} 1`, tokens + "7"},
			{prompts + `"known"} 2`, tokens + "14"},
			{prompts + `"known"} 2`, tokens + "14", prompts + `"unknown"} 1`},
			{prompts + `"known"} 2`, tokens + "14", prompts + `"unknown"} 2`},
			{prompts + `"known"} 2`, tokens + "14", prompts + `"unknown"} 2`}, // it was refused
		} {
			if resp, got := r.post(t, `{"max_tokens":7}`); (resp.StatusCode == 200) != (i < 4) {
				t.Fatalf("%s %s", resp.Status, got)
			}
			counted(t, r, want...)
		}
		lines := logged.FilterMessageSnippet("decode servers computed prompts").All()
		if reason == belowLimit { // as it was told to
			if len(lines) != 0 {
				t.Errorf("logged %+v", lines)
			}
		} else if len(lines) != 1 || !strings.Contains(lines[0].Message, "no prefill server could serve them (1 prompt, 7 tokens)") {
			t.Errorf("logged %+v", lines)
		}
	}
}

// A prefill server that gives nothing says how long the prompt was.
func TestComputedOfPairs(t *testing.T) {
	leaktest.Check(t)
	whole, err := os.ReadFile(filepath.Join("testdata", "vllm", "completion.json"))
	if err != nil {
		t.Fatal(err)
	}
	with := func(params string) http.HandlerFunc {
		text := strings.Replace(string(whole), `"kv_transfer_params":null`, `"kv_transfer_params":`+params, 1)
		if !strings.Contains(text, params) {
			t.Fatalf("%s has no parameters", whole)
		}
		return status(200, text)
	}
	refused := with(`{"kvconn_error":"it asks for prompt_logprobs"}`)
	stream := vllm(t, "completion.sse")
	for name, tt := range map[string]struct {
		contract Contract
		p, d     http.HandlerFunc
		want     []string
	}{
		"carried by nixl":     {NIXL, with(`{"do_remote_prefill":true}`), stream, nil},
		"carried by mooncake": {Mooncake, with("null"), stream, nil},
		"without parameters":  {NIXL, with("null"), stream, []string{`prompts_total{reason="no_params",tokens="known"} 1`, `tokens_total{reason="no_params"} 7`}},
		"refused":             {NIXL, refused, stream, []string{`prompts_total{reason="refused",tokens="known"} 1`, `tokens_total{reason="refused"} 7`}},
		"refused, failed":     {NIXL, refused, status(500, `{"error":"no"}`), nil},
		"without usage":       {NIXL, status(200, `{"choices":[]}`), stream, []string{`prompts_total{reason="no_params",tokens="unknown"} 1`}},
		"refused at once":     {Mooncake, refused, stream, []string{`prompts_total{reason="refused",tokens="known"} 1`, `tokens_total{reason="refused"} 7`}},
	} {
		t.Run(name, func(t *testing.T) {
			pe, de := newPrefill(t, tt.p, "engine-0"), newEngine(t, tt.d)
			r := newRouter(t, Config{Prefill: []Prefill{pe.prefill(t)}, Decode: []string{de.URL}, Contract: tt.contract})
			r.waitAllUp(t)
			r.post(t, `{"max_tokens":7,"stream":true}`)
			eventually(t, "both halves have ended", func() bool { return len(r.places) == 0 })
			counted(t, r, tt.want...)
		})
	}
}

// P's answer may come when D has served.
func TestComputedThenRefused(t *testing.T) {
	leaktest.Check(t)
	served := make(chan struct{})
	r, _, _ := pairOf(t, func(w http.ResponseWriter, q *http.Request) {
		select {
		case <-served:
		case <-time.After(patience):
		}
		status(200, `{"usage":{"prompt_tokens":5},"kv_transfer_params":{"kvconn_error":"nothing"}}`)(w, q)
	}, ok)
	r.post(t, `{}`)
	counted(t, r)
	close(served)
	counted(t, r, `prompts_total{reason="refused",tokens="known"} 1`, `tokens_total{reason="refused"} 5`)
}

// What a first attempt's P has said is known when D serves alone at last.
func TestComputedAfterPrefillsAnswer(t *testing.T) {
	leaktest.Check(t)
	r, _, _, _ := withFallback(t, NIXL, 0, status(200, `{"usage":{"prompt_tokens":5},"kv_transfer_params":{"x":1}}`),
		turns(status(500, "the load failed"), vllm(t, "completion.sse")))
	if resp, got := r.post(t, `{"stream":true}`); resp.StatusCode != 200 {
		t.Fatalf("%s %s", resp.Status, got)
	}
	counted(t, r, `prompts_total{reason="fallback",tokens="known"} 1`, `tokens_total{reason="fallback"} 5`)
}

// The first line comes at once, the next ones have the sums of half a minute each, also if no further prompt comes then. The rest comes at the end,
// also if a request goes on then.
func TestUnsaid(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		core, logged := observer.New(zap.WarnLevel)
		p := &Proxy{log: zap.New(core), client: newClient(nil), bootstraps: newClient(nil), unsaid: unsaid{waits: make(chan struct{}, 1)}}
		p.ctx, p.cancel = context.WithCancel(t.Context())
		p.wg.Go(p.sayComputed)
		last := make(chan struct{})
		p.wg.Go(func() { <-last })
		began := time.Now()
		for _, step := range []struct {
			at     time.Duration
			reason string
			tokens int64
			want   string
		}{
			{0, wasRefused, 5, "prefill had nothing to load for them (1 prompt, 5 tokens)"},
			{time.Second, fellBack, 7, ""},
			{29 * time.Second, wasRefused, 0, ""},
			{31 * time.Second, "", 0, "no prefill server could serve them (1 prompt, 7 tokens); prefill had nothing to load for them (1 prompt, 0 tokens, and those of 1 prompt whose answers do not say it)"},
			{59 * time.Second, fellBack, 3, ""},
			{60 * time.Second, "", 0, "no prefill server could serve them (1 prompt, 3 tokens)"},
			{100 * time.Second, fellBack, 4, "no prefill server could serve them (1 prompt, 4 tokens)"},
			{101 * time.Second, fellBack, 5, ""},
			{102 * time.Second, fellBack, 6, ""},
		} {
			time.Sleep(time.Until(began.Add(step.at)))
			if step.reason != "" {
				p.writeComputed(p.unsaid.add(time.Now(), step.reason, step.tokens))
			}
			synctest.Wait()
			got := ""
			for _, line := range logged.TakeAll() {
				got += strings.TrimPrefix(line.Message, "decode servers computed prompts that prefill servers were to compute: ")
			}
			if got != step.want {
				t.Errorf("after %v: wrote %q, want %q", step.at, got, step.want)
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := p.Close(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a request goes on, and Close returns %v", err)
		}
		if lines := logged.TakeAll(); len(lines) != 1 || !strings.HasSuffix(lines[0].Message, "no prefill server could serve them (2 prompts, 11 tokens)") {
			t.Errorf("Close wrote %+v", lines)
		}
		p.writeComputed(p.unsaid.add(time.Now(), fellBack, 8)) // the one that goes on
		close(last)
		if err := p.Close(t.Context()); err != nil {
			t.Error(err)
		}
		if lines := logged.All(); len(lines) != 1 || !strings.HasSuffix(lines[0].Message, "no prefill server could serve them (1 prompt, 8 tokens)") {
			t.Errorf("the second Close wrote %+v", lines)
		}
	})
}
