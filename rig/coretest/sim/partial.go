// A prefill engine computes a request in steps, and offers what is ready.

package sim

import (
	"errors"
	"slices"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
)

// computation is a request that a prefill engine computes in steps, in blocks that it
// has from the beginning. In each step some layers get some more blocks.
type computation struct {
	id       core.TransferID
	token    uint64
	blocks   []kv.BlockID
	offered  int          // of them, to the machine
	said     bool         // of which prompt they are
	computed [regions]int // per region
}

// compute works on a request until it is offered. It has been announced.
func (a *agent) compute(id core.TransferID, prefill time.Duration) {
	w := a.w
	until := w.now + prefill + time.Second
	if w.plan.kind {
		until += 20 * time.Second
	}
	a.wait(&want{id: id, n: w.plan.blocks, until: until,
		got: func(blocks []kv.BlockID) error {
			if a.computing[id] != nil { // an id twice
				return nil
			}
			w.token++
			p := &computation{id: id, token: w.token, blocks: blocks}
			a.computing[id] = p
			a.host.own(blocks, p.token)
			a.stepOf(p, prefill)
			return nil
		},
		none: func() {
			if !a.closing {
				a.cancel(id)
			}
		}})
}

// stepOf computes a part of what is left, for a part of the time that is left.
func (a *agent) stepOf(p *computation, left time.Duration) {
	w := a.w
	takes := left
	if w.chance(0.8) {
		takes = w.upTo(left + time.Millisecond)
	}
	a.after(takes, func() {
		if a.closing || a.computing[p.id] != p {
			return
		}
		left -= min(takes, left)
		switch {
		case w.chance(w.plan.errors): // the prefill failed
			w.faults["partial-failed"]++
			a.cancel(p.id)
			a.withdraw(p)
		case w.chance(0.08):
			w.faults["preempt"]++
			a.withdraw(p)
			again := func() { a.compute(p.id, left) }
			if w.chance(0.5) {
				again = func() { a.whenRead(p.id, func() { a.compute(p.id, left) }) }
			}
			again()
		case left == 0 || w.chance(0.2):
			a.offerComputed(p)
		case a.computeMore(p):
			a.stepOf(p, left)
		}
	})
}

// computeMore computes some more, and offers it.
func (a *agent) computeMore(p *computation) bool {
	w := a.w
	r := core.PartialOffer{ID: p.id, Prompt: a.promptOf(p), First: w.begin()}
	if more := w.rnd.IntN(len(p.blocks) - p.offered + 1); more > 0 {
		r.Blocks = [][]kv.BlockID{p.blocks[p.offered : p.offered+more]}
		p.offered += more
	}
	// A layer at a time, or all: up to a block of those that are given.
	of := a.host.allRegions()
	if w.chance(0.5) {
		of = of[w.rnd.IntN(len(of)):]
		of = of[:1+w.rnd.IntN(len(of))]
		r.Regions = of
	}
	upTo := w.rnd.IntN(p.offered + 1)
	after := a.fill(p, of, upTo)
	r.Ready, r.After = []uint32{uint32(w.plan.begin + upTo)}, after.number()
	w.acted(w.now)
	w.faults["partial"]++
	err := a.try(r, func() { a.offering[p.id] = p.token },
		"partial %s%s%s ready=%d%s%s%s", p.id, optional("first", list(r.First)), groups(r.Blocks), r.Ready[0], optional("in", list(r.Regions)), prompt(r.Prompt), after.said())
	if err != nil {
		a.cancel(p.id)
		a.withdraw(p)
	}
	return err == nil
}

// fill has regions' blocks hold the prompt after a moment, up to one of them.
func (a *agent) fill(p *computation, of []uint32, upTo int) *moment {
	from := p.computed
	for _, region := range of {
		p.computed[region] = max(p.computed[region], upTo)
	}
	end := p.computed
	mo := a.momentOf(func() {
		for _, region := range of {
			for i := from[region]; i < end[region]; i++ {
				if a.host.mem[p.blocks[i]].owner == p.token {
					a.host.compute(p.id, p.blocks[i], i, int(region))
				}
			}
		}
	})
	for _, region := range of {
		for i := from[region]; i < end[region]; i++ {
			a.host.mem[p.blocks[i]].writes[region] = mo
		}
	}
	return mo
}

func (a *agent) offerComputed(p *computation) {
	after := a.fill(p, a.host.allRegions(), len(p.blocks))
	delete(a.computing, p.id)
	switch err := a.offerOf(p.id, p.blocks, a.promptOf(p), p.token, after); {
	case err == nil:
		return
	case !errors.Is(err, core.ErrDuplicate):
		a.cancel(p.id)
	}
	a.computing[p.id] = p
	a.withdraw(p)
}

// withdraw makes a computation's blocks free as soon as they are read no more.
func (a *agent) withdraw(p *computation) {
	delete(a.computing, p.id)
	a.w.acted(a.w.now)
	err := a.try(core.Withdraw{ID: p.id}, func() {}, "withdraw %s", p.id)
	if a.m.Reading(p.id) {
		a.remark("its blocks are being read")
	}
	if err != nil { // it is offered, by another request of the id
		a.free(p.token)
		return
	}
	a.whenRead(p.id, func() { a.free(p.token) })
}

// reader waits until a transfer's blocks are read no more.
type reader struct {
	id   core.TransferID
	then func()
}

func (a *agent) whenRead(id core.TransferID, then func()) {
	a.readers = append(a.readers, reader{id, then})
	a.checkReaders()
}

func (a *agent) checkReaders() {
	for i := 0; i < len(a.readers); i++ {
		if r := a.readers[i]; !a.m.Reading(r.id) {
			a.readers = slices.Delete(a.readers, i, i+1)
			i--
			r.then()
		}
	}
}
