package natsbus

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/wire"
)

// host serves joins as an agent's first rank does.
func host(b *Bus) {
	b.Serve(func(via core.Via, req *wire.Request) *wire.Reply {
		if req.Kind != wire.KindJoin {
			return &wire.Reply{Reason: shortName(b.opt.Identity.ID()) + " via " + string(via) + ": hello " + shortName(req.From)}
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
	opt.Identity, opt.Join, opt.JoinTimeout, opt.TTL = named(string(id)), address, within, time.Second
	b := newBus(t, opt)
	serve(b)
	return b
}

// A rank joins the server of the first one, is found there, and answers there; a new
// server in the first one's place has the rank again, though the rank's engine does
// nothing.
func TestJoin(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{})
	first := newBus(t, Options{Identity: named("P0"), Server: p.Server})
	host(first)
	second := joiner(t, "P1", p.url(), Options{})
	if err := second.Register(ctxOf(t, within), rank("P1", "e", 0, 1)); err != nil {
		t.Fatal(err)
	}
	register(t, first, "e")
	d := newBus(t, Options{Identity: named("D")})
	serve(d)
	to := core.Target{Bootstrap: p.url(), EngineID: "e", DPRank: -1, TPRank: 1}
	found := func() error {
		a, via, err := d.Lookup(ctxOf(t, within), to)
		if err == nil && (shortName(a.ID) != "P1" || !a.Joined) {
			err = fmt.Errorf("found %+v", a)
		}
		if err == nil {
			_, err = d.Request(ctxOf(t, time.Second), via, reach(d, "P1"), hello("D"))
		}
		return err
	}
	eventually(t, "the rank is found", found)
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
	host(newBus(t, Options{Identity: named("P9"), Server: p.Server}))
	eventually(t, "the rank is found at the new server", found)

	closeBus(t, second)
	_, _, err := d.Lookup(ctxOf(t, within), to)
	mustBe(t, err, core.ErrNotRegistered) // it has said goodbye
}

// A rank waits for a first rank that comes up last, but no longer than it was told.
func TestJoinWaits(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{})
	p.stop()
	begin := time.Now()
	_, err := Open(Options{Identity: named("P1"), Join: p.url(), JoinTimeout: 700 * time.Millisecond})
	mustBe(t, err, core.ErrUnreachable)
	if took := time.Since(begin); took < 700*time.Millisecond || !strings.Contains(err.Error(), p.addr) {
		t.Fatalf("after %v: %v", took, err)
	}
	opened := make(chan *Bus)
	log, logs := observed()
	go func() {
		b, err := Open(Options{Identity: named("P1"), Join: p.url(), JoinTimeout: within, Logger: log})
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
	host(newBus(t, Options{Identity: named("P0"), Server: p.Server}))
	if err := <-registered; err != nil {
		t.Fatal(err)
	}
}

// TestWhoMayJoin: being a rank takes another secret than asking does, or being on the
// host of the first rank as the same user. A rank that may not join does not try for long.
func TestWhoMayJoin(t *testing.T) {
	leaktest.Check(t)
	home, elsewhere := t.TempDir(), t.TempDir()
	seed, public := newNKey(t)
	for what, c := range map[string]struct {
		server ServerOptions
		rank   Options
		here   bool // on the server's host
		says   string
	}{
		"open":                    {ServerOptions{}, Options{}, false, ""},
		"local, open":             {ServerOptions{}, Options{}, true, ""},
		"local, token":            {ServerOptions{Token: "right"}, Options{Token: "right"}, true, ""},
		"local, nkeys":            {ServerOptions{NKeys: []string{public}}, Options{}, true, ""},
		"both":                    {ServerOptions{Token: "right", JoinToken: "ranks"}, Options{Token: "right", JoinToken: "ranks"}, false, ""},
		"join token alone":        {ServerOptions{Token: "right", JoinToken: "ranks"}, Options{JoinToken: "ranks"}, false, ""},
		"join token, open":        {ServerOptions{JoinToken: "ranks"}, Options{JoinToken: "ranks"}, false, ""},
		"a decode engine's token": {ServerOptions{Token: "right", JoinToken: "ranks"}, Options{Token: "right"}, false, "join_token"},
		"a token for asking only": {ServerOptions{Token: "right"}, Options{Token: "right"}, false, "join_token"},
		"an nkey":                 {ServerOptions{NKeys: []string{public}}, Options{Seed: seed}, false, "join_token"},
		"nothing, join token":     {ServerOptions{JoinToken: "ranks"}, Options{}, false, "join_token"},
		"another join token":      {ServerOptions{Token: "right", JoinToken: "ranks"}, Options{Token: "right", JoinToken: "other"}, false, "join_token"},
		"another token":           {ServerOptions{Token: "right"}, Options{Token: "wrong"}, false, "nats_token"},
	} {
		t.Setenv("TMPDIR", home)
		p := newPort(t, "127.0.0.1:0", c.server)
		first := newBus(t, Options{Identity: named("P0"), Server: p.Server})
		host(first)
		if !c.here {
			t.Setenv("TMPDIR", elsewhere)
		}
		c.rank.Identity, c.rank.Join, c.rank.JoinTimeout = named("P1"), p.url(), time.Hour
		b, err := Open(c.rank)
		if err == nil {
			err = b.Register(ctxOf(t, within), rank("P1", "e", 0, 1))
			closeBus(t, b)
		}
		if (err == nil) != (c.says == "") || err != nil && (!errors.Is(err, core.ErrUnreachable) || !strings.Contains(err.Error(), c.says)) {
			t.Errorf("%s: %v, want %q", what, err, c.says)
		}
		closeBus(t, first)
		p.stop()
	}
}

// TestNobodyElseRegisters: a client that may only ask cannot reach the agent that
// registers others, whatever request it sends, and wherever.
func TestNobodyElseRegisters(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{Token: "right"})
	first := newBus(t, Options{Identity: named("P0"), Server: p.Server})
	host(first)
	register(t, first, "e0")
	d := newBus(t, Options{Identity: named("D"), Token: "right"})
	_, via, err := d.Lookup(ctxOf(t, within), core.Target{Bootstrap: p.url()})
	if err != nil {
		t.Fatal(err)
	}
	join := &wire.Request{Kind: wire.KindJoin, Join: &wire.Join{Agent: rank("D", "e0", 0, 1), New: true}}
	if rep, err := d.Request(ctxOf(t, 300*time.Millisecond), via, hostID, join); err == nil {
		t.Errorf("a client that may ask joins: %+v", rep)
	}
	if rep, err := d.Request(ctxOf(t, within), via, named("P0").ID(), join); err != nil || rep.Code == 0 {
		t.Errorf("the same, asked of the first rank by its id: %+v, %v", rep, err)
	}
	if a, _, err := first.Lookup(ctxOf(t, within), core.Target{EngineID: "e0", TPRank: 1}); err == nil {
		t.Errorf("the registry has %+v", a)
	}
}

// An agent without a server registers nobody.
func TestHostNeedsAServer(t *testing.T) {
	leaktest.Check(t)
	open := newPort(t, "127.0.0.1:0", ServerOptions{})
	unknown := newBus(t, Options{Identity: named("D")})
	if _, _, err := unknown.Lookup(ctxOf(t, within), core.Target{Bootstrap: open.url()}); !errors.Is(err, core.ErrNotRegistered) {
		t.Fatal(err)
	}
	if _, err := unknown.Host(ctxOf(t, within), rank("X", "e", 0, 1), true, 0); err == nil {
		t.Fatal("an agent without a server has registered another")
	}
}

// If two agents register one rank at the first rank, the newest wins, whatever their
// clocks say. When it has gone, the other agent has the rank again.
func TestNewestJoinedRankWins(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{})
	first := newBus(t, Options{Identity: named("P0"), Server: p.Server, TTL: time.Minute}) // nobody renews what is put
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
		if a, _, err := first.Lookup(ctxOf(t, within), core.Target{EngineID: "e", TPRank: 1}); err != nil || shortName(a.ID) != want {
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
	put(a, false, sinceA, "newer agent "+string(named("B").ID()))
	put(b, false, sinceB, "")
	is("B")
	if err := first.Unhost(ctxOf(t, within), a); err != nil {
		t.Fatal(err)
	}
	is("B") // the rank is not A's to end
	if err := first.Unhost(ctxOf(t, within), b); err != nil {
		t.Fatal(err)
	}
	put(a, false, sinceA, "")
	is("A")
	put(rank("C", "e", 7, 1), true, 0, "dp rank 0 (agent "+string(named("A").ID())+")")
	bad := rank("A", "e", 0, 1)
	bad.ID = "A.*"
	if _, err := first.Host(ctxOf(t, within), bad, true, 0); err == nil {
		t.Fatal("an id that is no part of a subject")
	}
}

// dp ranks are found by their engines' ids or, without an id, by their numbers.
func TestLookupOfDPRanks(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{})
	first := newBus(t, Options{Identity: named("P0"), Server: p.Server})
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
		{core.Target{DPRank: -1}, `"e3" (agent ` + string(named("P3").ID()), ErrAmbiguous},
		{core.Target{DPRank: 4}, "rank dp 4", core.ErrNotRegistered},
	} {
		a, _, err := first.Lookup(ctxOf(t, within), c.t)
		switch {
		case c.err != nil && (!errors.Is(err, c.err) || !strings.Contains(err.Error(), c.want)):
			t.Errorf("%+v: %v, want %v with %q", c.t, err, c.err, c.want)
		case c.err == nil && (err != nil || shortName(a.ID) != c.want):
			t.Errorf("%+v: %v, %v, want %s", c.t, a, err, c.want)
		}
	}
}
