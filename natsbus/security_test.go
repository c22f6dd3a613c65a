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
	"github.com/kvconn/kvconn/rig/leaktest"
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
	unknown, _ := newNKey(t)
	log, logs := observed()
	p := newPort(t, "127.0.0.1:0", ServerOptions{Token: "right", NKeys: []string{public}, Logger: log})
	prefill := newBus(t, Options{Identity: named("P"), Server: p.Server, Token: "right"})
	serve(prefill)
	register(t, prefill, "e")
	refused := 0 // by P: the others saw that P does not know their token
	for what, c := range map[string]struct {
		opt Options
		ok  bool
	}{
		"the key":       {Options{Identity: named("D"), Seed: seed}, true},
		"the token":     {Options{Identity: named("D"), Token: "right"}, true},
		"another key":   {Options{Identity: named("D"), Seed: unknown}, false},
		"another token": {Options{Identity: named("D"), Token: "wrong"}, false},
		"nothing":       {Options{Identity: named("D")}, false},
	} {
		d := newBus(t, c.opt)
		_, _, err := d.Lookup(ctxOf(t, within), core.Target{Bootstrap: p.url()})
		if c.ok {
			if err != nil {
				t.Errorf("%s: %v", what, err)
			}
			continue
		}
		if c.opt.Token == "" {
			refused++
		}
		mustBe(t, err, core.ErrUnreachable)
		if !strings.Contains(err.Error(), "nats_token") || c.opt.Token == "" && !strings.Contains(err.Error(), "nats_nkey_seed_file") {
			t.Errorf("%s: error %q has no remedy", what, err)
		}
	}
	eventually(t, "a line for each who was refused", func() error {
		if n := logs.FilterMessageSnippet("is refused").FilterMessageSnippet("127.0.0.1:").FilterMessageSnippet("is not one that it admits").Len(); n != refused {
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

// TestTokenIsNotSent: a client never sends its token, since the port may be an attacker's.
func TestTokenIsNotSent(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{Token: "the-token"})
	prefill := newBus(t, Options{Identity: named("P"), Server: p.Server, Token: "the-token"})
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
	d := newBus(t, Options{Identity: named("D"), Token: "the-token"})
	if _, _, err := d.Lookup(ctxOf(t, within), core.Target{Bootstrap: "http://" + l.Addr().String()}); err != nil {
		t.Fatal(err)
	}
	closeBus(t, d)
	if text := <-sent; !strings.Contains(text, "Upgrade: nats") || strings.Contains(text, "the-token") || strings.Contains(text, "CONNECT {") {
		t.Errorf("sent was %q", text)
	}
}

// A client that is let in can ask agents and read the registry; it cannot write there,
// hear what others say, or be another agent.
func TestPermissions(t *testing.T) {
	leaktest.Check(t)
	log, _ := observed()
	p := newPort(t, "127.0.0.1:0", ServerOptions{Logger: log})
	prefill := newBus(t, Options{Identity: named("P"), Server: p.Server})
	serve(prefill)
	register(t, prefill, "e")
	me := named("D").At(p.opt.Identity.ID()).ID()
	dial := func(r right) *nats.Conn { return natsClient(t, p, named("D"), secrets{}, r) }
	// violation is the server's word about what was just sent.
	violation := func(nc *nats.Conn) bool {
		t.Helper()
		if err := nc.FlushTimeout(within); err != nil {
			t.Fatal(err)
		}
		return errors.Is(nc.LastError(), nats.ErrPermissionViolation)
	}
	box := inboxOf(me) + ".1"
	to := subject(named("P").ID(), me)
	for _, r := range []right{rightAsk, rightJoin} {
		id := me
		if r == rightJoin {
			id = named("D").ID()
		}
		for subj, ok := range map[string]bool{
			subject(named("P").ID(), id): true, "$JS.API.STREAM.INFO." + stream: true, "$JS.API.DIRECT.GET." + stream + "." + subtree + "x.0.0.0": true,
			subject(hostID, id): r == rightJoin, subject(hostID, "x"): false, subject(named("P").ID(), "x"): false,
			inboxOf(id) + ".1": false, subtree + "x.0.0.0": false, "$JS.API.STREAM.DELETE." + stream: false, "$JS.API.STREAM.PURGE." + stream: false,
			"$JS.API.STREAM.CREATE.x": false, "$JS.API.INFO": false, "$SYS.REQ.SERVER.PING": false, "anything": false,
		} {
			nc := dial(r)
			err := error(nil)
			if strings.HasPrefix(subj, inboxRoot) { // an answer that nobody has asked for
				err = nc.Publish(subj, nil)
			} else {
				err = nc.PublishRequest(subj, inboxOf(id)+".1", nil)
			}
			if err != nil {
				t.Fatal(err)
			}
			if violation(nc) == ok {
				t.Errorf("%s: publish to %s: violation %v, want it allowed: %v", r, subj, !ok, ok)
			}
		}
	}
	for subj, ok := range map[string]bool{
		subject(me, "*"): true, inboxOf(me) + ".>": true, box: true,
		subject(named("P").ID(), "*"): false, subject("*", me): false, "kvconn.>": false, "_INBOX.>": false, "_INBOX.other.>": false, ">": false,
		"$KV.>": false, "$JS.EVENT.>": false, "$SYS.>": false,
	} {
		for _, queue := range []string{"", "agent"} {
			nc := dial(rightAsk)
			if _, err := nc.QueueSubscribe(subj, queue, func(*nats.Msg) {}); err != nil {
				t.Fatal(err)
			}
			if violation(nc) == ok {
				t.Errorf("subscribe to %s: violation %v, want it allowed: %v", subj, !ok, ok)
			}
		}
	}
	// What a message names for its answer is held where bytes come in, also for subjects that
	// the server itself answers; and nobody sends headers, which steer the server.
	key := rankKey("e", 0, 0)
	for _, command := range []string{
		"PUB " + to + " " + key + " 0\r\n\r\n", "PUB $JS.API.STREAM.INFO." + stream + " " + key + " 0\r\n\r\n", "PUB " + to + " 0\r\n\r\n",
		"PUB " + to + " " + inboxOf(named("P").ID()) + ".1 0\r\n\r\n", "PUB " + to + " " + inboxOf(me) + ".> 0\r\n\r\n", "PUB " + subject("*", me) + " " + box + " 0\r\n\r\n",
		"HPUB " + to + " " + box + " 12 12\r\nNATS/1.0\r\n\r\n\r\n", "PUB " + to + " " + box + " 99999999\r\n", "PUB " + to + " " + box + " 1\r\nabcd\r\n", "CONNECT {}\r\n", "INFO {}\r\n",
	} {
		conn := rawClient(t, p, named("D"), secrets{}, rightAsk)
		_, _ = io.WriteString(conn, "CONNECT {\"user\":\"kvconn-home\"}\r\nPING\r\n"+command+"PING\r\n")
		text, _ := io.ReadAll(conn) // it ends
		if n := strings.Count(string(text), "PONG"); n > 1 {
			t.Errorf("%q is carried: %q", command, text)
		}
	}
	if a, _, err := prefill.Lookup(ctxOf(t, within), core.Target{EngineID: "e"}); err != nil || shortName(a.ID) != "P" {
		t.Errorf("the registry has %v, %v", a, err)
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
		d := newBus(t, Options{Identity: named("D"), Allow: allow})
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
	prefill := newBus(t, Options{Identity: named("P"), Server: p.Server, Token: "right"})
	serve(prefill)
	register(t, prefill, "e")
	for token, ok := range map[string]bool{"right": true, "wrong": false, "": false} {
		d := newBus(t, Options{Identity: named("D"), Token: token})
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
	}
}
