// Faults are drawn and injected, several at a time, and one for each target.

package chaos

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/sleep"
	"github.com/kvconn/kvconn/rig/faultnet"
)

// faultKind says what a fault does, and to which target.
type faultKind string

const (
	killP       faultKind = "SIGKILL of P"
	killD       faultKind = "SIGKILL of D"
	stopP       faultKind = "SIGSTOP of P"
	stopD       faultKind = "SIGSTOP of D"
	cutReset    faultKind = "cut, reset"
	cutEnd      faultKind = "cut, in order"
	halfClose   faultKind = "half-close"
	delay       faultKind = "delay"
	throttle    faultKind = "throttle"
	blackHole   faultKind = "black hole"
	refuseConns faultKind = "cut and refused"
	diskFull    faultKind = "disk full at P"
	noFiles     faultKind = "no descriptors"
	pathOff     faultKind = "a path off"
	allOff      faultKind = "all paths off"
)

// deadly: a half that was under way with the other side is lost for sure.
func (k faultKind) deadly() bool { return k == killP || k == killD }

// weighted is how often a kind is drawn.
type weighted struct {
	kind   faultKind
	weight int
}

func (k faultKind) isOf(begin string) bool { return strings.HasPrefix(string(k), begin) }

// IsKind says whether the name of a kind of fault begins so, of one that needs no paths.
func IsKind(begin string) bool {
	return begin != "" && slices.ContainsFunc(mixture, func(m weighted) bool { return m.kind.isOf(begin) })
}

var mixture = []weighted{
	{killP, 20}, {killD, 8}, {stopP, 10}, {stopD, 8}, {cutReset, 10}, {cutEnd, 8}, {halfClose, 10},
	{delay, 6}, {throttle, 6}, {blackHole, 8}, {refuseConns, 4}, {diskFull, 3}, {noFiles, 4},
}

// pathMixture is added to mixture where there are paths.
var pathMixture = []weighted{{pathOff, 25}, {allOff, 8}}

// fault is one that was injected.
type fault struct {
	kind   faultKind
	target string
	from   int64
	victim processLife // of a SIGKILL
	// affects says whether a half depends on the target.
	affects func(*entry) bool
	hits    int // halves that it began upon
}

// injector draws faults and injects them, several at a time but one for each
// target.
type injector struct {
	f       *fleet
	r       *rand.Rand
	longest time.Duration // of a fault
	mixture []weighted
	inTurn  bool // of mixture, whatever the weights

	mu     sync.Mutex
	busy   map[string]bool
	faults []*fault
	notRun map[faultKind]string
	// startErrors counts why processes did not start again at once.
	startErrors map[string]int
}

// Bounds of the injector.
const (
	atOnce      = 4
	shortest    = 50 * time.Millisecond
	restartWait = 1500 * time.Millisecond
)

func newInjector(f *fleet, opt *Options, longest time.Duration) *injector {
	mix := slices.Clone(mixture)
	if f.paths.n > 0 {
		mix = append(mix, pathMixture...)
	}
	in := &injector{mixture: mix, f: f, r: rand.New(rand.NewPCG(opt.Seed, 0xFA17)), longest: longest, busy: map[string]bool{}, notRun: map[faultKind]string{}, startErrors: map[string]int{}}
	if len(opt.Kinds) > 0 {
		in.choose(opt.Kinds)
	}
	return in
}

// choose leaves the kinds whose names begin so, and has them drawn in turn. One that cannot be run would never have its turn over.
func (in *injector) choose(kinds []string) {
	in.inTurn = true
	in.mixture = slices.DeleteFunc(in.mixture, func(m weighted) bool {
		if !slices.ContainsFunc(kinds, m.kind.isOf) {
			return true
		}
		if m.kind == diskFull && in.f.disk.reason != "" {
			in.skip(m.kind, in.f.disk.reason)
			return true
		}
		return false
	})
}

// run injects n faults, and returns when the last one has ended.
func (in *injector) run(ctx context.Context, n int) {
	var wg sync.WaitGroup
	defer wg.Wait()
	places := make(chan struct{}, atOnce)
	for i := range n {
		select {
		case <-ctx.Done():
			return
		case places <- struct{}{}:
		}
		inject, target := in.draw(ctx, i)
		if inject == nil {
			return
		}
		wg.Go(func() {
			inject()
			in.release(target)
			<-places
		})
		if sleep.For(ctx, time.Duration(in.r.Int64N(int64(300*time.Millisecond)))) != nil {
			return
		}
	}
}

// kind picks that of the nth fault.
func (in *injector) kind(n int) faultKind {
	if in.inTurn {
		return in.mixture[n%len(in.mixture)].kind
	}
	total := 0
	for _, m := range in.mixture {
		total += m.weight
	}
	at := in.r.IntN(total)
	for _, m := range in.mixture {
		if at -= m.weight; at < 0 {
			return m.kind
		}
	}
	return ""
}

// draw picks the nth fault, whose target is free; nil when ctx ends first, or no kind can be run.
func (in *injector) draw(ctx context.Context, nth int) (inject func(), target string) {
	for ctx.Err() == nil && len(in.mixture) > 0 {
		kind := in.kind(nth)
		p, d := in.r.IntN(len(in.f.P)), in.r.IntN(len(in.f.D))
		// Long ones are rare: half of all are shorter than some 0.6 s.
		long := time.Duration(float64(shortest) * math.Pow(float64(in.longest)/float64(shortest), in.r.Float64()))
		pick := in.r.Uint64()
		target, inject := in.make(ctx, kind, p, d, long, pick)
		if inject != nil && in.claim(target) {
			return inject, target
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Millisecond):
		}
	}
	return nil, ""
}

func (in *injector) claim(target string) bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.busy[target] {
		return false
	}
	in.busy[target] = true
	return true
}

func (in *injector) release(target string) {
	in.mu.Lock()
	delete(in.busy, target)
	in.mu.Unlock()
}

// skip writes down that a kind cannot be run here.
func (in *injector) skip(kind faultKind, reason string) {
	in.mu.Lock()
	in.notRun[kind] = reason
	in.mu.Unlock()
}

// begin writes a fault down, which starts right after. over is called when the fault has
// ended.
func (in *injector) begin(kind faultKind, target string, affects func(*entry) bool) (over func()) {
	return in.beginOn(&fault{kind: kind, target: target, affects: affects})
}

func (in *injector) beginOn(f *fault) (over func()) {
	f.from = now()
	in.f.led.begin(f)
	in.mu.Lock()
	in.faults = append(in.faults, f)
	in.mu.Unlock()
	return func() { in.f.led.over(f) }
}

func noHalf(*entry) bool { return false }

// make prepares a fault; its inject returns when the fault is over. The last process of
// each side is never killed, so that a leak has the time to show.
func (in *injector) make(ctx context.Context, kind faultKind, p, d int, long time.Duration, pick uint64) (target string, inject func()) {
	f := in.f
	pair := fmt.Sprintf("p%d-d%d", p, d)
	ofPair := func(e *entry) bool { return e.prefill == p && e.decode == d }
	loadsFromP := func(e *entry) bool { return e.side == core.SideLoad && e.prefill == p }
	offersToD := func(e *entry) bool { return e.side == core.SideOffer && e.decode == d }
	w := f.relays[p][d]
	relays := [][]*faultnet.Relay{{w.boot}, {w.data}, {w.data}, w.each()}[pick%4]
	if slices.Contains([]string{"rdma", "local", "auto"}, f.memory.Transport) { // no byte goes over a relay of data: auto takes local here
		relays = []*faultnet.Relay{w.boot}
	}
	impair := func(t faultnet.Impairment) func() {
		return func() {
			defer in.begin(kind, pair, ofPair)()
			for _, w := range relays {
				f.impair(w, t)
			}
			_ = sleep.For(ctx, long)
			for _, w := range relays {
				f.restore(w)
			}
		}
	}
	cut := func(f func(*faultnet.Relay)) func() {
		return func() {
			defer in.begin(kind, pair, ofPair)()
			for _, w := range relays {
				f(w)
			}
		}
	}
	switch kind {
	case killP:
		if p == len(f.P)-1 {
			return "", nil
		}
		return f.P[p].name, func() { in.kill(ctx, kind, f.P[p], loadsFromP, pick) }
	case killD:
		if d == len(f.D)-1 {
			return "", nil
		}
		return f.D[d].name, func() { in.kill(ctx, kind, f.D[d], offersToD, pick) }
	case stopP:
		return f.P[p].name, func() { in.stop(ctx, kind, f.P[p], loadsFromP, long) }
	case stopD:
		return f.D[d].name, func() { in.stop(ctx, kind, f.D[d], offersToD, long) }
	case cutReset:
		return pair, cut(func(w *faultnet.Relay) { w.Cut(true) })
	case cutEnd:
		return pair, cut(func(w *faultnet.Relay) { w.Cut(false) })
	case halfClose:
		return pair, cut(func(w *faultnet.Relay) { w.HalfClose(faultnet.Direction(pick >> 8 % 2)) })
	case delay:
		return pair, impair(faultnet.Impairment{Delay: time.Duration(5+pick>>8%200) * time.Millisecond})
	case throttle:
		return pair, impair(faultnet.Impairment{Rate: 8 << 10 << (pick >> 8 % 8)})
	case blackHole:
		return pair, impair(faultnet.Impairment{Hold: [][2]bool{{true, true}, {true, false}, {false, true}}[pick>>8%3]})
	case refuseConns:
		refuse := impair(faultnet.Impairment{Refuse: true})
		return pair, func() {
			for _, w := range relays {
				w.Cut(true)
			}
			refuse()
		}
	case diskFull:
		if f.disk.reason != "" {
			in.skip(kind, f.disk.reason)
			return "", nil
		}
		return "disk", func() {
			defer in.begin(kind, "disk", noHalf)()
			if err := f.disk.fillUp(); err != nil {
				in.skip(kind, err.Error())
			}
			_ = sleep.For(ctx, long)
			f.disk.empty()
		}
	case noFiles:
		c := f.all()[pick>>8%uint64(len(f.P)+len(f.D))]
		return c.name, func() { in.noFiles(ctx, c, long) }
	case pathOff:
		return "paths", func() { in.pathsOff(ctx, kind, long, int(pick>>8%uint64(f.paths.n))) }
	case allOff:
		return "paths", func() { in.pathsOff(ctx, kind, long, f.paths.all()...) }
	}
	return "", nil
}

// kill kills a process under load, and starts it again on its ports.
func (in *injector) kill(ctx context.Context, kind faultKind, c *child, affects func(*entry) bool, pick uint64) {
	p, life := c.up()
	if p == nil {
		return
	}
	defer in.beginOn(&fault{kind: kind, target: c.name, victim: processLife{c.name, life}, affects: affects})()
	c.kill()
	_ = sleep.For(ctx, time.Duration(pick%uint64(restartWait)))
	// The disk may be full, or descriptors short: an engine's supervisor tries on.
	for ctx.Err() == nil {
		err := c.start(ctx)
		if err == nil {
			return
		}
		in.mu.Lock()
		in.startErrors[particulars.ReplaceAllString(err.Error(), "…")]++
		in.mu.Unlock()
		_ = sleep.For(ctx, 100*time.Millisecond)
	}
}

func (in *injector) stop(ctx context.Context, kind faultKind, c *child, affects func(*entry) bool, long time.Duration) {
	defer in.begin(kind, c.name, affects)()
	c.signal(syscall.SIGSTOP)
	_ = sleep.For(ctx, long)
	c.signal(syscall.SIGCONT)
}

// pathsOff has paths off for a while.
func (in *injector) pathsOff(ctx context.Context, kind faultKind, long time.Duration, which ...int) {
	defer in.begin(kind, fmt.Sprint("paths ", which), func(*entry) bool { return true })()
	if err := in.f.paths.set(which, pathIsOff); err != nil {
		in.skip(kind, err.Error())
	}
	_ = sleep.For(ctx, long)
	if err := in.f.paths.set(which, pathIsOn); err != nil {
		in.f.led.problem("a path does not come back: %v", err)
	}
}

// noFiles lets a process open nothing for a while.
func (in *injector) noFiles(ctx context.Context, c *child, long time.Duration) {
	pid := c.pid()
	var old unix.Rlimit
	err := unix.Prlimit(pid, unix.RLIMIT_NOFILE, nil, &old)
	if err == nil {
		err = unix.Prlimit(pid, unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 4, Max: old.Max}, nil)
	}
	if err != nil {
		in.skip(noFiles, "the limit of another process cannot be lowered: "+err.Error())
		return
	}
	defer in.begin(noFiles, c.name, noHalf)()
	_ = sleep.For(ctx, long)
	_ = unix.Prlimit(pid, unix.RLIMIT_NOFILE, &old, nil)
}
