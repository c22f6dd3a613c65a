package proxy

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode"

	"github.com/kvconn/kvconn/rig/alloctest"
)

// fakeEngines is an http.RoundTripper in the place of two engines.
type fakeEngines struct {
	prefill, decode int // statuses

	mu   sync.Mutex
	seen map[string]sentRequest // by host
}

type sentRequest struct {
	url    *url.URL
	header http.Header
	body   []byte
}

func (f *fakeEngines) RoundTrip(r *http.Request) (*http.Response, error) {
	body, err := []byte(nil), error(nil)
	if r.Body != nil {
		body, err = io.ReadAll(r.Body)
		_ = r.Body.Close()
	}
	f.mu.Lock()
	f.seen[r.URL.Host] = sentRequest{r.URL, r.Header.Clone(), body}
	f.mu.Unlock()
	code := f.prefill
	if r.URL.Host == "d:1" {
		code = f.decode
	}
	if err != nil || code == 0 {
		return nil, errors.Join(errors.New("connection refused"), err)
	}
	return &http.Response{StatusCode: code, Header: http.Header{"Content-Type": {"application/json"}, "X-From": {r.URL.Host}},
		Body: io.NopCloser(strings.NewReader(`{"from":"` + r.URL.Host + `"}`)), Request: r}, nil
}

// fuzzProxy is a router of two engines that are up, without its background work.
func fuzzProxy(t *testing.T, f *fakeEngines) *Proxy {
	cfg := Config{Prefill: []Prefill{{"http://p:1", 0}}, Decode: []string{"http://d:1"}, MaxBody: 1 << 16}.withDefaults()
	p := &Proxy{cfg: cfg, log: cfg.Logger, client: &http.Client{Transport: f, CheckRedirect: newClient(nil).CheckRedirect}, places: make(chan struct{}, 2), ctx: t.Context()}
	p.bodies.init(cfg)
	p.metrics = newMetrics(p)
	for _, s := range []*server{{role: prefillRole, url: "http://p:1"}, {role: decodeRole, url: "http://d:1"}} {
		base, err := baseURL(s.url)
		if err != nil {
			t.Fatal(err)
		}
		if s.base = base; s.role == prefillRole {
			s.bootstrap = bootstrapURL(base, 0, false)
			s.setUp([]rank{{dp: 3, engineID: "engine-0"}})
			p.balancer.prefill.servers = append(p.balancer.prefill.servers, s)
			continue
		}
		s.setUp([]rank{{dp: unranked}})
		p.balancer.decode.servers = append(p.balancer.decode.servers, s)
	}
	return p
}

// FuzzHandler gives the router any request that net/http can read. The answer is D's, P's
// refusal, or an error in OpenAI's shape. It is 5xx only if an engine or the router is at
// fault. Completions reach P. Both halves are the client's request, with our parameters and
// no others. All other requests reach D only, unchanged, and without parameters.
func FuzzHandler(f *testing.F) {
	add := func(raw string) {
		f.Add([]byte(raw), uint16(200), uint16(200))
		f.Add([]byte(raw), uint16(422), uint16(200))
		f.Add([]byte(raw), uint16(0), uint16(503))
	}
	for _, body := range []string{
		`{"prompt":"x","max_tokens":5,"stream":true,"stream_options":{"include_usage":true},"min_tokens":3}`, `{"prompt":[1,2],"max_completion_tokens":1e400,"seed":12345678901234567890}`,
		`{"kv_transfer_params":{"remote_bootstrap_addr":"http://evil:1"},"kv_transfer_params":7,"\u006bv_transfer_params":8}`, `{"<&>":"\u2028<&>","a":1,"a":2,"":null}`,
		`{}`, `null`, `[]`, `7`, `{"a":`, `{"a":1}{}`, "{\"\xff\":\"\xff\"}", ``, strings.Repeat(`{"a":`, 11000), `{"min_tokens":"x","max_tokens":null}`, strings.Repeat(" ", 1<<16) + "{}",
	} {
		for _, path := range []string{"/v1/completions", "/v1/chat/completions?x=y"} {
			add("POST " + path + " HTTP/1.1\r\nHost: h\r\nContent-Length: " + strconv.Itoa(len(body)) + "\r\n\r\n" + body)
		}
	}
	add("POST /v1/completions HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer x\r\nX-Request-Id: r-1\r\nTraceparent: 00-1-2-3\r\nX-Data-Parallel-Rank: 9\r\nCookie: c\r\nContent-Length: 2\r\n\r\n{}")
	add("POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 4294967296\r\n\r\n{}")
	add("POST /v1/completions HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\nfffffff0\r\n{}")
	for _, line := range []string{"GET /health", "HEAD /v1/models", "GET /v1/models", "DELETE /v1/completions", "GET //evil/x", "POST /v1/../v1/completions", "OPTIONS *", "CONNECT h:1", "GET /", "GET http://evil/v1/models", "GET /metrics", "POST /tokenize?a=b"} {
		add(line + " HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer x\r\n\r\n")
	}
	f.Fuzz(func(t *testing.T, raw []byte, prefill, decode uint16) {
		r, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(raw)))
		if err != nil {
			return
		}
		for _, values := range r.Header { // net/http's server refuses these
			if slices.ContainsFunc(values, func(v string) bool { return strings.ContainsFunc(v, unicode.IsControl) }) {
				return
			}
		}
		var sent []byte
		r.Body = struct {
			io.Reader
			io.Closer
		}{io.TeeReader(r.Body, writerFunc(func(b []byte) { sent = append(sent, b...) })), r.Body}
		e := &fakeEngines{prefill: status3(prefill), decode: status3(decode), seen: map[string]sentRequest{}}
		p := fuzzProxy(t, e)
		w := httptest.NewRecorder()
		// Both halves hold the body, and a JSON tree of it is several times larger.
		alloctest.Bound(t, 32<<20, func() {
			defer func() { // how a handler closes the connection, as net/http has it
				if v := recover(); v != nil && v != http.ErrAbortHandler {
					panic(v)
				}
			}()
			p.Handler().ServeHTTP(w, r.WithContext(t.Context()))
		})
		p.wg.Wait()
		if len(p.places) != 0 {
			t.Errorf("%d places are taken after the answer", len(p.places))
		}
		if len(sent) > 1<<16+1 {
			t.Errorf("%d bytes of the body are read", len(sent))
		}
		checkRouted(t, e, r, sent, w)
	})
}

type writerFunc func([]byte)

func (f writerFunc) Write(b []byte) (int, error) { f(b); return len(b), nil }

// status3 is a final HTTP status, or 0 for an engine that cannot be reached.
func status3(n uint16) int {
	if n < 200 || n > 599 {
		return 0
	}
	return int(n)
}

func checkRouted(t *testing.T, e *fakeEngines, r *http.Request, sent []byte, w *httptest.ResponseRecorder) {
	t.Helper()
	from := w.Header().Get("X-From")
	completion := r.URL.Path == "/v1/completions" || r.URL.Path == "/v1/chat/completions"
	if from == "" && r.URL.Path != "/health" && r.URL.Path != "/metrics" && !(completion && w.Code == e.prefill) {
		var a apiError
		if err := json.Unmarshal(w.Body.Bytes(), &a); err != nil || a.Error.Message == "" || a.Error.Code != w.Code {
			t.Fatalf("%s %s: %d %s: %v", r.Method, r.URL, w.Code, w.Body, err)
		}
	}
	if w.Code >= 500 && from == "" && (e.prefill/100 == 2 || e.prefill/100 == 4) && e.decode != 0 {
		t.Errorf("%s %s: %d %s, with engines that answer %d and %d", r.Method, r.URL, w.Code, w.Body, e.prefill, e.decode)
	}
	p, d := e.seen["p:1"], e.seen["d:1"]
	var client map[string]json.RawMessage
	valid := json.Unmarshal(sent, &client) == nil && client != nil
	if !completion {
		if p.url != nil || d.url != nil && (d.url.EscapedPath() != r.URL.EscapedPath() || d.url.RawQuery != r.URL.RawQuery || !bytes.Equal(d.body, sent)) {
			t.Errorf("%s is passed on as %+v, %+v", r.URL, p, d)
		}
		if kind := r.Header.Get("Content-Type"); d.url != nil && (kind == "" || strings.Contains(kind, "json")) && client[paramsName] != nil {
			t.Errorf("the client's parameters reach D: %s", sent)
		}
		return
	}
	if p.url == nil && d.url == nil {
		if completion && r.Method == "POST" && valid && w.Code < 400 {
			t.Errorf("a good request reaches nobody: %d %s", w.Code, w.Body)
		}
		return
	}
	if r.Method != "POST" || !valid {
		t.Fatalf("%s %s with %q reaches an engine", r.Method, r.URL, sent)
	}
	ids := map[string]bool{}
	for _, half := range []sentRequest{p, d} {
		if half.url == nil { // its context ended first
			continue
		}
		if half.url.Path != r.URL.Path || half.url.RawQuery != "" {
			t.Errorf("%s becomes %s", r.URL, half.url)
		}
		for name := range half.header {
			if !slices.Contains([]string{"Authorization", "Traceparent", "Tracestate", "Content-Type", "X-Request-Id", "X-Data-Parallel-Rank"}, name) {
				t.Errorf("the engine gets the client's %s", name)
			}
		}
		if n := half.header["X-Data-Parallel-Rank"]; half.url.Host == "p:1" && !slices.Equal(n, []string{"3"}) || half.url.Host == "d:1" && n != nil {
			t.Errorf("%s gets the rank %v", half.url.Host, n)
		}
		ids[checkHalf(t, half, client)] = true
	}
	if len(ids) != 1 {
		t.Errorf("the halves have the transfer ids %v", ids)
	}
}

// checkHalf returns the transfer's id.
func checkHalf(t *testing.T, half sentRequest, client map[string]json.RawMessage) string {
	t.Helper()
	var got map[string]json.RawMessage
	if err := json.Unmarshal(half.body, &got); err != nil {
		t.Fatalf("the engine gets %q: %v", half.body, err)
	}
	var params map[string]any
	if err := json.Unmarshal(got["kv_transfer_params"], &params); err != nil {
		t.Fatalf("the engine gets %q: %v", half.body, err)
	}
	id, _ := params["transfer_id"].(string)
	want := map[string]any{"do_remote_decode": true, "do_remote_prefill": false, "transfer_id": id}
	if half.url.Host == "d:1" {
		want = map[string]any{"do_remote_decode": false, "do_remote_prefill": true, "transfer_id": id, "remote_engine_id": "engine-0", "remote_bootstrap_addr": "http://p:8998"}
	}
	if !reflect.DeepEqual(params, want) || !strings.HasPrefix(id, "xfer-") {
		t.Errorf("%s gets the parameters %v", half.url.Host, params)
	}
	ours := []string{"kv_transfer_params"}
	if half.url.Host == "p:1" {
		ours = append(ours, "stream", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens", "n", "best_of")
		if string(got["stream"]) != "false" || string(got["max_tokens"]) != "1" || got["stream_options"] != nil {
			t.Errorf("P gets %s", half.body)
		}
	}
	for name, value := range client {
		var compact, gotCompact bytes.Buffer
		if slices.Contains(ours, name) {
			continue
		}
		if err := errors.Join(json.Compact(&compact, value), json.Compact(&gotCompact, got[name])); err != nil || compact.String() != gotCompact.String() {
			t.Errorf("%q of the client is %s, the engine gets %s", name, value, got[name])
		}
	}
	for name := range got {
		if _, known := client[name]; !known && !slices.Contains(ours, name) {
			t.Errorf("the engine gets %q, which the client has not sent", name)
		}
	}
	return id
}

// FuzzQuery: a bootstrap port may answer anything. A table of ranks is an error, or the
// same list each time, in order, each rank once and with an id.
func FuzzQuery(f *testing.F) {
	for _, s := range []string{`{"0":{"engine_id":"a","worker_addr":{"0":{"0":"x"}}},"10":{"engine_id":"b"}}`, `{}`, `null`, `[]`, `{"-1":{"engine_id":"a"}}`, `{"0":{"engine_id":""}}`,
		`{"0":{"engine_id":"a"},"00":{"engine_id":"b"},"+0":{"engine_id":"c"}}`, `{"99999999999999999999":{"engine_id":"a"}}`, `{"0":7}`, `{"0":{"engine_id":`, strings.Repeat(`{"0":`, 20000)} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		ranks, err := parseQuery(body)
		if err != nil {
			return
		}
		for i, r := range ranks {
			if r.dp < 0 || r.engineID == "" || i > 0 && ranks[i-1].dp >= r.dp {
				t.Errorf("%q is read as %v", body, ranks)
			}
		}
		for range 3 {
			if again, err := parseQuery(body); err != nil || !slices.Equal(again, ranks) {
				t.Errorf("%q is read as %v, then as %v, %v", body, ranks, again, err)
			}
		}
	})
}

// FuzzArgs: a command line (a line is an argument) is refused, or gives a Config
// that is valid and that the same command line, written out, gives again.
func FuzzArgs(f *testing.F) {
	for _, s := range []string{"--prefill http://p1:8010 9000 --prefill http://p2:8010 none --decode http://d:1 --host 0.0.0.0 --port=0", "--prefill=http://[::1]:8010 --decode=https://d2 --bootstrap-ca system",
		"--prefill http://p:1 x", "--prefill http://p:1 0 --decode http://d", "--port 65536", "--help", "--prefill http://p:1/%zz --decode http://d", "--prefill http://p:1/a/ 7 --decode http://d:1//", "--decode", "=",
		"--prefill http://p --decode http://d --contract sglang --balance round-robin --retries 0 --max-requests 1 --max-body 7 --drain-timeout 3 --no-access-log", "--prefill HTTP://P --decode http://d:0", "--prefill http://p%41:1 --decode http://[fe80::1%25eth0]:1"} {
		f.Add(strings.ReplaceAll(s, " ", "\n"))
	}
	f.Fuzz(func(t *testing.T, line string) {
		cfg, err := ParseArgs(strings.Split(line, "\n"))
		if err != nil {
			return
		}
		if err := cfg.validate(); err != nil {
			t.Fatalf("%q is accepted: %v", line, err)
		}
		again := []string{"--host=" + cfg.Host, "--port", strconv.Itoa(cfg.Port), "--bootstrap-ca=" + cfg.BootstrapCA, "--retries", strconv.Itoa(cfg.Retries)}
		for name, v := range map[string]int64{"--max-requests": int64(cfg.MaxRequests), "--max-body": cfg.MaxBody, "--body-memory": cfg.BodyMemory, "--drain-timeout": int64(cfg.ShutdownTimeout / time.Second)} {
			if v != 0 {
				again = append(again, name, strconv.FormatInt(v, 10))
			}
		}
		for name, v := range map[string]string{"--contract": string(cfg.Contract), "--balance": string(cfg.Balance)} {
			if v != "" {
				again = append(again, name, v)
			}
		}
		if !cfg.AccessLog {
			again = append(again, "--no-access-log")
		}
		for _, p := range cfg.Prefill {
			port := "none"
			if p.BootstrapPort != 0 {
				port = strconv.Itoa(p.BootstrapPort)
			}
			again = append(again, "--prefill="+p.URL, port)
			base, err := baseURL(p.URL)
			if err != nil {
				t.Fatalf("%q: %v", line, err)
			}
			at, err := url.Parse(bootstrapURL(base, p.BootstrapPort, false))
			if err != nil || at.Hostname() != base.Hostname() || at.Port() == "" {
				t.Errorf("%q has its bootstrap port at %v: %v", line, at, err)
			}
		}
		for _, d := range cfg.Decode {
			again = append(again, "--decode="+d)
		}
		if cfg2, err := ParseArgs(again); err != nil || !reflect.DeepEqual(cfg, cfg2) {
			t.Errorf("%q is %+v, and then %+v, %v", line, cfg, cfg2, err)
		}
	})
}

// FuzzLogprobs: whatever two engines answer, if D's answer was JSON it still is, with all
// members but meta_info as they were.
func FuzzLogprobs(f *testing.F) {
	for _, s := range [][2]string{
		{`{"meta_info":{"input_token_logprobs":[[1,2,null]]}}`, `{"text":"x","meta_info":{"input_token_logprobs":[],"id":1e2}}`},
		{`[{"index":1,"meta_info":{"input_token_logprobs":[]}}]`, `{"index":1,"meta_info":{"input_token_logprobs":[ 7 ]}}`},
		{"data: {\"index\":-3,\"meta_info\":{\"input_top_logprobs\":[null]}}\n\ndata: [DONE]\n\n", `{"index":-3,"meta_info":{"input_top_logprobs":{}},"meta_info":{}}`},
		{`{"meta_info":[]}`, `[]`}, {`x`, `{"meta_info":null}`}, {``, ``}, {`[]`, `"data:"`},
	} {
		f.Add([]byte(s[0]), []byte(s[1]))
	}
	f.Fuzz(func(t *testing.T, p, d []byte) {
		prompts := (&prompt{text: p}).byIndex()
		got := merged(d, 0, prompts)
		if !json.Valid(d) {
			if string(got) != string(d) {
				t.Errorf("%q becomes %q", d, got)
			}
			return
		}
		var before, after map[string]any
		if !json.Valid(got) {
			t.Fatalf("%q and %q become %q", p, d, got)
		}
		if json.Unmarshal(d, &before) != nil || before == nil {
			return
		}
		if err := json.Unmarshal(got, &after); err != nil {
			t.Fatal(err)
		}
		delete(before, "meta_info")
		delete(after, "meta_info")
		if !reflect.DeepEqual(before, after) {
			t.Errorf("%q becomes %q", d, got)
		}
	})
}
