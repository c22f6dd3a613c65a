package natsbus

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvconn/kvconn/rig/leaktest"
)

// TestRegistryQueries: JetStream's queue of queries is short, however many clients ask at
// once. A long one dropped everybody's, and kept what had been in it.
func TestRegistryQueries(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{})
	p.queries.within = time.Hour // a loaded machine hides no answer
	const clients, each = 8, 60
	done := make(chan error, clients)
	var most atomic.Uint64
	for i := range clients {
		conn, br, me := talk(t, p, named(fmt.Sprint("E", i)))
		_ = conn.SetDeadline(time.Now().Add(time.Minute))
		var all strings.Builder
		fmt.Fprintf(&all, "SUB %s.> 1\r\n", inboxOf(me))
		for k := range each {
			fmt.Fprintf(&all, "PUB $JS.API.STREAM.INFO.%s %s.%d 0\r\n\r\n", stream, inboxOf(me), k)
		}
		go func() { _, _ = io.WriteString(conn, all.String()) }()
		go func() {
			for range each {
				if _, err := told(br, "MSG "); err != nil {
					done <- err
					return
				}
				if j, err := p.nats.Jsz(nil); err == nil {
					for old := most.Load(); j.API.Inflight > old && !most.CompareAndSwap(old, j.API.Inflight); old = most.Load() {
					}
				}
			}
			done <- nil
		}()
	}
	for range clients {
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	}
	if workers := uint64(16); most.Load() > maxQueries+workers { // a query counts until its worker has answered it
		t.Errorf("%d queries waited at a time, at most %d may", most.Load(), maxQueries)
	}
}

// TestQueriesWithoutAnswer: clients that hide the answers to their queries do not keep others
// from asking, and who has gone waits no longer.
func TestQueriesWithoutAnswer(t *testing.T) {
	q := newRegistryQueries()
	q.within = time.Millisecond
	of := func() *window {
		return newWindow(newBudget(1<<30).newShare("A", func() {}), q)
	}
	hides, honest := of(), of()
	for i := range 4 * maxQueries {
		if _, err := hides.open(fmt.Sprint("_INBOX.A.", i), 0, true); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := honest.open("_INBOX.B.1", 0, true); err != nil {
		t.Fatal(err)
	}
	q.within = time.Hour
	for i := range maxQueries {
		if _, err := hides.open(fmt.Sprint("_INBOX.A.later", i), 0, true); err != nil {
			t.Fatal(err)
		}
	}
	gone := make(chan error)
	go func() {
		_, err := honest.open("_INBOX.B.2", 0, true)
		gone <- err
	}()
	honest.close()
	if err := <-gone; !errors.Is(err, errGone) {
		t.Errorf("who has gone: %v", err)
	}
	hides.answered([]byte("_INBOX.A.later3"))
	if _, err := of().open("_INBOX.C.1", 0, true); err != nil {
		t.Errorf("after an answer: %v", err)
	}
}

// TestLongQuery: the registry is asked nothing long.
func TestLongQuery(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{})
	conn, br, me := talk(t, p, named("E"))
	_, _ = fmt.Fprintf(conn, "SUB %s.> 1\r\nPUB $JS.API.STREAM.INFO.%s %s.1 %d\r\n%s\r\n", inboxOf(me), stream, inboxOf(me), maxQuerySize+1, strings.Repeat(" ", maxQuerySize+1))
	if all, err := told(br, "MSG "); err == nil {
		t.Errorf("it is answered %q", all)
	}
}
