package node

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/core/machine"
	"github.com/kvconn/kvconn/kv"
)

// TestYield: what a step leaves over to let others have the lock is done in the next, at once and without a tick.
func TestYield(t *testing.T) {
	const places, shares = 8, 4
	a, _ := agentWithoutBus(t)
	a.goRun("agent", func() { run(a.ctx, a.machine, a.perform) })
	t.Cleanup(func() { a.cancel(); a.wg.Wait() })
	a.machine.mu.Lock()
	a.machine.inner = machine.New(a.machine.inner.Layout(), core.Options{MaxTransfers: places, Ends: 1, EarlyLoad: time.Hour})
	a.machine.mu.Unlock()
	for i := range places {
		a.machine.tell(core.RenewMessage{From: "d", Account: "many", Claims: []core.TransferID{core.TransferID(fmt.Sprint("claim", i))}})
	}
	claim := core.RenewMessage{From: "e", Account: "few", Claims: []core.TransferID{machine.PartID("shares", kv.Share{Of: shares})}}
	if answer := a.machine.tell(claim).(core.AnswerRenew).Answers[0]; answer.Status != core.StatusEarly {
		t.Fatalf("%+v", answer)
	}
	for deadline := time.Now().Add(time.Minute); ; runtime.Gosched() { // it only ends a hang
		a.machine.mu.Lock()
		n := a.machine.inner.Sizes().Early
		a.machine.mu.Unlock()
		if n == places {
			return
		}
		if n < places || time.Now().After(deadline) {
			t.Fatalf("%d places are taken, want %d", n, places)
		}
	}
}
