package httpserve

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/kvconn/kvconn/rig/leaktest"
)

// start opens a server on a free port and returns a function that closes it
// and checks that Serve has ended.
func start(t *testing.T, h http.Handler) (*Server, func()) {
	t.Helper()
	s := New(h, Options{Name: "test"})
	if err := s.Listen("127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve() }()
	return s, func() {
		t.Helper()
		if err := s.Close(context.Background()); err != nil { // also if it took its whole time
			t.Errorf("Close: %v", err)
		}
		if err := <-served; err != nil {
			t.Errorf("Serve: %v", err)
		}
	}
}

func TestServerServesAndCloses(t *testing.T) {
	leaktest.Check(t)
	s, stop := start(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "hello") }))
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	resp, err := client.Get("http://" + s.Addr().String() + "/")
	if err != nil {
		t.Fatal(err)
	}
	body, _ := io.ReadAll(resp.Body)
	resp.Body.Close()
	if string(body) != "hello" {
		t.Fatalf("answered %q", body)
	}
	stop()
	if err := s.Close(context.Background()); err != nil {
		t.Errorf("second Close: %v", err)
	}
	if c, err := net.Dial("tcp", s.Addr().String()); err == nil {
		c.Close()
		t.Error("the port is still open after Close")
	}
}

func TestCloseWithoutServe(t *testing.T) {
	leaktest.Check(t)
	s := New(http.NotFoundHandler(), Options{Name: "test"})
	if err := s.Listen("127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(context.Background()); err != nil {
		t.Fatal(err)
	}
	if err := s.Serve(); err == nil {
		t.Error("Serve after Close returned nil")
	}
	if err := s.Listen("127.0.0.1:0"); err == nil {
		t.Error("Listen after Close returned nil")
	}
}

// A connection that sends nothing, one that stops within its headers and one
// that is idle after an answer must not hold Close.
func TestCloseWithSilentClients(t *testing.T) {
	leaktest.Check(t)
	s, stop := start(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "hello") }))
	for _, sent := range []string{"", "GET / HT", "GET / HTTP/1.1\r\nHost: x\r\n\r\n"} {
		c, err := net.Dial("tcp", s.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := io.WriteString(c, sent); err != nil {
			t.Fatal(err)
		}
		if strings.HasSuffix(sent, "\r\n\r\n") {
			if _, err := http.ReadResponse(bufio.NewReader(c), nil); err != nil {
				t.Fatal(err)
			}
		}
	}
	stop()
}

// A hijacked connection is another's: Close returns while its handler runs,
// ends its context, and leaves the connection open.
func TestCloseWithHijackedConnection(t *testing.T) {
	leaktest.Check(t)
	var (
		hijacked = make(chan net.Conn, 1)
		ended    = make(chan struct{})
		release  = make(chan struct{})
		returned = make(chan struct{})
	)
	s, stop := start(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer close(returned)
		c, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		hijacked <- c
		<-r.Context().Done()
		close(ended)
		<-release
	}))
	c, err := net.Dial("tcp", s.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	other := <-hijacked
	defer other.Close()
	stop()
	<-ended
	if _, err := io.WriteString(other, "still here"); err != nil {
		t.Errorf("Close closed a hijacked connection: %v", err)
	}
	buf := make([]byte, len("still here"))
	if _, err := io.ReadFull(c, buf); err != nil {
		t.Errorf("the client of the hijacked connection: %v", err)
	}
	close(release)
	<-returned
}

// Close ends the context of a handler that waits for it.
func TestCloseEndsRunningRequests(t *testing.T) {
	leaktest.Check(t)
	running := make(chan struct{})
	s, stop := start(t, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		close(running)
		<-r.Context().Done()
	}))
	c, err := net.Dial("tcp", s.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	<-running
	stop()
}

// A handler that never returns makes Close report it, not wait for it.
func TestCloseIsBounded(t *testing.T) {
	leaktest.Check(t)
	running, release := make(chan struct{}), make(chan struct{})
	s := New(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		close(running)
		<-release
	}), Options{Name: "test"})
	defer close(release)
	if err := s.Listen("127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	go s.Serve()
	c, err := net.Dial("tcp", s.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	<-running
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	closed := make(chan error, 1)
	go func() { closed <- s.Close(ctx) }()
	select {
	case err := <-closed:
		if err == nil || !strings.Contains(err.Error(), "1 requests") {
			t.Errorf("Close: %v; want an error that counts the request", err)
		}
	case <-time.After(patience):
		t.Errorf("Close has not returned within %v", patience)
	}
}
