// The part in which peers accept connections and read nothing.

package chaos

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/faultnet"
)

// window is how long one measurement takes.
func (o *Options) window() time.Duration {
	if o.Short {
		return time.Second
	}
	return 3 * time.Second
}

// pace is how some D's were served meanwhile.
type pace struct {
	figures
	bytes float64 // a second
}

func (p pace) String() string {
	return fmt.Sprintf("%d, median %s ms, max %s ms", p.N, milliseconds(p.Median), milliseconds(p.Max))
}

// steady has D's load one transfer after the other for a while. Each is offered at once,
// and all must end well.
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

// stalledFor is how long nobody reads: longer than the transport waits for
// progress.
const stalledFor = 12 * time.Second

// runStalled: peers that accept connections and never read, in both roles and at both ports.
// Transfers with them end in time; the others go on.
func runStalled(ctx context.Context, opt *Options, led *ledger) (partRow, error) {
	return with(ctx, opt, led, shape{name: "stalled", prefills: 1, decodes: 3, memory: bigBlocks()}, func(f *fleet) (string, error) {
		opt.Progress("peers that never read")
		good := []int{2}
		before := f.steady(ctx, opt.window(), good)

		// A prefill engine whose bootstrap port says nothing.
		silent, err := newSilentListener()
		if err != nil {
			return "", err
		}
		defer silent.close()
		lost := f.items("silent", 32, 0, 2)
		for i := range lost {
			lost[i].From = &core.Target{Bootstrap: "http://" + silent.addr(), EngineID: "silent"}
		}
		start := now()
		unreachable, err := f.loads(0, 2, lost)
		if err != nil {
			return "", err
		}
		// Idle clients of the prefill engine's ports never say or read anything.
		idle := 0
		ports := []int{f.P[0].open.BootstrapPort, f.P[0].open.TCPPort}
		if f.memory.Transport == "local" { // which listens at no port
			ports = ports[:1]
		}
		for _, port := range ports {
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
		// One data port says nothing to D 0, and a D 1 reads nothing.
		w := f.relays[0][0].data
		w.Set(faultnet.Impairment{Hold: [2]bool{true, true}})
		w.Cut(true)
		f.relays[0][1].data.Set(faultnet.Impairment{Hold: [2]bool{faultnet.Down: true}})
		var stuck []*entry
		for d := range 2 {
			items := f.items(fmt.Sprintf("stalled%d", d), 8, 0, d)
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
		during := f.steady(ctx, stalledFor, good)
		for _, w := range f.relays[0] {
			f.restore(w.data)
		}
		await(ctx, append(stuck, unreachable...), opt.drain)
		led.require("stalled", unreachable, "load unreachable")
		led.slower("peers that never read", f.again(ctx, opt, good, before), during)
		return fmt.Sprintf("silent bootstrap port: %s; silent data port and stalled D: %s; others' transfers: %s before, %s during",
			led.tell(unreachable, start), led.tell(stuck, start), before, during), nil
	})
}

// silentListener accepts connections and never reads.
type silentListener struct {
	ln    net.Listener
	mu    sync.Mutex
	conns []net.Conn
	wg    sync.WaitGroup
}

func newSilentListener() (*silentListener, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	m := &silentListener{ln: ln}
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

func (m *silentListener) addr() string { return m.ln.Addr().String() }

func (m *silentListener) close() {
	m.ln.Close()
	m.wg.Wait()
	for _, c := range m.conns {
		c.Close()
	}
}
