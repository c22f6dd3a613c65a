package machine_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/core/machine"
	"github.com/kvconn/kvconn/kv"
)

// TestEarlyLoadsGiveWay: when there is no room for more block ids, the agent with the most block
// ids gives way. An agent that holds many places and no block ids keeps them.
func TestEarlyLoadsGiveWay(t *testing.T) {
	l, err := kv.NewLayout([]kv.Region{{Name: "k", Base: 1 << 24, BlockStride: 1024, BlockBytes: 1024, NumBlocks: 1 << 18}})
	if err != nil {
		t.Fatal(err)
	}
	const all = 1 << 22 / kv.MaxBlocks // loads that take all room
	m := machine.Told{Machine: machine.New(l, core.Options{MaxTransfers: 64})}
	now := time.Unix(0, 0)
	load := func(id string, from core.AgentID, blocks int) core.Code {
		answer := m.Tell(now, core.LoadMessage{ID: core.TransferID(id), Peer: from, Grant: []byte("g"),
			Selection: kv.Selection{First: []uint32{0}, Blocks: [][]kv.BlockID{make([]kv.BlockID, blocks)}}})
		m.Actions()
		return answer.(core.AnswerLoad).Code
	}
	claim := func(n int) core.Answer {
		return m.Tell(now, core.RenewMessage{From: "claims", Claims: []core.TransferID{core.TransferID(fmt.Sprint("c", n))}}).(core.AnswerRenew).Answers[0]
	}
	for n := range 40 {
		if a := claim(n); a.Status != core.StatusEarly {
			t.Fatal(n, a)
		}
	}
	for n := range all {
		if code := load(fmt.Sprint("l", n), core.AgentID(fmt.Sprint("d", n)), kv.MaxBlocks); code != core.OK {
			t.Fatal(n, code)
		}
	}
	if code := load("equal", "e", kv.MaxBlocks); code != core.Refused {
		t.Errorf("a load of as many blocks as the greatest: %v", code)
	}
	if code := load("less", "e", kv.MaxBlocks/2); code != core.OK {
		t.Errorf("a load of half as many blocks: %v", code)
	}
	left := 0
	for n := range all {
		if m.Tell(now, core.RenewMessage{From: core.AgentID(fmt.Sprint("d", n)), Loads: []core.TransferID{core.TransferID(fmt.Sprint("l", n))}}).(core.AnswerRenew).Answers[0].Status == core.StatusEarly {
			left++
		}
	}
	if left != all-1 {
		t.Errorf("%d of %d loads are left", left, all)
	}
	for n := range 40 {
		if a := claim(n); a.Status != core.StatusEarly {
			t.Errorf("claim %d gave way to a load: %v", n, a)
		}
	}
}
