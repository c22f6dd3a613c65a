package node

import (
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
)

// countedClock counts how often the time is asked for: once for each hold of the lock in which the
// machine is told something.
type countedClock struct {
	core.Clock
	asked int
}

func (c *countedClock) Now() time.Time {
	c.asked++
	return c.Clock.Now()
}

// TestAnswerOfManyTransfers: the agent's lock comes free between the parts of a long answer.
func TestAnswerOfManyTransfers(t *testing.T) {
	a, _ := agentWithoutBus(t)
	clock := &countedClock{Clock: a.machine.clock}
	a.machine.clock = clock
	renewal := core.SendRenew{Peer: "p", Loads: make([]core.TransferID, 4096)}
	a.machine.renewReplied(renewal, make([]core.Answer, 4096), false, nil)
	if clock.asked != 4096/core.MaxLocked {
		t.Errorf("4096 answers are %d events", clock.asked)
	}
	clock.asked = 0
	if a.machine.renewReplied(renewal, nil, false, core.ErrAbsent); clock.asked != 1 {
		t.Errorf("no answer is %d events", clock.asked)
	}
}
