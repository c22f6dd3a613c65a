// How P makes lanes and replaces those that broke. One goroutine of a connection does
// all of it, so no two steps cross.

package rdma

import (
	"errors"
	"fmt"
	"time"

	"github.com/kvconn/kvconn/core"
)

// startReconnect starts that goroutine if there is something to do; cn.mu is held.
func (cn *conn) startReconnect() {
	if !cn.reconnecting && cn.next() != stepNone {
		cn.reconnecting = cn.t.goRun("rdma connect", cn.reconnectLoop)
	}
}

// retryDue says whether the pause of a path is over.
func (cn *conn) retryDue() bool {
	now := time.Now()
	for _, p := range cn.paths {
		if !p.usable() && !now.Before(p.retryAt) {
			return true
		}
	}
	return false
}

// due returns the paths whose pause is over. After each of its pauses a path is due once, even if
// P cannot try it now because one of its ports is down or in use.
func (cn *conn) due() map[pathKey]bool {
	now, due := time.Now(), map[pathKey]bool{}
	for key, p := range cn.paths {
		if p.retry(now) {
			due[key] = true
		}
	}
	return due
}

// busyPause is the time after which P asks D again, when D was still ending lanes in error.
const busyPause = 5 * time.Millisecond

func (cn *conn) reconnectLoop() {
	var giveUp time.Time // when P stops asking a D that does not answer
	for {
		var done bool
		cn.update(func(cn *conn) {
			if done = cn.next() == stepNone; done {
				cn.reconnecting = false
			}
		})
		if done {
			return
		}
		again, err := cn.reconnectOnce()
		switch {
		case err == nil && again:
			cn.t.pause(busyPause)
			continue
		case err == nil:
			giveUp = time.Time{}
			continue
		case giveUp.IsZero():
			giveUp = time.Now().Add(cn.t.cfg.ConnectTimeout)
		}
		lasting := errors.Is(err, core.ErrAbsent) || errors.Is(err, errRefused) || errors.Is(err, errNoPath) || errors.Is(err, core.ErrOtherWay)
		if lasting || time.Now().After(giveUp) || !cn.t.pause(100*time.Millisecond) {
			cn.update(func(cn *conn) { cn.giveUp(err) })
			return
		}
	}
}

// giveUp ends the writes that wait for a D that cannot be asked or reached; cn.mu is held.
func (cn *conn) giveUp(err error) {
	absent := errors.Is(err, core.ErrAbsent) || errors.Is(err, errRefused) && !errors.Is(err, errNoPath)
	cause := fmt.Errorf("rdma: no way to decode agent %s: %w: %w", cn.peer, err, core.ErrConnectionLost)
	tasks := cn.tasks & makeLanes
	asked := errors.Is(err, errNoPath)                                  // D may have asked again, since it was told
	back := errors.Is(err, core.ErrOtherWay) && cn.t.forgotten() == nil // the memory is: returned may have come while D was told that it is not
	if !asked && !back {
		tasks = 0
	}
	if errors.Is(err, core.ErrOtherWay) {
		cause = err
	}
	cn.tasks, cn.reconnecting = tasks, false
	if len(cn.lanes) > 0 && !absent {
		// The lanes work, and only D's answer is missing: writes on their way go on.
		for w := range cn.writes {
			if w.isLost() {
				cn.fail(w, cause)
			}
		}
		return
	}
	cn.disconnect(cause)
	cn.tasks |= tasks
	if absent {
		cn.confirmed(cn.lost) // D is gone or has forgotten this agent, so it has cut all lanes
	}
}

// reconnectOnce does the next step. again says that D is busy and must be asked once more.
func (cn *conn) reconnectOnce() (again bool, err error) {
	cn.mu.Lock()
	s := &signal{Kind: signalLost, Ticket: cn.ticket, Lanes: append([]uint32(nil), cn.lost...)}
	s.Lanes = s.Lanes[:min(len(s.Lanes), 1024)]
	for w := range cn.writes {
		if w.known && w.cause == nil && w.isLost() {
			s.Seqs = append(s.Seqs, w.grant.seq)
		}
	}
	next := cn.next()
	cn.mu.Unlock()
	switch next {
	case stepAsk:
		rep, err := cn.t.ask(cn.peer, s, cn.t.cfg.ConnectTimeout/3)
		if err != nil || rep.Busy {
			return true, err
		}
		cn.update(func(cn *conn) {
			cn.tasks &^= askGrants
			if err = cn.arrived(s.Lanes, s.Seqs, rep); err == nil {
				cn.again()
			}
		})
		return false, err
	case stepRest:
		return false, cn.goToRest()
	case stepConnect:
		return false, cn.connect()
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

// watchRest arranges that the lanes are closed once nothing was written for cfg.Idle;
// cn.mu is held.
func (cn *conn) watchRest() {
	cn.used = time.Now()
	if cn.sleep != nil {
		cn.sleep.Stop()
	}
	idle := cn.t.cfg.Idle
	cn.sleep = time.AfterFunc(idle, func() {
		cn.update(func(cn *conn) {
			switch left := idle - time.Since(cn.used); {
			case cn.state != stateUp:
			case len(cn.writes) > 0:
				cn.sleep.Reset(idle)
			case left > 0:
				cn.sleep.Reset(left)
			default:
				cn.tasks |= restLanes
			}
		})
	})
}

// goToRest closes the lanes and tells D. The next write opens others.
func (cn *conn) goToRest() error {
	cn.mu.Lock()
	cn.tasks &^= restLanes
	idle, last, epoch := len(cn.writes) == 0, cn.lastID, cn.remote.epoch()
	if idle {
		for _, l := range append([]*lane(nil), cn.lanes...) {
			cn.remove(l)
		}
	}
	cn.mu.Unlock()
	if !idle {
		return nil
	}
	_, err := cn.t.ask(cn.peer, &signal{Kind: signalConnected, Ticket: cn.ticket, Last: last, Secret: epoch}, cn.t.cfg.ConnectTimeout/3)
	return err
}
