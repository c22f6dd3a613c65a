// The part in which all connections between two agents that live break at once.

package chaos

import (
	"context"
	"syscall"
	"time"

	"github.com/kvconn/kvconn/internal/sleep"
)

// resetTransfers is how many transfers wait when all connections of a pair break.
const resetTransfers = 100

// stoppedFor is how long P is stopped while its connections break: too short for P to
// count as gone.
const stoppedFor = 1500 * time.Millisecond

// runReset: every connection between a living P and a living D breaks at once, and again
// while P is stopped. No byte of the waiting transfers has come: they survive.
func runReset(ctx context.Context, opt *Options, led *ledger) (partRow, error) {
	return with(ctx, opt, led, shape{name: "reset", prefills: 1, decodes: 1, memory: tinyBlocks(leaseSeconds, earlySeconds)}, func(f *fleet) (string, error) {
		opt.Progress("all connections of a pair break at once")
		items := f.items("reset", resetTransfers, 0, 0)
		claims := f.items("claim", resetTransfers, 0, 0)
		if err := f.announce(0, append(items, claims...)); err != nil {
			return "", err
		}
		proc, _ := f.D[0].up()
		if proc == nil {
			return "", errDown
		}
		if err := proc.send(command{Op: opClaim, Items: claims}); err != nil {
			return "", err
		}
		loads, err := f.loads(0, 0, items)
		if err != nil {
			return "", err
		}
		if err := f.waiting(ctx, 0, len(items), len(claims)); err != nil {
			return "", err
		}
		start := now()
		f.cut(0, 0)
		_ = sleep.For(ctx, 2*time.Second)
		f.P[0].signal(syscall.SIGSTOP)
		f.cut(0, 0)
		_ = sleep.For(ctx, stoppedFor)
		f.P[0].signal(syscall.SIGCONT)
		_ = sleep.For(ctx, time.Second)
		offers, err := f.offers(0, 0, append(items, claims...))
		if err != nil {
			return "", err
		}
		late, err := f.loads(0, 0, claims)
		if err != nil {
			return "", err
		}
		loads = append(loads, late...)
		await(ctx, append(loads, offers...), opt.drain)
		led.require("reset", loads, "load ok")
		led.require("reset", offers, "offer ok")
		return led.tell(loads, start) + "; " + led.tell(offers, start), nil
	})
}

// cut breaks all connections of a pair.
func (f *fleet) cut(p, d int) {
	for _, w := range f.relays[p][d].each() {
		w.Cut(true)
	}
}
