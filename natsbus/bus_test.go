package natsbus

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/safe"
	"github.com/kvconn/kvconn/rig/leaktest"
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
	prefill := newBus(t, Options{Identity: named("P"), Server: p.Server})
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
		if _, err := prefill.Request(ctxOf(t, within), "", reach(prefill, "P"), hello("P")); err != nil {
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
	prefill := newBus(t, Options{Identity: named("P"), Server: p.Server})
	serve(prefill)
	register(t, prefill, "e")
	decode := newBus(t, Options{Identity: named("D")})
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
		a := newBus(t, Options{Identity: named(id), Server: p.Server})
		serve(a)
		register(t, a, id)
		ask(t, decode, via, core.AgentID(id), id+" via : hello D")
		closeBus(t, a)
		_, err := decode.Request(ctxOf(t, within), via, core.AgentID(id), hello("D"))
		mustBe(t, err, core.ErrAbsent) // by an answer: without one it is the context's error
		_, _, err = decode.Lookup(ctxOf(t, within), core.Target{Bootstrap: p.url(), EngineID: id})
		mustBe(t, err, core.ErrNotRegistered)
	}
}

func TestHandlerPanic(t *testing.T) {
	leaktest.Check(t)
	var mu sync.Mutex
	var told []any
	safe.SetHandler(func(_ string, cause any, _ []byte) { mu.Lock(); told = append(told, cause); mu.Unlock() })
	p := newPort(t, "127.0.0.1:0", ServerOptions{})
	b := newBus(t, Options{Identity: named("P"), Server: p.Server})
	b.Serve(func(_ core.Via, req *wire.Request) *wire.Reply {
		switch shortName(req.Hello.ID) {
		case "panic":
			panic("boom")
		case "nil":
			return nil
		}
		return &wire.Reply{Reason: strings.Repeat("ü", 600)} // over the limit
	})
	for range 2 * maxHandlers { // a panic gives its place back
		r, err := b.Request(ctxOf(t, within), "", reach(b, "P"), hello("panic"))
		if err != nil || r.Code != int(core.Failed) {
			t.Fatalf("%+v, %v", r, err)
		}
	}
	mu.Lock()
	if len(told) != 2*maxHandlers || told[0] != "boom" {
		t.Errorf("told of %v", told)
	}
	mu.Unlock()
	if r, err := b.Request(ctxOf(t, within), "", reach(b, "P"), hello("nil")); err != nil || r.Code != int(core.Failed) {
		t.Errorf("%+v, %v", r, err)
	}
	if r, err := b.Request(ctxOf(t, within), "", reach(b, "P"), hello("long")); err != nil || r.Code != 0 || len(r.Reason) != 1024 {
		t.Errorf("%+v, %v", r, err)
	}
}

func TestOverload(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{})
	b := newBus(t, Options{Identity: named("P"), Server: p.Server})
	running, hold := make(chan struct{}, maxHandlers), make(chan struct{})
	b.Serve(func(core.Via, *wire.Request) *wire.Reply { running <- struct{}{}; <-hold; return &wire.Reply{} })
	var wg sync.WaitGroup
	for range maxHandlers {
		wg.Go(func() {
			if r, err := b.Request(ctxOf(t, within), "", reach(b, "P"), hello("D")); err != nil || r.Code != 0 {
				t.Errorf("%+v, %v", r, err)
			}
		})
	}
	for range maxHandlers {
		<-running
	}
	r, err := b.Request(ctxOf(t, within), "", reach(b, "P"), hello("D"))
	if err != nil || r.Code != int(core.Refused) || !strings.Contains(r.Reason, "overloaded") {
		t.Errorf("%+v, %v", r, err)
	}

	close(hold)
	wg.Wait()
}

// TestCloseIsBounded: an agent that is told to close soon does not wait for its handlers, and says how many requests they have.
func TestCloseIsBounded(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{})
	prefill, err := Open(Options{Identity: named("P"), Server: p.Server})
	if err != nil {
		t.Fatal(err)
	}
	running, hold := make(chan struct{}), make(chan struct{})
	prefill.Serve(func(core.Via, *wire.Request) *wire.Reply { running <- struct{}{}; <-hold; return &wire.Reply{} })
	d := newBus(t, Options{Identity: named("D"), Server: p.Server})
	ctx, cancel := context.WithCancel(context.Background())
	failed := make(chan error, 2)
	for _, req := range []*wire.Request{hello("D"), longHello("D")} {
		go func() {
			_, err := d.Request(ctx, "", reach(d, "P"), req)
			failed <- err
		}()
		<-running
	}
	err = prefill.Close(ctxOf(t, 50*time.Millisecond))
	mustBe(t, err, context.DeadlineExceeded)
	if !strings.Contains(err.Error(), "while 2 requests") {
		t.Errorf("%v; a short and a long one are being answered", err)
	}
	cancel()
	mustBe(t, <-failed, context.Canceled)
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
	_, err := decode.Request(ctxOf(t, within), via, reach(decode, "P"), req)
	if err == nil || !strings.Contains(err.Error(), "8388608") {
		t.Fatalf("error %v names no limit", err)
	}
	// One that the server carries and the receiver refuses.
	req.Hello.Shapes = req.Hello.Shapes[:4<<10]
	r, err := decode.Request(ctxOf(t, within), via, reach(decode, "P"), req)
	if err != nil || r.Code != int(core.Refused) || !strings.Contains(r.Reason, "region name") {
		t.Fatalf("%+v, %v", r, err)
	}
	for i := range req.Hello.Shapes { // 1 MiB and more is fine
		req.Hello.Shapes[i].Name = strings.Repeat("x", 256)
	}
	ask(t, decode, via, "P", "P via : hello D")
	if r, err := decode.Request(ctxOf(t, within), via, reach(decode, "P"), req); err != nil || r.Code != 0 {
		t.Fatalf("%+v, %v", r, err)
	}
}

func TestGarbage(t *testing.T) {
	leaktest.Check(t)
	_, prefill, decode, via := pair(t)
	nc := prefill.homeLink().nc
	for _, garbage := range []string{"", "garbage", "\x81", "\xff\xff\xff\xff", "\xdd\xff\xff\xff\xff", string(make([]byte, 1<<20))} {
		m, err := nc.RequestWithContext(ctxOf(t, within), subject(named("P").ID(), named("P").ID()), []byte(garbage))
		if err != nil {
			t.Fatal(err)
		}
		var r wire.Reply
		if err := wire.Decode(m.Data, &r); err != nil || r.Code != int(core.Refused) || r.Reason == "" {
			t.Errorf("%.10q: %+v, %v", garbage, r, err)
		}
		if err := nc.Publish(subject(named("P").ID(), named("P").ID()), []byte(garbage)); err != nil { // nobody to answer
			t.Fatal(err)
		}
	}
	ask(t, decode, via, "P", "P via : hello D")

	// A garbled reply is an error, not a reply.
	sub, err := nc.QueueSubscribe(subject(named("G").ID(), "*"), "agent", garble)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sub.Unsubscribe() }()
	if r, err := prefill.Request(ctxOf(t, within), "", reach(prefill, "G"), hello("P")); err == nil {
		t.Errorf("garbage is read as %+v", r)
	}
	// Ids that would reach other subjects.
	for _, id := range []core.AgentID{"", ">", "*", "a.b", "a b", "a\r\nPUB x 0\r\n"} {
		if _, err := prefill.Request(ctxOf(t, within), "", id, hello("P")); err == nil || errors.Is(err, core.ErrAbsent) {
			t.Errorf("request to %q: %v", string(id), err)
		}
	}
	// An entry of the registry that is none.
	if _, err := prefill.homeLink().js.Publish(ctxOf(t, within), rankKey("bad", 0, 0), []byte("garbage")); err != nil {
		t.Fatal(err)
	}
	if _, _, err := decode.Lookup(ctxOf(t, within), core.Target{Bootstrap: string(via), EngineID: "bad"}); err == nil || !strings.Contains(err.Error(), `"bad"`) {
		t.Errorf("a garbled entry gives %v", err)
	}
}

func TestClosedBus(t *testing.T) {
	leaktest.Check(t)
	p, prefill, decode, via := pair(t)
	closeBus(t, decode)
	closeBus(t, decode)
	if _, _, err := decode.Lookup(ctxOf(t, within), core.Target{Bootstrap: p.url()}); !errors.Is(err, errClosed) {
		t.Errorf("lookup: %v", err)
	}
	if _, err := decode.Request(ctxOf(t, within), via, reach(decode, "P"), hello("D")); !errors.Is(err, errClosed) {
		t.Errorf("request: %v", err)
	}
	_, err := prefill.Request(ctxOf(t, within), "", reach(prefill, "D"), hello("P"))
	mustBe(t, err, core.ErrAbsent)
	p.stop()
	if _, err := os.Stat(p.store.dir); !os.IsNotExist(err) {
		t.Errorf("%s is left: %v", p.store.dir, err)
	}
	if err := p.Server.Close(); err != nil {
		t.Error(err)
	}
}

func BenchmarkRequest(b *testing.B) {
	_, prefill, decode, via := pair(b)
	for name, from := range map[string]struct {
		bus *Bus
		via core.Via
		to  core.AgentID
	}{"decode-to-prefill": {decode, via, reach(decode, "P")}, "prefill-to-decode": {prefill, "", reach(prefill, "D")}} {
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
