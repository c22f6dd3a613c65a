// A wait is bounded in steps, so that a stop of this process is not taken for the peer's silence.

package tcp

import (
	"cmp"
	"errors"
	"os"
	"time"
)

// step is the length of the steps of longer waits. If this process itself was stopped,
// that time counts as one step, and not as the peer's silence.
const step = 250 * time.Millisecond

// stall bounds a time without progress.
type stall struct {
	bound time.Duration
	since time.Duration // the last progress
	each  time.Duration // the length of the steps; 0: step
}

// deadline is when to look again.
func (s *stall) deadline() time.Time { return time.Now().Add(s.next()) }

func (s *stall) next() time.Duration { return min(cmp.Or(s.each, step), s.bound-s.since) }

// last says whether the wait ends with the step that begins now.
func (s *stall) last() bool { return s.since+s.next() >= s.bound }

// goesOn says whether a wait goes on after an error. If the error is the time-out of a step, it counts the step.
func (s *stall) goesOn(err error) bool {
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		return false
	}
	s.since += s.next()
	return s.since < s.bound
}
