package natsbus

import (
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/leaktest"
)

func newNKey(t testing.TB) (seed, public string) {
	t.Helper()
	key, err := nkeys.CreateUser()
	if err != nil {
		t.Fatal(err)
	}
	s, err := key.Seed()
	if err != nil {
		t.Fatal(err)
	}
	if public, err = key.PublicKey(); err != nil {
		t.Fatal(err)
	}
	return string(s), public
}

func TestNKeys(t *testing.T) {
	leaktest.Check(t)
	seed, public := newNKey(t)
	stranger, _ := newNKey(t)
	log, logs := observed()
	p := newPort(t, "127.0.0.1:0", ServerOptions{Token: "right", NKeys: []string{public}, Logger: log})
	prefill := newBus(t, Options{AgentID: "P", Server: p.Server, Token: "right"})
	serve(prefill)
	register(t, prefill, "e")
	refused := 0
	for what, c := range map[string]struct {
		opt Options
		ok  bool
	}{
		"the key":       {Options{AgentID: "D", Seed: seed}, true},
		"the token":     {Options{AgentID: "D", Token: "right"}, true},
		"another key":   {Options{AgentID: "D", Seed: stranger}, false},
		"another token": {Options{AgentID: "D", Token: "wrong"}, false},
		"nothing":       {Options{AgentID: "D"}, false},
	} {
		d := newBus(t, c.opt)
		_, _, err := d.Lookup(ctxOf(t, within), core.Target{Bootstrap: p.url()})
		if c.ok {
			if err != nil {
				t.Errorf("%s: %v", what, err)
			}
			continue
		}
		refused++
		mustBe(t, err, core.ErrUnreachable)
		if !strings.Contains(err.Error(), "nats_token") || !strings.Contains(err.Error(), "nats_nkey_seed_file") {
			t.Errorf("%s: error %q has no remedy", what, err)
		}
	}
	eventually(t, "a line for each who was refused", func() error {
		if n := logs.FilterMessageSnippet("is refused").FilterMessageSnippet("127.0.0.1:").FilterMessageSnippet("Authorization Violation").Len(); n != refused {
			return fmt.Errorf("%d lines for %d: %v", n, refused, logs.All())
		}
		return nil
	})
	for _, e := range logs.FilterMessageSnippet("right").All() {
		t.Errorf("the log tells the token: %s", e.Message)
	}
	if _, err := StartServer(ServerOptions{NKeys: []string{seed}}); err == nil || strings.Contains(err.Error(), "right") {
		t.Errorf("a seed as a public key: %v", err)
	}
}

// Who connects never gives its token away: it may be at a stranger's port.
func TestTokenIsNotSent(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{Token: "the-token"})
	prefill := newBus(t, Options{AgentID: "P", Server: p.Server, Token: "the-token"})
	register(t, prefill, "e")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	sent := make(chan string, 1)
	go func() {
		in, err := l.Accept()
		if err != nil {
			return
		}
		defer in.Close()
		out, err := net.Dial("tcp", p.addr)
		if err != nil {
			return
		}
		defer out.Close()
		go func() { _, _ = io.Copy(in, out) }()
		var all strings.Builder
		_, _ = io.Copy(io.MultiWriter(out, &all), in)
		sent <- all.String()
	}()
	d := newBus(t, Options{AgentID: "D", Token: "the-token"})
	if _, _, err := d.Lookup(ctxOf(t, within), core.Target{Bootstrap: "http://" + l.Addr().String()}); err != nil {
		t.Fatal(err)
	}
	closeBus(t, d)
	if text := <-sent; !strings.Contains(text, "CONNECT") || strings.Contains(text, "the-token") {
		t.Errorf("sent was %q", text)
	}
}

// A client that is let in can ask agents and read the registry; it cannot write
// there, nor hear what others say, nor be another agent.
func TestPermissions(t *testing.T) {
	leaktest.Check(t)
	log, _ := observed()
	p := newPort(t, "127.0.0.1:0", ServerOptions{Logger: log})
	prefill := newBus(t, Options{AgentID: "P", Server: p.Server})
	serve(prefill)
	register(t, prefill, "e")
	dial := func(name string) *nats.Conn {
		at := Address{Host: p.addr, Name: "127.0.0.1"}
		nc, err := nats.Connect("nats://"+p.addr, nats.Name(name), nats.CustomInboxPrefix("_INBOX.box"), nats.NoReconnect(),
			nats.SetCustomDialer(newDialer(within, dialUpgrade(at, nil, nil))), nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(nc.Close)
		return nc
	}
	// violation is the server's word about what was just sent.
	violation := func(nc *nats.Conn) bool {
		t.Helper()
		if err := nc.FlushTimeout(within); err != nil {
			t.Fatal(err)
		}
		return errors.Is(nc.LastError(), nats.ErrPermissionViolation)
	}
	for subj, ok := range map[string]bool{
		"kvconn.v1.agent.P": true, "$JS.API.STREAM.INFO." + stream: true, "$JS.API.STREAM.MSG.GET." + stream: true,
		"$JS.API.DIRECT.GET." + stream + "." + subtree + "x.0.0.0": true,
		"_INBOX.box.1": false, subtree + "x.0.0.0": false, "$JS.API.STREAM.DELETE." + stream: false, "$JS.API.STREAM.PURGE." + stream: false,
		"$JS.API.STREAM.CREATE.x": false, "$JS.API.INFO": false, "$SYS.REQ.SERVER.PING": false, "anything": false,
	} {
		nc := dial("kvconn D box")
		if err := nc.PublishRequest(subj, "_INBOX.box.1", nil); err != nil {
			t.Fatal(err)
		}
		if violation(nc) == ok {
			t.Errorf("publish to %s: violation %v, want it allowed: %v", subj, !ok, ok)
		}
	}
	for subj, ok := range map[string]bool{
		"kvconn.v1.agent.D": true, "_INBOX.box.>": true, "_INBOX.box.1": true,
		"kvconn.v1.agent.P": false, "kvconn.v1.agent.*": false, "kvconn.>": false, "_INBOX.>": false, "_INBOX.other.>": false, ">": false,
		"$KV.>": false, "$JS.EVENT.>": false, "$SYS.>": false,
	} {
		for _, queue := range []string{"", "agent"} {
			nc := dial("kvconn D box")
			if _, err := nc.QueueSubscribe(subj, queue, func(*nats.Msg) {}); err != nil {
				t.Fatal(err)
			}
			if violation(nc) == ok {
				t.Errorf("subscribe to %s: violation %v, want it allowed: %v", subj, !ok, ok)
			}
		}
	}
	for _, name := range []string{"", "kvconn", "kvconn D", "kvconn * >", "kvconn D >", "other D box", "kvconn D box x", "kvconn D. box"} {
		nc := dial(name)
		if _, err := nc.Subscribe("_INBOX.box.1", func(*nats.Msg) {}); err != nil {
			t.Fatal(err)
		}
		if !violation(nc) {
			t.Errorf("%q may subscribe", name)
		}
		nc = dial(name)
		if err := nc.Publish("kvconn.v1.agent.P", nil); err != nil {
			t.Fatal(err)
		}
		if !violation(nc) {
			t.Errorf("%q may publish", name)
		}
	}
}

// Allow is asked before anything is sent, and again about the address.
func TestAllow(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{})
	refusal := errors.New("not this one")
	for what, allow := range map[string]func(string) (Control, error){
		"host": func(host string) (Control, error) {
			if host != "127.0.0.1" {
				t.Errorf("asked about %q", host)
			}
			return nil, refusal
		},
		"address": func(string) (Control, error) {
			return func(_, address string, _ syscall.RawConn) error {
				if address != p.addr {
					t.Errorf("asked about %q", address)
				}
				return refusal
			}, nil
		},
	} {
		d := newBus(t, Options{AgentID: "D", Allow: allow})
		_, _, err := d.Lookup(ctxOf(t, within), core.Target{Bootstrap: p.url()})
		if !errors.Is(err, refusal) || !strings.Contains(err.Error(), p.addr) {
			t.Errorf("%s: %v", what, err)
		}
	}
	p.clients.mu.Lock()
	defer p.clients.mu.Unlock()
	if len(p.clients.conns) != 0 {
		t.Errorf("%d connections were made", len(p.clients.conns))
	}
}

func TestToken(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{Token: "right"})
	prefill := newBus(t, Options{AgentID: "P", Server: p.Server, Token: "right"})
	serve(prefill)
	register(t, prefill, "e")
	for token, ok := range map[string]bool{"right": true, "wrong": false, "": false} {
		d := newBus(t, Options{AgentID: "D", Token: token})
		_, _, err := d.Lookup(ctxOf(t, within), core.Target{Bootstrap: p.url()})
		if ok && err != nil {
			t.Error(err)
		}
		if !ok {
			mustBe(t, err, core.ErrUnreachable)
			if !strings.Contains(err.Error(), "token") || strings.Contains(err.Error(), "wrong") {
				t.Errorf("token %q: error %q", token, err)
			}
		}
		if b, err := Open(Options{AgentID: "P2", Server: p.Server, Token: token}); (err == nil) != ok {
			t.Errorf("token %q: own server: %v", token, err)
		} else if err == nil {
			closeBus(t, b)
		}
	}
}
