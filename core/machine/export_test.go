package machine

import (
	"time"

	"github.com/kvconn/kvconn/core"
)

// Told is the machine of a test, whose actions gather until the test takes them.
type Told struct {
	*Machine
	actions []core.Action
}

// Tell returns the answer, nil if the event has none.
func (t *Told) Tell(now time.Time, e core.Event) core.Action {
	answer, rest := core.Split(t.Step(now, e))
	t.actions = append(t.actions, rest...)
	return answer
}

// Try returns why the event is refused.
func (t *Told) Try(now time.Time, e core.Event) error {
	r, _ := t.Tell(now, e).(core.Refuse)
	return r.Err
}

// Actions takes them.
func (t *Told) Actions() []core.Action {
	out := t.actions
	t.actions = nil
	return out
}
