package httpserve

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/kvconn/kvconn/rig/leaktest"
)

// sayFrom is say from another address of this host.
func sayFrom(t *testing.T, s *Server, ip, text string) net.Conn {
	t.Helper()
	c, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(ip)}}).Dial("tcp", s.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(patience))
	_, _ = io.WriteString(c, text) // it may be ended already
	return c
}

// TestPlacesByAddress: while one address opens more connections than there are places, another's keep theirs: one that has sent nothing
// yet, one that is idle between two requests, and one that has a request under way, whether or not requests are brief. A new one of
// another address gets in.
func TestPlacesByAddress(t *testing.T) {
	const honest, flood = "127.0.0.1", "127.0.0.2"
	for name, c := range map[string]struct {
		brief bool
		says  string
	}{
		"silent": {true, ""}, "half a header": {false, "GET / HTTP/1.1\r\n"}, "at work": {true, "GET /slow HTTP/1.1\r\nHost: h\r\n\r\n"},
	} {
		t.Run(name, func(t *testing.T) {
			leaktest.Check(t)
			at, release := make(chan struct{}, 100), make(chan struct{})
			s := serve(t, func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path == "/slow" {
					at <- struct{}{}
					<-release
				}
				_, _ = io.WriteString(w, "hello")
			}, Options{MaxConns: 12, Brief: c.brief})
			quick := "GET / HTTP/1.1\r\nHost: h\r\n"
			answers := func(what string, conn net.Conn, last string) {
				t.Helper()
				answer, err := io.ReadAll(conn)
				if _, last, _ := strings.Cut(string(answer), last); err != nil || !strings.HasSuffix(last, "hello") {
					t.Errorf("%s: %q, %v", what, answer, err)
				}
			}
			busy := sayFrom(t, s, honest, "GET /slow HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
			<-at
			silent := sayFrom(t, s, honest, "")
			idle := sayFrom(t, s, honest, quick+"\r\n")
			head := make([]byte, len("HTTP/1.1 200"))
			if _, err := io.ReadFull(idle, head); err != nil {
				t.Fatal(err)
			}
			for range 30 {
				sayFrom(t, s, flood, c.says)
				if strings.Contains(c.says, "/slow") {
					<-at // so that none of the flood's waits
				}
			}
			answers("another address", sayFrom(t, s, "127.0.0.3", quick+"Connection: close\r\n\r\n"), "")
			_, _ = io.WriteString(silent, quick+"Connection: close\r\n\r\n")
			answers("one that had said nothing", silent, "")
			_, _ = io.WriteString(idle, quick+"Connection: close\r\n\r\n")
			answers("one that was idle", idle, "hello")
			close(release)
			answers("one at work", busy, "")
		})
	}
}

// TestLongHeadsByAddress: the long headers that one address does not send to their ends push out its own.
func TestLongHeadsByAddress(t *testing.T) {
	leaktest.Check(t)
	s := serve(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "hello") }, Options{MaxLongHeads: 8 << 10})
	begin := fmt.Sprintf("GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\nX: %s", strings.Repeat("x", 1<<10))
	honest := sayFrom(t, s, "127.0.0.1", begin)
	until := func(what string, is func() bool) {
		t.Helper()
		for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
			s.mu.Lock()
			ok := is()
			s.mu.Unlock()
			if ok {
				return
			}
			if time.Now().After(end) {
				t.Fatal(what)
			}
		}
	}
	until("the first header was not read", func() bool { return s.longHeads.Len() == 1 })
	for range 20 {
		c := sayFrom(t, s, "127.0.0.2", begin)
		port := c.LocalAddr().String()
		until("a header was not read", func() bool {
			for e := s.longHeads.Back(); e != nil; e = e.Prev() {
				if k := e.Value.(*conn); k.c.RemoteAddr().String() == port {
					return true
				}
			}
			return false
		})
	}
	if _, err := io.WriteString(honest, "\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	if answer, err := io.ReadAll(honest); err != nil || !strings.HasSuffix(string(answer), "hello") {
		t.Errorf("another address's: %q, %v", answer, err)
	}
}
