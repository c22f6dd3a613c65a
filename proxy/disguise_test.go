package proxy

import (
	"bytes"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/internal/leaktest"
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
		"a multipart, any text": {"multipart/form-data; boundary=x", "Content-Type", evil, true},
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
	// When many bodies are held, the largest gives way.
	b := &bodies{}
	b.bytes.Store(maxBodies)
	large, small := b.begin(), b.begin()
	if _, err := io.ReadAll(large.count(bytes.NewReader(make([]byte, modestBody+1<<20)))); err == nil {
		t.Error("a large body has found room")
	}
	if _, err := io.ReadAll(small.count(strings.NewReader("small"))); err != nil {
		t.Error(err)
	}
	large.end()
	small.end()
	if n := b.bytes.Load(); n != maxBodies {
		t.Errorf("%d bytes are counted", n-maxBodies)
	}
}
