package natsbus

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/leaktest"
	"github.com/kvconn/kvconn/wire"
)

// host serves joins as an agent's first rank does.
func host(b *Bus) {
	b.Serve(func(via core.Via, req *wire.Request) *wire.Reply {
		if req.Kind != wire.KindJoin {
			return &wire.Reply{Reason: string(b.opt.AgentID) + " via " + string(via) + ": hello " + req.From}
		}
		j, rep := req.Join, &wire.Reply{}
		var err error
		if j.Leave {
			err = b.Unhost(context.Background(), j.Agent)
		} else {
			rep.Since, err = b.Host(context.Background(), j.Agent, j.New, j.Since)
		}
		if err != nil {
			return refuse("%v", err)
		}
		return rep
	})
}

func rank(id, engine string, dp, tp int) *wire.Agent {
	a := agent(id, engine)
	a.DPRank, a.TPRank, a.Joined = dp, tp, true
	return a
}

func joiner(t testing.TB, id core.AgentID, address string, opt Options) *Bus {
	t.Helper()
	opt.AgentID, opt.Join, opt.JoinTimeout, opt.TTL = id, address, within, time.Second
	b := newBus(t, opt)
	serve(b)
	return b
}

// A rank joins the server of the first one, is found there, and answers there; a
// new server in its place has it again without its doing.
func TestJoin(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{})
	first := newBus(t, Options{AgentID: "P0", Server: p.Server})
	host(first)
	second := joiner(t, "P1", p.url(), Options{})
	if err := second.Register(ctxOf(t, within), rank("P1", "e", 0, 1)); err != nil {
		t.Fatal(err)
	}
	register(t, first, "e")
	d := newBus(t, Options{AgentID: "D"})
	serve(d)
	to := core.Target{Bootstrap: p.url(), EngineID: "e", DPRank: -1, TPRank: 1}
	found := func() error {
		a, via, err := d.Lookup(ctxOf(t, within), to)
		if err == nil && (a.ID != "P1" || !a.Joined) {
			err = fmt.Errorf("found %+v", a)
		}
		if err == nil {
			_, err = d.Request(ctxOf(t, time.Second), via, "P1", hello("D"))
		}
		return err
	}
	if err := found(); err != nil {
		t.Fatal(err)
	}
	ask(t, d, core.Via(p.url()), "P1", "P1 via : hello D")
	ask(t, d, core.Via(p.url()), "P0", "P0 via : hello D")
	ask(t, second, "", "D", "D via "+p.url()+": hello P1") // and the other way
	if _, _, err := second.Lookup(ctxOf(t, within), core.Target{EngineID: "e"}); err != nil {
		t.Fatal(err)
	}

	// The first rank ends, and another process has its port.
	p.stop()
	closeBus(t, first)
	p = newPort(t, p.addr, ServerOptions{})
	host(newBus(t, Options{AgentID: "P9", Server: p.Server}))
	eventually(t, "the rank is found at the new server", found)

	closeBus(t, second)
	_, _, err := d.Lookup(ctxOf(t, within), to)
	mustBe(t, err, core.ErrNotRegistered) // it has said goodbye
}

// A rank waits for a first one that is up last, and no longer than it was told.
func TestJoinWaits(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{})
	p.stop()
	begin := time.Now()
	_, err := Open(Options{AgentID: "P1", Join: p.url(), JoinTimeout: 700 * time.Millisecond})
	mustBe(t, err, core.ErrUnreachable)
	if took := time.Since(begin); took < 700*time.Millisecond || !strings.Contains(err.Error(), p.addr) {
		t.Fatalf("after %v: %v", took, err)
	}
	opened := make(chan *Bus)
	log, logs := observed()
	go func() {
		b, err := Open(Options{AgentID: "P1", Join: p.url(), JoinTimeout: within, Logger: log})
		if err != nil {
			t.Error(err)
		}
		opened <- b
	}()
	eventually(t, "the first try", func() error {
		if logs.FilterMessageSnippet("waiting for the first rank").Len() == 0 {
			return errors.New("not yet")
		}
		return nil
	})
	p = newPort(t, p.addr, ServerOptions{})
	b := <-opened
	if b == nil {
		t.FailNow()
	}
	defer closeBus(t, b)
	// The server is there, its agent does not serve yet.
	registered := make(chan error, 1)
	go func() { registered <- b.Register(ctxOf(t, within), rank("P1", "e", 0, 1)) }()
	host(newBus(t, Options{AgentID: "P0", Server: p.Server}))
	if err := <-registered; err != nil {
		t.Fatal(err)
	}
}

// Who may not come in is not tried for long.
func TestJoinIsRefused(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{Token: "right"})
	_, err := Open(Options{AgentID: "P1", Join: p.url(), JoinTimeout: time.Hour, Token: "wrong"})
	mustBe(t, err, core.ErrUnreachable)
	if !strings.Contains(err.Error(), "refuses this agent") {
		t.Fatal(err)
	}
	if err := newBus(t, Options{AgentID: "P2", Join: p.url(), JoinTimeout: time.Hour, Token: "right"}).Register(ctxOf(t, 500*time.Millisecond), rank("P2", "e", 0, 1)); err == nil {
		t.Fatal("registered by nobody")
	}
	// Nobody takes the place of the one who registers others.
	open := newPort(t, "127.0.0.1:0", ServerOptions{})
	stranger := newBus(t, Options{AgentID: "D"})
	if _, _, err := stranger.Lookup(ctxOf(t, within), core.Target{Bootstrap: open.url()}); !errors.Is(err, core.ErrNotRegistered) {
		t.Fatal(err)
	}
	other, err := Open(Options{AgentID: hostID})
	if err != nil {
		t.Fatal(err)
	}
	defer closeBus(t, other)
	serve(other)
	if _, _, err := other.Lookup(ctxOf(t, within), core.Target{Bootstrap: open.url()}); err == nil || errors.Is(err, core.ErrNotRegistered) {
		t.Fatalf("a client of the name %q: %v", hostID, err)
	}
	if _, err := stranger.Host(ctxOf(t, within), rank("X", "e", 0, 1), true, 0); err == nil {
		t.Fatal("an agent without a server has registered another")
	}
}

// Of two that register one rank at the first one, the newest wins, whatever their
// clocks say; the other has the rank again when that has gone.
func TestNewestGuestWins(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{})
	first := newBus(t, Options{AgentID: "P0", Server: p.Server, TTL: time.Second})
	host(first)
	a, b := rank("A", "e", 0, 1), rank("B", "e", 0, 1)
	put := func(a *wire.Agent, fresh bool, since int64, want string) int64 {
		t.Helper()
		since, err := first.Host(ctxOf(t, within), a, fresh, since)
		if err != nil && (want == "" || !strings.Contains(err.Error(), want)) || err == nil && want != "" {
			t.Fatalf("%s: %v, want %q", a.ID, err, want)
		}
		return since
	}
	is := func(want string) {
		t.Helper()
		if a, _, err := first.Lookup(ctxOf(t, within), core.Target{EngineID: "e", TPRank: 1}); err != nil || a.ID != want {
			t.Fatalf("%v, %v, want %s", a, err, want)
		}
	}
	sinceA := put(a, true, 1000, "")
	is("A")
	sinceB := put(b, true, 10, "") // its clock is behind
	is("B")
	if sinceB <= sinceA {
		t.Fatalf("since %d after %d", sinceB, sinceA)
	}
	put(a, false, sinceA, "newer agent B")
	put(b, false, sinceB, "")
	is("B")
	if err := first.Unhost(ctxOf(t, within), a); err != nil {
		t.Fatal(err)
	}
	is("B") // not its to end
	if err := first.Unhost(ctxOf(t, within), b); err != nil {
		t.Fatal(err)
	}
	put(a, false, sinceA, "")
	is("A")
	put(rank("C", "e", 7, 1), true, 0, "dp rank 0 (agent A)")
	if _, err := first.Host(ctxOf(t, within), rank("A.*", "e", 0, 1), true, 0); err == nil {
		t.Fatal("an id that is no part of a subject")
	}
}

// dp ranks are found by their engines' ids; without one, by their numbers.
func TestLookupOfDPRanks(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{})
	first := newBus(t, Options{AgentID: "P0", Server: p.Server})
	host(first)
	register(t, first, "e0")
	for id, a := range map[string]*wire.Agent{"P3": rank("P3", "e3", 3, 0), "P7": rank("P7", "e7", 7, 0), "P71": rank("P71", "e7", 7, 1)} {
		if _, err := first.Host(ctxOf(t, within), a, true, 0); err != nil {
			t.Fatal(id, err)
		}
	}
	for _, c := range []struct {
		t    core.Target
		want string
		err  error
	}{
		{core.Target{EngineID: "e7", DPRank: -1}, "P7", nil},
		{core.Target{EngineID: "e7", DPRank: -1, TPRank: 1}, "P71", nil},
		{core.Target{EngineID: "e7", DPRank: 7}, "P7", nil},
		{core.Target{EngineID: "e0"}, "P0", nil},
		{core.Target{EngineID: "e7"}, `engine "e7", rank dp 7 tp 1 pp 0`, core.ErrNotRegistered},
		{core.Target{DPRank: 3}, "P3", nil},
		{core.Target{}, "P0", nil},
		{core.Target{DPRank: -1, TPRank: 1}, "P71", nil},
		{core.Target{DPRank: -1}, `"e3" (agent P3)`, ErrAmbiguous},
		{core.Target{DPRank: 4}, "rank dp 4", core.ErrNotRegistered},
	} {
		a, _, err := first.Lookup(ctxOf(t, within), c.t)
		switch {
		case c.err != nil && (!errors.Is(err, c.err) || !strings.Contains(err.Error(), c.want)):
			t.Errorf("%+v: %v, want %v with %q", c.t, err, c.err, c.want)
		case c.err == nil && (err != nil || a.ID != c.want):
			t.Errorf("%+v: %v, %v, want %s", c.t, a, err, c.want)
		}
	}
}
