package machine_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/core/machine"
	"github.com/kvconn/kvconn/kv"
)

// BenchmarkHostileMessage measures how long a prefill agent's machine takes for what package
// node gives it at a time, under the agent's lock, of a message that a hostile peer has made.
// All places are taken: half by one peer, half by as many peers as there are.
func BenchmarkHostileMessage(b *testing.B) {
	const locked = core.MaxLocked
	l, err := kv.NewLayout([]kv.Region{{Name: "k", Base: 1 << 24, BlockStride: 1024, BlockBytes: 1024, NumBlocks: 1 << 18}})
	if err != nil {
		b.Fatal(err)
	}
	ids := make([]kv.BlockID, kv.MaxBlocks)
	now := time.Unix(0, 0)
	seen := 0
	name := func(form string) core.TransferID {
		seen++
		return core.TransferID(fmt.Sprintf(form, seen))
	}
	many := func(form string) []core.TransferID {
		list := make([]core.TransferID, locked)
		for i := range list {
			list[i] = name(form)
		}
		return list
	}
	for what, message := range map[string]func(m *machine.Told, from core.AgentID){
		"renew": func(m *machine.Told, from core.AgentID) {
			m.Tell(now, core.RenewMessage{From: from, Loads: many("a%d")})
		},
		"claim": func(m *machine.Told, from core.AgentID) {
			m.Tell(now, core.RenewMessage{From: from, Claims: many("a%d")})
		},
		"claim-shares": func(m *machine.Told, from core.AgentID) {
			m.Tell(now, core.RenewMessage{From: from, Claims: many("a%d\x000/64@0")})
		},
		"finish": func(m *machine.Told, from core.AgentID) {
			for _, id := range many("a%d") {
				m.Tell(now, core.FinishMessage{From: from, ID: id, Code: core.Failed})
			}
		},
		"finish-shares": func(m *machine.Told, from core.AgentID) {
			for _, id := range many("a%d\x000/64@0") {
				m.Tell(now, core.FinishMessage{From: from, ID: id, Code: core.Failed})
			}
		},
		"load": func(m *machine.Told, from core.AgentID) {
			m.Tell(now, core.LoadMessage{ID: name("a%d"), Peer: from, Grant: []byte("g"), Selection: kv.Selection{First: []uint32{0}, Blocks: [][]kv.BlockID{ids}}})
		},
	} {
		b.Run(what, func(b *testing.B) {
			m := &machine.Told{Machine: machine.New(l, core.Options{})}
			for i := range core.Defaults.MaxTransfers {
				from := core.AgentID("greedy")
				if i%2 == 0 {
					from = core.AgentID(fmt.Sprint("d", i))
				}
				m.Tell(now, core.RenewMessage{From: from, Claims: []core.TransferID{name("a%d")}})
				m.Tell(now, core.FinishMessage{From: from, ID: name("a%d"), Code: core.Failed})
			}
			m.Actions()
			var most time.Duration
			for i := 0; b.Loop(); i++ {
				began := time.Now()
				message(m, core.AgentID(fmt.Sprint("e", i)))
				m.Actions()
				most = max(most, time.Since(began))
			}
			b.ReportMetric(float64(most.Microseconds()), "µs-most")
		})
	}
}
