package proxy

import (
	"bytes"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/kvconn/kvconn/rig/alloctest"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// TestDisguisedParameters: a client once named a bootstrap host in a body of type text, and
// had the router drop the type. Some engines then read the body as JSON.
func TestDisguisedParameters(t *testing.T) {
	leaktest.Check(t)
	seen := make(chan http.Header, 100)
	p := newPrefill(t, ok, "engine-0")
	d := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, q *http.Request) {
		if q.URL.Path == "/invocations" {
			seen <- q.Header.Clone()
		}
	}))
	t.Cleanup(d.Close)
	r := newRouter(t, Config{Prefill: []Prefill{p.prefill(t)}, Decode: []string{d.URL}})
	r.waitReady(t)
	const evil = `{"kv_transfer_params":{"remote_bootstrap_addr":"http://169.254.169.254:1"}}`
	utf16 := func(s string) string {
		var b bytes.Buffer
		for _, c := range []byte(s) {
			b.Write([]byte{c, 0})
		}
		return b.String()
	}
	for name, c := range map[string]struct {
		kind, connection, body string
		passes                 bool
	}{
		"text":                  {"text/plain", "Content-Type", evil, false},
		"a form":                {"application/x-www-form-urlencoded", "close, content-type", " \n" + evil, false},
		"no type":               {"", "", evil, false},
		"a list":                {"text/plain", "", "[" + evil + "]", false},
		"UTF-16":                {"text/plain", "", utf16(evil), false},
		"UTF-16 with a mark":    {"text/plain", "", "\xff\xfe" + utf16(evil), false},
		"UTF-8 with a mark":     {"text/plain", "", "\ufeff" + evil, false},
		"Python's JSON":         {"text/plain", "", `{"x":NaN,` + evil[1:], false},
		"a form that is one":    {"application/x-www-form-urlencoded", "", "a=b&c=d", true},
		"text that is text":     {"text/plain", "Content-Type", "hello", true},
		"octets":                {"application/octet-stream", "", "{", true},
		"JSON without harm":     {"text/plain", "Content-Type", `{"a":1}`, true},
		"octets that are JSON":  {"application/octet-stream", "", evil, false},
		"octets with NaN":       {"application/octet-stream", "", `[NaN,` + evil + "]", false},
		"octets, escaped":       {"application/octet-stream", "", strings.ReplaceAll(evil, "kv_", `\u006B\u0076_`), false},
		"octets without harm":   {"application/octet-stream", "", `{"a":NaN}`, true},
		"a multipart of JSON":   {"multipart/form-data; boundary=x", "Content-Type", strings.Repeat(" ", 9000) + evil, false},
		"a multipart, UTF-16":   {"multipart/form-data; boundary=x", "", "\xff\xfe" + utf16(" "+strings.ReplaceAll(evil, "_", `\u005f`)), false},
		"a multipart, any text": {"multipart/form-data; boundary=x", "Content-Type", "--x\r\n\r\n" + evil + "\r\n--x--\r\n", true},
	} {
		req, err := http.NewRequest(http.MethodPost, r.URL+"/invocations", strings.NewReader(c.body))
		if err != nil {
			t.Fatal(err)
		}
		if c.kind != "" {
			req.Header.Set("Content-Type", c.kind)
		}
		if c.connection != "" {
			req.Header.Set("Connection", c.connection)
		}
		req.Header.Set("X-Override-Bootstrap-Host", "169.254.169.254")
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		_ = resp.Body.Close()
		if (resp.StatusCode == http.StatusOK) != c.passes {
			t.Errorf("%s: status %d, want it passed on: %v", name, resp.StatusCode, c.passes)
		}
		if !c.passes {
			continue
		}
		if h := <-seen; h.Get("Content-Type") != c.kind || h.Get("X-Override-Bootstrap-Host") != "" {
			t.Errorf("%s: the engine sees %v", name, h)
		}
	}
	http.DefaultClient.CloseIdleConnections()
	// An answer of arrays within arrays is read once.
	deep := strings.Repeat("[", 1<<20) + strings.Repeat("]", 1<<20)
	if _, status, err := readPrefillAnswer([]byte(deep)); status != 0 || err != nil {
		t.Errorf("a deep answer: %d, %v", status, err)
	}
}

// TestNamesBesideOurs: in a completion request an engine takes the router's parameters from other members
// too. The router refuses such a request.
func TestNamesBesideOurs(t *testing.T) {
	leaktest.Check(t)
	for body, refused := range map[string]bool{
		`{"vllm_xargs":{"kv_transfer_params":["x"]}}`:               true,
		`{"vllm_xargs":{"\u006bv_transfer_params":"x"}}`:            true,
		`{"vllm_xargs":{"kv_transfer_params":"x"},"vllm_xargs":{}}`: true,
		`{"vllm_xargs":{"a":"x"},"prompt":"kv_transfer_params"}`:    false,
		`{"messages":[{"content":"{\"kv_transfer_params\":1}"}]}`:   false,
	} {
		e := &fakeEngines{prefill: http.StatusOK, decode: http.StatusOK, seen: map[string]sentRequest{}}
		p, w := fuzzProxy(t, e), httptest.NewRecorder()
		p.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/v1/completions", strings.NewReader(body)))
		p.wg.Wait()
		if (w.Code == http.StatusBadRequest) != refused || (len(e.seen) == 0) != refused {
			t.Errorf("%s: status %d %s, %d engines have it", body, w.Code, w.Body, len(e.seen))
		}
	}
	// A path that is a completion's to an engine only.
	for _, path := range []string{"/v1/completions%0a", "/v1/chat/completions%00", "/v1/%7Fcompletions", "//v1/completions"} {
		e := &fakeEngines{prefill: http.StatusOK, decode: http.StatusOK, seen: map[string]sentRequest{}}
		p, w := fuzzProxy(t, e), httptest.NewRecorder()
		p.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodPost, "http://router"+path, strings.NewReader("{}")))
		if w.Code != http.StatusNotFound || len(e.seen) != 0 {
			t.Errorf("%s: status %d %s, %d engines have it", path, w.Code, w.Body, len(e.seen))
		}
	}
	a := &attempt{request: &request{fields: fields{{pairKeyName, []byte(`"bootstrap_pair_key":"x"`), []byte(`"x"`)}}}, transferID: "7",
		prefill: target{server: &server{base: &url.URL{Host: "p:1"}}, rank: rank{dp: unranked}}}
	for _, body := range []pieces{SGLang.prefillBody(a), SGLang.decodeBody(a, nil)} {
		if bytes.Contains(body.whole(), []byte(pairKeyName)) {
			t.Errorf("an engine gets %s", body.whole())
		}
	}
}

// FuzzSpelled: a name that is a member's in JSON is found, with any escapes, also where the
// characters are wide.
func FuzzSpelled(f *testing.F) {
	for _, s := range []string{`{"kv_transfer_params":1}`, `{"a":[{"\u006bv_transfer_params":1}]}`, `{"\\\u006bv_transfer_params":1}`, `{"kv_transfer_params\u0000":1}`, `{"\\u006bv_transfer_params":"`, "\\u", `{"b":"\ud834\udd1ekv"}`} {
		f.Add(s, uint8(0))
		f.Add(s, uint8(3))
	}
	f.Fuzz(func(t *testing.T, text string, zeros uint8) {
		names := SGLang.reserved()
		name, err := memberAmong([]byte(text), names)
		var wide []byte
		for _, c := range []byte(text) {
			wide = append(append(wide, c), make([]byte, zeros%4)...)
		}
		if found := findEncoded(wide, names); err == nil && name != "" && found == "" {
			t.Errorf("%q is a member of %q, and is not found with %d zeros", name, text, zeros%4)
		}
		b := &bodies{}
		b.init(DefaultConfig())
		g := b.beginAnswer().gather(-1)
		isJSON, err := g.readBegin(iotest.OneByteReader(bytes.NewReader(wide)))
		if begin := slices.Concat(append(g.full, g.last)...); err == nil {
			first := begin[len(begin)-1]
			if isJSON != (first == '{' || first == '[') || !bytes.HasPrefix(wide, begin) {
				t.Errorf("%q begins with %q, JSON: %v", text, begin, isJSON)
			}
		} else if len(begin) != len(wide) || len(bytes.Trim(wide, beforeJSON)) != 0 {
			t.Errorf("of %q is read %q: %v", text, begin, err)
		}
	})
}

// TestSpelledInPieces: a name is found wherever it stands in a long text, and the text is not held
// a second time for that.
func TestSpelledInPieces(t *testing.T) {
	names := []string{"bootstrap_host", "kv"}
	for _, name := range []string{"bootstrap_host", `\u0062ootstrap_hos\u0074`, "b\x00o\x00o\x00t\x00s\x00t\x00r\x00a\x00p\x00_\x00h\x00o\x00s\x00t\x00"} {
		for at := encodedPiece - 40; at < encodedPiece+4; at++ {
			text := append(bytes.Repeat([]byte("x"), at), name...)
			text = append(text, bytes.Repeat([]byte("y"), 2*encodedPiece)...)
			if got := findEncoded(text, names); got != "bootstrap_host" {
				t.Fatalf("%q at %d: %q", name, at, got)
			}
		}
	}
	text := bytes.Repeat([]byte("x"), 8<<20)
	alloctest.Bound(t, 1<<20, func() {
		if got := findEncoded(text, names); got != "" {
			t.Errorf("%q is found", got)
		}
	})
}
