package natsbus

import (
	"bufio"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/rig/nettest"
	"github.com/kvconn/kvconn/wire"
)

// TestServerThatWantsTLSWithin: a host that D was sent to must not get behind the
// guard by a second TLS inside of the connection. Its messages there could end
// the process.
func TestServerThatWantsTLSWithin(t *testing.T) {
	leaktest.Check(t)
	ca := nettest.NewAuthority(t)
	t.Setenv("SSL_CERT_FILE", ca.File) // its certificate is a good one
	secure := ca.Server(time.Now().Add(time.Hour), "127.0.0.1")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served, within2 := make(chan struct{}), false
	go func() {
		defer close(served)
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(within))
		if _, err := http.ReadRequest(bufio.NewReader(c)); err != nil {
			return
		}
		_, _ = io.WriteString(c, "HTTP/1.1 101 x\r\nConnection: Upgrade\r\nUpgrade: nats\r\n\r\n"+
			`INFO {"server_id":"x","version":"2.11.0","proto":1,"nonce":"abc","headers":true,"max_payload":1048576,"tls_required":true}`+"\r\n")
		s := tls.Server(c, secure)
		if s.Handshake() == nil {
			within2 = true
			_, _ = io.WriteString(s, "PONG\r\nMSG a 1 9223372036854775807\r\nxx")
		}
	}()
	d := newBus(t, Options{Identity: named("D"), ConnectTimeout: time.Second})
	if _, _, err := d.Lookup(ctxOf(t, within), core.Target{Bootstrap: "http://" + l.Addr().String()}); err == nil {
		t.Error("a host that serves nothing was taken for a prefill engine")
	}
	closeBus(t, d)
	l.Close()
	<-served
	if within2 {
		t.Error("D followed the server into a TLS of its own")
	}
}

// TestNobodyListensAsAnother: the registry tells every admitted agent by which ids
// agents are asked. No agent may be asked in another's place, nor ask in another's
// name.
func TestNobodyListensAsAnother(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{Token: "right"})
	prefill := newBus(t, Options{Identity: named("P"), Server: p.Server, Token: "right"})
	var mu sync.Mutex
	heard := map[string]bool{}
	prefill.Serve(func(via core.Via, req *wire.Request) *wire.Reply {
		mu.Lock()
		defer mu.Unlock()
		heard[req.From] = true
		return &wire.Reply{Reason: "hello " + shortName(req.From)}
	})
	register(t, prefill, "e")
	nc := natsClient(t, p, named("E"), secrets{token: "right"}, rightAsk)
	me := named("E").At(p.opt.Identity.ID()).ID()
	for _, subj := range []string{subject(named("P").ID(), "*"), subject("*", "*"), subject(hostID, "*"), "kvconn.>", ">", inboxOf(named("P").ID()) + ".>"} {
		if _, err := nc.QueueSubscribe(subj, "agent", func(*nats.Msg) { t.Error("it hears another's requests") }); err != nil {
			t.Fatal(err)
		}
		if err := nc.FlushTimeout(within); err != nil || !errors.Is(nc.LastError(), nats.ErrPermissionViolation) {
			t.Errorf("subscribe to %s: %v, %v", subj, err, nc.LastError())
		}
	}
	hello, err := hello("D").MarshalMsg(nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, from := range []core.AgentID{named("P").ID(), "X"} { // these come before the next, if they come
		if err := nc.PublishRequest(subject(named("P").ID(), from), nc.NewInbox(), hello); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := nc.RequestWithContext(ctxOf(t, within), subject(named("P").ID(), me), hello); err != nil {
		t.Errorf("a request in its own name: %v", err)
	}
	d := newBus(t, Options{Identity: named("D"), Token: "right"})
	_, via, err := d.Lookup(ctxOf(t, within), core.Target{Bootstrap: p.url()})
	if err != nil {
		t.Fatal(err)
	}
	ask(t, d, via, "P", "hello D")
	closeBus(t, prefill) // when all that came is answered
	for from := range heard {
		if from != string(me) && shortName(core.AgentID(from)) != "D" {
			t.Errorf("a request in the name of %q is heard", from)
		}
	}
}
