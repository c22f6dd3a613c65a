// The parts that overload one agent: 10,000 loads at once, 1,000 aborts, halves that nobody joins.

package chaos

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/sleep"
)

// How many transfers the parts of the overload have at once.
const (
	burstLoads  = 10_000
	stormAborts = 1_000
	orphans     = 1_000
)

// tinyBlocks is an engine of very many blocks that cost nothing to move.
func tinyBlocks(lease, early float64) opening {
	return opening{Lease: lease, EarlyLoad: early, MaxTransfers: 4096, Regions: 1, Blocks: 12_000, BlockBytes: 256}
}

// bigBlocks is an engine whose transfers do not fit into socket buffers. Its peers share this machine with many others: one that is late
// is not gone.
func bigBlocks() opening {
	return opening{Lease: leaseSeconds, EarlyLoad: patientSeconds, PeerTimeout: patientSeconds, MaxTransfers: 4096, Regions: 4, Blocks: 512, BlockBytes: 64 << 10}
}

// with starts a fleet, does f, drains it and closes it.
func with(ctx context.Context, opt *Options, led *ledger, s shape, do func(*fleet) (string, error)) (partRow, error) {
	s.memory.Transport, s.memory.Memory = opt.Transport, opt.Memory
	f, err := startFleet(ctx, opt.Self, s, led)
	if err != nil {
		return partRow{}, err
	}
	defer f.destroy()
	f.round(ctx, "before "+s.name, opt.Seed, 2, false)
	text, err := do(f)
	if err != nil {
		return partRow{}, err
	}
	if err := f.heal(ctx); err != nil {
		return partRow{}, err
	}
	if err := f.drain(ctx, opt.drain); err != nil {
		return partRow{}, err
	}
	f.round(ctx, "after "+s.name, opt.Seed, 2, false)
	if err := f.stop(); err != nil {
		led.problem("close: %v", err)
	}
	return partRow{Name: s.name, Text: text}, ctx.Err()
}

// items makes n transfers of one block each.
func (f *fleet) items(what string, n, p, d int) []item {
	out := make([]item, n)
	for i := range out {
		out[i] = item{ID: core.TransferID(fmt.Sprintf("%s-%s-%d", f.name, what, i)), Tag: mix(uint64(i)<<8 | uint64(len(what))), Blocks: 1, From: f.target(p, d)}
	}
	return out
}

// loads orders loads of D d from P p, all at once.
func (f *fleet) loads(p, d int, items []item) ([]*entry, error) {
	proc, life := f.D[d].up()
	if proc == nil {
		return nil, fmt.Errorf("%s: %w", f.D[d].name, errDown)
	}
	return f.call(f.D[d], proc, life, core.SideLoad, p, d, items), nil
}

// offers orders offers of P p for D d, all at once.
func (f *fleet) offers(p, d int, items []item) ([]*entry, error) {
	proc, life := f.P[p].up()
	if proc == nil {
		return nil, fmt.Errorf("%s: %w", f.P[p].name, errDown)
	}
	return f.call(f.P[p], proc, life, core.SideOffer, p, d, items), nil
}

// announce tells P of transfers.
func (f *fleet) announce(p int, items []item) error {
	proc, _ := f.P[p].up()
	if proc == nil {
		return fmt.Errorf("%s: %w", f.P[p].name, errDown)
	}
	return proc.send(command{Op: opAnnounce, Items: items})
}

// cancel cancels transfers at a process, in one call.
func (f *fleet) cancel(c *child, items []item, entries []*entry) error {
	for _, e := range entries {
		f.led.cancel(e)
	}
	proc, _ := c.up()
	if proc == nil {
		return fmt.Errorf("%s: %w", c.name, errDown)
	}
	return proc.send(command{Op: opCancel, Items: items, Reason: "the router cancels"})
}

// runBurst: 10,000 loads at once on one agent. The calls over the bound are refused, with
// a reason. All others end, and no call waits.
func runBurst(ctx context.Context, opt *Options, led *ledger) (partRow, error) {
	return with(ctx, opt, led, shape{name: "burst", prefills: 1, decodes: 1, memory: tinyBlocks(30, 30)}, func(f *fleet) (string, error) {
		opt.Progress("%d loads at once", burstLoads)
		items := f.items("load", burstLoads, 0, 0)
		start := now()
		loads, err := f.loads(0, 0, items)
		if err != nil {
			return "", err
		}
		if _, err := f.D[0].ask(ctx, command{Op: opInspect}); err != nil { // all calls have been told
			return "", err
		}
		var accepted []item
		reason := ""
		led.mu.Lock()
		for i, e := range loads {
			switch {
			case e.state == halfRefused && e.overloaded:
				reason = e.reason
			case e.state == halfRefused:
				led.addProblem("burst: a load is refused for another reason: %s", e.reason)
			default:
				accepted = append(accepted, items[i])
			}
		}
		led.mu.Unlock()
		if reason == "" || len(accepted) == 0 {
			led.problem("burst: %d of %d loads are accepted, want some of them", len(accepted), len(items))
		}
		offers, err := f.offers(0, 0, accepted)
		if err != nil {
			return "", err
		}
		await(ctx, append(loads, offers...), opt.drain)
		led.require("burst", loads, "load ok", "load refused: too many")
		led.require("burst", offers, "offer ok")
		return fmt.Sprintf("%s; longest call %s ms; refused with %q", led.tell(loads, start), milliseconds(led.longestCall(loads)), reason), nil
	})
}

// runStorm: 1,000 transfers are aborted at once, on D, on P and on both, while
// others go on.
func runStorm(ctx context.Context, opt *Options, led *ledger) (partRow, error) {
	return with(ctx, opt, led, shape{name: "storm", prefills: 1, decodes: 2, memory: tinyBlocks(30, 30)}, func(f *fleet) (string, error) {
		opt.Progress("%d transfers aborted at once", stormAborts)
		items := f.items("abort", stormAborts, 0, 0)
		if err := f.announce(0, items); err != nil {
			return "", err
		}
		loads, err := f.loads(0, 0, items)
		if err != nil {
			return "", err
		}
		if err := f.waiting(ctx, 0, stormAborts, 0); err != nil {
			return "", err
		}
		window := opt.window()
		before := f.steady(ctx, window, []int{0, 1})
		third := stormAborts / 3
		start := now()
		err = errors.Join(f.cancel(f.D[0], items[:2*third], loads[:2*third]), f.cancel(f.P[0], items[third:], loads[third:]))
		if err != nil {
			return "", err
		}
		during := f.steady(ctx, window, []int{0, 1})
		await(ctx, loads, opt.drain)
		led.require("storm", loads, "load cancelled", "load peer-cancelled")
		return fmt.Sprintf("%s; others' transfers: %s before, %s during", led.tell(loads, start), before, during), nil
	})
}

// waiting waits until P has that many loads and claims of D d.
func (f *fleet) waiting(ctx context.Context, d, loads, claims int) error {
	for end := time.Now().Add(askTimeout); ; {
		ev, err := f.D[d].ask(ctx, command{Op: opInspect})
		if err != nil {
			return err
		}
		if ev.Inspection.Waiting >= loads && ev.Inspection.Claims >= claims {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("there are %d loads and %d claims of %s that P knows of, want %d and %d", ev.Inspection.Waiting, ev.Inspection.Claims, f.D[d].name, loads, claims)
		}
		_ = sleep.For(ctx, 20*time.Millisecond)
	}
}

// runOrphans: offers that nobody loads, and loads that nobody offers, must all
// end by themselves.
func runOrphans(ctx context.Context, opt *Options, led *ledger) (partRow, error) {
	return with(ctx, opt, led, shape{name: "orphans", prefills: 1, decodes: 1, memory: tinyBlocks(leaseSeconds, earlySeconds)}, func(f *fleet) (string, error) {
		opt.Progress("%d offers that nobody loads, %d loads that nobody offers", orphans, orphans)
		start := now()
		offers, err := f.offers(0, 0, f.items("offer", orphans, 0, 0))
		if err != nil {
			return "", err
		}
		loads, err := f.loads(0, 0, f.items("load", orphans, 0, 0))
		if err != nil {
			return "", err
		}
		await(ctx, append(offers, loads...), opt.drain)
		led.require("orphans", offers, "offer expired")
		led.require("orphans", loads, "load not-offered")
		return led.tell(offers, start) + "; " + led.tell(loads, start), nil
	})
}
