package coretest

import (
	"sync"
	"time"

	"github.com/kvconn/kvconn/core"
)

// Clock is a core.Clock that stands still until Advance.
type Clock struct {
	mu      sync.Mutex
	now     time.Time
	tickers []*ticker // in the order of NewTicker
}

var _ core.Clock = (*Clock)(nil)

type ticker struct {
	every   time.Duration
	next    time.Time
	f       func(time.Time)
	running sync.Mutex // held while f runs
	stopped bool       // guarded by running
}

// NewClock starts at a time that is the same in every run.
func NewClock() *Clock { return &Clock{now: time.Unix(1_000_000_000, 0)} }

// Now implements core.Clock.
func (c *Clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

// NewTicker implements core.Clock. f runs on the goroutine that calls Advance;
// stop must not be called from f.
func (c *Clock) NewTicker(d time.Duration, f func(now time.Time)) (stop func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	tk := &ticker{every: d, next: c.now.Add(d), f: f}
	c.tickers = append(c.tickers, tk)
	return func() {
		c.mu.Lock()
		for i, other := range c.tickers {
			if other == tk {
				c.tickers = append(c.tickers[:i:i], c.tickers[i+1:]...)
				break
			}
		}
		c.mu.Unlock()
		tk.running.Lock()
		tk.stopped = true
		tk.running.Unlock()
	}
}

// Tickers is the number of tickers that run: 0 when an agent is idle.
func (c *Clock) Tickers() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.tickers)
}

// Advance moves the time on and calls the tickers that are due, in the order of time. Only
// one call of Advance runs at a time.
func (c *Clock) Advance(d time.Duration) {
	c.mu.Lock()
	end := c.now.Add(d)
	for {
		var due *ticker
		for _, tk := range c.tickers {
			if !tk.next.After(end) && (due == nil || tk.next.Before(due.next)) {
				due = tk
			}
		}
		if due == nil {
			break
		}
		c.now = due.next
		due.next = due.next.Add(due.every)
		now := c.now
		c.mu.Unlock()
		due.running.Lock()
		if !due.stopped {
			due.f(now)
		}
		due.running.Unlock()
		c.mu.Lock()
	}
	c.now = end
	c.mu.Unlock()
}
