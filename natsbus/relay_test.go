package natsbus

import (
	"bufio"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// relay is a host to which a client of D's has sent it. It first carries D's connection to
// a prefill engine. When it has cut that, it serves D itself.
type relay struct {
	net.Listener
	to      string      // "": it carries nothing
	secure  *tls.Config // its own
	carried chan net.Conn
	heard   chan string                              // messages that D sends to the host itself
	listens func(conn net.Conn, subject, sid string) // D does; may be nil
}

func newRelay(t testing.TB, to string, secure *tls.Config) *relay {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := &relay{Listener: l, to: to, secure: secure, carried: make(chan net.Conn, 1), heard: make(chan string, 1024)}
	ended := make(chan struct{})
	t.Cleanup(func() {
		_ = l.Close()
		<-ended
	})
	go func() {
		defer close(ended)
		for first := true; ; first = false {
			d, err := l.Accept()
			if err != nil {
				return
			}
			t.Cleanup(func() { _ = d.Close() })
			if first && to != "" {
				r.carry(d)
				continue
			}
			go r.serve(d)
		}
	}()
	return r
}

func (r *relay) carry(d net.Conn) {
	p, err := net.Dial("tcp", r.to)
	if err != nil {
		return
	}
	go func() {
		defer p.Close()
		_, _ = io.Copy(p, d)
	}()
	go func() {
		defer d.Close()
		_, _ = io.Copy(d, p)
	}()
	r.carried <- d
}

// serve does what a prefill engine's server does. It notes what it is told.
func (r *relay) serve(d net.Conn) {
	defer d.Close()
	_ = d.SetDeadline(time.Now().Add(within))
	br := bufio.NewReader(d)
	if _, err := http.ReadRequest(br); err != nil {
		return
	}
	_, _ = io.WriteString(d, "HTTP/1.1 101 x\r\nConnection: Upgrade\r\nUpgrade: nats\r\n\r\n")
	conn := tls.Server(&headConn{d, br}, r.secure)
	if conn.Handshake() != nil {
		return
	}
	_, _ = io.WriteString(conn, "kvconn - -\n")
	if _, err := readLine(conn); err != nil {
		return
	}
	_, _ = io.WriteString(conn, "ok\n"+`INFO {"server_id":"x","version":"2.11.0","proto":1,"headers":true,"max_payload":1048576}`+"\r\n")
	said := bufio.NewReader(conn)
	for {
		line, err := said.ReadString('\n')
		if err != nil {
			return
		}
		if strings.HasPrefix(line, "PING") {
			_, _ = io.WriteString(conn, "PONG\r\n")
		}
		if words := strings.Fields(line); r.listens != nil && len(words) > 2 && words[0] == "SUB" && strings.HasPrefix(words[1], agentRoot) {
			go r.listens(conn, strings.Replace(words[1], "*", string(named("H").ID()), 1), words[len(words)-1])
		}
		if verb, _, _ := strings.Cut(line, " "); verb == "PUB" || verb == "HPUB" {
			r.heard <- line
		}
	}
}

// TestHostThatRelaysFirst: a host carries D's connection to a prefill engine, cuts it, and then
// serves D itself. It must not hear what D asks that prefill engine, whether it asks for D's
// identity or not.
func TestHostThatRelaysFirst(t *testing.T) {
	leaktest.Check(t)
	for _, asks := range []tls.ClientAuthType{tls.NoClientCert, tls.RequestClientCert, tls.RequireAnyClientCert} {
		t.Run(fmt.Sprint(asks), func(t *testing.T) {
			p := newPort(t, "127.0.0.1:0", ServerOptions{})
			prefill := newBus(t, Options{Identity: named("P"), Server: p.Server})
			serve(prefill)
			register(t, prefill, "e")
			secure, err := NewIdentity().serverTLS()
			if err != nil {
				t.Fatal(err)
			}
			if secure.ClientAuth = asks; asks == tls.NoClientCert {
				secure.VerifyConnection = nil
			}
			h := newRelay(t, p.addr, secure)
			d := newBus(t, Options{Identity: named("D")})
			_, via, err := d.Lookup(ctxOf(t, within), core.Target{Bootstrap: "http://" + h.Addr().String(), EngineID: "e"})
			if err != nil {
				t.Fatal(err)
			}
			l, err := d.known(via)
			if err != nil {
				t.Fatal(err)
			}
			session, _ := l.current()
			_ = (<-h.carried).Close()
			<-session.Done()
			eventually(t, "the host serves D, or D has refused it", func() error {
				if _, up := l.current(); up || l.why() != nil && strings.Contains(l.why().Error(), "identity") {
					return nil
				}
				return fmt.Errorf("not yet: %v", l.why())
			})
			a, _, err := d.Lookup(ctxOf(t, within), core.Target{Bootstrap: p.url(), EngineID: "e"})
			if err != nil || shortName(a.ID) != "P" {
				t.Errorf("D does not find prefill: %+v, %v", a, err)
			}
			select {
			case line := <-h.heard:
				t.Errorf("the host hears what D asks prefill: %.100q", line)
			default:
			}
		})
	}
}
