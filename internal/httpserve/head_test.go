package httpserve

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvconn/kvconn/rig/leaktest"
)

// TestHeadTimeout: a header has its time from its first byte, on a new connection and on one that was idle. A body, and a connection of
// which no byte has come, have theirs.
// Who sends a whole header may take longer for it on a slow machine than the shortest time that is tried: then the next is. A server that
// is wrong about any of them is so with each.
func TestHeadTimeout(t *testing.T) {
	leaktest.Check(t)
	for head := 100 * time.Millisecond; ; head *= 10 {
		wrong := headTimeout(t, head)
		if len(wrong) == 0 {
			return
		}
		if head >= 10*time.Second {
			t.Fatal(strings.Join(wrong, "\n"))
		}
		t.Logf("LATE: within %v: %s", head, wrong)
	}
}

// headTimeout is what a server does wrong whose headers have so much time.
func headTimeout(t *testing.T, head time.Duration) (wrong []string) {
	var mu sync.Mutex
	says := func(format string, args ...any) {
		mu.Lock()
		defer mu.Unlock()
		wrong = append(wrong, fmt.Sprintf(format, args...))
	}
	goOn := make(chan struct{})
	s := serve(t, func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(time.Hour)) // the body's time is the handler's
		if r.URL.Path == "/wait" {
			<-goOn // beyond the header's time
			if r.Context().Err() != nil {
				says("a request without a body has ended with the time of its header")
			}
		}
		text, err := io.ReadAll(r.Body)
		if err != nil {
			says("a body: %v", err)
		}
		_, _ = w.Write(append(text, "hello"...))
	}, Options{MaxLongHeads: 1 << 20, HeadTimeout: head, ReadHeaderTimeout: time.Hour, IdleTimeout: time.Hour})
	silent := say(t, s, "")
	body := say(t, s, "POST / HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: 4\r\n\r\n12")
	wait := say(t, s, "GET /wait HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
	idle := say(t, s, "GET / HTTP/1.1\r\nHost: h\r\n\r\n")
	if _, err := io.ReadFull(idle, make([]byte, len("HTTP/1.1 200 OK"))); err != nil {
		close(goOn)
		return []string{fmt.Sprint("no answer before the connection is idle: ", err)}
	}
	for deadline := time.Now().Add(patience); ; time.Sleep(time.Millisecond) { // until it is idle
		s.mu.Lock()
		idle := 0
		for _, k := range s.conns {
			if k.ConnState == http.StateIdle {
				idle++
			}
		}
		s.mu.Unlock()
		if idle == 1 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("a connection that has its answer is not idle")
		}
	}
	if _, err := io.WriteString(idle, "GET / HT"); err != nil {
		says("after another request: %v", err)
	}
	for name, c := range map[string]io.Reader{"a header that is not whole": say(t, s, "GET / HTTP/1.1\r\nHost: "), "one after another request": idle,
		"its first bytes": say(t, s, "G")} {
		if answer, err := io.ReadAll(c); errors.Is(err, os.ErrDeadlineExceeded) || strings.Contains(name, "another") != strings.Contains(string(answer), "hello") {
			says("%s: %q, %v", name, answer, err)
		}
	}
	close(goOn)
	for name, c := range map[string]struct {
		conn io.ReadWriter
		rest string
	}{"silent": {silent, "GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"}, "body": {body, "34"}, "wait": {wait, ""}} {
		if _, err := io.WriteString(c.conn, c.rest); err != nil {
			says("%s: %v", name, err)
		}
		if answer, err := io.ReadAll(c.conn); err != nil || !strings.HasSuffix(string(answer), "hello") {
			says("%s: %q, %v", name, answer, err)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	return wrong
}
