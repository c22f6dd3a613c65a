package sim

import (
	"errors"
	"slices"
	"time"

	"github.com/kvconn/kvconn/core"
)

// growth is a request that a prefill engine computes in steps, in blocks that it
// has from the beginning. In each step some layers get some more blocks.
type growth struct {
	id       core.TransferID
	token    uint64
	blocks   []core.BlockID
	given    int          // of them, to the machine
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
		got: func(blocks []core.BlockID) error {
			if a.growing[id] != nil { // an id twice
				return nil
			}
			w.token++
			g := &growth{id: id, token: w.token, blocks: blocks}
			a.growing[id] = g
			a.host.own(blocks, g.token, "")
			a.stepOf(g, prefill)
			return nil
		},
		none: func() {
			if !a.closing {
				a.cancel(id)
			}
		}})
}

// stepOf computes a part of what is left, for a part of the time that is left.
func (a *agent) stepOf(g *growth, left time.Duration) {
	w := a.w
	takes := left
	if w.chance(0.8) {
		takes = w.upTo(left + time.Millisecond)
	}
	a.after(takes, func() {
		if a.closing || a.growing[g.id] != g {
			return
		}
		left -= min(takes, left)
		switch {
		case w.chance(w.plan.errors): // the prefill failed
			w.faults["grow-failed"]++
			a.cancel(g.id)
			a.takeBack(g)
		case w.chance(0.08):
			w.faults["preempt"]++
			a.takeBack(g)
			again := func() { a.compute(g.id, left) }
			if w.chance(0.5) {
				again = func() { a.whenRead(g.id, func() { a.compute(g.id, left) }) }
			}
			again()
		case left == 0 || w.chance(0.2):
			a.offerGrown(g)
		case a.growBy(g):
			a.stepOf(g, left)
		}
	})
}

// growBy computes and says so.
func (a *agent) growBy(g *growth) bool {
	w := a.w
	r := core.PartialOffer{ID: g.id, Prompt: a.promptOf(g)}
	if more := w.rnd.IntN(len(g.blocks) - g.given + 1); more > 0 {
		r.Blocks = [][]core.BlockID{g.blocks[g.given : g.given+more]}
		g.given += more
	}
	// A layer at a time, or all: up to a block of those that are given.
	of := []uint32{0, 1, 2}
	if w.chance(0.5) {
		of = of[w.rnd.IntN(3):]
		of = of[:1+w.rnd.IntN(len(of))]
		r.Regions = of
	}
	upTo := w.rnd.IntN(g.given + 1)
	for _, region := range of {
		a.fill(g, int(region), upTo)
	}
	r.Ready = []uint32{uint32(upTo)}
	w.acted(w.now)
	w.faults["grow"]++
	err := a.feed(func(m *core.Machine, now time.Time) (string, error) {
		err := m.OfferPartial(now, r)
		if err == nil {
			a.offering[g.id] = g.token
		}
		return "", err
	},
		"partial %s%s ready=%d%s%s", g.id, groups(r.Blocks), upTo, optional("in", list(r.Regions)), prompt(r.Prompt))
	if err != nil {
		a.cancel(g.id)
		a.takeBack(g)
	}
	return err == nil
}

// fill has a region's blocks hold the prompt, up to one of them.
func (a *agent) fill(g *growth, region, upTo int) {
	for i := g.computed[region]; i < upTo; i++ {
		a.host.each(g.blocks[i], func(r, t int, head uint64, c *content) {
			if r == region {
				*c = content{g.id, i*a.host.size() + t, head, a.host.number}
			}
		})
	}
	g.computed[region] = max(g.computed[region], upTo)
}

func (a *agent) offerGrown(g *growth) {
	for region := range regions {
		a.fill(g, region, len(g.blocks))
	}
	delete(a.growing, g.id)
	switch err := a.offerOf(g.id, g.blocks, a.promptOf(g), g.token, func() {}); {
	case err == nil:
		return
	case !errors.Is(err, core.ErrDuplicate):
		a.cancel(g.id)
	}
	a.growing[g.id] = g
	a.takeBack(g)
}

// takeBack makes a growth's blocks free as soon as they are read no more.
func (a *agent) takeBack(g *growth) {
	delete(a.growing, g.id)
	a.w.acted(a.w.now)
	err := a.feed(func(m *core.Machine, now time.Time) (said string, err error) {
		if err = m.Withdraw(now, g.id); m.Reading(g.id) {
			said = "its blocks are being read"
		}
		return said, err
	}, "withdraw %s", g.id)
	if err != nil { // it is offered, by another request of the id
		a.free(g.token)
		return
	}
	a.whenRead(g.id, func() { a.free(g.token) })
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
