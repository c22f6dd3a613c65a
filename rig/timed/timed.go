// Package timed judges how long something takes whose bound is a promise in seconds.
package timed

import (
	"testing"
	"time"
)

// tries is how often something may take too long before that counts: on a machine that has other work, any one try may be late.
const tries = 3

// Within wants one of three tries to take at most so long. A try does what is timed, and returns how long that took.
func Within(t testing.TB, most time.Duration, what string, try func() time.Duration) {
	t.Helper()
	var took []time.Duration
	for range tries {
		d := try()
		if d <= most {
			return
		}
		took = append(took, d)
	}
	t.Errorf("%s took %v, want %v at most", what, took, most)
}
