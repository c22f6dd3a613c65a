package leaktest

import (
	"strings"
	"testing"
	"time"
)

// recorder stands in for the test that Check watches.
type recorder struct {
	testing.TB
	cleanups []func()
	errors   int
}

func (r *recorder) Helper()               {}
func (r *recorder) Cleanup(f func())      { r.cleanups = append(r.cleanups, f) }
func (r *recorder) Errorf(string, ...any) { r.errors++ }

func TestGoroutineThatEndsIsNoLeak(t *testing.T) {
	r := &recorder{TB: t}
	Check(r)
	stop := make(chan struct{})
	go func() { <-stop }()
	close(stop)
	for _, f := range r.cleanups {
		f()
	}
	if len(r.cleanups) != 1 || r.errors != 0 {
		t.Fatalf("cleanups %d, errors %d; want 1 and 0", len(r.cleanups), r.errors)
	}
}

func TestLeakIsFoundWithItsStack(t *testing.T) {
	Check(t)
	before := map[string]bool{}
	for id := range stacks() {
		before[id] = true
	}
	stop := make(chan struct{})
	defer close(stop)
	go leakyFunction(stop)
	left := wait(before, 20*time.Millisecond)
	if len(left) != 1 || !strings.Contains(left[0], "leakyFunction") {
		t.Fatalf("stacks left: %q; want the one of leakyFunction", left)
	}
}

func leakyFunction(stop chan struct{}) { <-stop }
