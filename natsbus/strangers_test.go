package natsbus

import (
	"bufio"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/leaktest"
)

// The name of the own agent's way in is of no use without its secret, and a
// signature is of no use for another connection.
func TestForgedProofs(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{Token: "right"})
	key, public, err := tokenKey("right")
	if err != nil {
		t.Fatal(err)
	}
	old, err := key.Sign([]byte("another nonce"))
	if err != nil {
		t.Fatal(err)
	}
	for _, connect := range []string{
		`{}`, `{"user":"kvconn-home","pass":""}`, `{"user":"kvconn-home"}`, `{"user":"kvconn-home","pass":"right"}`,
		`{"auth_token":""}`, `{"auth_token":"Right"}`, `{"nkey":"` + public + `"}`,
		`{"nkey":"` + public + `","sig":"` + base64.RawURLEncoding.EncodeToString(old) + `"}`,
		`{"nkey":"` + public + `","sig":"%"}`, `{"nkey":"U","sig":"x"}`, `{"jwt":"x","sig":"y"}`,
	} {
		_, _, br := rawUpgrade(t, p.addr, good+"CONNECT "+connect+"\r\nPING\r\n")
		text, err := io.ReadAll(br)
		if err != nil || !strings.Contains(string(text), "Authorization Violation") || strings.Contains(string(text), "PONG") {
			t.Errorf("%s: %q, %v", connect, text, err)
		}
	}
	// The token itself is as good: other NATS clients give it.
	_, _, br := rawUpgrade(t, p.addr, good+"CONNECT {\"auth_token\":\"right\",\"verbose\":false}\r\nPING\r\n")
	if !strings.HasPrefix(line(t, br), "INFO ") || line(t, br) != "PONG\r\n" {
		t.Error("the token is refused")
	}
}

func line(t testing.TB, br *bufio.Reader) string {
	t.Helper()
	s, err := br.ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// Who does not prove itself is sent away, holds no place of a client's, and
// cannot do anything before.
func TestStrangersAreBounded(t *testing.T) {
	leaktest.Check(t)
	log, logs := observed()
	p := newPort(t, "127.0.0.1:0", ServerOptions{Token: "right", MaxConns: 1, Logger: log})
	_, _, br := rawUpgrade(t, p.addr, good+"SUB > 1\r\n")
	if text, err := io.ReadAll(br); err != nil || !strings.Contains(string(text), "Authorization Violation") {
		t.Fatalf("%q, %v", text, err)
	}
	var strangers []*bufio.Reader
	for len(strangers) < maxHandshakes {
		status, _, br := rawUpgrade(t, p.addr, good)
		if status == 503 {
			break // some have been sent away meanwhile, or the bound is reached
		}
		strangers = append(strangers, br)
	}
	if len(strangers) == 0 {
		t.Fatal("no stranger got as far as the handshake")
	}
	p.clients.mu.Lock()
	waiting := len(p.clients.conns) - p.clients.in
	p.clients.mu.Unlock()
	if waiting > maxHandshakes {
		t.Errorf("%d connections are in the handshake", waiting)
	}
	for _, br := range strangers {
		// The server's last word is sometimes lost, by its own doing.
		if text, err := io.ReadAll(br); err != nil || strings.Contains(string(text), "PONG") {
			t.Fatalf("%q, %v", text, err)
		}
	}
	eventually(t, "the log tells of them, and not of each", func() error {
		n := logs.FilterMessageSnippet("is refused: Authentication Timeout").Len() + logs.FilterMessageSnippet("is refused: it did not prove itself").Len()
		if n == 0 || n > 20 {
			return fmt.Errorf("%d lines", n)
		}
		return nil
	})
	d := newBus(t, Options{AgentID: "D", Token: "right"})
	if _, _, err := d.Lookup(ctxOf(t, within), core.Target{Bootstrap: p.url()}); !errors.Is(err, core.ErrNotRegistered) {
		t.Fatal(err)
	}
	p.clients.mu.Lock()
	clients := p.clients.in
	p.clients.mu.Unlock()
	if clients != 1 {
		t.Errorf("%d clients are counted", clients)
	}
	closeBus(t, d)
	eventually(t, "the client's place is free", func() error {
		p.clients.mu.Lock()
		defer p.clients.mu.Unlock()
		if p.clients.in != 0 || len(p.clients.conns) != 0 {
			return fmt.Errorf("%d clients, %d connections", p.clients.in, len(p.clients.conns))
		}
		return nil
	})
}
