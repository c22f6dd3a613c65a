package proxy

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/kvconn/kvconn/rig/alloctest"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// TestPackedBodies: a client once named a bootstrap host in a body that the router took for octets, and SGLang unpacked.
func TestPackedBodies(t *testing.T) {
	leaktest.Check(t)
	for name, c := range map[string]struct {
		header http.Header
		passes bool
	}{
		"plain":               {http.Header{}, true},
		"identity":            {http.Header{"Content-Encoding": {"Identity, "}}, true},
		"zstd, SGLang's way":  {http.Header{"X-Body-Compressed": {"zstd"}}, false},
		"an empty way":        {http.Header{"X-Body-Compressed": {""}}, false},
		"gzip":                {http.Header{"Content-Encoding": {"gzip"}}, false},
		"gzip in the second":  {http.Header{"Content-Encoding": {"identity", "identity, br"}}, false},
		"zstd and a hop":      {http.Header{"X-Body-Compressed": {"zstd"}, "Connection": {"X-Body-Compressed"}}, false},
		"nothing is not gzip": {http.Header{"Content-Encoding": {""}}, true},
	} {
		for _, path := range []string{"/v1/completions", "/generate", "/v1/audio/transcriptions"} {
			for _, kind := range []string{"application/json", "application/octet-stream", "multipart/form-data; boundary=b"} {
				e := &fakeEngines{prefill: http.StatusOK, decode: http.StatusOK, seen: map[string]sentRequest{}}
				p, w := fuzzProxy(t, e), httptest.NewRecorder()
				r := httptest.NewRequest(http.MethodPost, path, strings.NewReader(`{"prompt":"x"}`))
				for name, values := range c.header {
					r.Header[name] = values
				}
				r.Header.Set("Content-Type", kind)
				p.Handler().ServeHTTP(w, r)
				p.wg.Wait()
				if (len(e.seen) > 0) != c.passes || (w.Code == http.StatusUnsupportedMediaType) == c.passes {
					t.Errorf("%s, %s to %s: status %d %s, %d engines have it", name, kind, path, w.Code, w.Body, len(e.seen))
				}
			}
		}
	}
}

// TestManyMembers: a body of 60 MiB with a member for each five bytes took 2 GiB beside itself.
func TestManyMembers(t *testing.T) {
	object := func(members int) []byte { return []byte(`{"a":1` + strings.Repeat(`,"":1`, members-1) + "}") }
	if f, err := parseFields(object(maxMembers)); err != nil || len(f) != maxMembers {
		t.Errorf("%d members, %v", len(f), err)
	}
	body := object(4 << 20)
	alloctest.Bound(t, 2<<20, func() {
		if _, err := parseFields(body); err == nil || !strings.Contains(err.Error(), fmt.Sprint(maxMembers)) {
			t.Errorf("error %v", err)
		}
	})
	long := []byte(`{"` + strings.Repeat(`\u0061`, 1<<20) + `":1,"max_tokens":7}`)
	alloctest.Bound(t, 1<<20, func() {
		f, err := parseFields(long)
		if err != nil || string(f.last("max_tokens")) != "7" {
			t.Errorf("%v", err)
		}
		if name, err := memberAmong(long, []string{"max_tokens"}); name != "max_tokens" || err != nil {
			t.Errorf("%q, %v", name, err)
		}
	})
	if got := string(must(parseFields(long)).with([]member{{"max_tokens", []byte("1")}}).whole()); got != strings.Replace(string(long), "7", "1", 1) {
		t.Errorf("the engine would get %d bytes", len(got))
	}
	for _, name := range append(append(SGLang.reserved(), rankMembers...), "max_completion_tokens", xargsName) {
		if len(name) > longestName {
			t.Errorf("%s is longer than %d bytes", name, longestName)
		}
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// TestManyHeaderFields: what a client says in very many fields is let go before anything else is done.
func TestManyHeaderFields(t *testing.T) {
	leaktest.Check(t)
	for _, n := range []int{maxHeaderFields, maxHeaderFields + 1} {
		e := &fakeEngines{prefill: http.StatusOK, decode: http.StatusOK, seen: map[string]sentRequest{}}
		p, w := fuzzProxy(t, e), httptest.NewRecorder()
		r := httptest.NewRequest(http.MethodPost, "/v1/completions", strings.NewReader(`{"prompt":"x"}`))
		for i := range n {
			name := fmt.Sprint("X", i/2)
			r.Header[name] = append(r.Header[name], "")
		}
		p.Handler().ServeHTTP(w, r)
		p.wg.Wait()
		if tooMany := n > maxHeaderFields; (w.Code == http.StatusRequestHeaderFieldsTooLarge) != tooMany || (len(e.seen) == 0) != tooMany {
			t.Errorf("%d fields: status %d %s, %d engines have it", n, w.Code, w.Body, len(e.seen))
		}
	}
}

// slowly sends a request whose body does not come whole, and returns when the router waits for the rest.
func slowly(t *testing.T, r router, path, header, begin string) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", r.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(patience))
	fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: h\r\nConnection: close\r\nExpect: 100-continue\r\n%sContent-Length: %d\r\n\r\n", path, header, len(begin)+9)
	const goOn = "HTTP/1.1 100 Continue\r\n\r\n" // it comes when somebody reads the body
	answer := make([]byte, len(goOn))
	if _, err := io.ReadFull(c, answer); err != nil || string(answer) != goOn {
		t.Fatalf("%q, %v", answer, err)
	}
	if _, err := io.WriteString(c, begin); err != nil {
		t.Fatal(err)
	}
	return c
}

// TestSlowBodiesTakeNoPlace: clients whose bodies did not come took all places for requests, for a minute.
func TestSlowBodiesTakeNoPlace(t *testing.T) {
	leaktest.Check(t)
	p, d := newPrefill(t, ok, "engine-0"), newEngine(t, ok)
	r := newRouter(t, Config{Prefill: []Prefill{p.prefill(t)}, Decode: []string{d.URL}, MaxRequests: 1})
	r.waitReady(t)
	for _, path := range []string{"/v1/completions", "/v1/chat/completions", "/v1/tokenize"} {
		slowly(t, r, path, "", "{")
	}
	if resp, text := r.post(t, `{"prompt":"x"}`); resp.StatusCode != http.StatusOK {
		t.Errorf("beside slow bodies: %s %s", resp.Status, text)
	}
}

// TestUploadsGiveWay: bodies that go on while they come take a quarter of the places, and the first of them gives way.
func TestUploadsGiveWay(t *testing.T) {
	leaktest.Check(t)
	came := make(chan string, 10)
	p := newPrefill(t, ok, "engine-0")
	d := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, q *http.Request) {
		if q.Method != http.MethodPost {
			return
		}
		begin := make([]byte, 1)
		_, _ = io.ReadFull(q.Body, begin)
		came <- string(begin)
		_, _ = io.Copy(io.Discard, q.Body)
	}))
	t.Cleanup(d.Close)
	r := newRouter(t, Config{Prefill: []Prefill{p.prefill(t)}, Decode: []string{d.URL}, MaxRequests: 8})
	r.waitReady(t)
	const kind = "Content-Type: multipart/form-data; boundary=b\r\n"
	var slow []net.Conn
	for i := range 3 {
		slow = append(slow, slowly(t, r, "/v1/audio", kind, fmt.Sprint(i)))
		recv(t, came, "upload at the engine")
	}
	answer, err := io.ReadAll(slow[0])
	if err != nil || !strings.Contains(string(answer), " 503 ") || !strings.Contains(string(answer), "too slowly") || !strings.Contains(string(answer), "Retry-After") {
		t.Errorf("the first upload: %q, %v", answer, err)
	}
	for _, c := range slow[1:] {
		if _, err := io.WriteString(c, "123456789"); err != nil {
			t.Fatal(err)
		}
		if answer, err := io.ReadAll(c); err != nil || !strings.Contains(string(answer), " 200 ") {
			t.Errorf("a later upload: %q, %v", answer, err)
		}
	}
	r.Proxy.uploads.mu.Lock()
	defer r.Proxy.uploads.mu.Unlock()
	if n := r.Proxy.uploads.list.Len(); n != 0 {
		t.Errorf("%d uploads are left", n)
	}
}
