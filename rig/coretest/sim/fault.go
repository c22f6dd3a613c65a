// Faults are planned: one by one, and some that several ranks must have together.

package sim

import (
	"time"

	"github.com/kvconn/kvconn/core"
)

// planFault plans one fault.
func (w *world) planFault(prefills []*host) {
	h := w.hosts[w.rnd.IntN(len(w.hosts))]
	if w.chance(0.4) {
		h = prefills[w.rnd.IntN(len(prefills))]
	}
	at := w.upTo(act + act/2)
	lasts := 50*time.Millisecond + w.upTo(4*time.Second)
	kind := w.rnd.IntN(8)
	restart := w.chance(0.8)
	w.after(at, func() {
		if h.agent == nil {
			return
		}
		w.acted(w.now + lasts)
		switch kind {
		case 0:
			w.faults["stop"]++
			h.stop()
			w.after(lasts, h.cont)
		case 1, 2:
			w.faults["crash"]++
			h.crash()
			if restart {
				w.after(lasts/2, func() {
					if h.agent == nil {
						w.faults["restart"]++
						h.open()
						w.note("%s is there", h.agent.id)
					}
				})
			} else if h.prefill { // its entry in the registry ends by itself
				id := w.registry[h.target]
				w.after(lasts, func() {
					if w.registry[h.target] == id {
						delete(w.registry, h.target)
					}
				})
			}
		case 3:
			h.jump(w.upTo(15 * time.Second))
		case 4, 5:
			other := w.hosts[w.rnd.IntN(len(w.hosts))]
			both := w.chance(0.5)
			w.note("the way from %s to %s is cut for %v, both ways %v", h.name, other.name, lasts, both)
			w.partition(way{h, other}, lasts)
			if both {
				w.faults["partition"]++
				w.partition(way{other, h}, lasts)
			} else {
				w.faults["one-way"]++
			}
		case 6:
			w.faults["close"]++
			h.run(func(a *agent) { a.close() })
		case 7:
			if w.now > h.agent.deaf+core.TickInterval*3 {
				w.faults["deaf"]++
				h.agent.deaf = w.now + w.upTo(w.plan.absence()-core.TickInterval/2)
				if w.chance(0.7) { // what broke its link broke its streams too
					h.agent.breakLinks()
				}
			}
		}
	})
}

// jump: the host has slept. When it wakes up, the clocks of its processes have jumped into
// the future.
func (h *host) jump(d time.Duration) {
	h.w.faults["clock-jump"]++
	h.skew += d
	h.disturbed = h.w.now
	h.w.note("the clock of %s is at %v", h.name, h.w.now+h.skew)
}

// silentDeath: two decode ranks have claimed their shares of an offer, and one dies in a way
// that nobody sees. The other keeps its share for longer than the lease, and loads it.
func (w *world) silentDeath(p *host, ranks []*host) {
	w.faults["silent-death"]++
	dl := w.dealsOf("silent-death", []*host{p}, ranks)[0]
	at, lasts := w.upTo(act), w.plan.opt.Lease+time.Second
	w.prefills(dl.id, p, at, 0, false)
	for _, d := range dl.ds {
		w.after(at, func() { d.run(func(a *agent) { a.claim(dl) }) })
	}
	w.after(at+time.Second, func() {
		dead := dl.ds[0].agent
		dead.host.crash()
		dead.silent = true
		w.after(lasts, func() { dl.ds[1].run(func(a *agent) { _ = a.load(dl, 1, 0, nil) }) })
	})
}

// resurrection: a prefill rank is stopped in the middle of its writes, and when
// it goes on another process has the decode rank's place.
func (w *world) resurrection(prefills []*host, decodes [][]*host) {
	p := prefills[w.rnd.IntN(len(prefills))]
	ranks := decodes[w.rnd.IntN(len(decodes))]
	d := ranks[w.rnd.IntN(len(ranks))]
	w.after(w.upTo(act), func() {
		if p.stopped || p.agent == nil || d.agent == nil {
			return
		}
		w.faults["resurrection"]++
		lasts := w.upTo(stallTimeout)
		w.acted(w.now + lasts)
		p.stop()
		w.after(lasts, p.cont)
		d.crash()
		w.after(w.upTo(lasts), func() {
			if d.agent == nil {
				d.open()
			}
		})
	})
}
