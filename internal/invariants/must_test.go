package invariants

import (
	"strings"
	"testing"
)

type agent string

type party struct{ account, agent agent }

// TestBrokenInvariant: what a broken invariant says has its arguments, which lie on the stack of the one that checks.
func TestBrokenInvariant(t *testing.T) {
	id := strings.Repeat("z", len(t.Name())) // that no compiler knows
	if n := testing.AllocsPerRun(100, func() { Must(len(id) > 1, "%q %d %v", id, len(id), party{"x", agent(id)}) }); n > 0 {
		t.Errorf("an invariant that holds allocates %v times", n)
	}
	defer func() {
		if got, want := recover(), `core: broken invariant: 3 of "a" {x yes} <nil>`; got != want {
			t.Errorf("got %v, want %s", got, want)
		}
	}()
	who := agent(string([]byte{'y', 'e', 's'}))
	Must(len(who) > 3, "%d of %q %v %v", 3, "a", party{"x", who}, error(nil))
}
