package natsbus

import (
	"bufio"
	"crypto/tls"
	"errors"
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

// TestForgedProofs: a proof is worth nothing on another connection, for another right, or
// from the other side; and a client that cannot prove anything gets no further than the handshake.
func TestForgedProofs(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{Token: "right", JoinToken: "ranks"})
	bound := func(s tls.ConnectionState) []byte {
		b, err := binding(s)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	// answer is the server's last word on a line of a client's handshake.
	answer := func(line func(s tls.ConnectionState, handshake []string) string) string {
		t.Helper()
		_, conn, br := rawUpgrade(t, p.addr, good)
		secure := tls.Client(&headConn{conn, br}, clientTLS(named("E").At))
		defer secure.Close()
		if err := secure.Handshake(); err != nil {
			t.Fatal(err)
		}
		handshake, err := readLine(secure)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(secure, line(secure.ConnectionState(), strings.Split(handshake, " "))+"\n")
		last, _ := readLine(secure)
		return last
	}
	old := ""
	if last := answer(func(s tls.ConnectionState, _ []string) string {
		old = proofOf("right", "client", rightAsk, bound(s))
		return "ask token - " + old
	}); last != "ok" {
		t.Fatalf("a true proof: %q", last)
	}
	if last := answer(func(s tls.ConnectionState, _ []string) string {
		return "join token - " + proofOf("ranks", "client", rightJoin, bound(s))
	}); last != "ok" {
		t.Fatalf("a true proof of a rank: %q", last)
	}
	for what, line := range map[string]func(s tls.ConnectionState, handshake []string) string{
		"of another connection":  func(tls.ConnectionState, []string) string { return "ask token - " + old },
		"the server's own":       func(_ tls.ConnectionState, g []string) string { return "ask token - " + g[1] },
		"the server's for ranks": func(_ tls.ConnectionState, g []string) string { return "join token - " + g[2] },
		"for asking, to join": func(s tls.ConnectionState, _ []string) string {
			return "join token - " + proofOf("right", "client", rightAsk, bound(s))
		},
		"the token, to join": func(s tls.ConnectionState, _ []string) string {
			return "join token - " + proofOf("right", "client", rightJoin, bound(s))
		},
		"as a local rank": func(s tls.ConnectionState, _ []string) string {
			return "join local - " + proofOf("right", "client", rightJoin, bound(s))
		},
		"nothing":          func(tls.ConnectionState, []string) string { return "ask open - -" },
		"nothing, to join": func(tls.ConnectionState, []string) string { return "join open - -" },
		"an unknown nkey":  func(tls.ConnectionState, []string) string { return "ask nkey UAAA AAAA" },
		"another right": func(s tls.ConnectionState, _ []string) string {
			return "own token - " + proofOf("right", "client", rightAsk, bound(s))
		},
		"too little": func(tls.ConnectionState, []string) string { return "ask" },
		"too much":   func(tls.ConnectionState, []string) string { return strings.Repeat("a", 2*maxHandshakeLine) },
	} {
		if last := answer(line); last == "ok" {
			t.Errorf("a proof %s is taken", what)
		}
	}
}

// TestRelayedProof: a host to which D is sent passes on what it hears, to P and back. What
// it can do is carry bytes that it cannot read: nothing that D proves lets it speak at P.
func TestRelayedProof(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{Token: "right"})
	hostile := NewIdentity()
	secure, err := hostile.serverTLS()
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	type told struct{ sent, answer string }
	got := make(chan told, 1)
	go func() { // it begins the handshake with D by P's own handshake of its own connection to P
		defer close(got)
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(within))
		br := bufio.NewReader(c)
		if _, err := http.ReadRequest(br); err != nil {
			return
		}
		_, _ = io.WriteString(c, "HTTP/1.1 101 x\r\nConnection: Upgrade\r\nUpgrade: nats\r\n\r\n")
		toD := tls.Server(&headConn{c, br}, secure)
		if toD.Handshake() != nil {
			return
		}
		raw, err := net.Dial("tcp", p.addr)
		if err != nil {
			return
		}
		defer raw.Close()
		up, err := clientUpgrade(raw, p.addr)
		if err != nil {
			return
		}
		toP := tls.Client(up, clientTLS(hostile.At))
		if toP.Handshake() != nil {
			return
		}
		handshake, _ := readLine(toP)
		_, _ = io.WriteString(toD, handshake+"\n")
		proof, _ := readLine(toD)
		if proof == "" { // D has said nothing
			proof = "ask open - -"
		}
		_, _ = io.WriteString(toP, proof+"\n")
		answer, _ := readLine(toP)
		got <- told{proof, answer}
	}()
	d := newBus(t, Options{Identity: named("D"), Token: "right"})
	_, _, err = d.Lookup(ctxOf(t, within), core.Target{Bootstrap: "http://" + l.Addr().String()})
	if err == nil || !strings.Contains(err.Error(), "nats_token") {
		t.Errorf("D takes the host for an agent of its deployment: %v", err)
	}
	g := <-got
	if g.answer == "ok" || g.sent != "ask open - -" {
		t.Errorf("D told the host %q, by which P lets it in with %q", g.sent, g.answer)
	}
}

// TestIdentityForEachServer: two servers know one agent by two ids, and each server by the
// same one at each connection.
func TestIdentityForEachServer(t *testing.T) {
	leaktest.Check(t)
	d := NewIdentity()
	seen := map[core.AgentID]int{}
	for range 2 {
		p := newPort(t, "127.0.0.1:0", ServerOptions{})
		for range 2 {
			conn, err := dialClient(t, p, d, secrets{}, rightAsk)
			if err != nil {
				t.Fatal(err)
			}
			seen[entered(t, p)]++
			_ = conn.Close()
			eventually(t, "the client has left", func() error {
				p.authenticator.mu.Lock()
				defer p.authenticator.mu.Unlock()
				if len(p.authenticator.users) > 0 {
					return errors.New("not yet")
				}
				return nil
			})
		}
	}
	if len(seen) != 2 || seen[d.ID()] != 0 {
		t.Errorf("seen are %v, the agent's own id is %s", seen, d.ID())
	}
}

// entered is the one client of a port.
func entered(t testing.TB, p *port) (id core.AgentID) {
	t.Helper()
	eventually(t, "the client is in", func() error {
		p.authenticator.mu.Lock()
		defer p.authenticator.mu.Unlock()
		for _, c := range p.authenticator.users {
			id = c.id
		}
		if id == "" {
			return errors.New("not yet")
		}
		return nil
	})
	return id
}

// TestHandshakesAreBounded: a client that does not prove itself is sent away, holds no
// place of an admitted client, and cannot do anything before.
func TestHandshakesAreBounded(t *testing.T) {
	leaktest.Check(t)
	log, logs := observed()
	p := newPort(t, "127.0.0.1:0", ServerOptions{Token: "right", MaxConns: 1, Logger: log, AuthTimeout: 2 * time.Second})
	_, _, br := rawUpgrade(t, p.addr, good+"SUB > 1\r\n")
	if text, _ := io.ReadAll(br); strings.Contains(string(text), "+OK") {
		t.Fatalf("%q", text)
	}
	var pending []*bufio.Reader
	for len(pending) < maxHandshakes {
		status, _, br := rawUpgrade(t, p.addr, good)
		if status == 503 {
			break // some have been sent away meanwhile, or the bound is reached
		}
		pending = append(pending, br)
	}
	if len(pending) == 0 {
		t.Fatal("no unauthenticated client got as far as the handshake")
	}
	p.clients.mu.Lock()
	waiting := len(p.clients.conns) - p.clients.authenticated
	p.clients.mu.Unlock()
	if waiting > maxHandshakes {
		t.Errorf("%d connections are in the handshake", waiting)
	}
	for _, br := range pending {
		// The server's last word is sometimes lost, by its own doing.
		if text, err := io.ReadAll(br); err != nil || strings.Contains(string(text), "PONG") {
			t.Fatalf("%q, %v", text, err)
		}
	}
	eventually(t, "the log tells of them, and not of each", func() error {
		n := logs.FilterMessageSnippet("is refused: it did not prove itself").Len()
		if n == 0 || n > 20 {
			return fmt.Errorf("%d lines", n)
		}
		return nil
	})
	d := newBus(t, Options{Identity: named("D"), Token: "right"})
	eventually(t, "one who proves itself is in", func() error { // a starved one may be sent away first
		if _, _, err := d.Lookup(ctxOf(t, within), core.Target{Bootstrap: p.url()}); !errors.Is(err, core.ErrNotRegistered) {
			return fmt.Errorf("lookup gives %w", err)
		}
		return nil
	})
	p.clients.mu.Lock()
	clients := p.clients.authenticated
	p.clients.mu.Unlock()
	if clients != 1 {
		t.Errorf("%d clients are counted", clients)
	}
	closeBus(t, d)
	eventually(t, "the client's place is free", func() error {
		p.clients.mu.Lock()
		defer p.clients.mu.Unlock()
		if p.clients.authenticated != 0 || len(p.clients.conns) != 0 {
			return fmt.Errorf("%d clients, %d connections", p.clients.authenticated, len(p.clients.conns))
		}
		return nil
	})
}
