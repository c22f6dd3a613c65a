package machine_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/core/machine"
	"github.com/kvconn/kvconn/kv"
)

func newMachine(t *testing.T) *machine.Told {
	t.Helper()
	l, err := kv.NewLayout([]kv.Region{{Name: "k", Base: 1 << 20, BlockStride: 64, BlockBytes: 64, NumBlocks: 1 << 14, Memory: kv.DeviceMemory(0)}})
	if err != nil {
		t.Fatal(err)
	}
	return &machine.Told{Machine: machine.New(l, core.Options{})}
}

// count says how many of a machine's actions are of each type.
func count(m *machine.Told) map[string]int {
	out := map[string]int{}
	for _, a := range m.Actions() {
		out[fmt.Sprintf("%T", a)]++
	}
	return out
}

// TestMomentOfMany: a moment that a step's loads share is awaited once, and they all go on
// when it has passed.
func TestMomentOfMany(t *testing.T) {
	m, now := newMachine(t), time.Unix(0, 0)
	const loads = 1000
	for i := range loads {
		r := core.LoadRequest{ID: core.TransferID(fmt.Sprint(i)), From: core.Target{EngineID: "e"}, Selection: kv.Selection{Blocks: [][]kv.BlockID{{kv.BlockID(i)}}}, After: 5}
		if err := m.Try(now, r); err != nil {
			t.Fatal(err)
		}
		m.Tell(now, core.Resolved{ID: r.ID, Seq: uint64(1 + i), Peer: "p"})
	}
	if got := count(m); got["core.Await"] != 1 || got["core.Resolve"] != loads || got["core.Expect"] != 0 {
		t.Errorf("before the moment: %v", got)
	}
	m.Tell(now, core.MomentPassed{Moment: 4}) // nobody waits for it
	m.Tell(now, core.MomentPassed{Moment: 5})
	if got := count(m); got["core.Expect"] != loads || len(got) != 1 {
		t.Errorf("after the moment: %v", got)
	}
	if m.Tell(now, core.Abandon{}); m.Busy() || m.Sizes().Moments != 0 {
		t.Errorf("left: %+v", m.Sizes())
	}
}

// TestPendingInAnyOrder: moments of partial offers pass from the last to the first. Nothing
// is read until the first has passed. More than 4096 of them are refused.
func TestPendingInAnyOrder(t *testing.T) {
	if machine.Raced {
		t.Skip("one goroutine: it runs without the race detector, in a tenth of the time")
	}
	m, now := newMachine(t), time.Unix(0, 0)
	const most = 4096
	blocks := make([]kv.BlockID, most+1)
	for i := range blocks {
		blocks[i] = kv.BlockID(i)
	}
	m.Tell(now, core.LoadMessage{ID: "t", Peer: "d", Grant: []byte("g"), Selection: kv.Selection{First: []uint32{0}, Blocks: [][]kv.BlockID{blocks}}})
	for i := range most + 1 {
		r := core.PartialOffer{ID: "t", Blocks: [][]kv.BlockID{blocks[i : i+1]}, Ready: []uint32{uint32(i + 1)}, After: core.Moment(1 + i)}
		switch err := m.Try(now, r); {
		case i < most && err != nil:
			t.Fatal(err)
		case i == most && !errors.Is(err, core.ErrOverload):
			t.Errorf("partial offer %d: %v", i, err)
		}
	}
	if got := count(m); got["core.Await"] != most || len(got) != 1 {
		t.Errorf("before the moments: %v", got)
	}
	for i := most; i > 1; i-- {
		m.Tell(now, core.MomentPassed{Moment: core.Moment(i)})
	}
	if got := count(m); len(got) != 0 {
		t.Errorf("before the first moment: %v", got)
	}
	m.Tell(now, core.MomentPassed{Moment: 1})
	actions := m.Actions()
	if len(actions) != 1 {
		t.Fatalf("after all moments: %v", actions)
	}
	if w, ok := actions[0].(core.Write); !ok || !slices.Equal(w.End, []uint32{most}) {
		t.Errorf("after all moments: %+v", actions[0])
	}
	m.Tell(now, core.Abandon{})
}

// TestNoMoment: without moments none are kept.
func TestNoMoment(t *testing.T) {
	m, now := newMachine(t), time.Unix(0, 0)
	if err := m.Try(now, core.OfferRequest{ID: "t", Selection: kv.Selection{Blocks: [][]kv.BlockID{{1}}}}); err != nil {
		t.Fatal(err)
	}
	if err := m.Try(now, core.LoadRequest{ID: "u", From: core.Target{EngineID: "e"}, Selection: kv.Selection{Blocks: [][]kv.BlockID{{2}}}}); err != nil {
		t.Fatal(err)
	}
	if err := m.Try(now, core.LoadRequest{ID: "v", From: core.Target{EngineID: "e"}, After: 3}); err != nil { // of no blocks
		t.Fatal(err)
	}
	if got := count(m); got["core.Await"] != 0 || m.Sizes().Moments != 0 {
		t.Errorf("%v, %+v", got, m.Sizes())
	}
	m.Tell(now, core.Abandon{})
}
