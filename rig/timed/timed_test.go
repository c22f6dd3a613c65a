package timed

import (
	"fmt"
	"testing"
	"time"
)

type told struct {
	testing.TB
	errors []string
}

func (t *told) Helper() {}

func (t *told) Errorf(format string, args ...any) {
	t.errors = append(t.errors, fmt.Sprintf(format, args...))
}

// TestWithin: one try in time is enough, and no further one is made. If all are late, their times are told.
func TestWithin(t *testing.T) {
	for _, c := range []struct {
		takes []time.Duration
		made  int
		says  string
	}{
		{[]time.Duration{1}, 1, "[]"},
		{[]time.Duration{4, 5, 3}, 3, "[]"},
		{[]time.Duration{4, 3}, 2, "[]"},
		{[]time.Duration{4, 5, 6}, 3, "[it took [4ns 5ns 6ns], want 3ns at most]"},
	} {
		made, of := 0, &told{TB: t}
		Within(of, 3, "it", func() time.Duration {
			made++
			return c.takes[made-1]
		})
		if made != c.made || fmt.Sprint(of.errors) != c.says {
			t.Errorf("%v: %d tries, %v", c.takes, made, of.errors)
		}
	}
}
