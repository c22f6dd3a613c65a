package bootstrap

import (
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/kvconn/kvconn/rig/leaktest"
)

// TestBodiesThatHoldAllPlaces: clients whose requests are under way at all places do not keep
// another client out.
func TestBodiesThatHoldAllPlaces(t *testing.T) {
	leaktest.Check(t)
	s := NewServer(NewHandler(&Table{}, nil, nil), nil, nil)
	if err := s.Listen("127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = s.Serve()
	}()
	defer func() {
		_ = s.Close(t.Context())
		<-served
	}()
	for range maxConns {
		c, err := net.Dial("tcp", s.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		_, _ = io.WriteString(c, "POST /query_dp_ranks HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\nExpect: 100-continue\r\n\r\n")
		var b [12]byte
		_ = c.SetReadDeadline(time.Now().Add(20 * time.Second))
		if _, err := io.ReadFull(c, b[:]); err != nil { // the handler reads the body now
			t.Fatal(err)
		}
	}
	client := &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Get("http://" + s.Addr().String() + "/health")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
}

// longest is a body of all bytes that a route takes, whose end comes when the gate opens.
type longest struct {
	left    int
	taken   chan<- struct{}
	release <-chan struct{}
}

func (l *longest) Read(b []byte) (int, error) {
	if l.left == 0 {
		l.taken <- struct{}{}
		<-l.release
		return 0, io.EOF
	}
	n := min(len(b), l.left)
	clear(b[:n])
	l.left -= n
	return n, nil
}

// TestBodiesOfManyClients: clients at all places who hold the ends of the longest bodies back have
// the port keep little.
func TestBodiesOfManyClients(t *testing.T) {
	leaktest.Check(t)
	for route, c := range map[string]struct{ body, most int }{
		"/query_dp_ranks": {MaxQuery, 64 << 20}, "/register": {MaxBody, 128 << 20}, // a token closes the second
	} {
		h, before := NewHandler(&Table{}, nil, nil), heap()
		taken, release := make(chan struct{}, 2*maxConns), make(chan struct{})
		var all sync.WaitGroup
		for range maxConns {
			all.Go(func() {
				w := httptest.NewRecorder()
				h.ServeHTTP(w, httptest.NewRequest(http.MethodPost, route, &longest{c.body, taken, release}))
				taken <- struct{}{}                           // also if it was refused before its end
				if w.Code != http.StatusUnprocessableEntity { // read to its end, and no JSON
					t.Errorf("%s: status %d", route, w.Code)
				}
			})
		}
		for range maxConns {
			<-taken
		}
		grown := heap() - before
		for end := time.Now().Add(20 * time.Second); grown > c.most && time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
			grown = heap() - before // what others have just let go of
		}
		if grown > c.most {
			t.Errorf("%s: %d bodies hold %d bytes, at most %d should be", route, maxConns, grown, c.most)
		}
		close(release)
		all.Wait()
	}
}

// heap is the memory that is in use.
func heap() int {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int(m.HeapAlloc)
}
