package httpserve

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/kvconn/kvconn/rig/leaktest"
)

// patience bounds what a test waits for; nothing takes nearly as long unless it fails.
const patience = 30 * time.Second

func serve(t *testing.T, h http.HandlerFunc, opt Options) *Server {
	t.Helper()
	opt.Name = "test"
	s := New(h, opt)
	if err := s.Listen("127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve() }()
	t.Cleanup(func() {
		if err := s.Close(context.Background()); err != nil {
			t.Error(err)
		}
		if err := <-served; err != nil {
			t.Error(err)
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		if n := s.waiting.Len() + s.busy.Len() + s.longHeads.Len() + s.longBytes + len(s.conns) + s.ending; n != 0 {
			t.Errorf("%d connections wait, %d are busy, %d have long headers of %d bytes, %d are there", s.waiting.Len(), s.busy.Len(), s.longHeads.Len(), s.longBytes, len(s.conns))
		}
	})
	return s
}

// say opens a connection and sends something.
func say(t *testing.T, s *Server, text string) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", s.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(patience))
	if _, err := io.WriteString(c, text); err != nil {
		t.Fatal(err)
	}
	return c
}

// TestAwaitingGivesWay: a request whose body does not come leaves its place to a new connection, one that is under way does
// not, and one whose body has come does not any more.
func TestAwaitingGivesWay(t *testing.T) {
	leaktest.Check(t)
	at, release := make(chan string), make(chan struct{})
	s := serve(t, func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/slow":
			done := Awaiting(r.Context())
			at <- r.URL.Path
			_, _ = io.ReadAll(r.Body)
			done()
		case "/came":
			done := Awaiting(r.Context())
			done()
			at <- r.URL.Path
			<-release
		case "/busy":
			at <- r.URL.Path
			<-release
		}
		_, _ = io.WriteString(w, "hello")
	}, Options{MaxConns: 3})
	const post = "POST %s HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: 9\r\n\r\nx"
	var conns []net.Conn
	for _, path := range []string{"/came", "/busy", "/slow"} {
		conns = append(conns, say(t, s, fmt.Sprintf(post, path)))
		<-at
	}
	answer, err := io.ReadAll(say(t, s, "GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"))
	if err != nil || !strings.HasSuffix(string(answer), "hello") {
		t.Errorf("a new connection: %q, %v", answer, err)
	}
	if answer, _ := io.ReadAll(conns[2]); len(answer) != 0 { // it ends, within patience
		t.Errorf("the request without a body: %q", answer)
	}
	close(release)
	for _, c := range conns[:2] {
		if answer, err := io.ReadAll(c); err != nil || !strings.HasSuffix(string(answer), "hello") {
			t.Errorf("a request under way: %q, %v", answer, err)
		}
	}
	Awaiting(context.Background())() // no connection of a server
}

// TestDroppedHoldsNoPlace: a connection that has given way holds no place for as long as its goroutine takes to end.
func TestDroppedHoldsNoPlace(t *testing.T) {
	leaktest.Check(t)
	at, release := make(chan struct{}), make(chan struct{})
	s := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/slow" {
			return
		}
		done := Awaiting(r.Context())
		at <- struct{}{}
		_, _ = io.ReadAll(r.Body)
		done()
		<-release
	}, Options{MaxConns: 1})
	defer close(release)
	say(t, s, "POST /slow HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\n")
	<-at
	for i := range 2 { // the first one takes the place of the slow one, whose goroutine goes on
		c := say(t, s, "GET /quick HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
		if answer, err := io.ReadAll(c); err != nil || !strings.Contains(string(answer), "200 OK") {
			t.Fatalf("request %d: %q, %v", i, answer, err)
		}
		_ = c.Close()
		for until := time.Now().Add(patience); s.open() != 1; time.Sleep(time.Millisecond) {
			if time.Now().After(until) {
				t.Fatalf("%d connections are there", s.open())
			}
		}
	}
}

// TestRefusedHeadHoldsNoPlace: a connection whose header was refused as too long stays for half a second, and gives way to a
// new one meanwhile.
func TestRefusedHeadHoldsNoPlace(t *testing.T) {
	leaktest.Check(t)
	s := serve(t, func(http.ResponseWriter, *http.Request) {}, Options{MaxConns: 1, MaxHeaderBytes: 1 << 10})
	for i := range 3 {
		refused := say(t, s, "GET / HTTP/1.1\r\nHost: h\r\nX: "+strings.Repeat("x", 8<<10))
		head := make([]byte, len("HTTP/1.1 431"))
		if _, err := io.ReadFull(refused, head); err != nil || string(head) != "HTTP/1.1 431" {
			t.Fatalf("a header of 8 KiB: %q, %v", head, err)
		}
		c := say(t, s, "GET /quick HTTP/1.1\r\nHost: h\r\n\r\n")
		answer := make([]byte, len("HTTP/1.1 200"))
		if _, err := io.ReadFull(c, answer); err != nil || string(answer) != "HTTP/1.1 200" {
			t.Fatalf("request %d beside it: %q, %v", i, answer, err)
		}
		idle := func() bool { // until the server has noted that its answer is out, c does not give way
			s.mu.Lock()
			defer s.mu.Unlock()
			return s.waiting.Len() > 0
		}
		for deadline := time.Now().Add(patience); !idle(); time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatal("a connection that has its answer is not idle")
			}
		}
	}
}

// TestLongHeads: the server holds a bounded number of bytes of headers that have not come whole. The oldest of these give
// way, and no header that comes at once does.
func TestLongHeads(t *testing.T) {
	leaktest.Check(t)
	s := serve(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "hello") }, Options{MaxLongHeads: 8 << 10})
	begin := "GET / HTTP/1.1\r\nHost: h\r\nX: " + strings.Repeat("x", 3<<10)
	read := func(bytes int) {
		t.Helper()
		for deadline := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
			s.mu.Lock()
			n := s.longBytes
			s.mu.Unlock()
			if n == bytes {
				return
			}
			if time.Now().After(deadline) {
				t.Fatalf("%d bytes of headers were read, want %d", n, bytes)
			}
		}
	}
	first := say(t, s, begin)
	read(len(begin))
	second := say(t, s, begin)
	read(2 * len(begin))
	small := say(t, s, "GET / HTTP/1.1\r\nHost: h")
	for range 5 {
		whole := say(t, s, strings.ReplaceAll(begin, "X: ", "Connection: close\r\nX: ")+"\r\n\r\n")
		if answer, err := io.ReadAll(whole); err != nil || !strings.HasSuffix(string(answer), "hello") {
			t.Errorf("a long header that has come: %q, %v", answer, err)
		}
	}
	read(2 * len(begin)) // those count for nothing
	third := say(t, s, begin)
	if answer, err := io.ReadAll(first); len(answer) != 0 || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the first: %q, %v", answer, err)
	}
	for name, c := range map[string]net.Conn{"the second": second, "the third": third, "a short one": small} {
		if _, err := io.WriteString(c, "\r\nConnection: close\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
		if answer, err := io.ReadAll(c); err != nil || !strings.HasSuffix(string(answer), "hello") {
			t.Errorf("%s: %q, %v", name, answer, err)
		}
	}
	long := say(t, s, "GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\nX: "+strings.Repeat("x", 9<<10)+"\r\n\r\n")
	if answer, err := io.ReadAll(long); err != nil || !strings.HasSuffix(string(answer), "hello") {
		t.Errorf("one header that is longer than all may be, alone: %q, %v", answer, err)
	}
}
