package natsbus

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/kvconn/kvconn/rig/leaktest"
)

func garble(m *nats.Msg) { _ = m.Respond([]byte("garbage")) }

// rawUpgrade returns the status line, and the connection after a 101.
func rawUpgrade(t testing.TB, addr, head string) (int, net.Conn, *bufio.Reader) {
	t.Helper()
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	if _, err := io.WriteString(conn, head); err != nil {
		t.Fatal(err)
	}
	br := bufio.NewReader(conn)
	resp, err := http.ReadResponse(br, nil)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, conn, br
}

const good = "GET /nats HTTP/1.1\r\nHost: h\r\nConnection: keep-alive, upgrade\r\nUpgrade: NATS\r\n\r\n"

func TestUpgradeAnswers(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{MaxConns: 1})
	for head, want := range map[string]int{
		"GET /nats HTTP/1.1\r\nHost: h\r\n\r\n":                                                                   426,
		"GET /nats HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n":                      426,
		"GET /nats HTTP/1.1\r\nHost: h\r\nUpgrade: nats\r\n\r\n":                                                  426,
		"POST /nats HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: nats\r\nContent-Length: 0\r\n\r\n":     405,
		"GET /nats HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nUpgrade: websocket, foo\r\n\r\n": 426,
	} {
		if got, _, _ := rawUpgrade(t, p.addr, head); got != want {
			t.Errorf("%q: status %d, want %d", head, got, want)
		}
	}

	conn := rawClient(t, p, named("D"), secrets{}, rightAsk)
	br := bufio.NewReader(conn)
	_, _ = io.WriteString(conn, "CONNECT {}\r\nPING\r\n")
	for _, want := range []string{"INFO ", "PONG"} {
		line, err := br.ReadString('\n')
		if err != nil || !strings.HasPrefix(line, want) {
			t.Fatalf("%q, %v, want %q", line, err, want)
		}
	}
	if got, _, _ := rawUpgrade(t, p.addr, good); got != http.StatusServiceUnavailable {
		t.Errorf("the second of one connection gets %d", got)
	}
	_ = conn.Close() // its place is free again
	eventually(t, "the place of a closed connection", func() error {
		status, conn, _ := rawUpgrade(t, p.addr, good)
		_ = conn.Close()
		if status != 101 {
			return fmt.Errorf("status %d", status)
		}
		return nil
	})
}

// The server's word ends the HTTP connection too.
func TestServerEndsConnection(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{Token: "right"})
	_, _, br := rawUpgrade(t, p.addr, good+"CONNECT {\"auth_token\":\"right\"}\r\nPING\r\n")
	if text, _ := io.ReadAll(br); strings.Contains(string(text), "PONG") {
		t.Fatalf("who proves nothing gets %q", text)
	}
	if _, err := dialClient(t, p, named("D"), secrets{token: "wrong"}, rightAsk); !errors.Is(err, errRefused) {
		t.Fatalf("another token: %v", err)
	}
	eventually(t, "no connection is left", func() error {
		p.clients.mu.Lock()
		defer p.clients.mu.Unlock()
		if len(p.clients.conns) != 0 {
			return errors.New("one is")
		}
		return nil
	})
}

func TestCloseEndsUpgradedConnections(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{})
	var readers []*bufio.Reader
	for range 5 {
		_, _, br := rawUpgrade(t, p.addr, good)
		readers = append(readers, br)
	}
	if err := p.Server.Close(); err != nil {
		t.Fatal(err)
	}
	for _, br := range readers {
		if _, err := io.Copy(io.Discard, br); err != nil && !strings.Contains(err.Error(), "reset") {
			t.Error(err)
		}
	}
	if got, _, _ := rawUpgrade(t, p.addr, good); got != http.StatusServiceUnavailable {
		t.Errorf("after Close: status %d", got)
	}
	if b, err := Open(Options{Identity: named("P"), Server: p.Server}); err == nil {
		t.Error("opened on a closed server")
		closeBus(t, b)
	}
}

// What nats-server calls fatal must not end the process.
func TestFatalIsNoExit(t *testing.T) {
	leaktest.Check(t)
	log, logs := observed()
	l := &serverLogger{log: log.Sugar()}
	l.Fatalf("no %s", "room")
	if l.last() != "no room" || logs.FilterMessageSnippet("no room").Len() != 1 {
		t.Errorf("%q, %v", l.last(), logs.All())
	}
}
