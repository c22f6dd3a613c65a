package coretest

import (
	"fmt"
	"reflect"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/core/machine"
	"github.com/kvconn/kvconn/kv"
)

// Record is a machine's run, as core.Options.OnStep tells it: its first steps, up to a limit. It is written under the
// lock of the machine's user.
type Record struct {
	Limit  int
	Steps  []Step
	Missed int // steps after the limit
}

// Step is an event and what the machine has made of it.
type Step struct {
	Now     time.Time
	Event   core.Event
	Actions []core.Action
}

// Add is for core.Options.OnStep.
func (r *Record) Add(now time.Time, e core.Event, actions []core.Action) {
	if len(r.Steps) == r.Limit {
		r.Missed++
		return
	}
	r.Steps = append(r.Steps, Step{now, e, actions})
}

// Replay tells a new machine the events, and fails at the first that it answers in another way. It returns how often each
// type of event was there.
func (r *Record) Replay(t testing.TB, layout *kv.Layout, opt core.Options) map[string]int {
	t.Helper()
	opt.OnStep = nil
	m, kinds := machine.New(layout, opt), map[string]int{}
	for i, s := range r.Steps {
		kinds[reflect.TypeOf(s.Event).Name()]++
		if got := m.Step(s.Now, s.Event); !reflect.DeepEqual(got, s.Actions) {
			t.Fatalf("step %d of %d, %T%+v: the machine wanted %s, and now wants %s", i, len(r.Steps), s.Event, s.Event, list(s.Actions), list(got))
		}
	}
	return kinds
}

func list(actions []core.Action) (out []string) {
	for _, a := range actions {
		out = append(out, fmt.Sprintf("%T%+v", a, a))
	}
	return out
}
