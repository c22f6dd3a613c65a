package natsbus

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/internal/freeport"
	"github.com/kvconn/kvconn/rig/nettest"
	"github.com/kvconn/kvconn/wire"
)

// within only ends a hang: a loaded machine may take long for anything. With a planted defect a hang is what a test finds.
var within = func() time.Duration {
	if fault.Planted() {
		return 5 * time.Second
	}
	return 30 * time.Second
}()

func ctxOf(t testing.TB, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

// eventually polls, since nothing tells a test of another process's state.
func eventually(t testing.TB, what string, f func() error) {
	t.Helper()
	deadline := time.Now().Add(within)
	for {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within %v: %v", what, within, err)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// port is a prefill agent's bootstrap port.
type port struct {
	*Server
	addr string // host:port
	http *http.Server
	once sync.Once
	tls  bool
}

func (p *port) url() string {
	if p.tls {
		return "https://" + p.addr
	}
	return "http://" + p.addr
}

func newPort(t testing.TB, addr string, opt ServerOptions) *port {
	t.Helper()
	return newSecurePort(t, addr, opt, nil)
}

func freeAddr(t testing.TB) string {
	t.Helper()
	ports, err := freeport.Take(1)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprint("127.0.0.1:", ports[0])
}

// newSecurePort speaks https when it has a configuration for that.
func newSecurePort(t testing.TB, addr string, opt ServerOptions, secure *tls.Config) *port {
	t.Helper()
	// A process that stands still for seconds is no attacker, and no dead peer.
	opt.AuthTimeout, opt.PingInterval = cmp.Or(opt.AuthTimeout, time.Hour), cmp.Or(opt.PingInterval, time.Hour)
	s, err := StartServer(opt)
	if err != nil {
		t.Fatal(err)
	}
	namedAt(s.opt.Identity.ID())
	var l net.Listener
	eventually(t, "listen on "+addr, func() error {
		at := addr
		if at == "127.0.0.1:0" { // one that no outgoing connection gets, since some servers come back at theirs
			at = freeAddr(t)
		}
		l, err = net.Listen("tcp", at)
		return err
	})
	mux := http.NewServeMux()
	mux.Handle(Path, s.Handler())
	p := &port{Server: s, addr: l.Addr().String(), http: &http.Server{Handler: mux, ErrorLog: log.New(io.Discard, "", 0)}, tls: secure != nil}
	if secure != nil {
		l = tls.NewListener(l, secure)
	}
	go func() { _ = p.http.Serve(l) }()
	t.Cleanup(p.stop)
	return p
}

func (p *port) stop() {
	p.once.Do(func() {
		_ = p.http.Close()
		if err := p.Server.Close(); err != nil {
			panic(err)
		}
	})
}

func newBus(t testing.TB, opt Options) *Bus {
	t.Helper()
	opt.PingInterval, opt.ConnectTimeout = cmp.Or(opt.PingInterval, time.Hour), cmp.Or(opt.ConnectTimeout, within)
	b, err := Open(opt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeBus(t, b) })
	return b
}

func closeBus(t testing.TB, b *Bus) {
	t.Helper()
	if err := b.Close(ctxOf(t, within)); err != nil {
		t.Errorf("close: %v", err)
	}
}

// rawClient is a connection of an agent that has proved itself.
func rawClient(t testing.TB, p *port, i *Identity, k secrets, r right) net.Conn {
	t.Helper()
	conn, err := dialClient(t, p, i, k, r)
	if err != nil {
		t.Fatal(err)
	}
	_ = conn.SetDeadline(time.Now().Add(within))
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

func dialClient(t testing.TB, p *port, i *Identity, k secrets, r right) (net.Conn, error) {
	t.Helper()
	e := &clientHandshake{self: i, secrets: k, right: r}
	return dialUpgrade(Address{Host: p.addr, Name: "127.0.0.1"}, nil, nil, e)(ctxOf(t, within))
}

// natsClient is a NATS client of an agent that has proved itself.
func natsClient(t testing.TB, p *port, i *Identity, k secrets, r right) *nats.Conn {
	t.Helper()
	e := &clientHandshake{self: i, secrets: k, right: r}
	d := newDialer(within, dialUpgrade(Address{Host: p.addr, Name: "127.0.0.1"}, nil, nil, e))
	if err := d.prepare(); err != nil {
		t.Fatal(err)
	}
	nc, err := nats.Connect("nats://"+p.addr, nats.CustomInboxPrefix(inboxOf(e.id())+".box"), nats.NoReconnect(), nats.SetCustomDialer(d),
		nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	return nc
}

func agent(id, engine string) *wire.Agent {
	if len(id) != len(NewIdentity().ID()) && !strings.Contains(id, keySeparator) { // a test's name
		id = string(named(id).ID())
	}
	return &wire.Agent{Version: wire.Version, ID: id, EngineID: engine, Model: "m", DType: "bf16", BlockTokens: 16,
		Endpoints: []wire.Endpoint{{Transport: "tcp", Address: ":7000"}},
		Shapes:    []wire.Shape{{Name: "layers.0", BlockStride: 4096, BlockBytes: 4096, NumBlocks: 10}}}
}

func hello(id string) *wire.Request {
	return &wire.Request{Kind: wire.KindHello, From: id, Hello: agent(id, "")}
}

// serve answers every request with "ID via VIA: hello SENDER".
func serve(b *Bus) {
	b.Serve(func(via core.Via, req *wire.Request) *wire.Reply {
		return &wire.Reply{Reason: shortName(b.opt.Identity.ID()) + " via " + string(via) + ": hello " + shortName(req.From)}
	})
}

func register(t testing.TB, b *Bus, engine string) {
	t.Helper()
	if err := b.Register(ctxOf(t, within), agent(string(b.opt.Identity.ID()), engine)); err != nil {
		t.Fatal(err)
	}
}

// ask sends a hello and checks who answered.
func ask(t testing.TB, b *Bus, via core.Via, to core.AgentID, want string) {
	t.Helper()
	r, err := b.Request(ctxOf(t, within), via, reach(b, string(to)), hello(string(b.opt.Identity.ID())))
	for end := time.Now().Add(within); errors.Is(err, core.ErrAway) && time.Now().Before(end); { // another server of a cluster may not know yet where an agent is
		r, err = b.Request(ctxOf(t, within), via, reach(b, string(to)), hello(string(b.opt.Identity.ID())))
	}
	if err != nil {
		t.Fatal(err)
	}
	if r.Code != 0 || r.Reason != want {
		t.Fatalf("reply %+v, want %q", r, want)
	}
}

// pair is a prefill agent "P" of engine "e" and a decode agent "D" that knows it.
func pair(t testing.TB) (p *port, prefill, decode *Bus, via core.Via) {
	t.Helper()
	p = newPort(t, "127.0.0.1:0", ServerOptions{})
	prefill = newBus(t, Options{Identity: named("P"), Server: p.Server})
	serve(prefill)
	register(t, prefill, "e")
	decode = newBus(t, Options{Identity: named("D")})
	serve(decode)
	_, via, err := decode.Lookup(ctxOf(t, within), core.Target{Bootstrap: p.url(), EngineID: "e"})
	if err != nil {
		t.Fatal(err)
	}
	return p, prefill, decode, via
}

func mustBe(t testing.TB, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("error %v, want one that is %q", err, want)
	}
}

func observed() (*zap.Logger, *observer.ObservedLogs) {
	c, logs := observer.New(zapcore.DebugLevel)
	return zap.New(c), logs
}

// proxy is a TCP proxy that can stop to carry bytes without closing anything.
type proxy struct {
	net.Listener
	frozen atomic.Bool
	mu     sync.Mutex
	conns  []net.Conn
	wg     sync.WaitGroup
}

func newProxy(t testing.TB, to string) *proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{Listener: l}
	p.wg.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", to)
			if err != nil {
				_ = in.Close()
				continue
			}
			p.mu.Lock()
			p.conns = append(p.conns, in, out)
			p.mu.Unlock()
			p.wg.Go(func() { p.copy(in, out) })
			p.wg.Go(func() { p.copy(out, in) })
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		p.cut()
		p.wg.Wait()
	})
	return p
}

// accepted is how many connections have come.
func (p *proxy) accepted() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.conns) / 2
}

// cut ends all connections that have come.
func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.conns {
		_ = c.Close()
	}
}

func (p *proxy) copy(dst, src net.Conn) {
	defer func() { _ = dst.Close() }()
	buf := make([]byte, 64<<10)
	for {
		n, err := src.Read(buf)
		if err != nil {
			return
		}
		if p.frozen.Load() {
			continue
		}
		if _, err := dst.Write(buf[:n]); err != nil {
			return
		}
	}
}

func TestMain(m *testing.M) {
	serveUntilKilled()
	os.Exit(nettest.Main(m))
}
