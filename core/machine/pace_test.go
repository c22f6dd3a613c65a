package machine_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/core/machine"
	"github.com/kvconn/kvconn/kv"
)

// paced is a machine of P that ends one offer a step.
func paced(t *testing.T, opt core.Options) *machine.Told {
	t.Helper()
	l, err := kv.NewLayout([]kv.Region{{Name: "k", Base: 1 << 24, BlockStride: 1024, BlockBytes: 1024, NumBlocks: 16}})
	if err != nil {
		t.Fatal(err)
	}
	opt.Ends = 1
	return &machine.Told{Machine: machine.New(l, opt)}
}

// claims claims transfers that P's engine has not named yet.
func claims(t *testing.T, m *machine.Told, now time.Time, from core.AgentID, ids ...core.TransferID) {
	t.Helper()
	for i, a := range m.Tell(now, core.RenewMessage{From: from, Claims: ids}).(core.AnswerRenew).Answers {
		if a.Status == core.StatusUnknown || a.Status == core.StatusEnded {
			t.Fatalf("claim %s of %s: %+v", ids[i], from, a)
		}
	}
}

// yields says whether the machine wants to be told Resume.
func yields(m *machine.Told) bool { return slices.Contains(m.Actions(), core.Action(core.Yield{})) }

// TestResumeAfterPause: a process is stopped while a step's rest is still to come. When it runs again, Resume may come before the first
// tick. No lease ran meanwhile, so nothing is late.
func TestResumeAfterPause(t *testing.T) {
	const places = 4
	for _, first := range []string{"resume", "message"} {
		m, now := paced(t, core.Options{MaxTransfers: places, EarlyLoad: 30 * time.Second}), time.Unix(0, 0)
		for i := range places {
			claims(t, m, now, "many", core.TransferID(fmt.Sprint("c", i)))
		}
		m.Tell(now, core.Tick{})
		two := machine.PartID("shares", kv.Share{Of: 2})
		if first == "resume" {
			claims(t, m, now, "few", two)
		}
		now = now.Add(40 * time.Second) // it is stopped
		if first == "message" {
			claims(t, m, now, "few", two)
		}
		if !yields(m) {
			t.Fatalf("%s first: the machine wants no Resume: the test is of nothing", first)
		}
		for m.Tell(now, core.Resume{}); yields(m); {
			m.Tell(now, core.Resume{})
		}
		if n := m.Sizes().Early; n != places {
			t.Errorf("%s first: after a pause %d early claims are left, want %d", first, n, places)
		}
	}
}

// TestGoneAgentComesBack: a D agent that counts as gone comes back before all that it had has ended. What it brings then stays.
func TestGoneAgentComesBack(t *testing.T) {
	m, now := paced(t, core.Options{}), time.Unix(0, 0)
	claims(t, m, now, "d", "a", "b", "c")
	m.Tell(now, core.PeerDown{Peer: "d"})
	for m.Actions(); !yields(m); now = now.Add(core.TickInterval) {
		if now.Sub(time.Unix(0, 0)) > time.Minute {
			t.Fatal("the agent does not count as gone")
		}
		m.Tell(now, core.Tick{})
		m.Actions()
		m.Tell(now, core.ProbeReplied{Peer: "d", Absent: true})
	}
	claims(t, m, now, "d", "new")
	for m.Tell(now, core.Resume{}); yields(m); {
		m.Tell(now, core.Resume{})
	}
	if n := m.Sizes().Early; n != 1 || m.StateOf(core.SideOffer, "new") != "early" {
		t.Errorf("%d early claims are left, and the new one is %q", n, m.StateOf(core.SideOffer, "new"))
	}
}

// TestLateInTheirOrder: more offers are late than a step ends. Those that have been late for longest end first, whatever they are called: who
// goes on naming transfers has nobody else's kept.
func TestLateInTheirOrder(t *testing.T) {
	m, now := paced(t, core.Options{EarlyLoad: 5 * core.TickInterval}), time.Unix(0, 0)
	came := []core.TransferID{"z", "b", "y", "a", "x"}
	for _, id := range came {
		claims(t, m, now, "d", id)
		now = now.Add(core.TickInterval / 10)
	}
	m.Actions()
	now = now.Add(5 * core.TickInterval)
	var ended []core.TransferID
	for m.Tell(now, core.Tick{}); len(ended) < len(came); m.Tell(now, core.Resume{}) {
		actions := m.Actions()
		for _, act := range actions {
			if v, ok := act.(core.SendFinish); ok {
				ended = append(ended, v.ID)
			}
		}
		if len(ended) < len(came) && !slices.Contains(actions, core.Action(core.Yield{})) {
			t.Fatalf("%v have ended, and the machine wants no Resume", ended)
		}
	}
	if !slices.Equal(ended, came) {
		t.Errorf("they end in the order %v, and came in the order %v", ended, came)
	}
}
