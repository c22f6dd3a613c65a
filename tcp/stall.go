package tcp

import (
	"errors"
	"os"
	"time"
)

// step is what longer waits are made of: the time in which this process itself
// was stopped then counts as one step, and not as its peer's.
const step = 250 * time.Millisecond

// stall bounds a time without progress.
type stall struct {
	bound time.Duration
	since time.Duration // the last progress
}

// deadline is when to look again.
func (s *stall) deadline() time.Time { return time.Now().Add(min(step, s.bound-s.since)) }

// goesOn says whether an error is the end of a step only, and counts it.
func (s *stall) goesOn(err error) bool {
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		return false
	}
	s.since += min(step, s.bound-s.since)
	return s.since < s.bound
}
