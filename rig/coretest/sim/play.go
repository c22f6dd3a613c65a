// What the engines do in a run: requests, aborts and what is late.

package sim

import (
	"errors"
	"fmt"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
)

const bootstrap = "http://p:8998"

// play opens the engines and plans what happens to them.
func (w *world) play() {
	var prefills []*host
	for i := range w.plan.prefills {
		h := &host{w: w, name: fmt.Sprintf("p%d", i), number: i, prefill: true, target: core.Target{Bootstrap: bootstrap, EngineID: fmt.Sprintf("/e%d", i), TPRank: i}}
		h.geometry = w.geometryOf(w.tokensOf(0), i, w.plan.prefills, true)
		prefills = append(prefills, h)
	}
	w.hosts = append(w.hosts, prefills...)
	var decodes [][]*host
	for e, ranks := range w.plan.decodes {
		var list []*host
		for i := range ranks {
			list = append(list, &host{w: w, name: fmt.Sprintf("d%d%c", i, 'a'+e), geometry: w.geometryOf(w.tokensOf(1+e), i, ranks, false)})
			if w.plan.mismatched == 1+e {
				list[i].geometry.index = w.plan.other
			}
		}
		decodes = append(decodes, list)
		w.hosts = append(w.hosts, list...)
	}
	for _, h := range w.hosts {
		if h.prefill && (w.plan.kind || w.plan.calm) && w.chance(0.3) {
			w.faults["late-prefill"]++
			h.openAt = w.upTo(3 * time.Second)
			w.after(h.openAt, func() { h.open() })
			continue
		}
		h.open()
	}
	ids := make([]string, w.plan.requests)
	for i := range ids {
		ids[i] = fmt.Sprintf("t%d", i)
		if !w.plan.kind && i > 0 && w.chance(0.06) {
			ids[i] = ids[w.rnd.IntN(i)]
			w.faults["id-twice"]++
			for rank := range 8 {
				w.reused[pairID(ids[i], rank)] = true
			}
		}
	}
	for _, id := range ids {
		e := w.rnd.IntN(len(decodes))
		w.request(id, prefills, decodes[e])
		if !w.plan.kind && w.chance(0.12) { // a router that sends a request to two decode engines
			w.faults["two-decoders"]++
			other := w.rnd.IntN(len(decodes))
			for i := range 8 {
				dl := w.deals[pairID(id, i)]
				if dl == nil {
					continue
				}
				w.shared[dl.id] = true
				w.reused[dl.id] = w.reused[dl.id] || other == e
				second := &deal{id: dl.id, ps: dl.ps} // perhaps of another number of ranks
				if second.ds = decodes[other]; len(dl.ds) == 1 || w.chance(0.7) {
					second.ds = second.ds[:min(len(dl.ds), len(second.ds))]
				}
				for k := range second.ds {
					w.decodes(second, k, w.upTo(act), w.upTo(act))
				}
			}
		}
	}
	for range w.plan.jumps {
		h := w.hosts[w.rnd.IntN(len(w.hosts))]
		w.after(w.upTo(2*act), func() { h.jump(time.Second + w.upTo(15*time.Second)) })
	}
	if w.plan.hostile {
		w.admitHostile()
	}
	if w.plan.silentDeath {
		w.silentDeath(prefills[0], decodes[0])
	}
	for range w.plan.sleeps {
		w.planSleep()
	}
	for range w.plan.faults {
		if w.chance(0.2) {
			w.resurrection(prefills, decodes)
		} else {
			w.planFault(prefills)
		}
	}
}

func pairID(id string, rank int) core.TransferID {
	return core.TransferID(fmt.Sprintf("%s.%d", id, rank))
}

// run does f in the process that the host has now.
func (h *host) run(f func(a *agent)) {
	if a := h.agent; a != nil {
		a.run(func() {
			if !a.closing {
				f(a)
			}
		})
	}
}

// request is what a router sends: ranks of the decode engine load from ranks of
// the prefill engine. Prefill ranks that nobody needs are let go.
func (w *world) request(id string, prefills, decodes []*host) {
	at := w.upTo(act)
	prefill := w.upTo(act / 2)
	if w.plan.kind || w.chance(0.1) {
		prefill = w.upTo(12 * time.Second)
	}
	hold := time.Duration(0)
	if w.chance(0.2) { // the decode engine is busy with others
		w.faults["queued"]++
		hold = w.upTo(8 * time.Second)
	}
	decode := at
	if !w.plan.kind && w.chance(0.3) { // a router that asks P first
		decode += w.upTo(prefill)
	}
	hearsP, hearsD := w.plan.kind || !w.chance(0.05), w.plan.kind || !w.chance(0.05)
	var abortD, abortP time.Duration
	if w.chance(w.plan.cancels) {
		w.faults["cancel-d"]++
		abortD = max(1, at-200*time.Millisecond+w.upTo(prefill+hold+time.Second))
	}
	if w.chance(w.plan.cancels) {
		w.faults["cancel-p"]++
		if abortP = max(1, at-200*time.Millisecond+w.upTo(prefill+time.Second)); abortD > 0 && w.chance(0.5) {
			w.faults["cancel-both"]++
			abortP = abortD
		}
	}
	one := func(dl *deal, needed bool) {
		for k, d := range dl.ds {
			if hearsD && needed {
				w.decodes(dl, k, decode+w.delay(), hold)
			} else if hearsD && (w.plan.kind || w.chance(0.8)) {
				w.after(max(decode, dl.opensAt()+50*time.Millisecond)+w.delay(), func() { d.run(func(a *agent) { _ = a.load(dl, k, 0, nil) }) })
			}
			if abortD > 0 {
				w.after(abortD+w.delay(), func() { d.run(func(a *agent) { a.abortLoad(dl, k) }) })
			}
		}
		for _, p := range dl.ps {
			if hearsP {
				hears := at + w.delay()
				up := dl.opensAt() // an engine works when all of its ranks do
				if up > at {       // the router asks until it is up
					hears = max(hears, up+w.upTo(20*time.Millisecond))
				}
				w.prefills(dl.id, p, hears, prefill, up > 0)
			}
			if abortP > 0 {
				w.after(abortP+w.delay(), func() { p.run(func(a *agent) { a.abortOffer(dl.id) }) })
			}
		}
	}
	used := map[*host]bool{}
	for _, dl := range w.dealsOf(id, prefills, decodes) {
		one(dl, true)
		for _, p := range dl.ps {
			used[p] = true
		}
	}
	for j, p := range prefills {
		if !used[p] {
			dl := &deal{id: pairID(id, j), ps: []*host{p}, ds: []*host{decodes[j%len(decodes)]}}
			w.deals[dl.id] = dl
			one(dl, false)
		}
	}
}

// decodes is one decode rank's part of a request.
func (w *world) decodes(dl *deal, k int, at, hold time.Duration) {
	id, d := dl.id, dl.ds[k]
	first := w.rnd.IntN(w.prompt(d))
	if !w.plan.kind && w.chance(0.03) {
		first += 3 // more than will be offered
	}
	n := max(1, w.prompt(d)-first)
	if up := dl.opensAt(); at < up { // the router asks P again until it is up
		hold = up - at + 50*time.Millisecond + w.upTo(3*time.Second) // a look-up that began before is shared
	}
	w.after(at, func() {
		d.run(func(a *agent) {
			if a.aborted[id] {
				if w.chance(0.8) {
					return
				}
				w.reused[id] = true // the abort was about this one, and made a load of it
			}
			if w.plan.kind || w.chance(0.7) {
				a.claim(dl)
				for _, p := range dl.ps {
					a.expectClaim(dl, k, p)
				}
				if !w.plan.kind && w.chance(0.02) {
					w.faults["claim-left"]++
					return // and forgets it
				}
			}
			a.after(hold, func() {
				if a.aborted[id] && hold > 0 {
					return
				}
				if !w.plan.kind && w.chance(0.06) {
					_ = a.load(dl, k, 0, nil) // the prefix was in its cache
					return
				}
				a.wait(&want{id: id, first: first, n: n, until: w.now + 12*time.Second,
					got:  func(blocks []kv.BlockID) error { return a.load(dl, k, first, blocks) },
					none: func() { a.abortLoad(dl, k) }})
			})
		})
	})
}

// abortLoad: the decode engine drops a request, whatever has become of it.
func (a *agent) abortLoad(dl *deal, k int) {
	id := dl.id
	if a.aborted[id] = true; a.closing {
		return
	}
	if _, asked := a.loading[id]; asked {
		h := a.loads[a.loading[id]]
		if a.cancel(id); h != nil && h.blocks != nil && a.w.chance(0.4) { // the same request comes again
			a.w.reused[id] = true
			a.after(a.w.upTo(30*time.Millisecond), func() {
				a.wait(&want{id: id, first: h.first, n: len(h.blocks), until: a.w.now + time.Second,
					got:  func(blocks []kv.BlockID) error { return a.load(dl, k, h.first, blocks) },
					none: func() {}})
			})
		}
		return
	}
	a.w.faults["abort-first"]++
	a.dropWaiting(id)
	if a.w.chance(0.5) {
		_ = a.load(dl, k, 0, nil)
	} else {
		a.cancel(id)
	}
}

// prefills is one prefill rank's part of a request.
func (w *world) prefills(id core.TransferID, p *host, at, prefill time.Duration, late bool) {
	w.after(at, func() {
		p.run(func(a *agent) {
			if a.aborted[id] {
				if w.chance(0.8) {
					return
				}
				w.reused[id] = true
			}
			announced := false
			if late || w.chance(0.6) || w.plan.kind && (prefill > w.plan.opt.EarlyLoad/2 || w.plan.prefills < 3) {
				announced = a.announce(id) == nil
			}
			if announced && w.chance(0.6) {
				a.compute(id, prefill)
				return
			}
			a.after(prefill, func() {
				if a.closing {
					return
				}
				if a.aborted[id] && !announced {
					return
				}
				until := w.now + time.Second
				if w.plan.kind {
					until += 20 * time.Second
				}
				if w.chance(w.plan.errors) { // the prefill failed
					a.cancel(id)
					return
				}
				a.wait(&want{id: id, n: w.plan.blocks, until: until,
					got: func(blocks []kv.BlockID) error {
						err := a.offer(id, blocks)
						if err != nil && !errors.Is(err, core.ErrDuplicate) {
							a.cancel(id)
						}
						return nil
					},
					none: func() {
						if !a.closing {
							a.cancel(id)
						}
					}})
			})
		})
	})
}

// abortOffer: the prefill engine drops a request.
func (a *agent) abortOffer(id core.TransferID) {
	a.aborted[id] = true
	if a.dropWaiting(id); !a.closing {
		a.cancel(id)
		if p := a.computing[id]; p != nil {
			a.withdraw(p)
		}
	}
}
