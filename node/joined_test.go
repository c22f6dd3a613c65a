package node

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/nats-io/nkeys"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/kvconn/kvconn/bootstrap"
	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/wire"
)

// TestJoinedRanksLeaveRoom: ranks that join cannot fill the registry, so that this agent's own entry finds room beside theirs. One that
// leaves, or comes with a shorter description, makes room.
func TestJoinedRanksLeaveRoom(t *testing.T) {
	a, _ := agentWithoutBus(t)
	const ranks = 64
	a.cfg.EngineID, a.cfg.DPSize, a.cfg.TPSize, a.cfg.PPSize = "e", 1, ranks, 1
	g := newJoinedRanks(&a.cfg, zap.NewNop(), &rankListing{&bootstrap.Table{}, func() string { return "http://127.0.0.1:1" }}, &fakeHost{})
	defer g.close()
	join := func(tp, bytes int) error {
		return joinAs(t, g, "one", ranks, tp, bytes)
	}
	if err := join(1, 4<<20); err == nil || !strings.Contains(err.Error(), "at most 2097152") {
		t.Errorf("a description of 4 MiB: %v", err)
	}
	taken := 1
	for ; taken < ranks; taken++ {
		if err := join(taken, 1<<20); err != nil {
			if !strings.Contains(err.Error(), "33554432") {
				t.Error(err)
			}
			break
		}
	}
	sum := 0
	for _, n := range g.ranks {
		sum += n.bytes
	}
	if sum > maxAllJoinedBytes || sum < maxAllJoinedBytes/2 || taken == ranks {
		t.Fatalf("%d ranks of 1 MiB are in, with %d bytes", taken-1, sum)
	}
	if err := join(1, 1<<20); err != nil {
		t.Errorf("one that is in renews: %v", err)
	}
	if err := join(2, 100); err != nil {
		t.Errorf("one that is in describes less: %v", err)
	}
	if err := join(taken, 1<<20); err != nil {
		t.Errorf("the next, once another takes less: %v", err)
	}
}

// joinAs has a rank of an engine join that describes itself in so many bytes.
func joinAs(t *testing.T, g *joinedRanks, owner core.Account, ranks, tp, bytes int) error {
	rank := &wire.Agent{Version: wire.Version, ID: fmt.Sprint("r", tp), EngineID: "e", TPRank: tp, TPSize: ranks, PPSize: 1, Joined: true}
	for left := bytes; left > 0; left -= 200 {
		rank.Shapes = append(rank.Shapes, wire.Shape{Name: strings.Repeat("n", 180)})
	}
	_, err := g.join(t.Context(), owner, &wire.Join{Agent: rank, New: true})
	return err
}

// TestJoinedRanksOfAnother: ranks of one account that fill the room leave some to another account's. Ranks of that account give way, and no
// more of them than it takes; it is not so for ranks of the account itself, nor for an account that would then have more.
func TestJoinedRanksOfAnother(t *testing.T) {
	a, _ := agentWithoutBus(t)
	const ranks = 64
	a.cfg.EngineID, a.cfg.DPSize, a.cfg.TPSize, a.cfg.PPSize = "e", 1, ranks, 1
	host := &countingHost{}
	g := newJoinedRanks(&a.cfg, zap.NewNop(), &rankListing{&bootstrap.Table{}, func() string { return "http://127.0.0.1:1" }}, host)
	defer g.close()
	taken := 1
	for ; joinAs(t, g, "greedy", ranks, taken, 1<<20) == nil; taken++ {
	}
	full := len(g.ranks)
	if full < 16 {
		t.Fatalf("%d ranks of one account are in", full)
	}
	next := taken + 1
	for ; next < taken+6; next++ {
		if err := joinAs(t, g, "newcomer", ranks, next, 3<<19); err != nil {
			t.Errorf("another account's: %v", err)
		}
	}
	lost := full + 5 - len(g.ranks)
	if lost < 6 || lost > 10 || len(host.unhosted) != lost {
		t.Errorf("%d of %d ranks have given way, %v are out of the registry", lost, full, host.unhosted)
	}
	sum := 0
	for _, n := range g.ranks {
		sum += n.bytes
	}
	if _, ok := g.ranks[rankPlace{0, 1, 0}]; !ok || sum > maxAllJoinedBytes {
		t.Errorf("the first is there: %v; %d bytes", ok, sum)
	}
	if err := joinAs(t, g, "greedy", ranks, taken-1, 3<<19); err == nil || !strings.Contains(err.Error(), "no room") {
		t.Errorf("one that gave way renews: %v", err)
	}
	for ; next < ranks && joinAs(t, g, "newcomer", ranks, next, 3<<19) == nil; next++ {
	}
	bytes := map[core.Account]int{}
	for _, n := range g.ranks {
		bytes[n.owner] += n.bytes
	}
	if d := bytes["greedy"] - bytes["newcomer"]; next == ranks || d < -4<<20 || d > 4<<20 {
		t.Errorf("at the end %v", bytes)
	}
	g.close()
	if n := g.shares.Holders(); n != 0 {
		t.Errorf("%d ranks count", n)
	}
}

// TestJoinThatFails: no rank gives way for one that does not come in. One that takes the place of a rank that is gone counts without that one,
// whoever's it was, and lines about ranks that give way are few.
func TestJoinThatFails(t *testing.T) {
	a, _ := agentWithoutBus(t)
	const ranks = 200
	a.cfg.EngineID, a.cfg.DPSize, a.cfg.TPSize, a.cfg.PPSize = "e", 1, ranks, 1
	host := &countingHost{}
	lines, seen := observer.New(zap.WarnLevel)
	g := newJoinedRanks(&a.cfg, zap.New(lines), &rankListing{&bootstrap.Table{}, func() string { return "http://127.0.0.1:1" }}, host)
	defer g.close()
	if err := joinAs(t, g, "dead", ranks, 1, 1<<20); err != nil {
		t.Fatal(err)
	}
	n := 2
	for ; joinAs(t, g, "greedy", ranks, n, 1<<18) == nil; n++ {
	}
	before := len(g.ranks)
	host.fails = true
	if err := joinAs(t, g, "newcomer", ranks, n, 1<<20); err == nil || len(g.ranks) != before || len(host.unhosted) != 0 {
		t.Errorf("one that the registry refuses: %v, and %d of %d ranks are there", err, len(g.ranks), before)
	}
	host.fails = false
	grow := func(owner core.Account, at rankPlace) {
		g.ranks[at].bytes += maxAllJoinedBytes
		g.shares.Add(owner, at, maxAllJoinedBytes)
	}
	grow("dead", rankPlace{0, 1, 0})
	grow("greedy", rankPlace{0, 2, 0})
	if _, err := g.join(t.Context(), "newcomer", &wire.Join{Agent: &wire.Agent{Version: wire.Version, ID: "r1 again", EngineID: "e", TPRank: 1, TPSize: ranks, PPSize: 1, Joined: true}, New: true}); err != nil {
		t.Errorf("in the place of one that is gone and had more than all: %v", err)
	}
	if len(host.unhosted) != 1 || host.unhosted[0] != "r2" {
		t.Errorf("%v give way", host.unhosted)
	}
	for range 100 {
		g.giveWay(t.Context(), slices.Collect(maps.Keys(g.ranks))[:1])
	}
	if n := seen.FilterMessageSnippet("rank dropped").Len(); n == 0 || n > 50 {
		t.Errorf("%d lines about 101 ranks", n)
	}
}

// TestJoinsIntoAFullTable: a rank that joins takes the place of the ranks that give way to it, so it needs none of the table's. If it does not
// come in, none gives way. A rank that gives way for its place in the table leaves the registry too.
func TestJoinsIntoAFullTable(t *testing.T) {
	a, _ := agentWithoutBus(t)
	const ranks = 1000
	a.cfg.EngineID, a.cfg.DPSize, a.cfg.TPSize, a.cfg.PPSize = "e", 1, ranks, 1
	host, table := &countingHost{}, &bootstrap.Table{}
	g := newJoinedRanks(&a.cfg, zap.NewNop(), &rankListing{table, func() string { return "http://127.0.0.1:1" }}, host)
	defer g.close()
	n := 1
	for ; joinAs(t, g, "greedy", ranks, n, 1<<20) == nil; n++ {
	}
	listed := 0
	for _, ofTP := range table.Query()[0].WorkerAddr {
		listed += len(ofTP)
	}
	fill := func(account string, pp int) bool {
		_, err := table.Join(bootstrap.Registration{EngineID: "other", DPRank: 1, PPRank: pp, Addr: "a"}, account, nil)
		return err == nil
	}
	for ; listed < bootstrap.MaxEntries-2; listed++ { // one more is kept for this agent's own
		if !fill(fmt.Sprint("other ", listed%8), listed) {
			t.Fatal("the table is full too early")
		}
	}
	at := bootstrap.Registration{EngineID: "e", TPRank: n, Addr: "elsewhere"}
	if _, err := table.Join(at, "other", nil); err != nil {
		t.Fatal(err)
	}
	if err := joinAs(t, g, "newcomer", ranks, n, 1<<20); err == nil || len(g.ranks) != n-1 || len(host.unhosted) != 1 {
		t.Errorf("at a place that is taken: %v, %d of %d ranks are there, %v are out of the registry", err, len(g.ranks), n-1, host.unhosted)
	}
	host.unhosted = nil
	if err := joinAs(t, g, "newcomer", ranks, n+1, 1<<20); err != nil || len(g.ranks) != n-1 || len(host.unhosted) != 1 {
		t.Errorf("beside a full table: %v, %d of %d ranks are there, %v are out of the registry", err, len(g.ranks), n-1, host.unhosted)
	}
}

// TestTableOfJoinedRanks: ranks of one account that fill the table have some give way to another account's, and those leave the registry.
func TestTableOfJoinedRanks(t *testing.T) {
	a, _ := agentWithoutBus(t)
	const ranks = 512
	a.cfg.EngineID, a.cfg.DPSize, a.cfg.TPSize, a.cfg.PPSize = "e", 1, ranks, 1
	host, table := &countingHost{}, &bootstrap.Table{}
	g := newJoinedRanks(&a.cfg, zap.NewNop(), &rankListing{table, func() string { return "http://127.0.0.1:1" }}, host)
	defer g.close()
	for tp := 1; tp < ranks-1; tp++ {
		if err := joinAs(t, g, "greedy", ranks, tp, 0); err != nil {
			t.Fatal(err)
		}
	}
	for i := range bootstrap.MaxEntries - 1 - (ranks - 2) { // one is kept for this agent's own
		if _, err := table.Join(bootstrap.Registration{EngineID: "other", DPRank: 1, PPRank: i, Addr: "a"}, fmt.Sprint("other ", i%8), nil); err != nil {
			t.Fatal(err)
		}
	}
	if err := joinAs(t, g, "newcomer", ranks, ranks-1, 0); err != nil || len(host.unhosted) != 1 || host.unhosted[0] != fmt.Sprint("r", ranks-2) || g.ranks[rankPlace{0, ranks - 2, 0}] != nil || g.shares.Holders() != ranks-2 {
		t.Errorf("another account's: %v, %v are out of the registry, %d of %d ranks count", err, host.unhosted, g.shares.Holders(), len(g.ranks))
	}
}

// TestRanksThatProveASecret: the table is told whether ranks that join have proved a secret.
func TestRanksThatProveASecret(t *testing.T) {
	leaktest.Check(t)
	key, err := nkeys.CreateUser()
	if err != nil {
		t.Fatal(err)
	}
	public, _ := key.PublicKey()
	for name, x := range map[string]struct {
		change func(c *Config)
		proved bool
	}{
		"all may join": {func(*Config) {}, false},
		"a token":      {func(c *Config) { c.NATSToken = theToken }, true},
		"keys":         {func(c *Config) { c.NATSNKeys = []string{public} }, true},
		"join token":   {func(c *Config) { c.JoinToken = theToken }, true},
	} {
		cfg := hostConfig(0)
		x.change(&cfg)
		h, err := Open(cfg, Options{})
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if got := h.plane.listing.table.JoinsProved; got != x.proved {
			t.Errorf("%s: ranks that join have proved a secret: %v", name, got)
		}
		if err := h.Close(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// countingHost notes whose registrations were withdrawn.
type countingHost struct {
	fakeHost
	unhosted []string
}

func (h *countingHost) Unhost(_ context.Context, a *wire.Agent) error {
	h.unhosted = append(h.unhosted, a.ID)
	return nil
}
