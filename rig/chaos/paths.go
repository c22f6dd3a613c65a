// The parts in which RDMA's paths are lost: one in the middle of transfers, then all.

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
	"github.com/kvconn/kvconn/internal/sleep"
)

// paths are those of this machine that may be taken off, by a command.
type paths struct {
	n       int
	command string
}

// The command's second argument.
const (
	pathIsOn   = "on"
	pathIsOff  = "off"  // the link is down, and this machine knows
	pathIsMute = "mute" // packets vanish
	pathIsThin = "thin" // large packets vanish, as where the MTU of a path is not what its ends think
	pathSent   = "sent" // prints how many packets it has sent so far
)

// pathBound is how long the command may take.
const pathBound = 20 * time.Second

func (o *Options) paths() paths { return paths{o.Paths, o.PathCommand} }

func (r paths) all() (list []int) {
	for i := range r.n {
		list = append(list, i)
	}
	return list
}

func (r paths) set(which []int, how string) error {
	var errs []error
	for _, i := range which {
		_, err := r.run(i, how)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func (r paths) run(i int, how string) (said string, err error) {
	// Not with the run's context: a path that is off must come on again.
	ctx, cancel := context.WithTimeout(context.Background(), pathBound)
	defer cancel()
	out, err := exec.CommandContext(ctx, r.command, fmt.Sprint(i), how).CombinedOutput()
	said = strings.TrimSpace(string(out))
	if err != nil {
		err = fmt.Errorf("%s %d %s: %w: %s", r.command, i, how, err, said)
	}
	return said, err
}

func (r paths) sent(i int) (packets int64, err error) {
	said, err := r.run(i, pathSent)
	if err == nil {
		packets, err = strconv.ParseInt(said, 10, 64)
	}
	return packets, err
}

// The sizes of the part paths: transfers at a time, and the blocks of one.
const (
	pathTransfers = 4
	pathBlocks    = 32
	// When a pair's paths are back, the pair must use them again within pathReturn:
	// the longest pause of a path, and a handshake.
	pathReturn = 60 * time.Second
)

// runPaths: one path is lost in the middle of transfers, then all are. Transfers go on by
// the paths that are left. If none is, they end with the reason, or new ones go by another
// transport, and come back.
func runPaths(ctx context.Context, opt *Options, led *ledger) (partRow, error) {
	return losePaths(ctx, opt, led, "paths", []string{pathIsOff, pathIsMute, pathIsThin})
}

// runAllPaths is the end of runPaths alone: all paths are lost.
func runAllPaths(ctx context.Context, opt *Options, led *ledger) (partRow, error) {
	return losePaths(ctx, opt, led, allPaths, nil)
}

// losePaths loses one path after the other in each of the ways, and then all.
func losePaths(ctx context.Context, opt *Options, led *ledger, name string, relays []string) (partRow, error) {
	if opt.Paths == 0 {
		return partRow{}, nil
	}
	s := shape{name: name, prefills: 1, decodes: 1, memory: bigBlocks(), paths: opt.paths(), host: opt.Host, decode: opt.Decode}
	s.memory.PeerTimeout, s.memory.Lease = 15, 15 // a machine that is emulated may be silent for long
	return with(ctx, opt, led, s, func(f *fleet) (string, error) {
		r := &pathRun{f: f, opt: opt}
		whole := r.stream(ctx, func() error { _ = sleep.For(ctx, time.Second); return nil })
		r.well(whole.hit, "rdma")
		r.log("%d transfers of %d MiB at a time take %s ms", pathTransfers, pathBlocks*s.memory.Regions*s.memory.BlockBytes>>20, milliseconds(r.took(whole.hit)))
		for _, how := range relays {
			for _, path := range f.paths.all() {
				if opt.Paths == 1 || ctx.Err() != nil || !r.oneLost(ctx, path, how) {
					break
				}
			}
		}
		r.allLost(ctx)
		return strings.Join(r.words, "; "), ctx.Err()
	})
}

type pathRun struct {
	f     *fleet
	opt   *Options
	n     atomic.Uint64 // names transfers
	words []string
}

func (r *pathRun) log(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	r.opt.Progress("paths: %s", text)
	r.words = append(r.words, text)
}

// batch is the result of a stream of transfers with a fault in its middle.
type batch struct {
	hit   []*entry // loads that were under way then
	fault error    // of the fault's function
}

// stream has some transfers at a time, one after another, until fault has returned and the
// transfers that were begun have ended.
func (r *pathRun) stream(ctx context.Context, fault func() error) (b batch) {
	var mu sync.Mutex
	var loads []*entry
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for range pathTransfers {
		wg.Go(func() {
			for ctx.Err() == nil {
				if e := r.carry(ctx, pathBlocks, func(e *entry) {
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
	for r.f.led.underWay(&mu, &loads) < pathTransfers/2 && ctx.Err() == nil {
		_ = sleep.For(ctx, time.Millisecond)
	}
	mu.Lock()
	before := len(loads)
	mu.Unlock()
	b.fault = fault()
	close(stop)
	wg.Wait()
	b.hit = loads[max(before-pathTransfers, 0):]
	return b
}

// carry offers and loads one transfer and waits for its end; begun is told of the load. It
// returns nil if an engine is not up.
func (r *pathRun) carry(ctx context.Context, blocks int, begun func(*entry)) *entry {
	f := r.f
	n := r.n.Add(1)
	it := item{ID: core.TransferID(fmt.Sprint(f.name, "-stream-", n)), Tag: mix(n << 16), Blocks: blocks, From: f.target(0, 0)}
	offers, err := f.offers(0, 0, []item{it})
	if err == nil {
		_, err = f.P[0].ask(ctx, command{Op: opInspect}) // it has filled its blocks
	}
	var loads []*entry
	if err == nil {
		loads, err = f.loads(0, 0, []item{it})
	}
	if err != nil {
		if ctx.Err() == nil {
			f.led.problem("paths: %v", err)
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
func (r *pathRun) took(loads []*entry) (longest time.Duration) {
	r.f.led.mu.Lock()
	defer r.f.led.mu.Unlock()
	for _, e := range loads {
		longest = max(longest, time.Duration(e.reported-e.accepted))
	}
	return longest
}

// well writes down loads that did not end well by a transport.
func (r *pathRun) well(loads []*entry, transport string) (ok bool) {
	r.f.led.mu.Lock()
	defer r.f.led.mu.Unlock()
	ok = true
	for _, e := range loads {
		if e.state != halfReported || e.code != core.OK || e.transport != transport {
			ok = false
			r.f.led.addProblem("paths: %s: %s by %q, want it to end well by %s: %s", e.id, e.outcome(), e.transport, transport, e.reason)
		}
	}
	return ok
}

// oneLost: transfers go on by the other paths, and end well. It returns false if a path
// cannot be lost in that way.
func (r *pathRun) oneLost(ctx context.Context, path int, how string) bool {
	b := r.stream(ctx, func() error { return r.f.paths.set([]int{path}, how) })
	if b.fault != nil {
		r.log("path %d %s: not run: %v", path, how, b.fault)
	} else if r.well(b.hit, "rdma") {
		r.log("path %d %s: they take %s ms", path, how, milliseconds(r.took(b.hit)))
	}
	if how == pathIsThin && b.fault == nil {
		r.thin(ctx, path)
	}
	if err := r.f.paths.set([]int{path}, pathIsOn); err != nil {
		r.f.led.problem("paths: %v", err)
	} else if b.fault == nil {
		r.used(ctx, path)
	}
	return b.fault == nil
}

// pathShare is a number of packets that only a transfer has, and no handshake.
const pathShare = 100

// thinFor is how long transfers go on beside a path that swallows large packets: it is
// tried again after one second, and after two more.
const thinFor = 5 * time.Second

// thin: once the path was found out it is tried again, and found out before transfers are
// given to it. A try is a few packets, which are sent again and again. A transfer has a
// hundred packets under way for each queue pair.
func (r *pathRun) thin(ctx context.Context, path int) {
	found, given, until := false, int64(0), time.Now().Add(pathReturn)
	for time.Now().Before(until) && ctx.Err() == nil {
		n, ok := r.gives(ctx, path)
		switch {
		case !ok:
			return
		case found:
			given += n
		case n < pathShare:
			found, until = true, time.Now().Add(thinFor)
		}
	}
	switch {
	case ctx.Err() != nil:
		return
	case !found:
		r.f.led.problem("paths: path %d swallows large packets, and is not found out within %v", path, pathReturn)
		return
	}
	if given > 3*pathShare {
		r.f.led.problem("paths: path %d swallows large packets, and was given %d packets after it was found out, within %v", path, given, thinFor)
	}
	r.log("tried with %d packets within %v", given, thinFor)
}

// gives carries a transfer. It says how many packets a path has got of that transfer and of
// the traffic beside it.
func (r *pathRun) gives(ctx context.Context, path int) (packets int64, ok bool) {
	before, err := r.f.paths.sent(path)
	if err == nil && r.carry(ctx, pathBlocks, nil) == nil {
		return 0, false
	}
	after := before
	if err == nil {
		after, err = r.f.paths.sent(path)
	}
	if err != nil {
		r.f.led.problem("paths: %v", err)
	}
	return after - before, err == nil
}

// used carries transfers until a path has its share of one again.
func (r *pathRun) used(ctx context.Context, path int) {
	start := time.Now()
	for total := int64(0); total < pathShare && ctx.Err() == nil; {
		if time.Since(start) > pathReturn {
			r.f.led.problem("paths: path %d is on and not used after %v", path, pathReturn)
			return
		}
		n, ok := r.gives(ctx, path)
		if !ok {
			return
		}
		total += n
	}
	r.log("on, and used after %s ms", milliseconds(time.Since(start)))
}

// back carries transfers until one goes by rdma. It says how many went another way before
// that, and for how long.
func (r *pathRun) back(ctx context.Context) (others int, after time.Duration) {
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
		if time.Since(start) > pathReturn {
			r.f.led.problem("paths: %v after its paths were back the pair does not use them: %s", pathReturn, last)
			break
		}
	}
	return others, time.Since(start)
}

// allLost: only tcp is left, where that is allowed.
func (r *pathRun) allLost(ctx context.Context) {
	f := r.f
	b := r.stream(ctx, func() error { return f.paths.set(f.paths.all(), pathIsOff) })
	if b.fault != nil {
		r.log("all paths off: not run: %v", b.fault)
		return
	}
	r.log("all paths off: %s", f.led.tell(b.hit, math.MaxInt64))
	f.led.mu.Lock()
	for _, e := range b.hit {
		if e.code != core.OK && e.reason == "" {
			f.led.addProblem("paths: %s ends without a reason", e.id)
		}
	}
	f.led.mu.Unlock()
	next := []*entry{r.carry(ctx, pathBlocks, nil)}
	if next[0] == nil {
		return
	}
	if r.opt.Transport == "rdma" {
		f.led.mu.Lock()
		e := next[0]
		reason := e.reason
		if e.code == core.OK || !strings.Contains(reason, "rdma") {
			f.led.addProblem("paths: without a path %s: %s: %q, want an error that says why", e.id, e.outcome(), reason)
		}
		f.led.mu.Unlock()
		r.log("a new one fails after %s ms: %s", milliseconds(r.took(next)), reason)
	} else if r.well(next, "tcp") {
		r.log("a new one goes by tcp in %s ms", milliseconds(r.took(next)))
	}
	if err := f.paths.set(f.paths.all(), pathIsOn); err != nil {
		f.led.problem("paths: %v", err)
	}
	others, after := r.back(ctx)
	r.log("on again: by rdma after %s ms and %d others", milliseconds(after), others)
}
