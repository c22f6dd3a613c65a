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

// TestQuestionsToTheRegistry: JetStream's queue of questions is short, however many clients ask at
// once. A long one dropped everybody's, and kept what had been in it.
func TestQuestionsToTheRegistry(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{})
	p.questions.within = time.Hour // a loaded machine hides no answer
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
	if workers := uint64(16); most.Load() > maxQuestions+workers { // a question counts until its worker has answered it
		t.Errorf("%d questions waited at a time, at most %d may", most.Load(), maxQuestions)
	}
}

// TestQuestionsWithoutAnswer: clients that hide the answers to their questions do not keep others
// from asking, and who has gone waits no longer.
func TestQuestionsWithoutAnswer(t *testing.T) {
	q := newQuestions()
	q.within = time.Millisecond
	of := func() *window {
		return newWindow(&share{of: newBudget(1 << 30), end: func() {}}, q)
	}
	hides, honest := of(), of()
	for i := range 4 * maxQuestions {
		if _, err := hides.open(fmt.Sprint("_INBOX.A.", i), 0, true); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := honest.open("_INBOX.B.1", 0, true); err != nil {
		t.Fatal(err)
	}
	q.within = time.Hour
	for i := range maxQuestions {
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

// TestLongQuestion: the registry is asked nothing long.
func TestLongQuestion(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{})
	conn, br, me := talk(t, p, named("E"))
	_, _ = fmt.Fprintf(conn, "SUB %s.> 1\r\nPUB $JS.API.STREAM.INFO.%s %s.1 %d\r\n%s\r\n", inboxOf(me), stream, inboxOf(me), maxQuestion+1, strings.Repeat(" ", maxQuestion+1))
	if all, err := told(br, "MSG "); err == nil {
		t.Errorf("it is answered %q", all)
	}
}
