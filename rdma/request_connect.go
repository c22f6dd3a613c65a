// How D asks P to connect.

package rdma

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvconn/kvconn/core"
)

// requestConnect asks P to connect, in the background. A goroutine that has the outcome of an earlier request, and has not ended
// yet, asks again. src.mu is held.
func (src *source) requestConnect() {
	if src.gone {
		return
	}
	if !src.requesting {
		src.requesting = src.r.t.goRun("rdma request connect", src.requestLoop)
	}
	if src.requesting && len(src.lanes) == 0 && src.cause != errUnsettled {
		src.cause, src.settled = errUnsettled, make(chan struct{})
	}
}

// requestAgain asks P once more, since P looked for the memory before it was there: once for each look. Those who wait go on
// waiting; src.mu is held.
func (src *source) requestAgain() {
	src.tooEarly = false
	if src.cause == errUnsettled {
		close(src.settled)
		src.settled = make(chan struct{})
	}
	src.requestConnect()
}

// The most that one request names.
const (
	maxBroken = 1024 // lanes
	maxUp     = 64   // ports
)

// maxBackoff is the longest time between attempts to reach a P.
const maxBackoff = 30 * time.Second

func (src *source) backOff() {
	src.backoff = min(max(2*src.backoff, time.Second), maxBackoff)
	src.requestAt = time.Now().Add(src.backoff)
}

// requestLoop tells P to connect, and which lanes broke here. P answers with signalConnected.
// Either signal may be lost, so D asks again while P has not answered and transfers or
// the first result depend on it.
func (src *source) requestLoop() {
	t := src.r.t
	began := time.Now()
	for {
		src.mu.Lock()
		outcome := src.settled // of what P hears now, or of an earlier request
		s := &signal{Kind: signalHello, Ticket: src.ticket, Lanes: src.broken[:min(len(src.broken), maxBroken)], Up: slices.Clone(src.up[:min(len(src.up), maxUp)])}
		src.mu.Unlock()
		_, err := t.ask(src.peer, s, t.cfg.ConnectTimeout/3)
		src.mu.Lock()
		bound := t.cfg.ConnectTimeout
		if len(src.live) > 0 {
			bound = max(bound, t.cfg.StallTimeout)
		}
		var settled <-chan struct{}
		switch {
		case err == nil:
			src.broken = src.broken[min(len(s.Lanes), len(src.broken)):] // Connect may have emptied the list
			src.up = src.up[min(len(s.Up), len(src.up)):]
			src.requesting = src.connectNeeded() && !src.gone
			if len(src.broken)+len(src.up) == 0 {
				settled = outcome
			}
		default:
			lasting := errors.Is(err, core.ErrAbsent) || errors.Is(err, errRefused) || t.ctx.Err() != nil
			src.requesting = !lasting && !src.gone && (len(src.live) > 0 || src.cause == errUnsettled) && time.Since(began) < bound
			if !src.requesting && !lasting && len(src.broken) == 0 && len(src.lanes) > 0 { // P learns of the ports at its next try
				src.up = nil
				src.mu.Unlock()
				return
			}
		}
		again := src.requesting
		src.mu.Unlock()
		switch {
		case err != nil && !again:
			src.disconnect(fmt.Errorf("rdma: prefill agent %s cannot be asked to connect: %w", src.peer, err))
			return
		case !again:
			return
		case err != nil && !t.pause(100*time.Millisecond):
			return
		case settled == nil:
			continue
		}
		if late := src.awaitSettled(settled, t.cfg.ConnectTimeout); late && time.Since(began) > bound+t.cfg.ConnectTimeout {
			src.mu.Lock()
			src.requesting = false
			src.mu.Unlock()
			src.disconnect(fmt.Errorf("rdma: prefill agent %s was asked to connect %v ago and has not told the outcome", src.peer, time.Since(began).Round(time.Millisecond)))
			return
		}
		src.mu.Lock()
		src.requesting = src.connectNeeded() && !src.gone && t.ctx.Err() == nil
		again = src.requesting
		src.mu.Unlock()
		if !again {
			return
		}
	}
}

// connectNeeded says whether P must be asked; src.mu is held.
func (src *source) connectNeeded() bool {
	return len(src.broken) > 0 || len(src.up) > 0 || src.cause == errUnsettled
}

// awaitSettled waits until P has said whether it can write; late says that P has not said so in time.
func (src *source) awaitSettled(settled <-chan struct{}, bound time.Duration) (late bool) {
	timer := time.NewTimer(bound)
	defer timer.Stop()
	select {
	case <-settled:
	case <-timer.C:
		late = true
	case <-src.r.t.ctx.Done():
	}
	return late
}
