package natsbus

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/wire"
)

func TestRegistrationEndsWithItsAgent(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{})
	const ttl = 3 * time.Second
	prefill := newBus(t, Options{Identity: named("P"), Server: p.Server, TTL: ttl})
	register(t, prefill, "e")
	lookup := func() error {
		_, _, err := prefill.Lookup(ctxOf(t, within), core.Target{EngineID: "e"})
		return err
	}
	// Each third of its TTL it is renewed: it is there from one renewal to the seventh after it, and for two TTLs. On a starved machine it
	// may end, and comes back.
	prefill.mu.Lock()
	reg := prefill.reg
	prefill.mu.Unlock()
	renewed, renewals, since := uint64(0), 0, time.Time{}
	for begin := time.Now(); renewals < 7 || time.Since(since) < 2*ttl; time.Sleep(20 * time.Millisecond) {
		err := lookup()
		if err != nil && !errors.Is(err, core.ErrNotRegistered) {
			t.Fatal(err)
		}
		entry, e := prefill.homeLink().readChecked(ctxOf(t, within), reg.key)
		switch {
		case e != nil:
			t.Fatal(e)
		case err != nil || entry.agent == nil:
			renewed, renewals = 0, 0
		case entry.seq > renewed:
			if renewed > 0 {
				renewals++
			} else {
				since = time.Now()
			}
			renewed = entry.seq
		}
		if time.Since(begin) > 4*within {
			t.Fatalf("the entry of an agent that lives was never there from one renewal to the seventh after it: %d", renewals)
		}
	}
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
	oldBus := newBus(t, Options{Identity: named("old"), Server: p.Server, TTL: time.Second, Logger: log})
	newer := newBus(t, Options{Identity: named("new"), Server: p.Server, TTL: time.Minute, Logger: log}) // which a starved machine renews in time
	register(t, oldBus, "e")
	register(t, newer, "e")
	who := func() string {
		a, _, err := newer.Lookup(ctxOf(t, within), core.Target{EngineID: "e"})
		if err != nil {
			return err.Error()
		}
		return shortName(a.ID)
	}
	eventually(t, "the old agent's warning", func() error {
		if w := who(); w != "new" { // on a starved machine its entry may end before it is renewed
			return fmt.Errorf("the rank belongs to %s", w)
		}
		if n := logs.FilterMessageSnippet(string(named("new").ID())).FilterMessageSnippet(string(named("old").ID())).Len(); n < 2 {
			return fmt.Errorf("%d warnings name both agents", n)
		}
		return nil
	})
	// All agents have lost the bucket: their order is still the same.
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
	// The old agent must not take the new agent's entry along.
	closeBus(t, oldBus)
	if who() != "new" {
		t.Fatalf("after the old agent's end the rank belongs to %s", who())
	}
}

func TestOldAgentComesBack(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{})
	a := newBus(t, Options{Identity: named("A"), Server: p.Server, TTL: time.Second})
	b := newBus(t, Options{Identity: named("B"), Server: p.Server, TTL: time.Second})
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
	first := newBus(t, Options{Identity: named("P1"), Server: p.Server})
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
	second := newBus(t, Options{Identity: named("P2"), Server: p.Server})
	register(t, second, "second")
	err = ask("", 0)
	mustBe(t, err, ErrAmbiguous)
	for _, want := range []string{`"second"`, string(named("P1").ID()), string(named("P2").ID())} {
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
	b := newBus(t, Options{Identity: named("P"), Server: p.Server})
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
	d := newBus(t, Options{Identity: named("D")})
	if err := d.Register(ctxOf(t, within), agent("D", "e")); err == nil {
		t.Error("registered without a server")
	}
	if _, err := d.Request(ctxOf(t, within), "", reach(d, "P"), hello("D")); !errors.Is(err, core.ErrUnreachable) {
		t.Errorf("request without a server: %v", err)
	}
	if _, _, err := d.Lookup(ctxOf(t, within), core.Target{}); !errors.Is(err, core.ErrUnreachable) {
		t.Errorf("lookup without a server: %v", err)
	}
}
