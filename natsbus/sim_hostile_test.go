package natsbus

import (
	"context"
	"flag"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/wire"
)

var (
	simSeeds = flag.Uint64("sim.seeds", 60, "how many seeds TestHostileSim runs")
	simFrom  = flag.Uint64("sim.from", 0, "the first seed of TestHostileSim")
)

// simSteps are those of one seed.
const simSteps = 120

// TestHostileSim runs seeds of a simulator: some honest agents ask each other, over a prefill agent's server or a NATS cluster,
// while messages are lost, doubled, delayed and overtaken, connections break, and a hostile peer says and does what its
// permissions allow. After each step:
//
//   - An honest agent takes a message only as one of its sender, only if the message is for this agent, and only once.
//   - Each request of an honest agent has ended with the answer of who was asked, or with an error, or its time is not over.
//   - The hostile peer has no more than its share of what there is for all.
//
// At the end, when nothing is lost any more, the hostile peer takes all places that it can: an honest newcomer gets in, and all
// honest agents are answered.
//
// The agents are the product's buses; the server that carries their messages is simNet, and time is that of a bubble of
// testing/synctest. The seed decides what the agents and the hostile peer do, and what becomes of each message. It does not decide
// what the product draws by itself: keys, names, and the wait before a connection is made anew. So a seed is nearly a run.
func TestHostileSim(t *testing.T) {
	leaktest.Check(t)
	seeds := *simSeeds
	if testing.Short() {
		seeds = min(seeds, 20)
	}
	faults := map[string]int{}
	emptyTimers()
	for seed := *simFrom; seed < *simFrom+seeds; seed++ {
		w := runSeed(t, seed)
		for what, n := range w.faults {
			faults[what] += n
		}
		if len(w.broken) > 0 {
			t.Fatalf("seed %d: %s\n\nwhat happened before:\n%s\n\nto repeat it: go test ./natsbus -run '^TestHostileSim$' -sim.from %d -sim.seeds 1",
				seed, strings.Join(w.broken, "\n\t"), strings.Join(w.story, "\n"), seed)
		}
		if t.Failed() {
			t.Fatalf("in seed %d", seed)
		}
	}
	t.Logf("faults: %v", faults)
	if seeds < 60 {
		return
	}
	// A world in which nothing is answered, or nothing happens, would prove nothing.
	for _, want := range []string{"ask", "answered", "unanswered", "lost", "doubled", "delayed", "break", "forget", "uncertain", "hostile-flood", "hostile-heard", "hostile-enters", "hostile-name",
		"hostile-from", "hostile-elsewhere", "hostile-answer", "hostile-hears", "hostile-late", "hostile-relay", "hostile-fill", "hostile-small", "hostile-replay",
		"hostile-open", "hostile-poses", "hostile-session", "hostile-plain"} {
		if faults[want] == 0 {
			t.Errorf("in %d seeds there was no %q", seeds, want)
		}
	}
}

// emptyTimers empties the pool of timers that nats.go has for all its connections: nobody outside of a bubble may touch one of the
// bubble's, and one of outside does not run by the bubble's clock. Two collections empty a pool. So no test of this package may run
// beside TestHostileSim, or leave a connection.
func emptyTimers() {
	runtime.GC()
	runtime.GC()
}

// runSeed runs a seed in a bubble of its own.
func runSeed(t *testing.T, seed uint64) (w *simWorld) {
	t.Helper()
	defer emptyTimers()
	synctest.Test(t, func(t *testing.T) {
		w = newSimWorld(t, seed)
		w.run()
	})
	return w
}

func (w *simWorld) run() {
	defer w.close()
	for range simSteps {
		switch what := w.rnd.IntN(100); {
		case what < 40:
			a, b := w.two()
			w.ask(a, b, []wire.Kind{wire.KindHello, wire.KindSignal}[w.rnd.IntN(2)], []time.Duration{30 * time.Millisecond, time.Second, 8 * time.Second}[w.rnd.IntN(3)], nil)
		case what < 85:
			w.attacker.strike()
		case what < 90:
			a := w.agents[w.rnd.IntN(len(w.agents))]
			w.tell("break", "%s", a.name)
			w.net.cut(a.id)
		case what < 92:
			w.attacker.fill()
		case what < 94:
			w.attacker.release()
		case what < 97 && w.server == nil:
			w.forget()
		}
		w.pass(time.Duration(w.rnd.Int64N(int64(200 * time.Millisecond))))
		if w.check(); len(w.broken) > 0 {
			return
		}
	}
	w.end()
}

// forget has an agent forget the sessions that others have opened with it, as one that has too many, and tells the hostile peer.
// It is one whose answer is on its way, if there is one.
func (w *simWorld) forget() {
	a := w.agents[w.rnd.IntN(len(w.agents))]
	w.mu.Lock()
	for i := len(w.asked) - 1; i >= 0; i-- {
		if q := w.asked[fmt.Sprint("w", i)]; q.handled > 0 && !q.ended && !repeatable(q.kind) {
			a = q.to
			break
		}
	}
	w.mu.Unlock()
	w.tell("forget", "%s", a.name)
	s := a.bus.seals.responder
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, v := range s.by {
		s.drop(v)
	}
	w.attacker.forgotten(a)
}

// check is what holds after each step.
func (w *simWorld) check() {
	w.attacker.listen()
	w.attacker.check(func(what string) { w.fault("%s", what) })
	w.net.mu.Lock()
	for _, what := range w.net.broken {
		w.fault("%s", what)
	}
	w.net.broken = nil
	w.net.mu.Unlock()
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, q := range w.asked {
		if !q.ended && time.Now().After(q.until) {
			w.broken = append(w.broken, fmt.Sprintf("%s has asked %s %q, and that goes on %v after its time", q.from.name, q.to.name, q.word, time.Since(q.until)))
		}
	}
}

// end has all requests end. Then all honest agents are answered, and so is a newcomer, though the hostile peer is there.
func (w *simWorld) end() {
	w.calm = true
	w.attacker.release()
	w.pass(15 * time.Second)
	w.attacker.fill()
	w.pass(time.Second)
	w.check()
	if len(w.broken) > 0 {
		return
	}
	old := w.agents[0]
	newcomer := w.addNewcomer()
	if newcomer == nil {
		return
	}
	// An agent may have forgotten sessions before: only a request that may be repeated ends well then.
	ended := make(chan error, 2*len(w.agents)+2)
	n := 0
	for _, a := range w.agents {
		if a != old {
			w.ask(a, old, wire.KindHello, 30*time.Second, ended)
			w.ask(old, a, wire.KindHello, 30*time.Second, ended)
			n += 2
		}
	}
	w.pass(time.Second)
	w.check()
	w.attacker.release()
	w.pass(31 * time.Second)
	for range n {
		select {
		case err := <-ended:
			if err != nil {
				w.fault("in a calm world a request of honest agents ends with: %v", err)
			}
		default:
			w.fault("in a calm world a request of honest agents does not end")
		}
	}
	w.check()
}

func (w *simWorld) addNewcomer() *simAgent {
	if w.server != nil {
		return w.addDecode(99)
	}
	return w.addMember("newcomer")
}

// close ends all agents.
func (w *simWorld) close() {
	w.attacker.leave()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for _, a := range slices.Backward(w.agents) {
		if err := a.bus.Close(ctx); err != nil {
			w.fault("close: %v", err)
		}
	}
	if w.server != nil {
		w.server.clients.close()
	}
	w.net.close()
	w.wg.Wait()
	if s := w.server; s != nil {
		s.clients.wg.Wait()
		if n := len(s.clients.conns) + len(s.clients.held) + len(s.clients.waiting) + len(s.authenticator.users); n > 0 || s.unanswered.total != 0 || s.unread.total != 0 {
			w.fault("when all have gone the server holds %d places, %d and %d bytes", n, s.unanswered.total, s.unread.total)
		}
	}
}
