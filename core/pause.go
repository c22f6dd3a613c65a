package core

import (
	"time"

	"github.com/kvconn/kvconn/internal/fault"
)

// maxGap is the longest time between two ticks that a busy machine explains.
const maxGap = 10 * TickInterval

// noticePause makes up for a time in which this process did not run: it was
// stopped, or its machine slept. Nobody was silent then, and no lease ran.
func (m *Machine) noticePause(now time.Time) {
	gap := now.Sub(m.awake)
	m.awake = now
	if gap < fault.Pick("pause-is-silence", maxGap, 1000*maxGap) {
		return
	}
	gap -= TickInterval // a dead peer is noticed also by a process that is slow but running
	// A deadline moves no further than if it began now: a part of its time may have run after the pause.
	move := func(at *time.Time, most time.Duration) {
		if !at.IsZero() {
			*at = earlier(at.Add(gap), now.Add(most))
		}
	}
	for _, p := range m.peers {
		move(&p.heard, 0)
	}
	for _, p := range m.probes {
		move(&p.since, 0)
	}
	for _, w := range m.moments {
		move(&w.since, 0)
	}
	for _, c := range m.claims.byID {
		move(&c.nameBy, m.patience())
		move(&c.replaceBy, m.patience())
	}
	for _, ld := range m.loads.byID {
		move(&ld.nameBy, m.patience())
		move(&ld.until, m.patience())
		move(&ld.endBy, m.opt.Load)
		move(&ld.held, 0)
	}
	for _, of := range m.offers {
		most := m.lease(of)
		if of.state == offerEarly {
			most = m.opt.EarlyLoad
		}
		move(&of.deadline, most)
		move(&of.endBy, m.opt.Offer)
	}
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

func later(a, b time.Time) time.Time {
	if a.Before(b) {
		return b
	}
	return a
}
