package core

import "time"

// StateNames lists the states of each half.
func StateNames() map[string][]string {
	out := map[string][]string{}
	for s := claimResolving; s <= claimVoid; s++ {
		out["claim"] = append(out["claim"], s.String())
	}
	for s := loadResolving; s <= loadEnding; s++ {
		out["load"] = append(out["load"], s.String())
	}
	for s := offerEarly; s <= offerRefused; s++ {
		out["offer"] = append(out["offer"], s.String())
	}
	return out
}

// Told is the machine of a test, whose actions gather until the test takes them.
type Told struct {
	*Machine
	actions []Action
}

// Tell returns the answer, nil if the event has none.
func (t *Told) Tell(now time.Time, e Event) Action {
	answer, rest := Split(t.Step(now, e))
	t.actions = append(t.actions, rest...)
	return answer
}

// Try returns why the event is refused.
func (t *Told) Try(now time.Time, e Event) error {
	r, _ := t.Tell(now, e).(Refuse)
	return r.Err
}

// Actions takes them.
func (t *Told) Actions() []Action {
	out := t.actions
	t.actions = nil
	return out
}
