package natsbus

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/leaktest"
	"github.com/kvconn/kvconn/internal/safe"
	"github.com/kvconn/kvconn/wire"
)

func TestBothDirectionsOverOnePort(t *testing.T) {
	leaktest.Check(t)
	p, prefill, decode, via := pair(t)
	if want := core.Via(p.url()); via != want {
		t.Fatalf("via %q, want %q", via, want)
	}
	a, _, err := decode.Lookup(ctxOf(t, within), core.Target{Bootstrap: p.url() + "/", EngineID: "e"})
	if err != nil {
		t.Fatal(err)
	}
	if want := agent("P", "e"); !reflect.DeepEqual(a, want) {
		t.Fatalf("looked up %+v, want %+v", a, want)
	}
	ask(t, decode, via, "P", "P via : hello D")
	ask(t, prefill, "", "D", "D via "+p.url()+": hello P")
	// Its own registry, without an address and by its own port.
	for _, addr := range []string{"", p.url()} {
		if _, via, err = prefill.Lookup(ctxOf(t, within), core.Target{Bootstrap: addr}); err != nil || string(via) != addr {
			t.Fatalf("own lookup at %q: via %q, %v", addr, via, err)
		}
	}
}

// Two links to one server must not bring a request twice.
func TestAtMostOnce(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{})
	prefill := newBus(t, Options{AgentID: "P", Server: p.Server})
	calls := make(chan struct{}, 100)
	prefill.Serve(func(core.Via, *wire.Request) *wire.Reply {
		calls <- struct{}{}
		return &wire.Reply{}
	})
	register(t, prefill, "e")
	_, port, _ := net.SplitHostPort(p.addr)
	for _, addr := range []string{p.url(), "http://localhost:" + port} {
		if _, _, err := prefill.Lookup(ctxOf(t, within), core.Target{Bootstrap: addr}); err != nil {
			t.Fatal(err)
		}
	}
	for range 20 {
		if _, err := prefill.Request(ctxOf(t, within), "", "P", hello("P")); err != nil {
			t.Fatal(err)
		}
	}
	closeBus(t, prefill) // waits for all handlers
	if len(calls) != 20 {
		t.Fatalf("20 requests called the handler %d times", len(calls))
	}
}

func TestIPv6(t *testing.T) {
	leaktest.Check(t)
	if l, err := net.Listen("tcp", "[::1]:0"); err != nil {
		t.Skip("this machine has no IPv6: ", err)
	} else {
		_ = l.Close()
	}
	p := newPort(t, "[::1]:0", ServerOptions{})
	prefill := newBus(t, Options{AgentID: "P", Server: p.Server})
	serve(prefill)
	register(t, prefill, "e")
	decode := newBus(t, Options{AgentID: "D"})
	_, via, err := decode.Lookup(ctxOf(t, within), core.Target{Bootstrap: p.url()})
	if err != nil {
		t.Fatal(err)
	}
	ask(t, decode, via, "P", "P via : hello D")
}

func TestAbsentAgentIsKnownAtOnce(t *testing.T) {
	leaktest.Check(t)
	p, _, decode, via := pair(t)
	for i := range 20 { // also in the moment after Close
		id := fmt.Sprint("A", i)
		a := newBus(t, Options{AgentID: core.AgentID(id), Server: p.Server})
		serve(a)
		register(t, a, id)
		ask(t, decode, via, core.AgentID(id), id+" via : hello D")
		closeBus(t, a)
		begin := time.Now()
		_, err := decode.Request(ctxOf(t, within), via, core.AgentID(id), hello("D"))
		mustBe(t, err, core.ErrAbsent)
		if d := time.Since(begin); d > time.Second {
			t.Errorf("it took %v to know that nobody listens", d)
		}
		_, _, err = decode.Lookup(ctxOf(t, within), core.Target{Bootstrap: p.url(), EngineID: id})
		mustBe(t, err, core.ErrNotRegistered)
	}
}

func TestDeadServerAndItsSuccessor(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{})
	prefill := newBus(t, Options{AgentID: "P", Server: p.Server})
	asked, hold := make(chan struct{}), make(chan struct{})
	prefill.Serve(func(core.Via, *wire.Request) *wire.Reply { asked <- struct{}{}; <-hold; return &wire.Reply{} })
	register(t, prefill, "e")
	decode := newBus(t, Options{AgentID: "D"})
	serve(decode)
	target := core.Target{Bootstrap: p.url(), EngineID: "e"}
	_, via, err := decode.Lookup(ctxOf(t, within), target)
	if err != nil {
		t.Fatal(err)
	}
	failed := make(chan error, 1)
	go func() {
		_, err := decode.Request(ctxOf(t, within), via, "P", hello("D"))
		failed <- err
	}()
	<-asked
	begin := time.Now()
	p.stop()
	mustBe(t, <-failed, core.ErrUnreachable)
	_, err = decode.Request(ctxOf(t, within), via, "P", hello("D"))
	mustBe(t, err, core.ErrUnreachable)
	_, _, err = decode.Lookup(ctxOf(t, 300*time.Millisecond), target)
	mustBe(t, err, core.ErrUnreachable)
	if !strings.Contains(err.Error(), p.addr) {
		t.Errorf("error %q does not name %s", err, p.addr)
	}
	if d := time.Since(begin); d > 3*time.Second {
		t.Errorf("it took %v to know that the server is dead", d)
	}
	close(hold)
	closeBus(t, prefill)

	// The engine starts again on the same port, as another agent.
	p2 := newPort(t, p.addr, ServerOptions{})
	prefill2 := newBus(t, Options{AgentID: "P2", Server: p2.Server})
	serve(prefill2)
	register(t, prefill2, "e")
	a, via, err := decode.Lookup(ctxOf(t, within), target)
	if err != nil || a.ID != "P2" {
		t.Fatalf("looked up %+v, %v", a, err)
	}
	ask(t, decode, via, "P2", "P2 via : hello D")
	ask(t, prefill2, "", "D", "D via "+p.url()+": hello P2")
	_, err = decode.Request(ctxOf(t, within), via, "P", hello("D"))
	mustBe(t, err, core.ErrAbsent)
}

// A peer whose host stops answers nothing and closes nothing.
func TestSilentServer(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{})
	prefill := newBus(t, Options{AgentID: "P", Server: p.Server})
	serve(prefill)
	register(t, prefill, "e")
	px := newProxy(t, p.addr)
	decode := newBus(t, Options{AgentID: "D", ConnectTimeout: time.Second})
	target := core.Target{Bootstrap: "http://" + px.Addr().String(), EngineID: "e"}
	_, via, err := decode.Lookup(ctxOf(t, within), target)
	if err != nil {
		t.Fatal(err)
	}
	px.frozen.Store(true)
	begin := time.Now()
	_, err = decode.Request(ctxOf(t, within), via, "P", hello("D"))
	mustBe(t, err, core.ErrUnreachable)
	if d := time.Since(begin); d > 5*time.Second {
		t.Errorf("it took %v to know that the server is silent", d)
	}
	// Nothing waits for the dials that nats.go makes meanwhile.
	for range 20 {
		begin = time.Now()
		_, err = decode.Request(ctxOf(t, within), via, "P", hello("D"))
		mustBe(t, err, core.ErrUnreachable)
		if d := time.Since(begin); d > 200*time.Millisecond {
			t.Fatalf("a request on a broken link took %v", d)
		}
		time.Sleep(20 * time.Millisecond) // spread over the dials
	}
	px.frozen.Store(false)
	if _, _, err = decode.Lookup(ctxOf(t, within), target); err != nil {
		t.Fatal(err)
	}
	ask(t, decode, via, "P", "P via : hello D")
}

func TestCloseWhileTheServerIsSilent(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{})
	px := newProxy(t, p.addr)
	px.frozen.Store(true)
	decode := newBus(t, Options{AgentID: "D", ConnectTimeout: within})
	failed := make(chan error, 1)
	go func() {
		_, _, err := decode.Lookup(ctxOf(t, within), core.Target{Bootstrap: "http://" + px.Addr().String()})
		failed <- err
	}()
	eventually(t, "dial", func() error {
		px.mu.Lock()
		defer px.mu.Unlock()
		if len(px.conns) == 0 {
			return errors.New("no connection")
		}
		return nil
	})
	begin := time.Now()
	closeBus(t, decode)
	if err := <-failed; err == nil {
		t.Error("a Lookup succeeded at a server that does not answer")
	}
	if d := time.Since(begin); d > 3*time.Second {
		t.Errorf("Close took %v", d)
	}
}

func TestRegistrationEndsWithItsAgent(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{})
	prefill := newBus(t, Options{AgentID: "P", Server: p.Server, TTL: time.Second})
	register(t, prefill, "e")
	lookup := func() error {
		_, _, err := prefill.Lookup(ctxOf(t, within), core.Target{EngineID: "e"})
		return err
	}
	// It lives longer than its TTL while it is renewed.
	for end := time.Now().Add(2500 * time.Millisecond); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if err := lookup(); err != nil {
			t.Fatal(err)
		}
	}
	prefill.mu.Lock()
	reg := prefill.reg
	prefill.mu.Unlock()
	reg.stop()
	<-reg.done
	begin := time.Now()
	eventually(t, "end of the entry", func() error {
		if err := lookup(); !errors.Is(err, core.ErrNotRegistered) {
			return fmt.Errorf("lookup gives %v", err)
		}
		return nil
	})
	t.Logf("it ended %v after the last renewal could be", time.Since(begin))
}

func TestNewestAgentWins(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{})
	log, logs := observed()
	oldBus := newBus(t, Options{AgentID: "old", Server: p.Server, TTL: time.Second, Logger: log})
	newer := newBus(t, Options{AgentID: "new", Server: p.Server, TTL: time.Second, Logger: log})
	register(t, oldBus, "e")
	register(t, newer, "e")
	who := func() string {
		a, _, err := newer.Lookup(ctxOf(t, within), core.Target{EngineID: "e"})
		if err != nil {
			return err.Error()
		}
		return a.ID
	}
	eventually(t, "the old agent's warning", func() error {
		if who() != "new" {
			t.Fatalf("the rank belongs to %s", who())
		}
		if n := logs.FilterMessageSnippet("new").FilterMessageSnippet("old").Len(); n < 2 {
			return fmt.Errorf("%d warnings name both agents", n)
		}
		return nil
	})
	// All lost the bucket: the order is still the same.
	if err := newer.homeLink().js.DeleteKeyValue(ctxOf(t, within), bucket); err != nil {
		t.Fatal(err)
	}
	oldBus.renewNow()
	eventually(t, "the new agent again", func() error {
		newer.renewNow()
		if w := who(); w != "new" {
			return errors.New(w)
		}
		return nil
	})
	// The old one must not take the new one's entry along.
	closeBus(t, oldBus)
	if who() != "new" {
		t.Fatalf("after the old agent's end the rank belongs to %s", who())
	}
}

func TestOldAgentComesBack(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{})
	a := newBus(t, Options{AgentID: "A", Server: p.Server, TTL: time.Second})
	b := newBus(t, Options{AgentID: "B", Server: p.Server, TTL: time.Second})
	register(t, a, "e")
	register(t, b, "e")
	closeBus(t, b)
	eventually(t, "the agent that still lives", func() error {
		_, _, err := a.Lookup(ctxOf(t, within), core.Target{EngineID: "e"})
		return err
	})
}

func TestLookupWithoutEngine(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{})
	first := newBus(t, Options{AgentID: "P1", Server: p.Server})
	ask := func(engine string, tp int) error {
		_, _, err := first.Lookup(ctxOf(t, within), core.Target{EngineID: engine, TPRank: tp})
		return err
	}
	mustBe(t, ask("", 0), core.ErrNotRegistered) // no bucket yet
	odd := "engine/ü *.> \x00"
	register(t, first, odd)
	for _, engine := range []string{"", odd} {
		if err := ask(engine, 0); err != nil {
			t.Fatal(err)
		}
	}
	err := ask("other", 3)
	mustBe(t, err, core.ErrNotRegistered)
	for _, want := range []string{`"other"`, "tp 3", fmt.Sprintf("%q", odd)} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error %q does not name %s", err, want)
		}
	}
	second := newBus(t, Options{AgentID: "P2", Server: p.Server})
	register(t, second, "second")
	err = ask("", 0)
	mustBe(t, err, ErrAmbiguous)
	for _, want := range []string{`"second"`, "P1", "P2"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error %q does not name %s", err, want)
		}
	}
	closeBus(t, second)
	if err := ask("", 0); err != nil {
		t.Errorf("with one engine left: %v", err)
	}
}

func TestRegisterRefusals(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{})
	b := newBus(t, Options{AgentID: "P", Server: p.Server})
	for what, a := range map[string]*wire.Agent{
		"another's id": agent("Q", "e"), "long engine_id": agent("P", strings.Repeat("x", 257)),
	} {
		if err := b.Register(ctxOf(t, within), a); err == nil {
			t.Errorf("%s: registered", what)
		}
	}
	register(t, b, "e")
	if err := b.Register(ctxOf(t, within), agent("P", "f")); err == nil {
		t.Error("registered twice")
	}
	d := newBus(t, Options{AgentID: "D"})
	if err := d.Register(ctxOf(t, within), agent("D", "e")); err == nil {
		t.Error("registered without a server")
	}
	if _, err := d.Request(ctxOf(t, within), "", "P", hello("D")); !errors.Is(err, core.ErrUnreachable) {
		t.Errorf("request without a server: %v", err)
	}
	if _, _, err := d.Lookup(ctxOf(t, within), core.Target{}); !errors.Is(err, core.ErrUnreachable) {
		t.Errorf("lookup without a server: %v", err)
	}
}

func TestHandlerPanic(t *testing.T) {
	leaktest.Check(t)
	var mu sync.Mutex
	var told []any
	safe.SetHandler(func(_ string, cause any, _ []byte) { mu.Lock(); told = append(told, cause); mu.Unlock() })
	p := newPort(t, "127.0.0.1:0", ServerOptions{})
	b := newBus(t, Options{AgentID: "P", Server: p.Server})
	b.Serve(func(_ core.Via, req *wire.Request) *wire.Reply {
		switch req.From {
		case "panic":
			panic("boom")
		case "nil":
			return nil
		}
		return &wire.Reply{Reason: strings.Repeat("ü", 600)} // over the limit
	})
	for range 2 * maxHandlers { // a panic gives its place back
		r, err := b.Request(ctxOf(t, within), "", "P", hello("panic"))
		if err != nil || r.Code != int(core.Failed) {
			t.Fatalf("%+v, %v", r, err)
		}
	}
	mu.Lock()
	if len(told) != 2*maxHandlers || told[0] != "boom" {
		t.Errorf("told of %v", told)
	}
	mu.Unlock()
	if r, err := b.Request(ctxOf(t, within), "", "P", hello("nil")); err != nil || r.Code != int(core.Failed) {
		t.Errorf("%+v, %v", r, err)
	}
	if r, err := b.Request(ctxOf(t, within), "", "P", hello("long")); err != nil || r.Code != 0 || len(r.Reason) != 1024 {
		t.Errorf("%+v, %v", r, err)
	}
}

func TestOverload(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{})
	b := newBus(t, Options{AgentID: "P", Server: p.Server})
	running, hold := make(chan struct{}, maxHandlers), make(chan struct{})
	b.Serve(func(core.Via, *wire.Request) *wire.Reply { running <- struct{}{}; <-hold; return &wire.Reply{} })
	var wg sync.WaitGroup
	for range maxHandlers {
		wg.Go(func() {
			if r, err := b.Request(ctxOf(t, within), "", "P", hello("D")); err != nil || r.Code != 0 {
				t.Errorf("%+v, %v", r, err)
			}
		})
	}
	for range maxHandlers {
		<-running
	}
	r, err := b.Request(ctxOf(t, within), "", "P", hello("D"))
	if err != nil || r.Code != int(core.Refused) || !strings.Contains(r.Reason, "overloaded") {
		t.Errorf("%+v, %v", r, err)
	}

	close(hold)
	wg.Wait()
}

func TestCloseIsBounded(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{})
	prefill, err := Open(Options{AgentID: "P", Server: p.Server})
	if err != nil {
		t.Fatal(err)
	}
	running, hold := make(chan struct{}), make(chan struct{})
	prefill.Serve(func(core.Via, *wire.Request) *wire.Reply { running <- struct{}{}; <-hold; return &wire.Reply{} })
	d := newBus(t, Options{AgentID: "D", Server: p.Server})
	ctx, cancel := context.WithCancel(context.Background())
	failed := make(chan error, 1)
	go func() {
		_, err := d.Request(ctx, "", "P", hello("D"))
		failed <- err
	}()
	<-running
	mustBe(t, prefill.Close(ctxOf(t, 50*time.Millisecond)), context.DeadlineExceeded)
	cancel()
	mustBe(t, <-failed, context.Canceled)
	close(hold)
}

func TestOversized(t *testing.T) {
	leaktest.Check(t)
	_, _, decode, via := pair(t)
	req := hello("D")
	for range 9 << 10 {
		req.Hello.Shapes = append(req.Hello.Shapes, wire.Shape{Name: strings.Repeat("x", 1024)})
	}
	_, err := decode.Request(ctxOf(t, within), via, "P", req)
	if err == nil || !strings.Contains(err.Error(), "8388608") {
		t.Fatalf("error %v names no limit", err)
	}
	// One that the server carries and the receiver refuses.
	req.Hello.Shapes = req.Hello.Shapes[:4<<10]
	r, err := decode.Request(ctxOf(t, within), via, "P", req)
	if err != nil || r.Code != int(core.Refused) || !strings.Contains(r.Reason, "region name") {
		t.Fatalf("%+v, %v", r, err)
	}
	for i := range req.Hello.Shapes { // 1 MiB and more is fine
		req.Hello.Shapes[i].Name = strings.Repeat("x", 256)
	}
	ask(t, decode, via, "P", "P via : hello D")
	if r, err := decode.Request(ctxOf(t, within), via, "P", req); err != nil || r.Code != 0 {
		t.Fatalf("%+v, %v", r, err)
	}
}

func TestGarbage(t *testing.T) {
	leaktest.Check(t)
	_, prefill, decode, via := pair(t)
	nc := prefill.homeLink().nc
	for _, garbage := range []string{"", "garbage", "\x81", "\xff\xff\xff\xff", "\xdd\xff\xff\xff\xff", string(make([]byte, 1<<20))} {
		m, err := nc.RequestWithContext(ctxOf(t, within), subject("P"), []byte(garbage))
		if err != nil {
			t.Fatal(err)
		}
		var r wire.Reply
		if err := wire.Decode(m.Data, &r); err != nil || r.Code != int(core.Refused) || r.Reason == "" {
			t.Errorf("%.10q: %+v, %v", garbage, r, err)
		}
		if err := nc.Publish(subject("P"), []byte(garbage)); err != nil { // nobody to answer
			t.Fatal(err)
		}
	}
	ask(t, decode, via, "P", "P via : hello D")

	// A garbled reply is an error, not a reply.
	sub, err := nc.QueueSubscribe(subject("G"), "agent", garble)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sub.Unsubscribe() }()
	if r, err := prefill.Request(ctxOf(t, within), "", "G", hello("P")); err == nil {
		t.Errorf("garbage is read as %+v", r)
	}
	// Ids that would reach other subjects.
	for _, id := range []core.AgentID{"", ">", "*", "a.b", "a b", "a\r\nPUB x 0\r\n"} {
		if _, err := prefill.Request(ctxOf(t, within), "", id, hello("P")); err == nil || errors.Is(err, core.ErrAbsent) {
			t.Errorf("request to %q: %v", string(id), err)
		}
		if b, err := Open(Options{AgentID: id}); err == nil {
			t.Errorf("opened as %q", string(id))
			closeBus(t, b)
		}
	}
	// An entry of the registry that is none.
	if _, err := prefill.homeLink().js.Publish(ctxOf(t, within), rankKey("bad", 0, 0, 0), []byte("garbage")); err != nil {
		t.Fatal(err)
	}
	if _, _, err := decode.Lookup(ctxOf(t, within), core.Target{Bootstrap: string(via), EngineID: "bad"}); err == nil || !strings.Contains(err.Error(), `"bad"`) {
		t.Errorf("a garbled entry gives %v", err)
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

func TestUnreachableAddresses(t *testing.T) {
	leaktest.Check(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed := "http://" + l.Addr().String()
	_ = l.Close()
	other := &http.Server{Handler: http.NotFoundHandler()}
	ol, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = other.Serve(ol) }()
	t.Cleanup(func() { _ = other.Close() })
	silent := newProxy(t, ol.Addr().String())
	silent.frozen.Store(true)

	d := newBus(t, Options{AgentID: "D", ConnectTimeout: 300 * time.Millisecond})
	for addr, want := range map[string]string{
		closed:                             "refused",
		"http://" + ol.Addr().String():     "404",
		"http://" + silent.Addr().String(): "", // either bound may be the first
		"https://" + ol.Addr().String():    "speaks no TLS",
		"h:1":                              "http://",
		"http://h":                         "no port",
		"http://:1":                        "no host",
		"http://h:1/x":                     "more than",
		"http://u@h:1":                     "more than",
		"http://h:x":                       "port",
		"http://[::1:1":                    "']'",
		"nats://h:1":                       "http://",
		"%":                                "%",
		"http://" + strings.Repeat("h", 600) + ":1": "600", // with its port and scheme 609
	} {
		begin := time.Now()
		_, _, err := d.Lookup(ctxOf(t, within), core.Target{Bootstrap: addr})
		if !errors.Is(err, core.ErrUnreachable) {
			t.Errorf("%.40s: error %v", addr, err)
			continue
		}
		if len(addr) < 512 && (!strings.Contains(err.Error(), strings.TrimPrefix(addr, "http://")) || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: error %q, want %q in it", addr, err, want)
		}
		if took := time.Since(begin); took > 2*time.Second {
			t.Errorf("%s: it took %v", addr, took)
		}
	}
	eventually(t, "no link is kept", func() error {
		d.mu.Lock()
		defer d.mu.Unlock()
		if len(d.links) != 0 {
			return fmt.Errorf("%d links", len(d.links))
		}
		return nil
	})
	for _, u := range []string{"http://h:1", "h", "nats://h:1,x", "nats://u:secret@", "nats://u:secret@h:%zz"} {
		if b, err := Open(Options{AgentID: "D", ClusterURL: u}); err == nil || strings.Contains(err.Error(), "secret") {
			t.Errorf("cluster %q: %v", u, err)
			if err == nil {
				closeBus(t, b)
			}
		}
	}
	_, err = Open(Options{AgentID: "D", ClusterURL: "nats://" + strings.TrimPrefix(closed, "http://")})
	mustBe(t, err, core.ErrUnreachable)
}

func TestOneLinkForAll(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{})
	prefill := newBus(t, Options{AgentID: "P", Server: p.Server})
	register(t, prefill, "e")
	d := newBus(t, Options{AgentID: "D"})
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			if _, _, err := d.Lookup(ctxOf(t, within), core.Target{Bootstrap: p.url()}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.conns) != 1 {
		t.Errorf("%d connections to one address", len(p.conns))
	}
}

func TestUnusedLinkIsDropped(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{})
	prefill := newBus(t, Options{AgentID: "P", Server: p.Server})
	register(t, prefill, "e")
	decode := newBus(t, Options{AgentID: "D", linkIdle: 300 * time.Millisecond})
	_, via, err := decode.Lookup(ctxOf(t, within), core.Target{Bootstrap: p.url()})
	if err != nil {
		t.Fatal(err)
	}
	p.stop()
	eventually(t, "drop", func() error {
		if decode.hasLink(via) {
			return errors.New("the link is still there")
		}
		return nil
	})
	_, err = decode.Request(ctxOf(t, within), via, "P", hello("D"))
	mustBe(t, err, core.ErrUnreachable)
}

func (b *Bus) hasLink(via core.Via) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.links[via] != nil
}

// nats.go gives a connection up for ever on some errors of a server.
func TestHomeIsOpenedAgain(t *testing.T) {
	leaktest.Check(t)
	_, prefill, decode, via := pair(t)
	prefill.homeLink().nc.Close()
	eventually(t, "the way back", func() error {
		_, err := decode.Request(ctxOf(t, 200*time.Millisecond), via, "P", hello("D")) // one may be lost on its way
		return err
	})
	decode.linkOf(via).nc.Close()
	if _, err := decode.Request(ctxOf(t, within), via, "P", hello("D")); err == nil {
		t.Fatal("a closed connection carries requests")
	}
	eventually(t, "a new link", func() error {
		_, _, err := decode.Lookup(ctxOf(t, within), core.Target{Bootstrap: string(via)})
		return err
	})
	ask(t, decode, via, "P", "P via : hello D")
}

func (b *Bus) linkOf(via core.Via) *link {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.links[via].link
}

func TestClosedBus(t *testing.T) {
	leaktest.Check(t)
	p, prefill, decode, via := pair(t)
	closeBus(t, decode)
	closeBus(t, decode)
	if _, _, err := decode.Lookup(ctxOf(t, within), core.Target{Bootstrap: p.url()}); !errors.Is(err, errClosed) {
		t.Errorf("lookup: %v", err)
	}
	if _, err := decode.Request(ctxOf(t, within), via, "P", hello("D")); !errors.Is(err, errClosed) {
		t.Errorf("request: %v", err)
	}
	_, err := prefill.Request(ctxOf(t, within), "", "D", hello("P"))
	mustBe(t, err, core.ErrAbsent)
	p.stop()
	if _, err := os.Stat(p.store.dir); !os.IsNotExist(err) {
		t.Errorf("%s is left: %v", p.store.dir, err)
	}
	if err := p.Server.Close(); err != nil {
		t.Error(err)
	}
}

func TestCluster(t *testing.T) {
	leaktest.Check(t)
	c := newCluster(t, "--auth", "right")
	prefill := newBus(t, Options{AgentID: "P", ClusterURL: c.url(), Token: "right", TTL: time.Minute}) // no renewal but that of the return
	serve(prefill)
	register(t, prefill, "e")
	decode := newBus(t, Options{AgentID: "D", ClusterURL: c.url(), Token: "right"})
	serve(decode)
	target := core.Target{Bootstrap: "http://not-used:1", EngineID: "e"}
	a, via, err := decode.Lookup(ctxOf(t, within), target)
	if err != nil || a.ID != "P" || via != "" {
		t.Fatalf("%+v via %q: %v", a, via, err)
	}
	ask(t, decode, "", "P", "P via : hello D")
	ask(t, prefill, "", "D", "D via : hello P")
	_, err = Open(Options{AgentID: "X", ClusterURL: c.url(), Token: "wrong"})
	mustBe(t, err, core.ErrUnreachable)

	c.kill()
	_, _, err = decode.Lookup(ctxOf(t, 200*time.Millisecond), target)
	mustBe(t, err, core.ErrUnreachable)
	_, err = decode.Request(ctxOf(t, within), "", "P", hello("D"))
	mustBe(t, err, core.ErrUnreachable)

	c.start() // with nothing of what it knew
	eventually(t, "the registration comes back", func() error {
		_, _, err := decode.Lookup(ctxOf(t, within), target)
		return err
	})
	ask(t, decode, "", "P", "P via : hello D")
	closeBus(t, prefill)
	_, _, err = decode.Lookup(ctxOf(t, within), target)
	mustBe(t, err, core.ErrNotRegistered)
	_, err = decode.Request(ctxOf(t, within), "", "P", hello("D"))
	mustBe(t, err, core.ErrAbsent)
}

func BenchmarkRequest(b *testing.B) {
	_, prefill, decode, via := pair(b)
	for name, from := range map[string]struct {
		bus *Bus
		via core.Via
		to  core.AgentID
	}{"decode-to-prefill": {decode, via, "P"}, "prefill-to-decode": {prefill, "", "D"}} {
		req := &wire.Request{Kind: wire.KindFinish, From: "D", Finishes: []wire.Finish{{TransferID: "t"}}}
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			ctx := context.Background()
			for b.Loop() {
				if _, err := from.bus.Request(ctx, from.via, from.to, req); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
