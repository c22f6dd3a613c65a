package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/rig/nettest"
	"github.com/kvconn/kvconn/wire"
)

// TestFirstRankRestarted: the first rank comes back at its port, and the others need
// nothing.
func TestFirstRankRestarted(t *testing.T) {
	leaktest.Check(t)
	m, two := model{2, 4, false}, kv.Ranks{TP: 2, PP: 2}
	port := freePort(t)
	ps, address := m.engine(t, RolePrefill, two, func(c *Config) {
		if soon(c); c.BootstrapJoin == "" {
			c.BootstrapPort = port
		}
	})
	ds, _ := m.engine(t, RoleDecode, kv.Ranks{TP: 2, PP: 1}, soon)
	at := from(address, ps[0].cfg.EngineID)
	carry(t, "a", 1, ps, ds, at)
	for _, d := range ds {
		d.loadFrom("lost", at, 1)
	}
	until(t, "all ranks have the loads", func() bool {
		n := 0
		for _, p := range ps {
			n += p.Stats().OffersEarly
		}
		return n == len(ps)
	})
	if err := ps[0].Close(); err != nil {
		t.Fatal(err)
	}
	// Loads from it lose the request; the others may go on.
	ds[0].want("lost", core.PeerLost, "prefill")
	if _, err := ds[1].Cancel([]core.TransferID{"lost"}, ""); err != nil {
		t.Fatal(err)
	}
	ds[1].want("lost", core.Cancelled)
	cfg := rankConfig(RolePrefill, two, kv.Rank{}, "")
	cfg.BootstrapPort = port
	soon(&cfg)
	ps[0] = m.open(t, cfg)
	until(t, "all ranks are back", func() bool { return shown(t, address)["0 engine-prefill"] == 4 })
	carry(t, "b", 2, ps, ds, at)
	carry(t, "c", 3, ps, ds, at)
}

// TestEngineRestartedWithOtherRanks: at its port there is then another number of
// ranks, and the next request finds them.
func TestEngineRestartedWithOtherRanks(t *testing.T) {
	leaktest.Check(t)
	m := model{2, 4, false}
	ds, _ := m.engine(t, RoleDecode, kv.Ranks{TP: 2, PP: 1}, func(c *Config) { soon(c); c.ConnectTimeout = Seconds(bound) })
	port := freePort(t)
	address := fmt.Sprint("http://127.0.0.1:", port)
	at := from(address, "engine-prefill")
	for i, n := range []kv.Ranks{{TP: 2, PP: 1}, {TP: 1, PP: 1}, {TP: 4, PP: 1}, {TP: 1, PP: 2}, {TP: 2, PP: 1}} {
		ps, _ := m.engine(t, RolePrefill, n, func(c *Config) { soon(c); c.BootstrapPort = port; c.JoinTimeout = Seconds(bound) })
		for _, p := range ps {
			if p.BootstrapAddress() != address {
				t.Fatalf("it is at %s, want %s", p.BootstrapAddress(), address)
			}
		}
		carry(t, core.TransferID(fmt.Sprint("a", i)), 2*i, ps, ds, at)
		carry(t, core.TransferID(fmt.Sprint("b", i)), 2*i+1, ps, ds, at)
		for _, d := range ds { // it knows of one when they go
			d.claimFrom(core.TransferID(fmt.Sprint("c", i)), at)
			until(t, "the claim is kept", func() bool { return d.sizes().Kept > 0 })
		}
		for _, p := range ps {
			if err := p.Close(); err != nil {
				t.Fatal(err)
			}
		}
		for _, d := range ds {
			d.loadFrom(core.TransferID(fmt.Sprint("c", i)), at, 1)
			if r := d.report(core.TransferID(fmt.Sprint("c", i))); r.Code != core.PeerLost && r.Code != core.Unreachable {
				t.Fatalf("a request of an engine that has gone ended with %v (%s)", r.Code, r.Reason)
			}
		}
	}
}

// TestRankKilled: all loads of its engine fail, and say which rank was killed. The other
// ranks free their blocks, and GET /query forgets the killed rank.
func TestRankKilled(t *testing.T) {
	leaktest.Check(t)
	m, two := model{2, 4, false}, kv.Ranks{TP: 2, PP: 1}
	pc := rankConfig(RolePrefill, two, kv.Rank{}, "")
	soon(&pc)
	first := m.open(t, pc)
	address := first.BootstrapAddress()
	text, err := json.Marshal(rankConfig(RolePrefill, two, kv.Rank{TP: 1}, address))
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("KVCONN_TEST_CONFIG", string(text))
	_, second := process(t, "rank", "", "")
	ds, _ := m.engine(t, RoleDecode, kv.One, soon)
	at := from(address, "engine-prefill")
	ids := []core.TransferID{"a", "b", "c"}
	for i, id := range ids {
		announce(t, first.side, id)
		ds[0].loadFrom(id, at, kv.BlockID(i))
	}
	until(t, "both ranks have them", func() bool { return ds[0].Stats().LoadsWaiting == 2*len(ids) })
	second.kill()
	for _, id := range ids {
		ds[0].want(id, core.PeerLost, `engine "engine-prefill" dp0 tp1 pp0`, "load of")
	}
	for _, id := range ids {
		first.offer(id, 1)
		first.want(id, core.PeerCancelled)
	}
	idle(t, []*rank{first}, ds)
	until(t, "it is forgotten", func() bool { return shown(t, address)["0 engine-prefill"] == 1 })
}

// runRank is a rank in a process of its own.
func runRank() (string, error) {
	cfg, err := ParseConfig([]byte(os.Getenv("KVCONN_TEST_CONFIG")))
	if err != nil {
		return "", err
	}
	a, err := Open(cfg, Options{})
	if err != nil {
		return "", err
	}
	kept, cache := model{2, 4, false}.regions(&cfg)
	rankCache = cache
	if err := a.RegisterKVCaches(kept); err != nil {
		return "", err
	}
	_, err = a.Announce([]core.TransferID{"a", "b", "c"})
	return a.BootstrapAddress(), err
}

var rankCache []byte // stays mapped

// watchedBus counts the renewals to an agent that find nobody.
type watchedBus struct {
	core.Bus
	to     core.AgentID
	absent atomic.Int32
}

func (b *watchedBus) Request(ctx context.Context, via core.Via, to core.AgentID, req *wire.Request) (*wire.Reply, error) {
	rep, err := b.Bus.Request(ctx, via, to, req)
	if to == b.to && req.Kind == wire.KindRenew && errors.Is(err, core.ErrAbsent) {
		b.absent.Add(1)
	}
	return rep, err
}

// TestRanksLinkBreaks: that nobody listens as a rank at another process's server is
// no proof that it is gone.
func TestRanksLinkBreaks(t *testing.T) {
	leaktest.Check(t)
	m, two := model{2, 4, false}, kv.Ranks{TP: 2, PP: 1}
	patient := func(c *Config) { c.PeerTimeout = Seconds(bound / 2) }
	cfg := rankConfig(RolePrefill, two, kv.Rank{}, "")
	patient(&cfg)
	first := m.open(t, cfg)
	way := nettest.Forward(t, strings.TrimPrefix(first.BootstrapAddress(), "http://"))
	cfg = rankConfig(RolePrefill, two, kv.Rank{TP: 1}, "http://"+way.Addr())
	patient(&cfg)
	ps := []*rank{first, m.open(t, cfg)}
	ds, _ := m.engine(t, RoleDecode, kv.One, patient)
	at := from(first.BootstrapAddress(), "engine-prefill")
	d := ds[0]
	bus := &watchedBus{Bus: d.bus, to: ps[1].ID()}
	setBus(d.Agent, bus)
	carry(t, "a", 1, ps, ds, at)
	for _, p := range ps {
		announce(t, p.side, "b")
	}
	d.loadFrom("b", at, 7, 3)
	until(t, "both ranks have it", func() bool { return d.Stats().LoadsWaiting == 2 })
	way.Shut(true)
	way.Cut()
	until(t, "a renewal has found nobody", func() bool { return bus.absent.Load() > 0 })
	way.Shut(false)
	for _, p := range ps {
		p.paint(9, 1, 2)
		p.offer("b", 1, 2)
	}
	d.want("b", core.OK)
	d.check(9, 7, 3)
	for _, p := range ps {
		p.want("b", core.OK)
	}
}
