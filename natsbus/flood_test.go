package natsbus

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/wire"
)

// told is what a server says to a client up to a line that begins with so, or to the end.
func told(br *bufio.Reader, so string) (all string, err error) {
	for {
		line, err := br.ReadString('\n')
		if all += line; err != nil || strings.HasPrefix(line, so) {
			return all, err
		}
	}
}

// talk is a client that has proved itself and says what it likes.
func talk(t testing.TB, p *port, i *Identity) (conn net.Conn, br *bufio.Reader, id core.AgentID) {
	t.Helper()
	conn = rawClient(t, p, i, secrets{}, rightAsk)
	br = bufio.NewReader(conn)
	_, _ = io.WriteString(conn, "CONNECT {}\r\nPING\r\n")
	if all, err := told(br, "PONG"); err != nil {
		t.Fatalf("%q, %v", all, err)
	}
	return conn, br, i.At(p.opt.Identity.ID()).ID()
}

// TestManyRequestsWithOneAnswer: a client that names one subject for the answers to many requests
// has as many places and bytes as any other, and no more: its second request before the first is
// answered ends it.
func TestManyRequestsWithOneAnswer(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{})
	prefill := newBus(t, Options{Identity: named("P"), Server: p.Server})
	var asked atomic.Int64
	first, release := make(chan struct{}, 1), make(chan struct{})
	prefill.Serve(func(core.Via, *wire.Request) *wire.Reply {
		asked.Add(1)
		select {
		case first <- struct{}{}:
		default:
		}
		<-release
		return &wire.Reply{}
	})
	conn, br, me := talk(t, p, named("E"))
	data, err := (&wire.Request{Kind: wire.KindRenew, Renew: &wire.Renew{}}).MarshalMsg(nil)
	if err != nil {
		t.Fatal(err)
	}
	request := func(reply string) string {
		return fmt.Sprintf("PUB %s %s.%s %d\r\n%s\r\n", subject(named("P").ID(), me), inboxOf(me), reply, len(data), data)
	}
	_, _ = io.WriteString(conn, request("1")+request("2"))
	<-first
	_, _ = io.WriteString(conn, strings.Repeat(request("1"), 2*maxUnanswered))
	all, err := told(br, "PONG") // it did not say PING
	close(release)
	if err == nil {
		t.Errorf("it is told %q", all)
	}
	if n := asked.Load(); n > 2 {
		t.Errorf("%d of its requests are answered at a time", n)
	}
}

// TestLinesOfOneClient: a client that says what it may not fills no log.
func TestLinesOfOneClient(t *testing.T) {
	leaktest.Check(t)
	log, logs := observed()
	p := newPort(t, "127.0.0.1:0", ServerOptions{Logger: log})
	nc := natsClient(t, p, named("E"), secrets{}, rightAsk)
	for i := range 1000 {
		if err := nc.PublishRequest(fmt.Sprint("kvconn.v1.agent.A.", i), nc.NewInbox(), nil); err != nil {
			t.Fatal(err)
		}
		if _, err := nc.Subscribe(fmt.Sprint("kvconn.v1.agent.A.", i), func(*nats.Msg) {}); err != nil {
			t.Fatal(err)
		}
	}
	if err := nc.FlushTimeout(within); err != nil {
		t.Fatal(err)
	}
	lines := logs.FilterMessageSnippet("Violation").Len()
	if lines == 0 || lines > 30 {
		t.Errorf("2000 offences are %d lines of the log", lines)
	}
}
