package natsbus

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/wire"
)

// TestAnswerBelongsToItsRequest: an answer is given once, to the request that waits for it. One
// that comes too late, twice or at a guessed subject reaches nobody, also if its channel waits
// for another answer by then.
func TestAnswerBelongsToItsRequest(t *testing.T) {
	a := newAnswers(inboxOf("A"))
	say := func(subj, text string) { a.came(&nats.Msg{Subject: subj, Data: []byte(text)}) }
	got := func(c chan *nats.Msg) string {
		select {
		case m := <-c:
			return string(m.Data)
		default:
			return ""
		}
	}
	first, one := a.expect(nil)
	second, two := a.expect(nil)
	if first == second || !ownInbox(first, "A") || len(first) > maxReplySubject {
		t.Fatalf("subjects %q and %q", first, second)
	}
	say(second, "2")
	say(second, "twice")
	for _, guess := range []string{first[:len(first)-1], first + "A", a.root, strings.ToLower(first), "", inboxOf("A") + ".x"} {
		say(guess, "guess")
	}
	if x, y := got(one), got(two); x != "" || y != "2" {
		t.Fatalf("answers %q and %q", x, y)
	}
	say(first, "1") // lies there when its request gives up
	a.forget(first, one)
	a.forget(second, two)
	for range 10 {
		subj, c := a.expect(nil)
		say(first, "late")
		say(second, "late")
		if x := got(c); x != "" {
			t.Fatalf("a new request got %q", x)
		}
		say(subj, "new")
		if x := got(c); x != "new" {
			t.Fatalf("a new request got %q in place of its answer", x)
		}
		a.forget(subj, c)
	}
	if len(a.waiting) != 0 {
		t.Fatalf("%d requests are waited for", len(a.waiting))
	}
}

// TestRequestEndsWithItsSession: of what may end a request, each does at once.
func TestRequestEndsWithItsSession(t *testing.T) {
	p := newPort(t, "127.0.0.1:0", ServerOptions{})
	b := newBus(t, Options{Identity: named("P"), Server: p.Server})
	asked, hold := make(chan struct{}, 2), make(chan struct{})
	b.Serve(func(_ core.Via, _ *wire.Request) *wire.Reply { asked <- struct{}{}; <-hold; return &wire.Reply{} })
	l := b.homeLink()
	data, err := hello("P").MarshalMsg(nil)
	if err != nil {
		t.Fatal(err)
	}
	whole := context.Background()
	for what, of := range map[string]func() (ctx, session context.Context, end func()){
		"the caller": func() (context.Context, context.Context, func()) {
			ctx, cancel := context.WithCancel(whole)
			return ctx, whole, cancel
		},
		"the session": func() (context.Context, context.Context, func()) {
			ctx, cancel := context.WithCancel(whole)
			return whole, ctx, cancel
		},
	} {
		ctx, session, end := of()
		over := make(chan error, 1)
		go func() {
			_, err := l.ask(ctx, session, subject(named("P").ID(), l.id), data, nil)
			over <- err
		}()
		<-asked
		end()
		if err := <-over; err == nil {
			t.Fatalf("the end of %s did not end the request", what)
		}
		if _, err := l.ask(ctx, session, subject(named("P").ID(), l.id), data, nil); err == nil {
			t.Fatalf("a request went on after the end of %s", what)
		}
	}
	close(hold)
}

// TestMessagesOnTheirWay: what passes a load's messages on leaves next to nothing to collect.
func TestMessagesOnTheirWay(t *testing.T) {
	const runs = 100
	reply := inboxOf("A") + ".box."
	var out bytes.Buffer
	out.Grow(1 << 20)
	w := newWindow(newBudget(1<<30).newShare("A", nil), newRegistryQueries())
	var text strings.Builder
	text.WriteString("CONNECT {}\r\n")
	for i := range runs + 2 {
		fmt.Fprintf(&text, "PUB %s %s%04d 5\r\nhello\r\n", subject("B", "A"), reply, i)
	}
	in := &commandFilter{from: bufio.NewReaderSize(strings.NewReader(text.String()), maxCommand), to: bufio.NewWriter(&out), connect: "CONNECT {}\r\n", inbox: inboxOf("A"), window: w}
	next := func() {
		line, err := in.line()
		if err == nil {
			err = in.command(line)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	next()
	var g guard
	answer := []byte("MSG _INBOX.A.box.0001 1 5\r\nhello\r\n")
	o := &clientWriter{window: w}
	a, unknown := newAnswers(inboxOf("A")), &nats.Msg{Subject: inboxOf("B") + ".1"}
	o.reader.line = o.line
	for what, c := range map[string]struct {
		most float64
		do   func()
	}{
		"a client's request":         {3, next}, // its subject, and the map's growth
		"an answer before a client":  {0, func() { o.reader.take(answer) }},
		"an answer before nats.go":   {0, func() { _ = g.check(answer) }},
		"an unknown sender's answer": {0, func() { a.came(unknown) }},
	} {
		if n := testing.AllocsPerRun(runs, c.do); n > c.most {
			t.Errorf("%s: %v allocations, want at most %v", what, n, c.most)
		}
	}
}
