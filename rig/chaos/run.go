// A run is its parts: the faults under traffic, and each part of the overload.

package chaos

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"time"
)

// Options of a run.
type Options struct {
	Self   []string // the command that runs RunEngine
	Faults int
	Seed   uint64
	Short  bool     // smaller overload parts and shorter faults
	Strict bool     // a goal that was missed is a failure too: a late notice of P's death …
	Parts  []string // of the run; all if empty
	Kinds  []string // of faults, by how their names begin, in turn; by chance from all if empty

	Transport string // of the agents, as in their configuration; empty for tcp
	// Memory is "double" if all regions lie in memory of the CUDA driver double, which
	// KVCONN_LIBCUDA names; else "host" or empty.
	Memory string
	Paths  int // RDMA paths that may be taken off
	// PathCommand takes a path's number and "off", "mute" (its packets vanish and
	// nobody is told), "on", or "sent", which prints its packets.
	PathCommand string
	// Host is where P's engines listen in the part paths, and Decode the command of
	// its D's engine, on another host: see ServeEngine and Relay.
	Host   string
	Decode []string

	// Progress is told what the run does now.
	Progress func(format string, args ...any)

	// sabotage is given to a D's and a P's process in the middle, by tests.
	sabotage []string
	quick    bool          // no long faults and claims
	drain    time.Duration // in place of drainBound
}

// Bounds of a run.
const (
	leaseSeconds = 4
	earlySeconds = 3
	// patientSeconds is for parts in which nobody is gone or silent for good.
	patientSeconds = 15
	// drainBound is how long after the last fault everything must have ended: a lease, two
	// look-ups, and a good deal for a machine that is busy.
	drainBound = 40 * time.Second
	// If a load's P was killed, noticeBound is how soon the load must be reported.
	noticeBound = 3 * time.Second
)

// dataRate makes transfers of the faults' fleet take some tenths of a second, so
// that faults find them with bytes on their way.
const dataRate = 4 << 20

// mainShape is the fleet of the faults: blocks are few, so that they are used
// again at once.
func mainShape(opt *Options) shape {
	s := shape{name: "f", prefills: 3, decodes: 2, rate: dataRate, paths: opt.paths(), memory: opening{
		Lease: leaseSeconds, EarlyLoad: earlySeconds, MaxTransfers: 4096, Regions: 4, Blocks: 384, BlockBytes: 8 << 10, Transport: opt.Transport, Memory: opt.Memory,
	}}
	if opt.Paths > 0 { // nothing slows their bytes down, so there are more of them, and fewer transfers
		s.prefills, s.rate, s.perPair, s.memory.BlockBytes = 2, 0, 4, 16<<10
	}
	return s
}

// Run carries out a whole run. The error says why it was no run; its findings are in the
// Result.
func Run(ctx context.Context, opt Options) (*Result, error) {
	if opt.Progress == nil {
		opt.Progress = func(string, ...any) {}
	}
	if opt.drain == 0 {
		opt.drain = drainBound
	}
	start := now()
	res := &Result{Seed: opt.Seed, Short: opt.Short, Strict: opt.Strict}
	led := newLedger()
	if opt.runs("faults") {
		if err := runFaults(ctx, &opt, led, res); err != nil {
			return nil, cause(ctx, "faults", err)
		}
	}
	// The parts reset, orphans and stalled wait most of the time, so they run side by side.
	for _, group := range [][]part{{{"burst", runBurst}}, {{"storm", runStorm}}, {{"slow", runSlow}}, {{"reset", runReset}, {"orphans", runOrphans}, {"stalled", runStalled}}, {{"paths", runPaths}}, {{allPaths, runAllPaths}}} {
		rows := make([]partRow, len(group))
		errs := make([]error, len(group))
		var wg sync.WaitGroup
		for i, p := range group {
			if opt.runs(p.name) {
				wg.Go(func() { rows[i], errs[i] = p.run(ctx, &opt, led) })
			}
		}
		wg.Wait()
		for i, p := range group {
			if errs[i] != nil {
				return nil, cause(ctx, p.name, errs[i])
			}
			if rows[i].Name != "" {
				res.Parts = append(res.Parts, rows[i])
			}
		}
	}
	res.Took = time.Duration(now() - start)
	res.close(led)
	return res, nil
}

// allPaths is a part of paths. It runs by itself only where it is named.
const allPaths = "all-paths"

// PartNames are the names of a run's parts.
func PartNames() []string {
	return []string{"faults", "burst", "storm", "slow", "reset", "orphans", "stalled", "paths", allPaths}
}

// part is one part of the overload.
type part struct {
	name string
	run  func(context.Context, *Options, *ledger) (partRow, error)
}

func (o *Options) runs(part string) bool {
	return slices.Contains(o.Parts, part) || len(o.Parts) == 0 && part != allPaths
}

// cause prefers the interruption of the run to the errors that came of it.
func cause(ctx context.Context, part string, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return fmt.Errorf("%s: %w", part, err)
}

// runFaults is the main part: traffic, and faults under it.
func runFaults(ctx context.Context, opt *Options, led *ledger, res *Result) error {
	ctx, cancel := context.WithCancel(ctx)
	f, err := startFleet(ctx, opt.Self, mainShape(opt), led)
	if err != nil {
		cancel()
		return err
	}
	var wg sync.WaitGroup
	defer func() {
		cancel()
		wg.Wait()
		f.destroy()
	}()
	opt.Progress("%d P and %d D engines, seed %d", len(f.P), len(f.D), opt.Seed)
	f.round(ctx, "before the faults", opt.Seed, 10, !opt.quick)
	before, err := f.counts(ctx)
	if err != nil {
		return err
	}

	stop, ended := make(chan struct{}), make(chan struct{})
	wg.Go(func() {
		defer close(ended)
		f.traffic(ctx, stop, opt.Seed)
	})
	longest := 8 * time.Second
	switch {
	case opt.quick:
		longest = time.Second
	case opt.Short:
		longest = 4 * time.Second
	}
	in := newInjector(f, opt, longest)
	every := 10 * time.Second
	if opt.quick {
		every = time.Second
	}
	watch := time.NewTicker(every)
	defer watch.Stop()
	injected := make(chan struct{})
	wg.Go(func() {
		defer close(injected)
		in.run(ctx, opt.Faults)
	})
	if err := f.sabotageAll(ctx, opt.sabotage); err != nil {
		return err
	}
	for done := false; !done; {
		select {
		case <-injected:
			done = true
		case <-watch.C:
			opt.Progress("%d of %d faults", in.count(), opt.Faults)
		}
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	opt.Progress("%d faults are over, everything must end now", in.count())
	close(stop)
	healed := now()
	if err := f.heal(ctx); err != nil {
		return fmt.Errorf("after the last fault: %w", err)
	}
	select { // if transfers are left, drain tells of them
	case <-ended:
	case <-ctx.Done():
	case <-time.After(opt.drain):
	}
	if err := f.drain(ctx, opt.drain); err != nil {
		return err
	}
	res.Drain = time.Duration(now() - healed)
	f.round(ctx, "after the faults", opt.Seed, 10, !opt.Short)
	if err := f.drain(ctx, opt.drain); err != nil {
		return err
	}
	after, err := f.counts(ctx)
	if err != nil {
		return err
	}
	for _, c := range f.all() {
		_, life := c.up()
		res.Processes = append(res.Processes, processRow{Name: c.name, Lives: life, Before: before[c.name], After: after[c.name]})
	}
	res.addFaults(in)
	if err := f.stop(); err != nil {
		led.problem("close: %v", err)
	}
	return ctx.Err()
}

// sabotageAll breaks something in every process that lives to the end.
func (f *fleet) sabotageAll(ctx context.Context, what []string) error {
	for _, s := range what {
		for _, c := range []*child{f.P[len(f.P)-1], f.D[len(f.D)-1]} {
			if _, err := c.ask(ctx, command{Op: opSabotage, What: s}); err != nil {
				return err
			}
		}
	}
	return nil
}

func (in *injector) count() int {
	in.mu.Lock()
	defer in.mu.Unlock()
	return len(in.faults)
}

// milliseconds writes a time for people.
func milliseconds(d time.Duration) string {
	return strings.TrimSuffix(fmt.Sprintf("%.1f", math.Round(float64(d)/1e5)/10), ".0")
}
