package attack

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/natsbus"
	"github.com/kvconn/kvconn/wire"
)

// elsewhere is an address of this host that no honest engine of these tests has.
const elsewhere = "127.0.0.2"

// newcomers are decode agents that come while the attack goes on, and load.
func newcomers(t *testing.T, p *victim, when string, n int) *honest {
	t.Helper()
	h := &honest{}
	for i := range n {
		d := start(t, map[string]any{"role": "decode", "engine_id": fmt.Sprint("new", i)})
		h.load(t, p, d, fmt.Sprint(when, i))
		d.end()
	}
	return h
}

// TestSilentConnections: sockets of unknown clients that ask for the control plane and say nothing had all places of those
// who are about to prove themselves: a newcomer was sent away. Now of their address one gives its place up for each that comes.
func TestSilentConnections(t *testing.T) {
	p := start(t, map[string]any{"role": "prefill"})
	calm := newcomers(t, p, "early", 5)
	a := newAttacker(t)
	a.at = elsewhere
	over, end := context.WithCancel(t.Context())
	var opened atomic.Int64
	var wg sync.WaitGroup
	const places = 256 // of those who have not proved themselves
	const sockets = 600
	for range sockets { // each comes again when it is sent away
		wg.Go(func() {
			for {
				if conn, err := a.knock(p.boot); err == nil {
					stop := context.AfterFunc(over, func() { _ = conn.Close() })
					if resp, err := http.ReadResponse(bufio.NewReader(conn), nil); err == nil && resp.StatusCode == http.StatusSwitchingProtocols {
						opened.Add(1)
						_, _ = io.Copy(io.Discard, conn)
					}
					stop()
					_ = conn.Close()
				}
				select {
				case <-over.Done():
					return
				case <-time.After(200 * time.Millisecond): // the attack's own pace
				}
			}
		})
	}
	for deadline := time.Now().Add(bound); opened.Load() < places && time.Now().Before(deadline); {
		time.Sleep(time.Millisecond)
	}
	h := newcomers(t, p, "new", 10)
	end()
	wg.Wait()
	if n := opened.Load(); n < places {
		t.Errorf("%d sockets of %d were opened: the attack itself has failed", n, sockets)
	}
	got(t, "5 of 10 first loads of newcomers failed (at 1a5364a)", "%s, before the attack %s, %s", h.went(t), calm.went(t), p.growth(t))
	settleKeeping(t, goKeeps, p) // its heap was not twice as large, but it had hundreds of goroutines more
}

// TestControlConnections: who has the token takes all places of the control plane, and does nothing but to answer pings. New
// decode engines were sent away, and one that was there before lost its place. Now newcomers from other addresses get in.
func TestControlConnections(t *testing.T) {
	p := start(t, map[string]any{"role": "prefill"})
	d := start(t, map[string]any{"role": "decode"})
	before(t, p, d)
	calm := newcomers(t, p, "early", 5)
	clients := 2200 // more than there are places
	if raced {
		clients = 100 // no figures are held to anything
	}
	var in, ended atomic.Int64
	crowd(clients, func(a *attacker) {
		s, err := a.enter(p.boot, "ask", "")
		if err != nil {
			return // it has all the places that it can have
		}
		in.Add(1)
		go func() {
			defer ended.Add(1)
			pong(s.conn, s.br)
		}()
	}, t)
	p.watch()
	h := newcomers(t, p, "new", 6)
	h.load(t, p, d, "idle")
	if n := in.Load(); n < int64(clients)-200 {
		t.Errorf("%d clients of %d got in: the attack itself has failed", n, clients)
	}
	if ended.Load() == 0 && !raced {
		t.Error("no place was given up")
	}
	got(t, "6 of 6 new decode engines out, an idle one too, 28 to 1,006 MiB (at 1a5364a)", "%s, %d connections, %s", h.comparedWith(t, calm), in.Load(), p.growth(t))
	settleKeeping(t, 20, p) // Go frees no descriptor of a goroutine, of which there were 10,000, and describes a heap of 200 MiB
}

// crowd is so many attackers from elsewhere, each with a key of its own.
func crowd(n int, attack func(a *attacker), t *testing.T) {
	var wg sync.WaitGroup
	var next atomic.Int64
	for range 8 {
		wg.Go(func() {
			for next.Add(1) <= int64(n) {
				a := newAttacker(t)
				a.at = elsewhere
				attack(a)
			}
		})
	}
	wg.Wait()
}

// TestManyHellos: who has the token says hello under as many ids as prefill remembers decode engines. All others were refused
// for as long as it went on. Now an engine that has only said hello makes room for the next. An engine whose load waits for prefill's
// engine meanwhile gets it, since each renewal makes it the newest of its account (get in node/peers.go). Half of the hellos come from its
// own address. It is an attack on a port: in a cluster as many take the attacker far longer than prefill remembers one (keptFor there).
func TestManyHellos(t *testing.T) {
	p := start(t, map[string]any{"role": "prefill", "early_load_s": 600})
	d := start(t, map[string]any{"role": "decode"})
	waits := start(t, map[string]any{"role": "decode", "engine_id": "waits"})
	before(t, p, d)
	calm := newcomers(t, p, "early", 5)
	if !loadEarly(p, waits, "waits") {
		t.Fatal("prefill does not keep the load")
	}
	ids := 4200 // more than are remembered
	if raced {
		ids = 100
	}
	began := time.Now()
	said := newScenario(t, deployments[0]).hellosUnder(ids, p, func(int64) *wire.Request { return aHello() })
	took := time.Since(began)
	h := newcomers(t, p, "new", 6)
	h.load(t, p, d, "idle")
	h.all++
	p.say("offer waits 4 4")
	if l := waits.report("waits"); l.Code == "ok" {
		h.well++
	} else {
		t.Logf("the load that waited: %+v", l)
	}
	if said < int64(ids)*9/10 {
		t.Errorf("prefill has answered %d hellos of %d: the attack itself has failed", said, ids)
	}
	got(t, "6 of 6 new decode engines refused (at 1a5364a); one was put out in mid-transfer", "%s, %d hellos in %.1f s, %s", h.comparedWith(t, calm), said, took.Seconds(), p.growth(t))
	settleKeeping(t, 20, p) // it remembers 4,096 engines, as docs/security.md says
}

// hellosUnder says hello to prefill under so many ids: at a port each has a key of its own, and half of them come from the address of
// honest engines; in a cluster all are of the attacker's nkey. It returns how many prefill has met.
func (s *scenario) hellosUnder(ids int, p *victim, hello func(n int64) *wire.Request) int64 {
	s.Helper()
	var met, next atomic.Int64
	note := func(rep *wire.Reply, err error) {
		if err == nil && core.Code(rep.Code) == core.OK {
			met.Add(1)
		}
	}
	if !s.cluster {
		crowd(ids, func(a *attacker) {
			n := next.Add(1)
			if n%2 == 0 {
				a.at = "127.0.0.1"
			}
			c, err := insistent(func() (*session, error) { return a.enter(p.boot, "ask", "") })
			if err != nil {
				s.Error(err)
				return
			}
			defer c.conn.Close()
			note(c.ask(p.id, c.id, hello(n)))
		}, s.T)
		return met.Load()
	}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for n := next.Add(1); n <= int64(ids); n = next.Add(1) {
				b, err := insistent(func() (*natsbus.Bus, error) { return natsbus.Open(s.options("decode")) })
				if err != nil {
					s.Error(err)
					return
				}
				ctx, cancel := context.WithTimeout(s.Context(), bound)
				note(b.Request(ctx, "", core.AgentID(p.id), hello(n)))
				_ = b.Close(ctx)
				cancel()
			}
		})
	}
	wg.Wait()
	return met.Load()
}

// pong answers pings until the connection ends.
func pong(conn net.Conn, br *bufio.Reader) {
	for {
		line, err := br.ReadString('\n')
		if err != nil {
			return
		}
		if strings.HasPrefix(line, "PING") {
			if _, err := io.WriteString(conn, "PONG\r\n"); err != nil {
				return
			}
		}
	}
}
