// The time in which this process did not run is nobody's silence.

package half

import (
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
)

// maxGap is the longest time between two ticks that a busy machine explains.
const maxGap = 10 * core.TickInterval

// noticePause makes up for a time in which this process did not run, because it was stopped or its
// machine slept. This time counts neither as a peer's silence nor as a lease's time.
func (h *Set) noticePause(now time.Time) {
	gap := now.Sub(h.awake)
	h.awake = now
	if gap < fault.Pick("pause-is-silence", maxGap, 1000*maxGap) {
		return
	}
	gap -= core.TickInterval // a dead peer is noticed also by a process that is slow but running
	// A deadline moves no further than if it began now: a part of its time may have run after the pause.
	move := func(at *time.Time, most time.Duration) {
		if !at.IsZero() {
			*at = at.Add(min(gap, now.Add(most).Sub(*at)))
		}
	}
	for _, p := range h.peers {
		move(&p.heard, 0)
	}
	for _, p := range h.probes {
		move(&p.since, 0)
	}
	for _, w := range h.moments {
		move(&w.since, 0)
	}
	for _, c := range h.claims.byID {
		move(&c.nameBy, h.patience())
		move(&c.replaceBy, h.patience())
	}
	for _, ld := range h.loads.byID {
		move(&ld.nameBy, h.patience())
		move(&ld.until, h.patience())
		move(&ld.endBy, h.opt.Load)
		move(&ld.held, 0)
	}
	for _, of := range h.offers {
		most := h.lease(of)
		if of.state == offerEarly {
			most = h.opt.EarlyLoad
		}
		move(&of.deadline, most)
		move(&of.endBy, h.opt.Offer)
	}
}

func later(a, b time.Time) time.Time {
	if a.Before(b) {
		return b
	}
	return a
}
