package stopwatch

import (
	"testing"
	"time"
)

func TestWatch(t *testing.T) {
	var w Watch
	at := func(s int) time.Time { return time.Unix(int64(1000+s), 0) }
	steps := []struct {
		at       int
		underWay bool
		sum      time.Duration // just before
	}{
		{0, false, 0},
		{5, true, 0},
		{7, true, 2 * time.Second}, // as it was
		{10, false, 5 * time.Second},
		{20, false, 5 * time.Second},
		{30, true, 5 * time.Second},
		{31, false, 6 * time.Second},
		{99, false, 6 * time.Second},
	}
	for _, s := range steps {
		if got := w.Sum(at(s.at)); got != s.sum {
			t.Errorf("at %d: %v, want %v", s.at, got, s.sum)
		}
		w.Run(s.underWay, at(s.at))
	}
}
