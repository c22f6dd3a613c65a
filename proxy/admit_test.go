package proxy

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// requestOf is a request from an address, with a header of so many bytes and some.
func requestOf(address string, header int) *http.Request {
	r := httptest.NewRequest(http.MethodPost, "/v1/completions", nil)
	r.RemoteAddr = address
	r.Header.Set("X-Long", strings.Repeat("x", header))
	return r
}

// TestManyRequestsAtOnce: at its defaults the router has room for 1,000 prompts of 12 KB with headers of 1 KB at once, from one
// address. Beside them it has room for some requests from another one.
func TestManyRequestsAtOnce(t *testing.T) {
	cfg := DefaultConfig()
	p := &Proxy{cfg: cfg, places: make(chan struct{}, cfg.MaxRequests)}
	p.bodies.init(cfg)
	text := bytes.Repeat([]byte("x"), 12_000)
	var ends []func()
	comes := func(address string, length int64) string {
		r := requestOf(address, 1000)
		h, err := p.bodies.beginRequest(&cutClient{}, r)
		ends = append(ends, func() { h.end(0) })
		if err == nil {
			_, err = h.readAll(bytes.NewReader(text), length)
		}
		if err != nil {
			return err.Error()
		}
		place, reason := p.begin(r, h)
		if place != nil {
			ends = append(ends, place.done)
		}
		return reason
	}
	length := int64(len(text))
	for i := range 1000 {
		if reason := comes(fmt.Sprintf("10.0.0.1:%d", i), length); reason != "" {
			t.Fatalf("request %d: %s", i, reason)
		}
	}
	last := ""
	for i := 0; i < 100 && last == ""; i++ {
		last = comes("10.0.0.1:1", length)
	}
	if !strings.Contains(last, "--body-memory") && !strings.Contains(last, "--max-requests") {
		t.Errorf("the client that has the most is refused by %q", last)
	}
	for i := range 14 {
		if reason := comes("10.0.0.2:1", length); reason != "" {
			t.Errorf("request %d from another address: %s", i, reason)
		}
	}
	for _, end := range ends {
		end()
	}
	if b := &p.bodies; b.held() != 0 || len(b.clients) != 0 || len(p.places) != 0 || b.arriving.Len() != 0 {
		t.Errorf("%d bytes are counted in the end, of %v, for %d requests", b.held(), b.clients, len(p.places))
	}
}

// TestLongPromptsBesideStreams: the places and headers of one client's requests keep no long prompts of another address out, as
// long as there is room for them at all.
func TestLongPromptsBesideStreams(t *testing.T) {
	for _, c := range []struct {
		header int // of each of the streams
		length int64
	}{{200, 2 << 20}, {4 << 10, 2 << 20}, {4 << 10, 100_000}} {
		cfg := DefaultConfig()
		p := &Proxy{cfg: cfg, places: make(chan struct{}, cfg.MaxRequests)}
		p.bodies.init(cfg)
		var ends []func()
		for i := range 880 {
			place, reason := p.begin(requestOf(fmt.Sprintf("10.0.0.1:%d", i), c.header), nil)
			if place == nil {
				t.Fatalf("stream %d: %s", i, reason)
			}
			ends = append(ends, place.done)
		}
		for i := range 4 {
			r := requestOf("10.0.0.2:1", 200)
			h, err := p.bodies.beginRequest(&cutClient{}, r)
			ends = append(ends, func() { h.end(0) })
			if err == nil {
				_, err = h.readAll(io.LimitReader(zeros{}, c.length), c.length)
			}
			if err != nil {
				t.Errorf("prompt %d of %d bytes beside streams with headers of %d: %v", i, c.length, c.header, err)
				continue
			}
			place, reason := p.begin(r, h)
			if place == nil {
				t.Errorf("prompt %d of %d bytes is not let in: %s", i, c.length, reason)
				continue
			}
			ends = append(ends, place.done)
		}
		for _, end := range ends {
			end()
		}
		if b := &p.bodies; b.held() != 0 || b.admitted != 0 {
			t.Errorf("%d bytes are counted in the end, %d of requests under way", b.held(), b.admitted)
		}
	}
}

// zeros is text without an end.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// TestRequestsCount: a request under way counts with its header until its end, and a header once.
func TestRequestsCount(t *testing.T) {
	cfg := DefaultConfig()
	p := &Proxy{cfg: cfg, places: make(chan struct{}, 128)}
	p.bodies.init(cfg)
	r := requestOf("10.0.0.1:1", 15<<10)
	head := headMemory(r)
	if head < 3*15<<10 || head > 3*16<<10 {
		t.Errorf("a header of 15 KiB counts %d bytes", head)
	}
	h, err := p.bodies.beginRequest(&cutClient{}, r)
	if got := p.bodies.held(); err != nil || got != head || h.at == nil {
		t.Errorf("before its body it counts %d bytes, %v", got, err)
	}
	text, err := h.readAll(strings.NewReader("0123456789"), 10)
	body := int64(cap(text))
	if got := p.bodies.held(); err != nil || got != head+body || h.at != nil {
		t.Errorf("with its body it counts %d bytes, %v", got, err)
	}
	place, reason := p.begin(r, h)
	if got := p.bodies.held(); got != requestMemory+head+body {
		t.Fatalf("under way it counts %d bytes, %s", got, reason)
	}
	h.end(0)
	if got := p.bodies.held(); got != requestMemory+head {
		t.Errorf("without its body it counts %d bytes", got)
	}
	second := must(p.bodies.admit(requestOf("10.0.0.1:2", 0), nil, 1, 128))
	second.leave()

	// The last two places are for who has none or one.
	if _, err := p.bodies.admit(r, nil, 126, 128); err != nil {
		t.Error(err)
	}
	if _, err := p.bodies.admit(r, nil, 126, 128); err == nil || !strings.Contains(err.Error(), "the last 2 of --max-requests, 128,") {
		t.Errorf("a third one of this client: %v", err)
	}
	if _, err := p.bodies.admit(requestOf("10.0.0.2:1", 0), nil, 127, 128); err != nil {
		t.Error(err)
	}
	if _, err := p.bodies.admit(requestOf("10.0.0.3:1", 0), nil, 128, 128); err == nil || !strings.Contains(err.Error(), "128 requests are in flight") {
		t.Error(err)
	}

	// The last of the memory is for who has little.
	filled := p.bodies.begin(&cutClient{}, "10.0.0.6:1")
	filled.add(p.bodies.most - p.bodies.newcomers - p.bodies.held())
	if _, err := p.bodies.admit(requestOf("10.0.0.6:2", 0), nil, 1, 128); !errors.Is(err, errBodies) {
		t.Errorf("the client that has the most: %v", err)
	}
	if err := p.bodies.begin(&cutClient{}, "10.0.0.6:2").take(1); !errors.Is(err, errBodies) {
		t.Errorf("a body of the client that has the most: %v", err)
	}
	newcomer, err := p.bodies.admit(requestOf("10.0.0.7:2", 0), nil, 1, 128)
	if err != nil {
		t.Fatal(err)
	}
	newcomer.leave()
	filled.end(0)

	// No memory: the reason names the option.
	p.bodies.begin(&cutClient{}, "10.0.0.4:1").add(p.bodies.most)
	if _, err := p.bodies.admit(requestOf("10.0.0.5:1", 0), nil, 1, 128); !errors.Is(err, errBodies) || !strings.Contains(err.Error(), "--body-memory is 134217728 bytes") || strings.Contains(err.Error(), "body cannot be read") {
		t.Error(err)
	}
	if h, err := p.bodies.beginRequest(&cutClient{}, r); !errors.Is(err, errBodies) || h.bytes != 0 {
		t.Errorf("a header without room: %v", err)
	}
	r.Body = io.NopCloser(strings.NewReader("the rest of the body"))
	if p.linger(httptest.NewRecorder(), r, errBodies); len(r.Header) != 0 {
		t.Errorf("a refused request holds its header uncounted, for as long as its body comes: %v", len(r.Header))
	}
	before := p.bodies.held()
	place.done()
	if got := before - p.bodies.held(); got != requestMemory+head {
		t.Errorf("%d bytes are let go at the end", got)
	}
}
