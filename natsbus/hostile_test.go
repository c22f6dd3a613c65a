package natsbus

import (
	"bufio"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/leaktest"
	"github.com/kvconn/kvconn/internal/nettest"
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
	d := newBus(t, Options{AgentID: "D", ConnectTimeout: time.Second})
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

// TestNobodyListensAsTheOwner: the registry tells all who get in by which id P is
// asked; none of them may be asked in its place.
func TestNobodyListensAsTheOwner(t *testing.T) {
	leaktest.Check(t)
	log, _ := observed()
	p := newPort(t, "127.0.0.1:0", ServerOptions{Owner: "P", Token: "right", Logger: log})
	prefill := newBus(t, Options{AgentID: "P", Server: p.Server, Token: "right"})
	serve(prefill)
	register(t, prefill, "e")
	key, public, err := tokenKey("right")
	if err != nil {
		t.Fatal(err)
	}
	at := Address{Host: p.addr, Name: "127.0.0.1"}
	nc, err := nats.Connect("nats://"+p.addr, nats.Name(clientName+" P evil"), nats.CustomInboxPrefix("_INBOX.evil"), nats.NoReconnect(),
		nats.Nkey(public, key.Sign), nats.SetCustomDialer(newDialer(within, dialUpgrade(at, nil, nil))), nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
	if err == nil { // it may come in, and do nothing
		defer nc.Close()
		if _, err := nc.QueueSubscribe(subject("P"), "agent", func(m *nats.Msg) {
			forged, _ := (&wire.Reply{Reason: "forged"}).MarshalMsg(nil)
			_ = m.Respond(forged)
		}); err != nil {
			t.Fatal(err)
		}
		_ = nc.FlushTimeout(within)
	}
	d := newBus(t, Options{AgentID: "D", Token: "right"})
	a, via, err := d.Lookup(ctxOf(t, within), core.Target{Bootstrap: p.url()})
	if err != nil {
		t.Fatal(err)
	}
	for range 50 {
		rep, err := d.Request(ctxOf(t, within), via, core.AgentID(a.ID), hello("D"))
		if err != nil || rep.Reason == "forged" {
			t.Fatalf("P answers %+v, %v", rep, err)
		}
	}
}
