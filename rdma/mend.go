package rdma

import (
	"errors"
	"fmt"
	"time"

	"github.com/kvconn/kvconn/core"
)

// What P does to have lanes, and to have back those that broke. One goroutine of
// a link does it all, so that nothing of it crosses.

// kick starts that goroutine if there is something to do; lk.mu is held.
func (lk *link) kick() {
	if !lk.mends && lk.next() != stepNone {
		lk.mends = lk.t.goRun("rdma connect", lk.mend)
	}
}

// retryDue says whether a rail that was paused may be tried again.
func (lk *link) retryDue() bool {
	now := time.Now()
	for _, r := range lk.rails {
		if !r.usable() && !now.Before(r.retryAt) {
			return true
		}
	}
	return false
}

// due are the rails whose pause is over. They are not due again before another
// pause, whether they can be tried now or not: a port may be down, or in use.
func (lk *link) due() map[railKey]bool {
	now, due := time.Now(), map[railKey]bool{}
	for key, r := range lk.rails {
		if r.retry(now) {
			due[key] = true
		}
	}
	return due
}

// busyPause is how long D may take to end lanes in error before it is asked again.
const busyPause = 5 * time.Millisecond

func (lk *link) mend() {
	var giveUp time.Time // of a D that does not answer
	for {
		var done bool
		lk.update(func(lk *link) {
			if done = lk.next() == stepNone; done {
				lk.mends = false
			}
		})
		if done {
			return
		}
		again, err := lk.mendOnce()
		switch {
		case err == nil && again:
			lk.t.pause(busyPause)
			continue
		case err == nil:
			giveUp = time.Time{}
			continue
		case giveUp.IsZero():
			giveUp = time.Now().Add(lk.t.cfg.ConnectTimeout)
		}
		lasting := errors.Is(err, core.ErrAbsent) || errors.Is(err, errRefused) || errors.Is(err, errNoPath)
		if lasting || time.Now().After(giveUp) || !lk.t.pause(100*time.Millisecond) {
			lk.update(func(lk *link) { lk.giveUp(err) })
			return
		}
	}
}

// giveUp ends what waits for a D that cannot be asked or reached.
func (lk *link) giveUp(err error) {
	absent := errors.Is(err, core.ErrAbsent) || errors.Is(err, errRefused) && !errors.Is(err, errNoPath)
	cause := fmt.Errorf("rdma: no way to decode agent %s: %w: %w", lk.peer, err, core.ErrConnectionLost)
	lk.tasks, lk.mends = 0, false
	if len(lk.lanes) > 0 && !absent {
		// What is on its way goes on: only D's word is missing.
		for w := range lk.writes {
			if w.isLost() {
				lk.fail(w, cause)
			}
		}
		return
	}
	lk.lose(cause)
	if absent {
		lk.confirmed(lk.lost) // D is gone, or knows nothing of this agent any more: it has cut all lanes
	}
}

// mendOnce does what stands first. again: D asks for a moment.
func (lk *link) mendOnce() (again bool, err error) {
	lk.mu.Lock()
	s := &signal{Kind: signalLost, Ticket: lk.ticket, Lanes: append([]uint32(nil), lk.lost...)}
	s.Lanes = s.Lanes[:min(len(s.Lanes), 1024)]
	for w := range lk.writes {
		if w.known && w.cause == nil && w.isLost() {
			s.Seqs = append(s.Seqs, w.grant.seq)
		}
	}
	next := lk.next()
	lk.mu.Unlock()
	switch next {
	case stepAsk:
		rep, err := lk.t.ask(lk.peer, s, lk.t.cfg.ConnectTimeout/3)
		if err != nil || rep.Busy {
			return true, err
		}
		lk.update(func(lk *link) {
			lk.tasks &^= askGrants
			if err = lk.arrived(s.Lanes, s.Seqs, rep); err == nil {
				lk.again()
			}
		})
		return false, err
	case stepRest:
		return false, lk.goToRest()
	case stepConnect:
		return false, lk.connect()
	}
	return false, nil
}

func (w *write) isLost() bool {
	for _, j := range w.jobs {
		if j.lost {
			return true
		}
	}
	return false
}

// watchRest closes the lanes when nothing was written for long; lk.mu is held.
func (lk *link) watchRest() {
	lk.used = time.Now()
	if lk.sleep != nil {
		lk.sleep.Stop()
	}
	idle := lk.t.cfg.Idle
	lk.sleep = time.AfterFunc(idle, func() {
		lk.update(func(lk *link) {
			switch left := idle - time.Since(lk.used); {
			case lk.state != stateUp:
			case len(lk.writes) > 0:
				lk.sleep.Reset(idle)
			case left > 0:
				lk.sleep.Reset(left)
			default:
				lk.tasks |= restLanes
			}
		})
	})
}

// goToRest closes the lanes and tells D; the next write opens others.
func (lk *link) goToRest() error {
	lk.mu.Lock()
	lk.tasks &^= restLanes
	idle, last := len(lk.writes) == 0, lk.lastID
	if idle {
		for _, l := range append([]*lane(nil), lk.lanes...) {
			lk.remove(l)
		}
	}
	lk.mu.Unlock()
	if !idle {
		return nil
	}
	_, err := lk.t.ask(lk.peer, &signal{Kind: signalJoined, Ticket: lk.ticket, Last: last}, lk.t.cfg.ConnectTimeout/3)
	return err
}
