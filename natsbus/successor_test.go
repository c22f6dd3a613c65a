package natsbus

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/wire"
)

func TestDeadServerAndItsSuccessor(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{})
	prefill := newBus(t, Options{Identity: named("P"), Server: p.Server})
	asked, hold := make(chan struct{}), make(chan struct{})
	prefill.Serve(func(core.Via, *wire.Request) *wire.Reply { asked <- struct{}{}; <-hold; return &wire.Reply{} })
	register(t, prefill, "e")
	decode := newBus(t, Options{Identity: named("D")})
	serve(decode)
	target := core.Target{Bootstrap: p.url(), EngineID: "e"}
	_, via, err := decode.Lookup(ctxOf(t, within), target)
	if err != nil {
		t.Fatal(err)
	}
	failed := make(chan error, 1)
	go func() {
		_, err := decode.Request(ctxOf(t, within), via, reach(decode, "P"), hello("D"))
		failed <- err
	}()
	<-asked
	p.stop()
	mustBe(t, <-failed, core.ErrUnreachable)
	_, err = decode.Request(ctxOf(t, within), via, reach(decode, "P"), hello("D"))
	mustBe(t, err, core.ErrUnreachable)
	_, _, err = decode.Lookup(ctxOf(t, 300*time.Millisecond), target)
	mustBe(t, err, core.ErrUnreachable)
	if !strings.Contains(err.Error(), p.addr) {
		t.Errorf("error %q does not name %s", err, p.addr)
	}
	close(hold)
	closeBus(t, prefill)

	// The engine starts again on the same port, as another agent.
	p2 := newPort(t, p.addr, ServerOptions{})
	prefill2 := newBus(t, Options{Identity: named("P2"), Server: p2.Server})
	serve(prefill2)
	register(t, prefill2, "e")
	a, via, err := decode.Lookup(ctxOf(t, within), target)
	if err != nil || shortName(a.ID) != "P2" {
		t.Fatalf("looked up %+v, %v", a, err)
	}
	ask(t, decode, via, "P2", "P2 via : hello D")
	ask(t, prefill2, "", "D", "D via "+p.url()+": hello P2")
	_, err = decode.Request(ctxOf(t, within), via, reach(decode, "P"), hello("D"))
	mustBe(t, err, core.ErrAbsent)
}

// A peer whose host stops answers nothing and closes nothing.
func TestSilentServer(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{})
	prefill := newBus(t, Options{Identity: named("P"), Server: p.Server})
	serve(prefill)
	register(t, prefill, "e")
	px := newProxy(t, p.addr)
	decode := newBus(t, Options{Identity: named("D"), ConnectTimeout: time.Hour, PingInterval: time.Second})
	target := core.Target{Bootstrap: "http://" + px.Addr().String(), EngineID: "e"}
	_, via, err := decode.Lookup(ctxOf(t, within), target)
	if err != nil {
		t.Fatal(err)
	}
	before := px.accepted()
	px.frozen.Store(true)
	_, err = decode.Request(ctxOf(t, within), via, reach(decode, "P"), hello("D"))
	mustBe(t, err, core.ErrUnreachable) // by the link's pings: else it is the context's error
	eventually(t, "a dial", func() error {
		if px.accepted() == before {
			return errors.New("no connection")
		}
		return nil
	})
	// That dial takes ConnectTimeout, and nothing waits for it.
	_, err = decode.Request(ctxOf(t, within), via, reach(decode, "P"), hello("D"))
	mustBe(t, err, core.ErrUnreachable)
	px.frozen.Store(false)
	px.cut()
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
	decode := newBus(t, Options{Identity: named("D"), ConnectTimeout: time.Hour})
	failed := make(chan error, 1)
	go func() {
		_, _, err := decode.Lookup(ctxOf(t, 3*within), core.Target{Bootstrap: "http://" + px.Addr().String()})
		failed <- err
	}()
	eventually(t, "dial", func() error {
		if px.accepted() == 0 {
			return errors.New("no connection")
		}
		return nil
	})
	closeBus(t, decode) // it waits for no dial
	if err := <-failed; err == nil {
		t.Error("a Lookup succeeded at a server that does not answer")
	}
}

func TestUnreachableAddresses(t *testing.T) {
	leaktest.Check(t)
	closed := "http://" + freeAddr(t)
	other := &http.Server{Handler: http.NotFoundHandler()}
	ol, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = other.Serve(ol) }()
	t.Cleanup(func() { _ = other.Close() })
	silent := newProxy(t, ol.Addr().String())
	silent.frozen.Store(true)

	shortWait, longWait := newBus(t, Options{Identity: named("D"), ConnectTimeout: 300 * time.Millisecond}), newBus(t, Options{Identity: named("D2"), ConnectTimeout: within})
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
		d := longWait
		if addr == "http://"+silent.Addr().String() {
			d = shortWait
		}
		_, _, err := d.Lookup(ctxOf(t, within), core.Target{Bootstrap: addr})
		if !errors.Is(err, core.ErrUnreachable) {
			t.Errorf("%.40s: error %v", addr, err)
			continue
		}
		if len(addr) < 512 && (!strings.Contains(err.Error(), strings.TrimPrefix(addr, "http://")) || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: error %q, want %q in it", addr, err, want)
		}
	}
	eventually(t, "no link is kept", func() error {
		for _, d := range []*Bus{shortWait, longWait} {
			d.mu.Lock()
			left := len(d.links)
			d.mu.Unlock()
			if left != 0 {
				return fmt.Errorf("%d links", left)
			}
		}
		return nil
	})
	for _, u := range []string{"http://h:1", "h", "nats://h:1,x", "nats://u:secret@", "nats://u:secret@h:%zz"} {
		if b, err := Open(Options{Identity: named("D"), ClusterURL: u}); err == nil || strings.Contains(err.Error(), "secret") {
			t.Errorf("cluster %q: %v", u, err)
			if err == nil {
				closeBus(t, b)
			}
		}
	}
	_, err = Open(Options{Identity: named("D"), ClusterURL: "nats://" + strings.TrimPrefix(closed, "http://")})
	mustBe(t, err, core.ErrUnreachable)
}
