// Messages between hosts are late, lost or doubled.

package sim

import (
	"errors"
	"time"

	"github.com/kvconn/kvconn/core"
)

// ask sends a request. serve runs at the peer, twice if the request is doubled. What serve
// returned and then answer run in a, once; on an error answer alone runs. absent is the
// proof that the peer is gone. errAbsent is what a server says if nobody listens as the
// peer.
func (a *agent) ask(to core.AgentID, bound time.Duration, serve func(p *agent) func(), answer func(absent bool, err error)) {
	answered := false
	once := func(absent bool, err error, take func()) {
		a.run(func() {
			if answered {
				return
			}
			answered = true
			if take != nil {
				take()
			}
			answer(absent, err)
		})
	}
	w := a.w
	w.after(bound, func() { once(false, errDeadline, nil) })
	p := w.byID[to]
	if p.dead || w.now < p.deaf {
		if !p.silent {
			w.after(w.delay(), func() { once(!w.plan.cluster, errAbsent, nil) })
		}
		return
	}
	copies := 1
	if w.chance(w.plan.double) {
		w.faults["double"]++
		copies = 2
	}
	deliver := func() {
		w.deliver(a.host, p.host, func() {
			if p.dead {
				once(!w.plan.cluster, errAbsent, nil)
				return
			}
			p.run(func() {
				take := serve(p)
				w.deliver(p.host, a.host, func() { once(false, nil, take) })
			})
		})
	}
	deliver()
	if copies > 1 && w.chance(0.5) {
		w.after(w.upTo(500*time.Millisecond), deliver)
	} else if copies > 1 {
		deliver()
	}
}

// deliver brings one message from host to host, or loses it.
func (w *world) deliver(from, to *host, f func()) {
	if w.chance(w.plan.loss) {
		w.faults["loss"]++
		return
	}
	w.after(w.delay(), func() {
		k := way{from, to}
		switch {
		case w.cut[k] == 0:
			f()
		case w.chance(0.3): // it waits in a socket
			w.stuck[k] = append(w.stuck[k], f)
		}
	})
}

// partition cuts a way until it is healed.
func (w *world) partition(k way, d time.Duration) {
	w.cut[k]++
	w.promiseOfCut(k, d)
	w.acted(w.now + d)
	w.after(d, func() {
		if w.cut[k]--; w.cut[k] > 0 {
			return
		}
		list := w.stuck[k]
		delete(w.stuck, k)
		for _, f := range list {
			w.after(w.delay(), f)
		}
	})
}

var (
	errAbsent   = errors.New("agent is gone")
	errDeadline = errors.New("deadline exceeded")
	errUnknown  = errors.New("agent is not known any more")
)
