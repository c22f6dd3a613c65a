package natsbus

import (
	"bufio"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/leaktest"
	"github.com/kvconn/kvconn/internal/nettest"
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
	p.mu.Lock()
	waiting := len(p.conns) - p.clients
	p.mu.Unlock()
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
	p.mu.Lock()
	clients := p.clients
	p.mu.Unlock()
	if clients != 1 {
		t.Errorf("%d clients are counted", clients)
	}
	closeBus(t, d)
	eventually(t, "the client's place is free", func() error {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.clients != 0 || len(p.conns) != 0 {
			return fmt.Errorf("%d clients, %d connections", p.clients, len(p.conns))
		}
		return nil
	})
}

func TestTLSBootstrap(t *testing.T) {
	leaktest.Check(t)
	ours, theirs := nettest.NewAuthority(t), nettest.NewAuthority(t)
	later, before := time.Now().Add(time.Hour), time.Now().Add(-time.Minute)
	open := func(secure *tls.Config) *port {
		p := newSecurePort(t, "127.0.0.1:0", ServerOptions{Token: "right"}, secure)
		prefill := newBus(t, Options{AgentID: "P", Server: p.Server, Token: "right"})
		serve(prefill)
		register(t, prefill, "e")
		return p
	}
	good, plain := open(ours.Server(later, "127.0.0.1")), open(nil)
	expired, other := open(ours.Server(before, "127.0.0.1")), open(ours.Server(later, "elsewhere"))
	for what, c := range map[string]struct {
		at   string
		opt  Options
		want string // "" for success
	}{
		"trusted":                {good.url(), Options{TLS: ours.Client()}, ""},
		"http that means https":  {"http://" + good.addr, Options{TLS: ours.Client(), OnlyTLS: true}, ""},
		"unknown authority":      {good.url(), Options{TLS: theirs.Client()}, "tls_ca_file"},
		"system's authorities":   {good.url(), Options{}, "tls_ca_file"},
		"expired":                {expired.url(), Options{TLS: ours.Client()}, "tls_cert_file"},
		"another host's":         {other.url(), Options{TLS: ours.Client()}, "another host"},
		"http to a TLS port":     {"http://" + good.addr, Options{}, "speaks https"},
		"https to a plain port":  {"https://" + plain.addr, Options{TLS: ours.Client()}, "speaks no TLS"},
		"plain where TLS is due": {plain.url(), Options{TLS: ours.Client(), OnlyTLS: true}, "speaks no TLS"},
	} {
		c.opt.AgentID, c.opt.Token, c.opt.ConnectTimeout = "D", "right", within
		d := newBus(t, c.opt)
		serve(d)
		_, via, err := d.Lookup(ctxOf(t, within), core.Target{Bootstrap: c.at})
		if c.want == "" {
			if err != nil {
				t.Errorf("%s: %v", what, err)
				continue
			}
			if want := core.Via("https://" + good.addr); via != want {
				t.Errorf("%s: via %q, want %q", what, via, want)
			}
			ask(t, d, via, "P", "P via : hello D")
			continue
		}
		mustBe(t, err, core.ErrUnreachable)
		if !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), strings.TrimPrefix(strings.TrimPrefix(c.at, "http://"), "https://")) {
			t.Errorf("%s: error %q, want %q and the address in it", what, err, c.want)
		}
	}
}

// The connection comes back over TLS after a break, and Close does not wait for
// a peer that does not read.
func TestTLSLinkComesBack(t *testing.T) {
	leaktest.Check(t)
	ca := nettest.NewAuthority(t)
	p := newSecurePort(t, "127.0.0.1:0", ServerOptions{}, ca.Server(time.Now().Add(time.Hour), "127.0.0.1"))
	prefill := newBus(t, Options{AgentID: "P", Server: p.Server})
	serve(prefill)
	register(t, prefill, "e")
	px := newProxy(t, p.addr)
	d := newBus(t, Options{AgentID: "D", TLS: ca.Client()})
	_, via, err := d.Lookup(ctxOf(t, within), core.Target{Bootstrap: "https://" + px.Addr().String()})
	if err != nil {
		t.Fatal(err)
	}
	px.mu.Lock()
	for _, c := range px.conns {
		_ = c.Close()
	}
	px.mu.Unlock()
	eventually(t, "the way back", func() error {
		_, err := d.Request(ctxOf(t, time.Second), via, "P", hello("D"))
		return err
	})
	px.frozen.Store(true)
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
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.conns) != 0 {
		t.Errorf("%d connections were made", len(p.conns))
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
