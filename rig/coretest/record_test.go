package coretest

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/core/machine"
	"github.com/kvconn/kvconn/kv"
)

// failing notes how a test fails, and goes no further then.
type failing struct {
	testing.TB
	said string
}

func (f *failing) Helper() {}

func (f *failing) Fatalf(format string, args ...any) {
	f.said = fmt.Sprintf(format, args...)
	panic(f)
}

// replayed says how a replay fails; "" if it does not.
func replayed(r *Record, layout *kv.Layout, opt core.Options) string {
	f := &failing{}
	func() {
		defer func() {
			if p := recover(); p != nil && p != any(f) {
				panic(p)
			}
		}()
		r.Replay(f, layout, opt)
	}()
	return f.said
}

// TestReplayFinds: a step that depends on more than the events and their times is found. Here it has its actions in another order, as a
// map gives them, or one of its actions is missing, or has another value; or the machine has other options.
func TestReplayFinds(t *testing.T) {
	layout, err := kv.NewLayout([]kv.Region{{Name: "k", Base: 1 << 24, BlockStride: 1024, BlockBytes: 1024, NumBlocks: 16}})
	if err != nil {
		t.Fatal(err)
	}
	const claims = 4
	record := func() (*Record, *Step) {
		r, m, now := &Record{Limit: 100}, machine.New(layout, core.Options{}), time.Unix(0, 0)
		tell := func(e core.Event) []core.Action {
			now = now.Add(time.Millisecond)
			actions := m.Step(now, e)
			r.Add(now, e, slices.Clone(actions))
			return actions
		}
		for i := range claims {
			id := core.TransferID(fmt.Sprint("c", i))
			for _, a := range tell(core.ClaimRequest{ID: id, From: core.Target{EngineID: "e"}}) {
				tell(core.Resolved{ID: id, Seq: a.(core.Resolve).Seq, Peer: "p"})
			}
		}
		tell(core.Close{})
		return r, &r.Steps[len(r.Steps)-1]
	}
	for what, change := range map[string]func(*Step){
		"nothing": func(*Step) {},
		"order":   func(s *Step) { s.Actions[0], s.Actions[1] = s.Actions[1], s.Actions[0] },
		"less":    func(s *Step) { s.Actions = s.Actions[1:] },
		"value": func(s *Step) {
			v := s.Actions[0].(core.SendFinish)
			v.Reason += "!"
			s.Actions[0] = v
		},
	} {
		r, last := record()
		if len(last.Actions) != claims {
			t.Fatalf("the last step wants %d actions, not %d", len(last.Actions), claims)
		}
		change(last)
		said, step := replayed(r, layout, core.Options{}), fmt.Sprintf("step %d of ", len(r.Steps)-1)
		if found := strings.Contains(said, step); found != (what != "nothing") || !found && said != "" {
			t.Errorf("after a change of %s the replay says %q", what, said)
		}
	}
	r, _ := record()
	if said := replayed(r, layout, core.Options{MaxTransfers: claims - 1}); !strings.Contains(said, "step 6 of ") {
		t.Errorf("of a machine that has other options the replay says %q", said)
	}
}
