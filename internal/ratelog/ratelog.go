// Package ratelog bounds how often an unknown client can make an agent write a line
// into its log.
package ratelog

import (
	"fmt"
	"sync"
	"time"
)

// A burst is written at once, then one line each interval.
const (
	burst    = 10
	interval = time.Second
)

// Limit counts the lines that are written and left out. The zero value is ready. It is
// safe for concurrent use and must not be copied.
type Limit struct {
	mu      sync.Mutex
	spent   float64 // of the burst
	last    time.Time
	omitted int
}

// Do calls write unless too much was written lately. The note tells how many lines were
// left out since the last one; it is mostly "".
func (l *Limit) Do(write func(note string)) { l.at(time.Now(), write) }

func (l *Limit) at(now time.Time, write func(note string)) {
	l.mu.Lock()
	l.spent = max(0, l.spent-now.Sub(l.last).Seconds()/interval.Seconds())
	l.last = now
	if l.spent > burst-1 {
		l.omitted++
		l.mu.Unlock()
		return
	}
	l.spent++
	note := ""
	if l.omitted > 0 {
		note = fmt.Sprintf(" (%d more were not written)", l.omitted)
		l.omitted = 0
	}
	l.mu.Unlock()
	write(note)
}
