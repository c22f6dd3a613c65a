package node

import (
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/kvconn/kvconn/bootstrap"
	"github.com/kvconn/kvconn/wire"
)

// TestWorkQueuesOfPeers: a decode agent that is refused again and again fills no log, and neither does
// a rank that comes and goes.
func TestWorkQueuesOfPeers(t *testing.T) {
	o, logs := observer.New(zap.InfoLevel)
	log := zap.New(o)
	a, _ := agentWithoutBus(t)
	a.cfg.EngineID, a.cfg.DPSize, a.cfg.TPSize, a.cfg.PPSize = "e", 1, 2, 1
	g := newJoinedRanks(&a.cfg, log, &rankListing{&bootstrap.Table{}, func() string { return "http://127.0.0.1:1" }}, &fakeHost{})
	a.server.joined, a.server.log = g, log
	defer g.close()
	rank := &wire.Agent{Version: wire.Version, ID: "r", EngineID: "e", TPRank: 1, TPSize: 2, PPSize: 1, Joined: true}
	for range 300 {
		for _, req := range []*wire.Request{
			{Kind: wire.KindHello, From: "d", Hello: &wire.Agent{Version: wire.Version + 1, EngineID: "d"}},
			{Kind: wire.KindJoin, From: "r", Join: &wire.Join{Agent: rank, New: true}},
			{Kind: wire.KindJoin, From: "r", Join: &wire.Join{Agent: &wire.Agent{Version: wire.Version + 1, ID: "r", EngineID: "e"}}},
			{Kind: wire.KindJoin, From: "r", Join: &wire.Join{Agent: rank, Leave: true}},
		} {
			a.server.serve("via", req)
		}
	}
	for _, said := range []string{"decode agent refused", "rank not registered", "rank joined"} {
		if n := logs.FilterMessageSnippet(said).Len(); n == 0 || n > 15 {
			t.Errorf("%d lines: %s", n, said)
		}
	}
}
