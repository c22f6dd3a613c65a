package chaos

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvconn/kvconn/core"
)

// rails are those of this machine that may be taken off, by a command.
type rails struct {
	n       int
	command string
}

// What the command takes as its second argument.
const (
	railIsOn   = "on"
	railIsOff  = "off"  // the link is down, and this machine knows
	railIsMute = "mute" // packets vanish
	railIsThin = "thin" // large packets vanish, as where the MTU of a path is not what its ends think
	railSent   = "sent" // prints how many packets it has sent so far
)

// railBound is how long the command may take.
const railBound = 20 * time.Second

func (o *Options) rails() rails { return rails{o.Rails, o.RailCommand} }

func (r rails) all() (list []int) {
	for i := range r.n {
		list = append(list, i)
	}
	return list
}

func (r rails) set(which []int, how string) error {
	var errs []error
	for _, i := range which {
		_, err := r.run(i, how)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func (r rails) run(i int, how string) (said string, err error) {
	// Not with the run's context: a rail that is off must come on again.
	ctx, cancel := context.WithTimeout(context.Background(), railBound)
	defer cancel()
	out, err := exec.CommandContext(ctx, r.command, fmt.Sprint(i), how).CombinedOutput()
	said = strings.TrimSpace(string(out))
	if err != nil {
		err = fmt.Errorf("%s %d %s: %w: %s", r.command, i, how, err, said)
	}
	return said, err
}

func (r rails) sent(i int) (packets int64, err error) {
	said, err := r.run(i, railSent)
	if err == nil {
		packets, err = strconv.ParseInt(said, 10, 64)
	}
	return packets, err
}

// The sizes of the part rails: transfers at a time, and the blocks of one.
const (
	railTransfers = 4
	railBlocks    = 32
	// railReturn is how long after its rails are back a pair may take to use them:
	// the longest pause of a rail, and a handshake.
	railReturn = 60 * time.Second
)

// runRails: one rail is lost in the middle of transfers, then all are. Transfers go on by
// the rails that are left. If none is, they end with the reason, or new ones go by another
// transport, and come back.
func runRails(ctx context.Context, opt *Options, led *ledger) (partRow, error) {
	if opt.Rails == 0 {
		return partRow{}, nil
	}
	s := shape{name: "rails", prefills: 1, decodes: 1, memory: bigBlocks(), rails: opt.rails(), host: opt.Host, decode: opt.Decode}
	s.memory.PeerTimeout = 15 // a machine that is emulated may be silent for long
	return with(ctx, opt, led, s, func(f *fleet) (string, error) {
		r := &railRun{f: f, opt: opt}
		whole := r.stream(ctx, func() error { pause(ctx, time.Second); return nil })
		r.well(whole.hit, "rdma")
		r.say("%d transfers of %d MiB at a time take %s ms", railTransfers, railBlocks*s.memory.Regions*s.memory.BlockBytes>>20, milliseconds(r.took(whole.hit)))
		for _, how := range []string{railIsOff, railIsMute, railIsThin} {
			for _, rail := range f.rails.all() {
				if opt.Rails == 1 || ctx.Err() != nil || !r.oneLost(ctx, rail, how) {
					break
				}
			}
		}
		r.allLost(ctx)
		return strings.Join(r.words, "; "), ctx.Err()
	})
}

type railRun struct {
	f     *fleet
	opt   *Options
	n     atomic.Uint64 // names transfers
	words []string
}

func (r *railRun) say(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	r.opt.Progress("rails: %s", text)
	r.words = append(r.words, text)
}

// batch is the result of a stream of transfers with a fault in its middle.
type batch struct {
	hit   []*entry // loads that were under way then
	fault error    // what the fault's function said
}

// stream has some transfers at a time, one after another, until fault has returned and the
// transfers that were begun have ended.
func (r *railRun) stream(ctx context.Context, fault func() error) (b batch) {
	var mu sync.Mutex
	var loads []*entry
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for range railTransfers {
		wg.Go(func() {
			for ctx.Err() == nil {
				if e := r.carry(ctx, railBlocks, func(e *entry) {
					mu.Lock()
					loads = append(loads, e)
					mu.Unlock()
				}); e == nil {
					return
				}
				select {
				case <-stop:
					return
				default:
				}
			}
		})
	}
	// Some of those that run now may end before the fault has come: it takes its time.
	for r.f.led.underWay(&mu, &loads) < railTransfers/2 && ctx.Err() == nil {
		pause(ctx, time.Millisecond)
	}
	mu.Lock()
	before := len(loads)
	mu.Unlock()
	b.fault = fault()
	close(stop)
	wg.Wait()
	b.hit = loads[max(before-railTransfers, 0):]
	return b
}

// carry offers and loads one transfer and waits for its end; begun is told of the load. It
// returns nil if an engine is not up.
func (r *railRun) carry(ctx context.Context, blocks int, begun func(*entry)) *entry {
	f := r.f
	n := r.n.Add(1)
	it := item{ID: core.TransferID(fmt.Sprint(f.name, "-stream-", n)), Tag: mix(n << 16), Blocks: blocks, From: f.target(0, 0)}
	offers, err := f.offers(0, 0, []item{it})
	if err == nil {
		_, err = f.P[0].ask(ctx, order{Op: opLook}) // it has filled its blocks
	}
	var loads []*entry
	if err == nil {
		loads, err = f.loads(0, 0, []item{it})
	}
	if err != nil {
		if ctx.Err() == nil {
			f.led.problem("rails: %v", err)
		}
		return nil
	}
	if begun != nil {
		begun(loads[0])
	}
	await(ctx, []*entry{loads[0], offers[0]}, carryBound)
	return loads[0]
}

// underWay counts the loads that have not ended.
func (l *ledger) underWay(mu *sync.Mutex, loads *[]*entry) (n int) {
	mu.Lock()
	defer mu.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range *loads {
		if !e.over() {
			n++
		}
	}
	return n
}

// took is the longest time from a load's call to its report, by D's clock.
func (r *railRun) took(loads []*entry) (longest time.Duration) {
	r.f.led.mu.Lock()
	defer r.f.led.mu.Unlock()
	for _, e := range loads {
		longest = max(longest, time.Duration(e.reported-e.accepted))
	}
	return longest
}

// well writes down loads that did not end well by a transport.
func (r *railRun) well(loads []*entry, transport string) (ok bool) {
	r.f.led.mu.Lock()
	defer r.f.led.mu.Unlock()
	ok = true
	for _, e := range loads {
		if e.state != halfReported || e.code != core.OK || e.transport != transport {
			ok = false
			r.f.led.addProblem("rails: %s: %s by %q, want it to end well by %s: %s", e.id, e.outcome(), e.transport, transport, e.reason)
		}
	}
	return ok
}

// oneLost: transfers go on by the other rails, and end well. It returns false if a rail
// cannot be lost in that way.
func (r *railRun) oneLost(ctx context.Context, rail int, how string) bool {
	b := r.stream(ctx, func() error { return r.f.rails.set([]int{rail}, how) })
	if b.fault != nil {
		r.say("rail %d %s: not run: %v", rail, how, b.fault)
	} else if r.well(b.hit, "rdma") {
		r.say("rail %d %s: they take %s ms", rail, how, milliseconds(r.took(b.hit)))
	}
	if how == railIsThin && b.fault == nil {
		r.thin(ctx, rail)
	}
	if err := r.f.rails.set([]int{rail}, railIsOn); err != nil {
		r.f.led.problem("rails: %v", err)
	} else if b.fault == nil {
		r.used(ctx, rail)
	}
	return b.fault == nil
}

// railShare is a number of packets that only a transfer has, and no handshake.
const railShare = 100

// thinFor is how long transfers go on beside a rail that swallows large packets: it is
// tried again after one second, and after two more.
const thinFor = 5 * time.Second

// thin: once the rail was found out it is tried again, and found out before transfers are
// given to it. A try is a few packets, which are sent again and again. A transfer has a
// hundred packets under way for each queue pair.
func (r *railRun) thin(ctx context.Context, rail int) {
	found, given, until := false, int64(0), time.Now().Add(railReturn)
	for time.Now().Before(until) && ctx.Err() == nil {
		n, ok := r.gives(ctx, rail)
		switch {
		case !ok:
			return
		case found:
			given += n
		case n < railShare:
			found, until = true, time.Now().Add(thinFor)
		}
	}
	switch {
	case ctx.Err() != nil:
		return
	case !found:
		r.f.led.problem("rails: rail %d swallows large packets, and is not found out within %v", rail, railReturn)
		return
	}
	if given > 3*railShare {
		r.f.led.problem("rails: rail %d swallows large packets, and was given %d packets after it was found out, within %v", rail, given, thinFor)
	}
	r.say("tried with %d packets within %v", given, thinFor)
}

// gives has a transfer, and says how many packets of it, and of the traffic beside it, a
// rail has got.
func (r *railRun) gives(ctx context.Context, rail int) (packets int64, ok bool) {
	before, err := r.f.rails.sent(rail)
	if err == nil && r.carry(ctx, railBlocks, nil) == nil {
		return 0, false
	}
	after := before
	if err == nil {
		after, err = r.f.rails.sent(rail)
	}
	if err != nil {
		r.f.led.problem("rails: %v", err)
	}
	return after - before, err == nil
}

// used has transfers until a rail has its share of one again.
func (r *railRun) used(ctx context.Context, rail int) {
	start := time.Now()
	for total := int64(0); total < railShare && ctx.Err() == nil; {
		if time.Since(start) > railReturn {
			r.f.led.problem("rails: rail %d is on and not used after %v", rail, railReturn)
			return
		}
		n, ok := r.gives(ctx, rail)
		if !ok {
			return
		}
		total += n
	}
	r.say("on, and used after %s ms", milliseconds(time.Since(start)))
}

// back has transfers until one goes by rdma, and says how many did not, and for
// how long.
func (r *railRun) back(ctx context.Context) (others int, after time.Duration) {
	start := time.Now()
	for ctx.Err() == nil {
		e := r.carry(ctx, 4, nil)
		if e == nil {
			break
		}
		r.f.led.mu.Lock()
		back := e.state == halfReported && e.code == core.OK && e.transport == "rdma"
		last := e.outcome() + ": " + e.reason
		r.f.led.mu.Unlock()
		if back {
			break
		}
		others++
		if time.Since(start) > railReturn {
			r.f.led.problem("rails: %v after its rails were back the pair does not use them: %s", railReturn, last)
			break
		}
	}
	return others, time.Since(start)
}

// allLost: only tcp is left, where that is allowed.
func (r *railRun) allLost(ctx context.Context) {
	f := r.f
	b := r.stream(ctx, func() error { return f.rails.set(f.rails.all(), railIsOff) })
	if b.fault != nil {
		r.say("all rails off: not run: %v", b.fault)
		return
	}
	r.say("all rails off: %s", f.led.tell(b.hit, math.MaxInt64))
	f.led.mu.Lock()
	for _, e := range b.hit {
		if e.code != core.OK && e.reason == "" {
			f.led.addProblem("rails: %s ends without a reason", e.id)
		}
	}
	f.led.mu.Unlock()
	next := []*entry{r.carry(ctx, railBlocks, nil)}
	if next[0] == nil {
		return
	}
	if r.opt.Transport == "rdma" {
		f.led.mu.Lock()
		e := next[0]
		reason := e.reason
		if e.code == core.OK || !strings.Contains(reason, "rdma") {
			f.led.addProblem("rails: without a rail %s: %s: %q, want an error that says why", e.id, e.outcome(), reason)
		}
		f.led.mu.Unlock()
		r.say("a new one fails after %s ms: %s", milliseconds(r.took(next)), reason)
	} else if r.well(next, "tcp") {
		r.say("a new one goes by tcp in %s ms", milliseconds(r.took(next)))
	}
	if err := f.rails.set(f.rails.all(), railIsOn); err != nil {
		f.led.problem("rails: %v", err)
	}
	others, after := r.back(ctx)
	r.say("on again: by rdma after %s ms and %d others", milliseconds(after), others)
}
