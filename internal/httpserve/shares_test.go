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

// slow serves requests for /slow, which end at release, and others.
func slow(t *testing.T, opt Options) (s *Server, at, release chan struct{}) {
	at, release = make(chan struct{}, 100), make(chan struct{})
	return serve(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/slow" {
			at <- struct{}{}
			<-release
		}
		_, _ = io.WriteString(w, "hello")
	}, opt), at, release
}

const (
	slowly  = "GET /slow HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
	quick   = "GET / HTTP/1.1\r\nHost: h\r\n\r\n"
	closing = "GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
)

// answers holds a connection to an answer, after what ends with first.
func answers(t *testing.T, what string, c net.Conn, first string) {
	t.Helper()
	answer, err := io.ReadAll(c)
	if _, last, _ := strings.Cut(string(answer), first); err != nil || !strings.HasSuffix(last, "hello") {
		t.Errorf("%s: %q, %v", what, answer, err)
	}
}

// TestPlacesByAddress: while one address opens more connections than there are places, and says nothing or does not end what it says, another's
// keep theirs: one that has sent nothing yet, one that is idle between two requests, and one that has a request under way. A new one of another
// address gets in.
func TestPlacesByAddress(t *testing.T) {
	const honest, flood = "127.0.0.1", "127.0.0.2"
	for name, says := range map[string]string{"silent": "", "half a header": "GET / HTTP/1.1\r\n"} {
		t.Run(name, func(t *testing.T) {
			leaktest.Check(t)
			s, at, release := slow(t, Options{MaxConns: 12, Brief: says == ""})
			busy := sayFrom(t, s, honest, slowly)
			<-at
			silent := sayFrom(t, s, honest, "")
			idle := sayFrom(t, s, honest, quick)
			head := make([]byte, len("HTTP/1.1 200"))
			if _, err := io.ReadFull(idle, head); err != nil {
				t.Fatal(err)
			}
			for range 30 {
				sayFrom(t, s, flood, says)
			}
			answers(t, "another address", sayFrom(t, s, "127.0.0.3", closing), "")
			_, _ = io.WriteString(silent, closing)
			answers(t, "one that had said nothing", silent, "")
			_, _ = io.WriteString(idle, closing)
			answers(t, "one that was idle", idle, "hello")
			close(release)
			answers(t, "one at work", busy, "")
		})
	}
}

// TestRequestsOfOneAddress: an address that has many requests under way, as one of a load balancer, loses none while there are connections
// that wait for their clients, and gets more of them answered. Those that wait are of addresses that each have few.
func TestRequestsOfOneAddress(t *testing.T) {
	for _, brief := range []bool{false, true} {
		t.Run(fmt.Sprint("brief ", brief), func(t *testing.T) {
			leaktest.Check(t)
			s, at, release := slow(t, Options{MaxConns: 12, Brief: brief})
			var under []net.Conn
			work := func() {
				under = append(under, sayFrom(t, s, "127.0.0.1", slowly))
				<-at
			}
			first, more := 8, 4
			if brief { // half of all places; with more its own give way
				first, more = 4, 2
			}
			for range first {
				work()
			}
			for i := range 20 {
				sayFrom(t, s, fmt.Sprint("127.0.1.", 1+i), "")
			}
			for range more { // the strangers' that wait are as many, or more
				work()
			}
			close(release)
			for i, c := range under {
				answers(t, fmt.Sprint("request ", i), c, "")
			}
		})
	}
}

// TestBriefRequestsByAddress: if all connections have requests under way, and these are brief, those of the address that has the most give
// way, and none of another.
func TestBriefRequestsByAddress(t *testing.T) {
	leaktest.Check(t)
	s, at, release := slow(t, Options{MaxConns: 12, Brief: true})
	busy := sayFrom(t, s, "127.0.0.1", slowly)
	<-at
	for range 30 {
		sayFrom(t, s, "127.0.0.2", slowly)
		<-at
	}
	answers(t, "another address", sayFrom(t, s, "127.0.0.3", closing), "")
	close(release)
	answers(t, "one at work", busy, "")
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
			for k := range s.longHeads.All() {
				if k.c.RemoteAddr().String() == port {
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

// TestUploadsOfOneAddress: an address whose requests wait for their bodies loses none while there are connections without a request, of
// addresses that each have few.
func TestUploadsOfOneAddress(t *testing.T) {
	for _, stale := range []time.Duration{time.Nanosecond, time.Hour} {
		t.Run(fmt.Sprint("stale ", stale), func(t *testing.T) {
			leaktest.Check(t)
			at := make(chan struct{}, 100)
			s := serve(t, func(w http.ResponseWriter, r *http.Request) {
				done := Awaiting(r.Context())
				at <- struct{}{}
				_, _ = io.Copy(io.Discard, r.Body)
				done()
				_, _ = io.WriteString(w, "hello")
			}, Options{MaxConns: 12})
			s.mu.Lock()
			s.stale = stale
			s.mu.Unlock()
			var uploads []net.Conn
			for range 6 {
				uploads = append(uploads, sayFrom(t, s, "127.0.0.1", "POST / HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: 2\r\n\r\n1"))
				<-at
			}
			for i := range 30 {
				sayFrom(t, s, fmt.Sprint("127.0.1.", 1+i), "")
			}
			for i, c := range uploads {
				_, _ = io.WriteString(c, "2")
				answers(t, fmt.Sprint("upload ", i), c, "")
			}
		})
	}
}

// TestStaleFirst: who has waited long for a request gives way before a newer one of an address that has more.
func TestStaleFirst(t *testing.T) {
	leaktest.Check(t)
	s := serve(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "hello") }, Options{MaxConns: 4})
	s.mu.Lock()
	s.stale = time.Nanosecond
	s.mu.Unlock()
	forgotten := sayFrom(t, s, "127.0.0.3", "")
	for end := time.Now().Add(patience); s.open() < 1 && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
	var many []net.Conn
	for range 4 {
		many = append(many, sayFrom(t, s, "127.0.0.1", ""))
	}
	if _, err := forgotten.Read(make([]byte, 1)); err == nil {
		t.Error("the one that nobody has used stays")
	}
	for i, c := range many {
		_, _ = io.WriteString(c, closing)
		answers(t, fmt.Sprint("newer ", i), c, "")
	}
}

// TestHalfOfThePlaces: if one address has more than half of all places busy with what should be brief, its own give way, and none that is idle.
func TestHalfOfThePlaces(t *testing.T) {
	leaktest.Check(t)
	s, at, release := slow(t, Options{MaxConns: 12, Brief: true})
	idle := sayFrom(t, s, "127.0.0.1", "")
	for range 30 {
		sayFrom(t, s, "127.0.0.2", slowly)
		<-at
	}
	_, _ = io.WriteString(idle, closing)
	answers(t, "one that was idle", idle, "")
	close(release)
}
