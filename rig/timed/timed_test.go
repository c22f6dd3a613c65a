package timed

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"
)

type told struct {
	testing.TB
	errors []string
}

func (t *told) Helper() {}

func (*told) Logf(string, ...any) {} // this test is not late

func (t *told) Errorf(format string, args ...any) {
	t.errors = append(t.errors, fmt.Sprintf(format, args...))
}

// TestWithin: one try in time is enough, and no further one is made. If all are late, their times are told. They are a minute apart.
func TestWithin(t *testing.T) {
	for _, c := range []struct {
		takes []time.Duration
		made  int
		waits time.Duration
		says  string
	}{
		{[]time.Duration{1}, 1, 0, "[]"},
		{[]time.Duration{4, 5, 3}, 3, 3 * time.Second, "[]"},
		{[]time.Duration{4, 3}, 2, time.Second, "[]"},
		{[]time.Duration{4, 5, 6, 7, 8, 9, 10}, 7, 63 * time.Second, "[it took [4ns 5ns 6ns 7ns 8ns 9ns 10ns], want 3ns at most]"},
	} {
		synctest.Test(t, func(t *testing.T) {
			made, of, began := 0, &told{TB: t}, time.Now()
			Within(of, 3, "it", func() time.Duration {
				made++
				return c.takes[made-1]
			})
			if waits := time.Since(began); made != c.made || waits != c.waits || fmt.Sprint(of.errors) != c.says {
				t.Errorf("%v: %d tries in %v, %v", c.takes, made, waits, of.errors)
			}
		})
	}
}
