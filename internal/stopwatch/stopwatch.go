// Package stopwatch adds up the times in which something was under way.
package stopwatch

import "time"

// Watch is stopped at first. Whoever uses it guards it.
type Watch struct {
	since time.Time // zero: it is stopped
	sum   time.Duration
}

// Run says whether something is under way from now on.
func (w *Watch) Run(underWay bool, now time.Time) {
	w.sum = w.Sum(now)
	if w.since = (time.Time{}); underWay {
		w.since = now
	}
}

// Sum is how long something was under way until now.
func (w *Watch) Sum(now time.Time) time.Duration {
	if w.since.IsZero() {
		return w.sum
	}
	return w.sum + now.Sub(w.since)
}
