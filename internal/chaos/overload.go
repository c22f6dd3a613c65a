package chaos

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/faultnet"
)

// The sizes of the overload's parts, as the issue asks for them.
const (
	burstLoads  = 10_000
	stormAborts = 1_000
	orphans     = 1_000
)

// tinyBlocks is an engine of very many blocks that cost nothing to move.
func tinyBlocks(lease, early float64) opening {
	return opening{Lease: lease, EarlyLoad: early, MaxTransfers: 4096, Regions: 1, Blocks: 12_000, BlockBytes: 256}
}

// bigBlocks is an engine whose transfers do not fit into socket buffers.
func bigBlocks() opening {
	return opening{Lease: leaseSeconds, EarlyLoad: earlySeconds, MaxTransfers: 4096, Regions: 4, Blocks: 512, BlockBytes: 64 << 10}
}

// with starts a fleet, does f, drains it and closes it.
func with(ctx context.Context, opt *Options, led *ledger, s shape, do func(*fleet) (string, error)) (partRow, error) {
	s.memory.Transport = opt.Transport
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
	return proc.give(order{Op: opAnnounce, Items: items})
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
	return proc.give(order{Op: opCancel, Items: items, Reason: "the router cancels"})
}

// await waits until all have ended, at most bound, and returns how many have not.
func await(ctx context.Context, entries []*entry, bound time.Duration) int {
	ctx, cancel := context.WithTimeout(ctx, bound)
	defer cancel()
	for i, e := range entries {
		select {
		case <-e.done:
		case <-ctx.Done():
			left := 0
			for _, e := range entries[i:] {
				select {
				case <-e.done:
				default:
					left++
				}
			}
			return left
		}
	}
	return 0
}

// tell says how entries ended, and how long after from the last one did.
func (l *ledger) tell(entries []*entry, from int64) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	outcomes := map[string]int{}
	var last int64
	for _, e := range entries {
		outcomes[e.outcome()]++
		last = max(last, e.reported)
	}
	var parts []string
	for _, o := range sortedKeys(outcomes) {
		parts = append(parts, fmt.Sprintf("%d %s", outcomes[o], o))
	}
	text := strings.Join(parts, ", ")
	if last > from {
		text += fmt.Sprintf(" after at most %s ms", milliseconds(time.Duration(last-from)))
	}
	return text
}

// require misses those that ended in another way than one of these.
func (l *ledger) require(what string, entries []*entry, outcomes ...string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	others := map[string]int{}
	example := ""
	for _, e := range entries {
		if got := e.outcome(); !slices.Contains(outcomes, got) {
			others[got]++
			example = fmt.Sprintf("%s: %s", e.id, e.reason)
		}
	}
	for _, got := range sortedKeys(others) {
		l.miss("%s: %d of %d: %s, want %s; one is %s", what, others[got], len(entries), got, strings.Join(outcomes, " or "), example)
	}
}

// longestCall is the longest time that one of these calls took.
func (l *ledger) longestCall(entries []*entry) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	var longest time.Duration
	for _, e := range entries {
		longest = max(longest, e.took)
	}
	return longest
}

// runBurst: 10,000 loads at once on one agent. What is over the bound is refused
// by the call, with a reason; all others end, and no call waits.
func runBurst(ctx context.Context, opt *Options, led *ledger) (partRow, error) {
	return with(ctx, opt, led, shape{name: "burst", prefills: 1, decodes: 1, memory: tinyBlocks(30, 30)}, func(f *fleet) (string, error) {
		opt.Progress("%d loads at once", burstLoads)
		items := f.items("load", burstLoads, 0, 0)
		start := now()
		loads, err := f.loads(0, 0, items)
		if err != nil {
			return "", err
		}
		if _, err := f.D[0].ask(ctx, order{Op: opLook}); err != nil { // all calls have been told
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

// blipTransfers is how many transfers wait when all connections of a pair break.
const blipTransfers = 100

// stoppedFor is how long P is stopped while its connections break: less than
// what makes it gone.
const stoppedFor = 1500 * time.Millisecond

// runBlip: every connection between a P and a D that both live breaks at once,
// and again while P is stopped. Of what waits, no byte has come: it survives.
func runBlip(ctx context.Context, opt *Options, led *ledger) (partRow, error) {
	return with(ctx, opt, led, shape{name: "blip", prefills: 1, decodes: 1, memory: tinyBlocks(leaseSeconds, earlySeconds)}, func(f *fleet) (string, error) {
		opt.Progress("all connections of a pair break at once")
		items := f.items("blip", blipTransfers, 0, 0)
		claims := f.items("claim", blipTransfers, 0, 0)
		if err := f.announce(0, append(items, claims...)); err != nil {
			return "", err
		}
		proc, _ := f.D[0].up()
		if proc == nil {
			return "", errDown
		}
		if err := proc.give(order{Op: opClaim, Items: claims}); err != nil {
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
		pause(ctx, 2*time.Second)
		f.P[0].signal(syscall.SIGSTOP)
		f.cut(0, 0)
		pause(ctx, stoppedFor)
		f.P[0].signal(syscall.SIGCONT)
		pause(ctx, time.Second)
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
		led.require("blip", loads, "load ok")
		led.require("blip", offers, "offer ok")
		return led.tell(loads, start) + "; " + led.tell(offers, start), nil
	})
}

// cut breaks all connections of a pair.
func (f *fleet) cut(p, d int) {
	for _, w := range f.ways[p][d].each() {
		w.Cut(true)
	}
}

// window is how long one measurement takes.
func (o *Options) window() time.Duration {
	if o.Short {
		return time.Second
	}
	return 3 * time.Second
}

// waiting waits until P has that many loads and claims of D d.
func (f *fleet) waiting(ctx context.Context, d, loads, claims int) error {
	for end := time.Now().Add(askTimeout); ; {
		ev, err := f.D[d].ask(ctx, order{Op: opLook})
		if err != nil {
			return err
		}
		if ev.Look.Waiting >= loads && ev.Look.Claims >= claims {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("there are %d loads and %d claims of %s that P knows of, want %d and %d", ev.Look.Waiting, ev.Look.Claims, f.D[d].name, loads, claims)
		}
		pause(ctx, 20*time.Millisecond)
	}
}

// pace is what some D's were served meanwhile.
type pace struct {
	figures
	bytes float64 // a second
}

func (p pace) String() string {
	return fmt.Sprintf("%d, median %s ms, max %s ms", p.N, milliseconds(p.Median), milliseconds(p.Max))
}

// steady has D's load one transfer after the other for a while, each offered at
// once; all must end well.
func (f *fleet) steady(ctx context.Context, window time.Duration, ds []int) pace {
	var mu sync.Mutex
	var times []time.Duration
	var blocks int
	var wg sync.WaitGroup
	begin := time.Now()
	for _, d := range ds {
		for k := range 2 {
			r := rand.New(rand.NewPCG(uint64(d), uint64(k)))
			wg.Go(func() {
				for n := 0; time.Since(begin) < window && ctx.Err() == nil; n++ {
					id := core.TransferID(fmt.Sprintf("%s-steady-%d-%d-%d-%d", f.name, begin.UnixNano(), d, k, n))
					pl := plainPlan(r, id, 0, d)
					pl.announce, pl.claim, pl.offer, pl.load = never, never, 0, 0
					t := f.carry(ctx, pl)
					if ctx.Err() != nil {
						return
					}
					f.endedWell(t, f.name+", beside the others")
					if t.load == nil {
						return
					}
					f.led.mu.Lock()
					took := time.Duration(t.load.reported - t.load.accepted)
					f.led.mu.Unlock()
					mu.Lock()
					times = append(times, took)
					blocks += pl.blocks
					mu.Unlock()
				}
			})
		}
	}
	wg.Wait()
	return pace{figuresOf(times), float64(blocks*f.memory.Regions*f.memory.BlockBytes) / time.Since(begin).Seconds()}
}

// runSlow: a D that takes its bytes slowly, and then not at all, beside fast
// ones of the same P.
func runSlow(ctx context.Context, opt *Options, led *ledger) (partRow, error) {
	memory := bigBlocks()
	memory.Lease = 30 // what is slow is to end by itself
	return with(ctx, opt, led, shape{name: "slow", prefills: 1, decodes: 3, memory: memory}, func(f *fleet) (string, error) {
		opt.Progress("a slow D beside fast ones")
		fast := []int{1, 2}
		alone := f.steady(ctx, opt.window(), fast)
		f.ways[0][0].data.Set(faultnet.Trouble{Rate: 64 << 10})
		items := f.items("slow", 8, 0, 0)
		for i := range items {
			items[i].Blocks = 4
		}
		offers, err := f.offers(0, 0, items)
		if err != nil {
			return "", err
		}
		loads, err := f.loads(0, 0, items)
		if err != nil {
			return "", err
		}
		start := now()
		throttled := f.steady(ctx, opt.window(), fast)
		f.D[0].signal(syscall.SIGSTOP)
		stopped := f.steady(ctx, opt.window(), fast)
		f.D[0].signal(syscall.SIGCONT)
		f.calm(f.ways[0][0].data)
		await(ctx, append(loads, offers...), opt.drain)
		return fmt.Sprintf("fast D's: %.0f MB/s alone, %.2f of it beside a throttled D, %.2f beside a stopped one; the slow one's: %s", alone.bytes/1e6,
			throttled.bytes/alone.bytes, stopped.bytes/alone.bytes, led.tell(append(loads, offers...), start)), nil
	})
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

// deafFor is how long nobody reads: longer than the transport waits for
// progress.
const deafFor = 12 * time.Second

// runDeaf: peers that accept connections and never read, in both roles and at
// both ports. What goes with them ends in time; what does not, goes on.
func runDeaf(ctx context.Context, opt *Options, led *ledger) (partRow, error) {
	return with(ctx, opt, led, shape{name: "deaf", prefills: 1, decodes: 3, memory: bigBlocks()}, func(f *fleet) (string, error) {
		opt.Progress("peers that never read")
		good := []int{2}
		before := f.steady(ctx, opt.window(), good)

		// A prefill engine whose bootstrap port says nothing.
		mute, err := newMute()
		if err != nil {
			return "", err
		}
		defer mute.close()
		lost := f.items("mute", 32, 0, 2)
		for i := range lost {
			lost[i].From = &core.Target{Bootstrap: "http://" + mute.addr(), EngineID: "mute"}
		}
		start := now()
		unreachable, err := f.loads(0, 2, lost)
		if err != nil {
			return "", err
		}
		// Clients of the prefill engine's ports that never say or read anything.
		idle := 0
		for _, port := range []int{f.P[0].open.BootstrapPort, f.P[0].open.TCPPort} {
			for range 64 {
				c, err := net.Dial("tcp", at(prefillHost, port))
				if err != nil {
					return "", err
				}
				defer c.Close()
				if idle++; idle%2 == 0 { // half of the control port's ask for the bus
					_, _ = fmt.Fprintf(c, "GET /nats HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: nats\r\n\r\n")
				}
			}
		}
		// A data port that says nothing to D 0, and a D 1 that reads nothing.
		w := f.ways[0][0].data
		w.Set(faultnet.Trouble{Hold: [2]bool{true, true}})
		w.Cut(true)
		f.ways[0][1].data.Set(faultnet.Trouble{Hold: [2]bool{faultnet.Down: true}})
		var stuck []*entry
		for d := range 2 {
			items := f.items(fmt.Sprintf("deaf%d", d), 8, 0, d)
			for i := range items {
				items[i].Blocks = 16
			}
			offers, err := f.offers(0, d, items)
			if err != nil {
				return "", err
			}
			loads, err := f.loads(0, d, items)
			if err != nil {
				return "", err
			}
			stuck = append(append(stuck, offers...), loads...)
		}
		during := f.steady(ctx, deafFor, good)
		for _, w := range f.ways[0] {
			f.calm(w.data)
		}
		await(ctx, append(stuck, unreachable...), opt.drain)
		led.require("deaf", unreachable, "load unreachable")
		return fmt.Sprintf("mute bootstrap port: %s; mute data port and deaf D: %s; others' transfers: %s before, %s during",
			led.tell(unreachable, start), led.tell(stuck, start), before, during), nil
	})
}

// mute accepts connections and never reads.
type mute struct {
	ln    net.Listener
	mu    sync.Mutex
	conns []net.Conn
	wg    sync.WaitGroup
}

func newMute() (*mute, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	m := &mute{ln: ln}
	m.wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			m.mu.Lock()
			m.conns = append(m.conns, c)
			m.mu.Unlock()
		}
	})
	return m, nil
}

func (m *mute) addr() string { return m.ln.Addr().String() }

func (m *mute) close() {
	m.ln.Close()
	m.wg.Wait()
	for _, c := range m.conns {
		c.Close()
	}
}
