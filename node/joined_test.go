package node

import (
	"strings"
	"testing"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/bootstrap"
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
		rank := &wire.Agent{Version: wire.Version, ID: "r", EngineID: "e", TPRank: tp, TPSize: ranks, PPSize: 1, Joined: true}
		for left := bytes; left > 0; left -= 200 {
			rank.Shapes = append(rank.Shapes, wire.Shape{Name: strings.Repeat("n", 180)})
		}
		_, err := g.join(t.Context(), &wire.Join{Agent: rank, New: true})
		return err
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
