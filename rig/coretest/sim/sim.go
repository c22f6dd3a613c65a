// Package sim runs prefill and decode engines of several ranks in one thread. The
// machine.Machines are real. Models stand for the node around them (node.go), the transport
// (transport.go), the control plane (net.go), and engines that use their blocks again as
// soon as they have them back (engine.go).
//
// Time and order come from the seed alone, so a seed is a run. Faults happen to a run
// (play.go): messages are lost, late, doubled and overtaken, ways are cut in one direction
// or both, connections break, processes are stopped and continued, crash and come back on
// the same memory, clocks jump.
//
// In half of the worlds each rank's blocks have as many tokens and heads as it likes,
// in either order, and plans cut and gather them.
//
// In a third of them a hostile peer says of others' transfers what it likes (hostile.go).
//
// In a third of them the engines work on devices (moment.go): what a block holds is written
// late, and what it held is read for a while, until moments that pass in no order, fail, or
// never pass.
//
// In some of them engines sleep, so that other memory lies under their blocks, and ways are not there for a
// while (sleep.go).
//
// Each check is made at the step that it is about. An item lands only in a block that
// belongs to its own transfer at its own position. If the router has given the transfer's
// id to two requests, no item lands. A source block is read only while its offer holds it,
// and no block is read or written before its moment.
// Each accepted half is reported once, and a failed load not before its fence. Nobody
// waits for a dead peer for longer than was agreed. At the end nothing is left, in the
// machines and around them.
package sim

import (
	"container/heap"
	"fmt"
	"math/rand/v2"
	"runtime/debug"
	"strings"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
)

// Words writes a transcript's lines; the tests of package core have them.
type Words struct {
	Action func(core.Action) string
}

// Result is what became of a run.
type Result struct {
	Seed   uint64
	Broken []string       // the promises that were broken; empty: all were kept
	Codes  map[string]int // how often a half ended so: "load ok"
	States map[string]int // the same with the state in which it ended: "load ok waiting"
	Faults map[string]int // how often each kind of fault was there
	// Transitions of the machines' halves, peers and fans, and how often each was taken.
	Transitions map[core.Transition]int
	Agents      int           // at the start
	Steps       int           // events that happened
	Took        time.Duration // virtual

	// With Words only.
	Transcript string // all machines' events, as a file of core/machine/testdata
	Short      string // its lines that name the transfer that was broken
	Story      string // what the world did, to be read
}

// Run runs a seed. words may be nil, which is faster.
func Run(seed uint64, words *Words) *Result {
	w := newWorld(seed, words)
	w.contain(w.live)
	w.contain(w.closeTranscript)
	return &Result{Seed: seed, Broken: w.broken, Codes: w.codes, States: w.states, Faults: w.faults, Transitions: w.changes, Agents: len(w.hosts), Steps: w.steps, Took: w.now,
		Transcript: w.lines.text(false, ""), Short: w.lines.text(true, w.suspect), Story: strings.Join(w.story, "\n")}
}

// live runs the world until nothing is left to happen, or a promise is broken.
func (w *world) live() {
	w.play()
	for w.events.Len() > 0 && len(w.broken) == 0 {
		e := heap.Pop(&w.events).(event)
		w.now = e.at
		w.steps++
		e.f()
		if w.now > w.lastAct+w.plan.quiet() {
			w.fault("", "%v after the last call and the last fault something still waits", w.now-w.lastAct)
		}
	}
	if len(w.broken) == 0 {
		w.checkEnd()
	}
}

// contain makes a panic a broken promise: a Machine's invariants panic.
func (w *world) contain(f func()) {
	defer func() {
		if v := recover(); v != nil {
			w.fault("", "panic: %v", v)
			w.note("%s", debug.Stack())
		}
	}()
	f()
}

// world is one run.
type world struct {
	seed    uint64
	rnd     *rand.Rand
	plan    plan
	words   *Words
	now     time.Duration
	lastAct time.Duration // last call of an engine, or end of a fault
	events  eventQueue
	order   int
	steps   int

	hosts    []*host
	byID     map[core.AgentID]*agent // all that were ever open
	all      []*agent                // the same, in the order of their opening
	registry map[core.Target]core.AgentID
	links    []*link     // all that were ever made
	cut      map[way]int // how many partitions lie on a way
	stuck    map[way][]func()
	token    uint64

	reused       map[core.TransferID]bool // ids that are used twice
	deals        map[core.TransferID]*deal
	matches      map[way]*kv.Match
	engines      map[core.Target]*deal    // what is found under the names of engines
	shared       map[core.TransferID]bool // that two decode engines want
	prompts      map[core.TransferID]prompts
	prompting    *rand.Rand // what engines say of prompts; the rest of a seed's run does not hang on it
	hearing      *rand.Rand // what they do when a claim is reported
	timing       *rand.Rand // of devices
	hostility    *rand.Rand // of the hostile peer
	cutting      *rand.Rand // of plans into windows
	sleeping     *rand.Rand // of engines that sleep, and of ways that are not there
	pulling      *rand.Rand // which worlds pull
	looking      *rand.Rand // how long looks at memory take
	yielding     *rand.Rand // when a machine is told Resume
	byMoments    int        // offers that moments have ended which failed or did not pass in time
	cancelledAtP map[core.TransferID]time.Duration
	cancelledAtD map[core.TransferID]time.Duration // after P's answer

	codes   map[string]int
	states  map[string]int
	changes map[core.Transition]int
	faults  map[string]int
	broken  []string
	suspect core.TransferID // what the first broken promise is about
	lines   transcript
	story   []string
}

// way is one direction between two hosts.
type way struct{ from, to *host }

type event struct {
	at    time.Duration
	order int
	f     func()
}

type eventQueue []event

func (q eventQueue) Len() int { return len(q) }
func (q eventQueue) Less(i, j int) bool {
	return q[i].at < q[j].at || q[i].at == q[j].at && q[i].order < q[j].order
}
func (q eventQueue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *eventQueue) Push(x any)   { *q = append(*q, x.(event)) }
func (q *eventQueue) Pop() any {
	last := (*q)[len(*q)-1]
	*q = (*q)[:len(*q)-1]
	return last
}

func newWorld(seed uint64, words *Words) *world {
	w := &world{seed: seed, words: words, rnd: rand.New(rand.NewPCG(seed, 2)), prompting: rand.New(rand.NewPCG(seed, 3)), hearing: rand.New(rand.NewPCG(seed, 4)), timing: rand.New(rand.NewPCG(seed, 5)), hostility: rand.New(rand.NewPCG(seed, 6)), cutting: rand.New(rand.NewPCG(seed, 7)), sleeping: rand.New(rand.NewPCG(seed, 8)), pulling: rand.New(rand.NewPCG(seed, 9)), looking: rand.New(rand.NewPCG(seed, 10)), yielding: rand.New(rand.NewPCG(seed, 11)), prompts: map[core.TransferID]prompts{},
		byID: map[core.AgentID]*agent{}, registry: map[core.Target]core.AgentID{},
		cut: map[way]int{}, stuck: map[way][]func(){}, codes: map[string]int{}, states: map[string]int{}, faults: map[string]int{},
		matches: map[way]*kv.Match{}, changes: map[core.Transition]int{},
		reused: map[core.TransferID]bool{}, shared: map[core.TransferID]bool{}, deals: map[core.TransferID]*deal{}, engines: map[core.Target]*deal{}, cancelledAtP: map[core.TransferID]time.Duration{}, cancelledAtD: map[core.TransferID]time.Duration{}}
	w.plan = w.newPlan()
	w.plan.opt.OnTransition = func(t core.Transition) {
		w.changes[t]++
		if t.Half == "offer" && t.Event == "MomentFailed" && t.To == "-" {
			w.byMoments++
		}
	}
	return w
}

func (w *world) chance(p float64) bool { return w.rnd.Float64() < p }

// upTo is a time from 0 to d.
func (w *world) upTo(d time.Duration) time.Duration { return time.Duration(w.rnd.Int64N(int64(d) + 1)) }

// delay is mostly short, sometimes long enough to be overtaken by everything.
func (w *world) delay() time.Duration {
	if w.chance(w.plan.slow) {
		w.faults["delay"]++
		return w.upTo(1500 * time.Millisecond)
	}
	return w.upTo(20 * time.Millisecond)
}

func (w *world) after(d time.Duration, f func()) {
	w.order++
	heap.Push(&w.events, event{w.now + d, w.order, f})
}

// acted notes that something outside of the machines happened now or will.
func (w *world) acted(at time.Duration) { w.lastAct = max(w.lastAct, at) }

func (w *world) note(format string, args ...any) {
	if w.words != nil {
		w.story = append(w.story, legible(fmt.Sprintf("%8v ", w.now.Round(time.Millisecond))+fmt.Sprintf(format, args...)))
	}
}

// fault says that a promise about a transfer was broken.
func (w *world) fault(id core.TransferID, format string, args ...any) {
	if len(w.broken) == 0 {
		w.suspect = id
	}
	w.broken = append(w.broken, legible(fmt.Sprintf(format, args...)))
	w.note(format, args...)
}
