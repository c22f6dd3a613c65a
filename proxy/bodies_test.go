package proxy

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/kvconn/kvconn/rig/leaktest"
)

// cutClient counts how often its body was cut.
type cutClient struct {
	http.ResponseWriter
	cuts int
}

func (c *cutClient) SetReadDeadline(time.Time) error { c.cuts++; return nil }

// TestBodyBudget: what takes too much is refused, and small bodies find room beside large ones. What is whole is let go for
// nobody. Answers have memory of their own.
func TestBodyBudget(t *testing.T) {
	const mib = 1 << 20
	var b bodies
	b.init(Config{BodyMemory: 64 * mib, MaxBody: 40 * mib}) // 48 MiB for large bodies, 56 for medium ones
	clock := time.Unix(1000, 0)
	b.now = func() time.Time { return clock }
	client := &cutClient{}
	takes := func(h *heldBody, n int64, want error) {
		t.Helper()
		before := b.held()
		if err := h.take(n); !errors.Is(err, want) || want == nil && b.held() != before+n || errors.Is(err, errBodies) && !strings.Contains(err.Error(), "--body-memory is 67108864 bytes") {
			t.Errorf("%d bytes: %v, %d are counted after %d", n, err, b.held(), before)
		}
	}
	large := b.begin(client, "10.0.0.1:1")
	takes(large, 40*mib, nil)
	if err := b.begin(client, "10.0.0.1:1").expect(8*mib + 1); !errors.Is(err, errBodies) {
		t.Errorf("a body that is too long is read: %v", err)
	}
	if err := b.begin(client, "10.0.0.1:1").expect(8 * mib); err != nil {
		t.Error(err)
	}
	var tooLarge *http.MaxBytesError
	if err := b.begin(client, "10.0.0.1:1").expect(40*mib + 1); !errors.As(err, &tooLarge) || tooLarge.Limit != 40*mib {
		t.Errorf("a body above --max-body: %v", err)
	}
	second := b.begin(client, "10.0.0.1:1")
	takes(second, 8*mib, nil)
	takes(second, 1, errBodies)
	var mediums []*heldBody
	for range 8 {
		mediums = append(mediums, b.begin(client, "10.0.0.1:1"))
		takes(mediums[len(mediums)-1], mib, nil)
	}
	takes(mediums[0], 1, errBodies)
	late := b.begin(client, "10.0.0.1:1")
	takes(late, smallBody+1, errBodies)
	small := b.begin(client, "10.0.0.1:1")
	takes(small, smallBody, nil)
	answer := b.beginAnswer()
	takes(answer, 16*mib, nil)
	if err := answer.take(1); !errors.Is(err, errAnswers) || !strings.Contains(err.Error(), "a quarter of --body-memory, 16777216 bytes") {
		t.Errorf("an answer above what all may take: %v", err)
	}
	takes(b.beginAnswer(), 2*mib, errAnswers)
	short := b.beginAnswer()
	takes(short, smallBody, nil) // however much the others take
	takes(short, 1, errAnswers)
	short.end(0)
	takes(small, 1, errBodies)
	if b.refused.Load() != 8 || client.cuts != 0 {
		t.Errorf("%d are refused and %d cut", b.refused.Load(), client.cuts)
	}

	// Whoever has been coming for long gives way, the largest first, and only if it helps.
	answer.end(0)
	clock = clock.Add(slowBody)
	if err := second.whole(8 * mib); err != nil {
		t.Error(err)
	}
	young := b.begin(client, "10.0.0.1:1")
	if err := young.take(2 * mib); err != nil {
		t.Error(err)
	}
	if client.cuts != 1 || !large.evicted() || mediums[0].evicted() || b.held() != (8+8+2)*mib+smallBody {
		t.Errorf("%d are cut, %d bytes are counted", client.cuts, b.held())
	}
	takes(large, 0, errSlowBody)
	if err := large.whole(1); !errors.Is(err, errSlowBody) {
		t.Errorf("what gave way is whole: %v", err)
	}
	if err := b.begin(client, "10.0.0.1:1").expect(37 * mib); err != nil || client.cuts != 9 || young.evicted() || second.evicted() {
		t.Errorf("%v, %d are cut", err, client.cuts) // the small one would be the last
	}
	filled := b.begin(client, "10.0.0.1:1")
	filled.add(b.most)
	takes(young, 1, errBodies)
	if client.cuts != 9 {
		t.Error("a body has given way for nothing")
	}

	// What several hold is counted until all have let go.
	second.keep(5)
	if before := b.held(); true {
		if second.end(0); b.held() != before {
			t.Error("what another holds is not counted")
		}
		if second.end(5); b.held() != before-8*mib-5 {
			t.Errorf("%d bytes are let go", before-b.held())
		}
	}
	for _, h := range append(mediums, large, late, small, young, filled) {
		h.end(0)
	}
	if b.held() != 0 || b.arriving.Len() != 0 || len(b.clients) != 0 {
		t.Errorf("%d bytes are counted, %d bodies arrive, of %v", b.held(), b.arriving.Len(), b.clients)
	}
}

// TestGreedyClient: where memory is short, the bodies of a client that takes too much give way to another client's at once.
// Among those of one client, and of clients that take about as much, whoever came first stays.
func TestGreedyClient(t *testing.T) {
	const mib = 1 << 20
	var b bodies
	b.init(Config{BodyMemory: 64 * mib, MaxBody: 40 * mib}) // 48 MiB for large bodies
	greedy, other := &cutClient{}, &cutClient{}
	var held []*heldBody
	for port := range 16 {
		h := b.begin(greedy, fmt.Sprintf("10.0.0.1:%d", port))
		if err := h.take(3 * mib); err != nil {
			t.Fatal(err)
		}
		held = append(held, h)
	}
	if err := b.begin(greedy, "[::ffff:10.0.0.1]:99").take(2 * mib); !errors.Is(err, errBodies) || greedy.cuts > 0 {
		t.Errorf("a client's own bodies give way to it: %v, %d are cut", err, greedy.cuts)
	}
	if err := b.begin(other, "10.0.0.2:1").take(12*mib + 1); !errors.Is(err, errBodies) || greedy.cuts > 0 {
		t.Errorf("a client that takes about as much: %v, %d are cut", err, greedy.cuts)
	}
	h := b.begin(other, "10.0.0.2:1")
	for range 5 { // it grows
		if err := h.take(mib); err != nil {
			t.Fatal(err)
		}
	}
	if greedy.cuts != 2 || other.cuts != 0 {
		t.Errorf("%d and %d are cut", greedy.cuts, other.cuts)
	}
	gone := 0
	for _, h := range held {
		if h.evicted() {
			gone++
			if err := h.take(1); !errors.Is(err, errTooMuch) || !errors.Is(err, errBodies) {
				t.Errorf("what gave way goes on: %v", err)
			}
		}
		h.end(0)
	}
	if h.end(0); gone != 2 || b.held() != 0 || len(b.clients) != 0 {
		t.Errorf("%d have given way, %d bytes are counted, of %v", gone, b.held(), b.clients)
	}
	for address, want := range map[string]string{"10.0.0.1:80": "10.0.0.1/32", "[::ffff:10.0.0.1]:80": "10.0.0.1/32",
		"[2001:db8:1:2:3::4]:80": "2001:db8:1:2::/64", "[fe80::1%eth0]:80": "fe80::/64", "@": "@", "": ""} {
		if got := clientOf(address); got != want {
			t.Errorf("%q counts for %q, want %q", address, got, want)
		}
	}
}

// TestGather: a text is read whole, whatever its length is said to be. What it takes is counted as it comes, and what it has
// in the end.
func TestGather(t *testing.T) {
	for _, size := range []int{0, 1, firstChunk / 4, firstChunk, firstChunk + 1, 3 << 20} {
		text := bytes.Repeat([]byte("0123456789"), size/10+1)[:size]
		for _, length := range []int64{-1, 0, 1, int64(size), 1 << 24} {
			var b bodies
			b.init(DefaultConfig())
			most := int64(0)
			h := b.begin(httptest.NewRecorder(), "10.0.0.1:1")
			got, err := h.readAll(iotest.HalfReader(io.TeeReader(bytes.NewReader(text), writerFunc(func([]byte) { most = max(most, b.held()) }))), length)
			if err != nil || !bytes.Equal(got, text) || b.held() < int64(size) || b.held() > int64(size+firstChunk) || b.arriving.Len() != 0 {
				t.Errorf("%d bytes, said to be %d: %d, %v; %d are counted", size, length, len(got), err, b.held())
			}
			if most > 2*int64(size)+firstChunk {
				t.Errorf("%d bytes, said to be %d: %d were counted", size, length, most)
			}
			h.end(0)
			breaks := func() io.Reader { return io.MultiReader(bytes.NewReader(text), iotest.ErrReader(io.ErrUnexpectedEOF)) }
			h = b.beginAnswer()
			if got, err := h.readAll(breaks(), length); !errors.Is(err, io.ErrUnexpectedEOF) || !bytes.Equal(got, text) {
				t.Errorf("an answer of %d bytes that breaks off: %d, %v", size, len(got), err)
			}
			h.end(0)
			h = b.begin(httptest.NewRecorder(), "10.0.0.1:1")
			if _, err := h.readAll(breaks(), length); !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Errorf("a body of %d bytes that breaks off: %v", size, err)
			}
			if h.end(0); b.held() != 0 || b.arriving.Len() != 0 {
				t.Errorf("%d bytes are left", b.held())
			}
		}
	}
}

// TestSlowBodyIsCut: a body that gives way ends with the reason, wherever it is read.
func TestSlowBodyIsCut(t *testing.T) {
	var b bodies
	b.init(DefaultConfig())
	h := b.begin(&cutClient{}, "10.0.0.1:1")
	g := h.gather(-1)
	for h.at == nil {
		if _, err := g.read(strings.NewReader("0123456789")); err != nil {
			t.Fatal(err)
		}
	}
	b.mu.Lock()
	h.evict(errSlowBody)
	b.mu.Unlock()
	cut := errors.New("i/o timeout")
	if _, err := g.read(iotest.ErrReader(cut)); !errors.Is(err, errSlowBody) || errors.Is(err, cut) {
		t.Error(err)
	}
	if _, err := g.text(); !errors.Is(err, errSlowBody) {
		t.Error(err)
	}
}

// TestBodyIsLetGo: while decode streams its answer, which may take minutes, the request's body is not held, on any path, and
// also if prefill has not answered.
func TestBodyIsLetGo(t *testing.T) {
	leaktest.Check(t)
	text := `{"prompt":"` + strings.Repeat("x", 1<<18) + `"}`
	for _, path := range []string{"/v1/completions", "/v1/responses"} {
		goOn := make(chan struct{})
		r, _, _ := pairOf(t, func(w http.ResponseWriter, r *http.Request) {
			select {
			case <-goOn:
			case <-r.Context().Done():
			}
		}, func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.WriteString(w, "begun")
			_ = http.NewResponseController(w).Flush()
			select {
			case <-goOn:
			case <-r.Context().Done():
			}
		})
		resp, err := r.Server.Client().Post(r.Server.URL+path, "application/json", strings.NewReader(text))
		if err != nil {
			t.Fatal(err)
		}
		eventually(t, "the body is let go", func() bool { return r.Proxy.bodies.held() < requestMemory+firstChunk })
		close(goOn)
		if text, err := io.ReadAll(resp.Body); err != nil || string(text) != "begun" {
			t.Errorf("%s: %q, %v", path, text, err)
		}
		_ = resp.Body.Close()
	}
	// net/http opens a body anew for a redirect that the router does not follow, and does not close it.
	moved := func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Location", "/elsewhere")
		w.WriteHeader(http.StatusTemporaryRedirect)
		_, _ = io.WriteString(w, "elsewhere")
	}
	r, _, _ := pairOf(t, ok, moved)
	r.Server.Client().CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	if resp, _ := r.post(t, text); resp.StatusCode != http.StatusTemporaryRedirect {
		t.Error(resp.Status)
	}
	eventually(t, "the body is let go", func() bool { return r.Proxy.bodies.held() == 0 })
}

// TestFullBudget: when memory is full, a large body is refused before it is read, and the answer says why. Small ones are
// served, and answers have memory of their own.
func TestFullBudget(t *testing.T) {
	leaktest.Check(t)
	params := `{"remote_host":"` + strings.Repeat("p", 1<<18) + `"}`
	p := newEngine(t, status(http.StatusOK, `{"kv_transfer_params":`+params+`}`))
	d := newEngine(t, ok)
	r := newRouter(t, Config{Contract: NIXL, Prefill: []Prefill{{URL: p.URL}}, Decode: []string{d.URL}, MaxBody: 2 << 20, BodyMemory: 8 << 20})
	r.waitReady(t)
	filled := r.Proxy.bodies.begin(httptest.NewRecorder(), "10.0.0.1:1")
	filled.add(6 << 20)
	for _, head := range []string{"completions HTTP/1.1\r\nExpect: 100-continue", "responses HTTP/1.1\r\nExpect: 100-continue", "completions HTTP/1.1", "responses HTTP/1.1"} {
		c := must(net.Dial("tcp", r.Listener.Addr().String()))
		_ = c.SetDeadline(time.Now().Add(patience))
		fmt.Fprintf(c, "POST /v1/%s\r\nHost: h\r\nContent-Length: %d\r\n\r\n", head, 2<<20)
		answers := bufio.NewReader(c)
		resp, err := http.ReadResponse(answers, nil) // before anything of the body is sent
		if err != nil {
			t.Fatal(head, err)
		}
		text := string(must(io.ReadAll(resp.Body)))
		_ = resp.Body.Close()
		if resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") == "" || !strings.Contains(text, "--body-memory is 8388608 bytes") || !strings.Contains(text, unavailable) {
			t.Errorf("%s: %s %s", head, resp.Status, text)
		}
		if !strings.Contains(head, "Expect") { // a client that sends first, and then reads, sees no reset
			if _, err := c.Write(make([]byte, 2<<20)); err != nil {
				t.Errorf("%s: %v", head, err)
			}
			if rest, err := io.ReadAll(answers); err != nil {
				t.Errorf("%s: %q, %v", head, rest, err)
			}
		}
		_ = c.Close()
	}
	req := must(http.NewRequest(http.MethodPost, r.Server.URL+"/v1/audio", strings.NewReader("{"+strings.Repeat(" ", 2<<20-1))))
	req.Header.Set("Content-Type", "application/octet-stream") // its begin is read, to see what it is
	resp, err := r.Server.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	if text := must(io.ReadAll(resp.Body)); resp.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("octets that begin like JSON: %s %s", resp.Status, text)
	}
	_ = resp.Body.Close()
	if resp, text := r.post(t, `{"prompt":"x"}`); resp.StatusCode != http.StatusOK {
		t.Errorf("a small body: %s %s", resp.Status, text)
	}
	if got := d.next(t).body[paramsName]; string(got) != params {
		t.Errorf("decode gets %d bytes of params", len(got))
	}
	filled.add(2<<20 - 256<<10)
	if resp, text := r.post(t, `{"prompt":"x"}`); resp.StatusCode != http.StatusOK {
		t.Errorf("beside bodies that take nearly all: %s %s", resp.Status, text)
	}
	answers := r.Proxy.bodies.beginAnswer()
	answers.add(2 << 20)
	if resp, text := r.post(t, `{"prompt":"x"}`); resp.StatusCode != http.StatusServiceUnavailable || !strings.Contains(text, "a quarter of --body-memory, 2097152 bytes") {
		t.Errorf("beside answers that take all of theirs: %s %s", resp.Status, text)
	}
	filled.add(1 << 20)
	if resp, text := r.post(t, `{"prompt":"x"}`); resp.StatusCode != http.StatusServiceUnavailable || !strings.Contains(text, "--body-memory") {
		t.Errorf("when nothing is left: %s %s", resp.Status, text)
	}
	if _, text := r.get(t, "/metrics"); !strings.Contains(text, fmt.Sprintf("kvconn_proxy_request_bytes %v\n", float64(11<<20-256<<10))) || !strings.Contains(text, "kvconn_proxy_bodies_refused_total 7\n") {
		t.Errorf("metrics: %s", text)
	}
	filled.end(0)
	answers.end(0)
	eventually(t, "all is let go", func() bool { return r.Proxy.bodies.held() == 0 })
}
