// The engines of a run, the relays between them, and how all of it is started, healed, drained and ended.

package chaos

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/sleep"
	"github.com/kvconn/kvconn/node"
	"github.com/kvconn/kvconn/rig/faultnet"
)

// shape says how a fleet is made.
type shape struct {
	name     string
	prefills int
	decodes  int
	memory   opening // of each engine: the fields that do not say who it is
	many     int     // blocks of a P's regions; 0: as many as a D's have
	rate     int     // bytes a second of each data connection; 0 = any
	perPair  int     // transfers at a time under load; 0 = perPair
	paths    paths
	host     string   // where P's engines listen, with no relays between; empty: prefillHost behind relays
	decode   []string // the command of D's engines; nil: the same as P's
}

func (s *shape) atOnce() int {
	if s.perPair > 0 {
		return s.perPair
	}
	return perPair
}

// fleet is some P and D engines in processes of their own, and the relays
// between each two.
type fleet struct {
	shape
	led    *ledger
	P, D   []*child
	relays [][]pairRelays // by P, then by D
	// isData tells the relays of data from those of the bootstrap port.
	isData map[*faultnet.Relay]bool
	disk   *disk
}

// pairRelays are the relays from one D to one P.
type pairRelays struct{ boot, data *faultnet.Relay }

func (w pairRelays) each() []*faultnet.Relay { return []*faultnet.Relay{w.boot, w.data} }

// restore ends a relay's impairment, all but the usual rate.
func (f *fleet) restore(w *faultnet.Relay) { f.impair(w, faultnet.Impairment{}) }

func (f *fleet) impair(w *faultnet.Relay, t faultnet.Impairment) {
	if t.Rate == 0 && f.isData[w] {
		t.Rate = f.rate
	}
	w.Set(t)
}

// prefillHost is where P's engines listen; D's come through addresses of their
// own with the same ports, since a P names only its port.
const prefillHost = "127.0.0.2"

func at(host string, port int) string { return net.JoinHostPort(host, strconv.Itoa(port)) }

func decodeHost(i int) string { return fmt.Sprintf("127.0.%d.1", 1+i) }

// startFleet starts the processes and the relays.
func startFleet(ctx context.Context, self []string, s shape, led *ledger) (_ *fleet, err error) {
	f := &fleet{shape: s, led: led, isData: map[*faultnet.Relay]bool{}}
	defer func() {
		if err != nil {
			f.destroy()
		}
	}()
	if f.disk, err = newDisk(); err != nil {
		return nil, err
	}
	on := func(c *child, life int, ev event) { led.event(c.name, life, ev) }
	for i := range s.prefills {
		ports, relays, err := s.openRelays()
		if err != nil {
			return nil, err
		}
		f.relays = append(f.relays, relays)
		for _, w := range relays {
			f.isData[w.data] = true
			f.restore(w.data)
		}
		c := &child{name: fmt.Sprintf("%s/p%d", s.name, i), index: i, self: self, open: s.memory, on: on}
		c.open.EngineID, c.open.Role, c.open.Host = fmt.Sprintf("p%d", i), node.RolePrefill, s.prefillHost()
		c.open.BootstrapPort, c.open.TCPPort = ports[0], ports[1]
		c.open.Blocks = cmp.Or(s.many, c.open.Blocks)
		tmp, err := f.disk.folder(c.open.EngineID)
		if err != nil {
			return nil, err
		}
		c.env = []string{"TMPDIR=" + tmp}
		f.P = append(f.P, c)
	}
	for i := range s.decodes {
		c := &child{name: fmt.Sprintf("%s/d%d", s.name, i), index: i, self: self, open: s.memory, on: on}
		c.open.EngineID, c.open.Role = fmt.Sprintf("d%d", i), node.RoleDecode
		if s.decode != nil {
			c.self = s.decode
		}
		f.D = append(f.D, c)
	}
	errs := make([]error, len(f.all()))
	var wg sync.WaitGroup
	for i, c := range f.all() {
		wg.Go(func() { errs[i] = c.start(ctx) })
	}
	wg.Wait()
	return f, errors.Join(errs...)
}

func (f *fleet) all() []*child { return append(append([]*child(nil), f.P...), f.D...) }

// openRelays finds two ports that are free for a P and for its relays, below those
// that systems give to connections.
func (s *shape) openRelays() (ports [2]int, relays []pairRelays, err error) {
	for range 50 {
		ports = [2]int{20000 + rand.IntN(12000), 20000 + rand.IntN(12000)}
		if relays, err = s.relaysTo(ports); err == nil {
			return ports, relays, nil
		}
	}
	return ports, nil, fmt.Errorf("no free ports: %w", err)
}

func (s *shape) prefillHost() string {
	if s.host != "" {
		return s.host
	}
	return prefillHost
}

func (s *shape) relaysTo(ports [2]int) (relays []pairRelays, err error) {
	defer func() {
		if err != nil {
			closeRelays(relays)
		}
	}()
	for _, port := range ports {
		ln, err := net.Listen("tcp", at(s.prefillHost(), port))
		if err != nil {
			return nil, err
		}
		ln.Close()
	}
	if s.host != "" {
		return nil, nil
	}
	for i := range s.decodes {
		var both [2]*faultnet.Relay
		for k, port := range ports {
			if both[k], err = faultnet.Open(at(decodeHost(i), port), at(prefillHost, port)); err != nil {
				if both[0] != nil {
					both[0].Close()
				}
				return relays, err
			}
		}
		relays = append(relays, pairRelays{both[0], both[1]})
	}
	return relays, nil
}

func closeRelays(relays []pairRelays) {
	for _, w := range relays {
		w.boot.Close()
		w.data.Close()
	}
}

// target is how a D finds a P.
func (f *fleet) target(p, d int) *core.Target {
	open := &f.P[p].open
	address := at(open.Host, open.BootstrapPort)
	if f.host == "" {
		address = f.relays[p][d].boot.Addr()
	}
	return &core.Target{Bootstrap: "http://" + address, EngineID: open.EngineID}
}

// heal ends all faults: processes run, relays pass, and the dead are started again.
func (f *fleet) heal(ctx context.Context) error {
	f.disk.empty()
	if err := f.paths.set(f.paths.all(), pathIsOn); err != nil {
		return err
	}
	for _, relays := range f.relays {
		for _, w := range relays {
			for _, w := range w.each() {
				f.restore(w)
			}
		}
	}
	for _, c := range f.all() {
		c.signal(syscall.SIGCONT)
		if p, _ := c.up(); p == nil {
			if err := c.start(ctx); err != nil {
				return err
			}
		}
	}
	return nil
}

// inspections asks each process for its state.
func (f *fleet) inspections(ctx context.Context, paint bool) (map[string]*inspection, error) {
	out := map[string]*inspection{}
	for _, c := range f.all() {
		ev, err := c.ask(ctx, command{Op: opInspect, Paint: paint})
		if err != nil {
			return out, err
		}
		out[c.name] = ev.Inspection
	}
	return out, nil
}

// drain waits until nothing is under way. If something still is when the time is over, a
// report or a block was lost, and drain writes that down.
func (f *fleet) drain(ctx context.Context, bound time.Duration) error {
	start := now()
	for {
		states, err := f.inspections(ctx, false)
		if err != nil {
			return err
		}
		var left []string
		for _, name := range sortedKeys(states) {
			if l := states[name]; !l.quiet() {
				left = append(left, fmt.Sprintf("%s: %d loads, %d offers, %d reports owed, %d unread, blocks held by %v", name, l.Loads, l.Offers, l.Outstanding, l.Unread, l.Held))
			}
		}
		open := f.openEntries()
		if len(left) == 0 && len(open) == 0 {
			break
		}
		if time.Duration(now()-start) > bound {
			for _, e := range open {
				f.led.problem("lost report: %s of %s (life %d) of %s has none %v after the last fault", e.side, e.child, e.life, e.id, bound)
			}
			if len(left) > 0 {
				f.led.problem("not drained %v after the last fault: %s", bound, strings.Join(left, "; "))
			}
			break
		}
		if err := sleep.For(ctx, 100*time.Millisecond); err != nil {
			return err
		}
	}
	states, err := f.inspections(ctx, true)
	if err != nil {
		return err
	}
	for _, name := range sortedKeys(states) {
		if l := states[name]; l.Free != l.Blocks {
			f.led.problem("lost blocks: %s has %d of %d, and nothing is under way", name, l.Free, l.Blocks)
		}
	}
	return nil
}

// openEntries are this fleet's halves without an end.
func (f *fleet) openEntries() []*entry {
	var out []*entry
	for _, e := range f.led.open() {
		if strings.HasPrefix(e.child, f.name+"/") {
			out = append(out, e)
		}
	}
	return out
}

// stop closes the agents in order, then everything else.
func (f *fleet) stop() error {
	var wg sync.WaitGroup
	errs := make([]error, len(f.all()))
	for i, c := range f.all() {
		wg.Go(func() { errs[i] = c.stop() })
	}
	wg.Wait()
	f.destroy()
	return errors.Join(errs...)
}

// destroy leaves nothing behind.
func (f *fleet) destroy() {
	for _, c := range f.all() {
		c.kill()
	}
	for _, relays := range f.relays {
		closeRelays(relays)
	}
	if f.disk != nil {
		f.disk.close()
	}
	_ = f.paths.set(f.paths.all(), pathIsOn) // heal says why it cannot
}

// counts is the system's word on a process.
type counts struct {
	Goroutines int    `json:"goroutines"`
	Files      int    `json:"files"`
	RSS        uint64 `json:"rss_bytes"`
	Heap       uint64 `json:"heap_bytes"`
}

func (f *fleet) counts(ctx context.Context) (map[string]counts, error) {
	states, err := f.inspections(ctx, false)
	if err != nil {
		return nil, err
	}
	out := map[string]counts{}
	for _, c := range f.all() {
		n := counts{Goroutines: states[c.name].Goroutines, Heap: states[c.name].HeapBytes}
		pid := c.pid()
		if fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid)); err == nil {
			n.Files = len(fds)
		}
		if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid)); err == nil {
			if _, rest, ok := strings.Cut(string(b), "VmRSS:"); ok {
				var kb uint64
				if _, err := fmt.Sscan(rest, &kb); err == nil {
					n.RSS = kb << 10
				}
			}
		}
		out[c.name] = n
	}
	return out, nil
}
