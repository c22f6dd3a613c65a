// Package timed judges how long something takes whose bound is a promise in seconds.
package timed

import (
	"testing"
	"time"
)

// tries is how often something may take too long before that counts: on a machine that has other work, any one try may be late, and
// those that come right after it. So each next one is twice as long after the one before: the last is a minute after the first.
const tries = 7

// Within wants one of several tries to take at most so long. A try does what is timed, and returns how long that took.
func Within(t testing.TB, most time.Duration, what string, try func() time.Duration) {
	t.Helper()
	var took []time.Duration
	for n := range tries {
		if n > 0 {
			time.Sleep(time.Second << (n - 1))
		}
		d := try()
		if d <= most {
			if len(took) > 0 { // scripts/digest.py shows it
				t.Logf("LATE: %s took %v before it took %v; at most %v is wanted", what, took, d, most)
			}
			return
		}
		took = append(took, d)
	}
	t.Errorf("%s took %v, want %v at most", what, took, most)
}
