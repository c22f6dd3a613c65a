// The part in which some D take their bytes slowly, beside fast ones of the same P.

package chaos

import (
	"context"
	"fmt"
	"syscall"
	"time"

	"github.com/kvconn/kvconn/rig/faultnet"
)

// slowPeers is how many D's of one P are slow at a time.
func (o *Options) slowPeers() int {
	if o.Short {
		return 12
	}
	return 40
}

// How fast they take their bytes, in bytes a second of each connection: first so that each moment brings some, then a packet now
// and then.
const dripRate, slowRate = 1 << 20, 64 << 10

// contentionBound is how much longer a load may take beside slow D's.
const contentionBound = 2

// runSlow: many D's that take their bytes slowly, then more slowly, and then not at all, beside fast ones of the same P.
func runSlow(ctx context.Context, opt *Options, led *ledger) (partRow, error) {
	memory := bigBlocks()
	memory.Lease = 60  // a slow transfer is to end by itself
	memory.Streams = 1 // several would have room for all its bytes in the kernel
	memory.Blocks = 128
	many := opt.slowPeers()
	return with(ctx, opt, led, shape{name: "slow", prefills: 1, decodes: many + 2, memory: memory, many: 48 * (many + 2)}, func(f *fleet) (string, error) {
		opt.Progress("%d slow D's beside fast ones", many)
		fast := []int{many, many + 1}
		alone := f.steady(ctx, opt.window(), fast)
		var under []*entry
		for d := range many {
			f.relays[0][d].data.Set(faultnet.Impairment{Rate: dripRate})
			items := f.items(fmt.Sprint("slow", d), 8, 0, d)
			for i := range items {
				items[i].Blocks = 4
			}
			offers, err := f.offers(0, d, items)
			if err != nil {
				return "", err
			}
			loads, err := f.loads(0, d, items)
			if err != nil {
				return "", err
			}
			under = append(append(under, loads...), offers...)
		}
		start := now()
		dripping := f.contended(ctx, opt, fast, alone)
		for d := range many {
			f.relays[0][d].data.Set(faultnet.Impairment{Rate: slowRate})
		}
		throttled := f.contended(ctx, opt, fast, alone)
		for d := range many {
			f.D[d].signal(syscall.SIGSTOP)
		}
		stopped := f.contended(ctx, opt, fast, alone)
		for d := range many {
			f.D[d].signal(syscall.SIGCONT)
			f.restore(f.relays[0][d].data)
		}
		await(ctx, under, opt.drain)
		alone = f.again(ctx, opt, fast, alone)
		led.slower(fmt.Sprintf("%d dripping D's", many), alone, dripping)
		led.slower(fmt.Sprintf("%d throttled D's", many), alone, throttled)
		led.slower(fmt.Sprintf("%d stopped D's", many), alone, stopped)
		return fmt.Sprintf("fast D's: %.0f MB/s alone, %.2f of it beside %d dripping D's, %.2f beside throttled ones, %.2f beside stopped ones; a load takes %.2f, %.2f and %.2f times as long; the slow ones': %s",
			alone.bytes/1e6, dripping.bytes/alone.bytes, many, throttled.bytes/alone.bytes, stopped.bytes/alone.bytes,
			dripping.times(alone), throttled.times(alone), stopped.times(alone), led.tell(under, start)), nil
	})
}

func (p pace) times(alone pace) float64 { return float64(p.Median) / float64(alone.Median) }

// noise is what loads of a few milliseconds may take more on a busy machine.
const noise = 20 * time.Millisecond

// fair says whether loads beside others took about as long as alone.
func (p pace) fair(alone pace) bool {
	return p.N > 0 && alone.N > 0 && p.Median <= contentionBound*alone.Median+noise
}

// again is the pace alone when the slow ones have gone. If the machine is busier than it was, it is what the others are judged by. What
// stays much slower has been harmed for good.
func (f *fleet) again(ctx context.Context, opt *Options, fast []int, before pace) pace {
	after := f.contended(ctx, opt, fast, before)
	f.led.slower("nobody, after them,", before, after)
	if after.Median > before.Median {
		return after
	}
	return before
}

// slower writes down that loads took too long beside others.
func (l *ledger) slower(condition string, alone, p pace) {
	if p.fair(alone) {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.late("beside %s %d loads take %v, and %d alone %v: %d times that and %v are the bound", condition, p.N, p.Median, alone.N, alone.Median, contentionBound, noise)
}

// contended is the pace of the fast D's beside slow ones. A machine that was busy with something else for a moment is measured again:
// what slow peers do to others, they do all the time.
func (f *fleet) contended(ctx context.Context, opt *Options, fast []int, alone pace) (best pace) {
	for range 8 {
		p := f.steady(ctx, opt.window(), fast)
		if best.N == 0 || p.N > 0 && p.Median < best.Median {
			best = p
		}
		if best.fair(alone) {
			break
		}
	}
	return best
}
