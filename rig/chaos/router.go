// The driver in the place of a router: it plans transfers and carries them out at both engines.

package chaos

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/kvconn/kvconn/core"
)

// never is the time of a step that is not made.
const never = time.Duration(-1)

// plan is the router's plan of one transfer; times count from its start.
type plan struct {
	id      core.TransferID
	tag     uint64
	p, d    int
	first   int // blocks that D has cached
	blocks  int // that it loads
	offered int // that P has

	announce, offer, claim, load time.Duration
	cancelP, cancelD             time.Duration
}

// Bounds of what is drawn.
const (
	maxBlocks  = 24
	maxPrefill = 800 * time.Millisecond
	maxMove    = 400 * time.Millisecond
	// longClaim is how long D may be without blocks: longer than a lease.
	longClaim = (leaseSeconds + 2) * time.Second
)

// drawPlan draws a transfer of one pair. Most are an engine's daily work; some go wrong
// without any fault.
func drawPlan(r *rand.Rand, id core.TransferID, p, d int) plan {
	pl := plan{id: id, tag: r.Uint64() >> 1, p: p, d: d, announce: never, claim: never, load: never, offer: never, cancelP: never, cancelD: never}
	pl.blocks = 1 + r.IntN(maxBlocks)
	if r.IntN(4) == 0 {
		pl.first = r.IntN(8)
	}
	pl.offered = pl.first + pl.blocks
	if r.IntN(8) == 0 {
		pl.offered += r.IntN(4)
	}
	within := func(d time.Duration) time.Duration { return time.Duration(r.Int64N(int64(d))) }
	pl.offer = within(maxPrefill)
	pl.load = within(maxPrefill)
	if r.IntN(3) > 0 {
		pl.announce = within(pl.offer + 1)
	}
	if r.IntN(3) == 0 {
		pl.claim = within(pl.load + 1)
	}
	switch n := r.IntN(100); {
	case n < 68: // a plain one
	case n < 72: // D has no blocks for it for long
		pl.claim = within(maxPrefill)
		pl.load = pl.claim + within(longClaim)
	case n < 74: // D never gets any
		pl.claim, pl.load = within(maxPrefill), never
		pl.cancelD = pl.claim + within(longClaim)
	case n < 78: // D needs nothing
		pl.first, pl.blocks = 0, 0
	case n < 84: // the request ends at D, most often while bytes move
		pl.cancelD = max(pl.offer, pl.load) + max(0, within(maxMove)-maxMove/4)
	case n < 90: // at P
		pl.cancelP = max(pl.offer, pl.load) + max(0, within(maxMove)-maxMove/4)
	case n < 94: // on both sides at once
		pl.cancelD = max(pl.offer, pl.load) + max(0, within(maxMove)-maxMove/4)
		pl.cancelP = pl.cancelD
	case n < 96: // nobody loads
		pl.claim, pl.load = never, never
	case n < 98: // nobody offers, nor ever says a word of it
		pl.offer, pl.announce = never, never
	default: // P works on it for a while, and then the request ends
		pl.offer, pl.announce = never, within(maxPrefill)
		pl.cancelP = pl.announce + within(4*maxPrefill)
	}
	return pl
}

// plainPlan is a transfer that ends well if nothing is broken.
func plainPlan(r *rand.Rand, id core.TransferID, p, d int) plan {
	for {
		pl := drawPlan(r, id, p, d)
		if pl.cancelP == never && pl.cancelD == never && pl.load != never && pl.offer != never && pl.blocks > 0 {
			pl.offer, pl.load = pl.offer/8, pl.load/8
			pl.announce, pl.claim = min(pl.announce, pl.offer), min(pl.claim, pl.load)
			return pl
		}
	}
}

// call orders one side's calls, all in one line, and opens their books.
func (f *fleet) call(c *child, p *process, life int, side core.Side, prefill, decode int, items []item) []*entry {
	entries := make([]*entry, len(items))
	for i, it := range items {
		entries[i] = f.led.ordered(c.name, life, half{side, it.ID}, prefill, decode)
	}
	op := opOffer
	if side == core.SideLoad {
		op = opLoad
	}
	if p.send(command{Op: op, Items: items}) != nil {
		for _, e := range entries {
			f.led.void(e)
		}
	}
	return entries
}

// transfer is one plan being carried out.
type transfer struct {
	offer, load *entry // nil when the call was not ordered
}

// carryBound is how long a transfer may take after its last step; drain tells of longer
// ones.
const carryBound = time.Minute

// carry carries a plan out. It returns when both halves have ended, ctx has, or carryBound
// is over.
func (f *fleet) carry(ctx context.Context, pl plan) transfer {
	var t transfer
	P, D := f.P[pl.p], f.D[pl.d]
	prefill, prefillLife := P.up()
	decode, decodeLife := D.up()
	type step struct {
		at time.Duration
		do func()
	}
	one := func(o command, p *process) error {
		if p == nil {
			return errDown
		}
		return p.send(o)
	}
	call := func(c *child, p *process, life int, side core.Side, it item) *entry {
		if p == nil {
			return nil
		}
		return f.call(c, p, life, side, pl.p, pl.d, []item{it})[0]
	}
	cancel := func(p *process, why string) {
		for _, e := range []*entry{t.offer, t.load} {
			if e != nil {
				f.led.cancel(e)
			}
		}
		_ = one(command{Op: opCancel, Items: []item{{ID: pl.id}}, Reason: why}, p)
	}
	steps := []step{
		{pl.announce, func() { _ = one(command{Op: opAnnounce, Items: []item{{ID: pl.id}}}, prefill) }},
		{pl.claim, func() {
			_ = one(command{Op: opClaim, Items: []item{{ID: pl.id, From: f.target(pl.p, pl.d)}}}, decode)
		}},
		{pl.offer, func() {
			t.offer = call(P, prefill, prefillLife, core.SideOffer, item{ID: pl.id, Tag: pl.tag, Blocks: pl.offered})
		}},
		{pl.load, func() {
			t.load = call(D, decode, decodeLife, core.SideLoad, item{ID: pl.id, Tag: pl.tag, First: pl.first, Blocks: pl.blocks, From: f.target(pl.p, pl.d)})
		}},
		{pl.cancelP, func() { cancel(prefill, "the router cancels at P") }},
		{pl.cancelD, func() { cancel(decode, "the router cancels at D") }},
	}
	slices.SortStableFunc(steps, func(a, b step) int { return cmp.Compare(a.at, b.at) })
	start := time.Now()
	for _, s := range steps {
		if s.at == never {
			continue
		}
		select {
		case <-ctx.Done():
			return t
		case <-time.After(time.Until(start.Add(s.at))):
			s.do()
		}
	}
	var given []*entry
	for _, e := range []*entry{t.offer, t.load} {
		if e != nil {
			given = append(given, e)
		}
	}
	await(ctx, given, carryBound)
	return t
}

// perPair is how many transfers of a pair the router has under way.
const perPair = 10

// traffic keeps transfers of every pair under way until stop ends. Those that were begun
// are carried on until ctx ends. It returns when all have ended.
func (f *fleet) traffic(ctx context.Context, stop <-chan struct{}, seed uint64) {
	var wg sync.WaitGroup
	for p := range f.P {
		for d := range f.D {
			for k := range f.atOnce() {
				r := rand.New(rand.NewPCG(seed, uint64(p)<<32|uint64(d)<<16|uint64(k)))
				wg.Go(func() {
					for n := 0; ; n++ {
						select {
						case <-stop:
							return
						case <-ctx.Done():
							return
						default:
						}
						id := core.TransferID(fmt.Sprintf("%s-p%d-d%d-%d-%d", f.name, p, d, k, n))
						t := f.carry(ctx, drawPlan(r, id, p, d))
						if t.offer == nil && t.load == nil { // both are down: not all the time
							select {
							case <-stop:
							case <-time.After(50 * time.Millisecond):
							}
						}
					}
				})
			}
		}
	}
	wg.Wait()
}

// round has every pair carry n plain transfers, which must end well; with claims
// also one whose offer a claim keeps beyond its lease.
func (f *fleet) round(ctx context.Context, what string, seed uint64, n int, claims bool) {
	var wg sync.WaitGroup
	for p := range f.P {
		for d := range f.D {
			r := rand.New(rand.NewPCG(seed, uint64(p)<<32|uint64(d)))
			id := core.TransferID(fmt.Sprintf("%s-%s-p%d-d%d", f.name, what, p, d))
			wg.Go(func() {
				for k := range n {
					f.mustCarry(ctx, plainPlan(r, core.TransferID(fmt.Sprintf("%s-%d", id, k)), p, d), what)
				}
			})
			if !claims {
				continue
			}
			other := rand.New(rand.NewPCG(seed, uint64(p)<<32|uint64(d)<<16))
			long := plainPlan(other, id+"-claimed", p, d)
			long.claim, long.load = long.offer, longClaim
			wg.Go(func() { f.mustCarry(ctx, long, what) })
		}
	}
	wg.Wait()
}

// attempts is how often a plain transfer is tried: on a busy machine one may run into a
// bound.
const attempts = 3

// mustCarry carries a transfer that nothing is in the way of. An attempt that does not end
// well is noted as missed. If no attempt ends well, that is a problem.
func (f *fleet) mustCarry(ctx context.Context, pl plan, what string) {
	id := pl.id
	for k := range attempts {
		pl.id = core.TransferID(fmt.Sprintf("%s-%d", id, k))
		if f.endedWell(f.carry(ctx, pl), what) || ctx.Err() != nil {
			return
		}
	}
	f.led.problem("%s: without any fault %s does not end well, tried %d times", what, id, attempts)
}

// endedWell writes a half down that has not ended well.
func (f *fleet) endedWell(t transfer, what string) bool {
	well := true
	for _, e := range []*entry{t.offer, t.load} {
		if e == nil {
			f.led.problem("%s: a process is not up", what)
			return false
		}
		f.led.mu.Lock()
		if e.state != halfReported || e.code != core.OK {
			well = false
			f.led.miss("%s: without any fault %s of %s: %s: %s", what, e.side, e.id, e.outcome(), e.reason)
		}
		f.led.mu.Unlock()
	}
	return well
}
