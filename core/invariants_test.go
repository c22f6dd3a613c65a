package core

import "testing"

// TestBrokenInvariant: what a broken invariant says has its arguments, which lie on the stack of the one that checks.
func TestBrokenInvariant(t *testing.T) {
	must(true, "%d", 1)
	defer func() {
		if got, want := recover(), `core: broken invariant: 3 of "a" {x y} <nil>`; got != want {
			t.Errorf("got %v, want %s", got, want)
		}
	}()
	agent := AgentID(string([]byte{'y'}))
	must(len(agent) > 1, "%d of %q %v %v", 3, "a", party{"x", agent}, error(nil))
}
