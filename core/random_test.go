package core_test

import (
	"container/heap"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
)

// TestRandom drives agents through a net that loses, doubles and reorders, with
// engines that cancel, agents that are closed, killed and replaced, and
// transports that fail. Every byte that lands is checked against the owner of
// its block, every accepted half is reported exactly once, and nothing is left.
func TestRandom(t *testing.T) {
	seeds := uint64(2000)
	if testing.Short() {
		seeds = 200
	}
	codes := map[string]int{}
	for seed := range seeds {
		w := newWorld(seed, false)
		w.run()
		if w.broken != nil {
			w = newWorld(seed, true) // the same again, told
			w.run()
			t.Fatalf("seed %d:\n%s\n\nwhat happened:\n%s", seed, strings.Join(w.broken, "\n"), strings.Join(w.log, "\n"))
		}
		for k, n := range w.codes {
			codes[k] += n
		}
	}
	// A net so hostile that nothing arrives, or so kind that nothing fails,
	// would prove nothing.
	for _, want := range []string{"load ok", "offer ok", "load cancelled", "offer cancelled", "load peer-cancelled", "offer peer-cancelled",
		"load peer-lost", "offer peer-lost", "load not-offered", "offer expired", "load failed", "offer failed", "load refused",
		"load unreachable", "load closed", "offer closed"} {
		if codes[want] == 0 {
			t.Errorf("in %d seeds no transfer ended with %q: %v", seeds, want, codes)
		}
	}
	t.Logf("%d seeds: %v", seeds, codes)
}

const (
	simBlocks = 24
	simLimit  = 2 * time.Minute  // of virtual time, where a run that hangs is cut
	simBound  = 30 * time.Second // engines act for 12 s, leases and time-outs are shorter
)

var simOptions = core.Options{Lease: 3 * time.Second, PeerTimeout: 900 * time.Millisecond, EarlyLoad: 2 * time.Second, MaxTransfers: 6}

// world is one run. Time and order come from the seed alone.
type world struct {
	rnd      *rand.Rand
	now      time.Time
	start    time.Time
	events   eventQueue
	n        int
	agents   map[core.AgentID]*simAgent
	registry map[string]core.AgentID // engine -> its agent
	token    uint64
	loss     float64
	codes    map[string]int
	kind     bool // nothing is lost, late, cancelled or closed: all must end well
	told     bool // keep a log
	log      []string
	broken   []string
}

type simAgent struct {
	w      *world
	id     core.AgentID
	m      *core.Machine
	ledger *ledger
	dead   bool
	closed bool
	known  map[core.Target]core.AgentID
	owner  [simBlocks]uint64          // token of the half that a block belongs to
	holds  [simBlocks]string          // what a block contains
	loads  map[uint64]*simHalf        // by token
	offers map[core.TransferID]uint64 // token of the newest
	armed  map[core.TransferID]*arm   // the transport's Expects
	writes map[core.TransferID]*simWrite
	queue  []core.Action // not done yet
}

type simHalf struct {
	id     core.TransferID
	blocks [][]core.BlockID
	first  uint32
}

// arm is one Expect of the simulated transport.
type arm struct {
	peer   core.AgentID
	grant  string
	blocks [][]core.BlockID
	live   bool // false: revoked, or the outcome was told
}

type simWrite struct {
	stopped bool
	owner   uint64 // token of the offer that it reads
}

type simEvent struct {
	at    time.Time
	order int
	f     func()
}

type eventQueue []simEvent

func (q eventQueue) Len() int { return len(q) }
func (q eventQueue) Less(i, j int) bool {
	return q[i].at.Before(q[j].at) || q[i].at.Equal(q[j].at) && q[i].order < q[j].order
}
func (q eventQueue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *eventQueue) Push(x any)   { *q = append(*q, x.(simEvent)) }
func (q *eventQueue) Pop() any {
	last := (*q)[len(*q)-1]
	*q = (*q)[:len(*q)-1]
	return last
}

func newWorld(seed uint64, told bool) *world {
	w := &world{told: told, rnd: rand.New(rand.NewPCG(seed, 1)), start: time.Unix(0, 0), agents: map[core.AgentID]*simAgent{},
		registry: map[string]core.AgentID{}, codes: map[string]int{}}
	w.now = w.start
	w.loss = []float64{0, 0, 0.05, 0.3}[w.rnd.IntN(4)]
	if w.kind = seed%10 == 0; w.kind {
		w.loss = 0
	}
	return w
}

func (w *world) chance(p float64) bool { return w.rnd.Float64() < p }

func (w *world) note(format string, args ...any) {
	if !w.told {
		return
	}
	w.log = append(w.log, fmt.Sprintf("%7v ", w.now.Sub(w.start).Round(time.Millisecond))+fmt.Sprintf(format, args...))
}

func (w *world) fault(format string, args ...any) {
	w.broken = append(w.broken, fmt.Sprintf(format, args...))
	w.note(format, args...)
}

func (w *world) after(d time.Duration, f func()) {
	w.n++
	heap.Push(&w.events, simEvent{w.now.Add(d), w.n, f})
}

// delay is mostly short, sometimes long enough to be overtaken by everything.
func (w *world) delay() time.Duration {
	d := time.Duration(w.rnd.Int64N(int64(20 * time.Millisecond)))
	if !w.kind && w.chance(0.1) {
		d = time.Duration(w.rnd.Int64N(int64(1500 * time.Millisecond)))
	}
	return d
}

func (w *world) open(id core.AgentID) *simAgent {
	l, err := core.NewLayout([]core.Region{{Name: "k", Base: 4096, BlockStride: 4, BlockBytes: 4, NumBlocks: simBlocks}})
	if err != nil {
		panic(err)
	}
	a := &simAgent{w: w, id: id, m: core.New(l, simOptions), ledger: newLedger(), known: map[core.Target]core.AgentID{},
		loads: map[uint64]*simHalf{}, offers: map[core.TransferID]uint64{}, armed: map[core.TransferID]*arm{}, writes: map[core.TransferID]*simWrite{}}
	w.agents[id] = a
	return a
}

func (w *world) run() {
	d1, d2 := w.open("d1"), w.open("d2")
	w.open("p1")
	w.registry["e"] = "p1"
	if w.kind {
		for i := range 5 {
			w.kindRequest(core.TransferID(fmt.Sprint("t", i)), d1)
		}
		w.drain()
		if w.codes["load ok"] != 5 || w.codes["offer ok"] != 5 {
			w.fault("nothing was in the way, but it ended so: %v", w.codes)
		}
		return
	}
	for i := range 5 + w.rnd.IntN(6) {
		id := core.TransferID(fmt.Sprint("t", i))
		if w.chance(0.05) {
			id = "t0" // a router that uses ids twice
		}
		d := d1
		if w.chance(0.3) {
			d = d2
		}
		w.request(id, d)
		if w.chance(0.05) { // two decode engines are sent the same request
			w.after(w.spread(), func() { d2.load(id) })
		}
	}
	if w.chance(0.2) { // the prefill engine is restarted
		w.after(w.spread(), func() {
			w.kill("p1")
			w.after(w.delay(), func() { w.open("p2"); w.registry["e"] = "p2" })
		})
	}
	for _, id := range []core.AgentID{"p1", "d1"} {
		if w.chance(0.1) {
			w.after(w.spread(), func() { w.agents[id].close() })
		}
	}
	w.drain()
}

// drain runs until nothing is left to happen and checks what is left then.
func (w *world) drain() {
	w.tick()
	for len(w.events) > 0 && w.broken == nil {
		e := heap.Pop(&w.events).(simEvent)
		w.now = e.at
		e.f()
	}
	if took := w.now.Sub(w.start); took > simBound {
		w.fault("all should have ended within %v, it took %v", simBound, took)
	}
	for _, id := range []core.AgentID{"d1", "d2", "p1", "p2"} {
		if a := w.agents[id]; a != nil && !a.dead {
			a.end()
		}
	}
}

// spread is a time within the first seconds of a run.
func (w *world) spread() time.Duration { return time.Duration(w.rnd.Int64N(int64(4 * time.Second))) }

// kindRequest: a prefill that takes longer than any lease, and engines that do
// what they should.
func (w *world) kindRequest(id core.TransferID, d *simAgent) {
	at, ready := w.spread(), 3*w.spread()
	w.after(at+w.delay(), func() { d.load(id) })
	w.after(at+w.delay(), func() {
		if p := w.agents["p1"]; w.chance(0.5) {
			_ = p.m.Announce(w.now, id)
			p.perform()
		} else {
			ready = min(ready, simOptions.EarlyLoad-50*time.Millisecond)
		}
		w.after(ready, func() { w.agents["p1"].offerOrCancel(id) })
	})
}

// request is what the router sends to both engines.
func (w *world) request(id core.TransferID, d *simAgent) {
	at := w.spread()
	p := func() *simAgent { return w.agents[w.registry["e"]] }
	w.after(at+w.delay(), func() { d.load(id) })
	if w.chance(0.1) {
		w.after(at+w.spread(), func() { d.cancel(id) })
	}
	if w.chance(0.1) {
		w.after(at+w.spread(), func() { p().cancel(id) })
	}
	if w.chance(0.1) {
		return // the prefill engine never hears of it
	}
	ready := at + w.delay() + w.spread()
	if w.chance(0.5) {
		w.after(ready-time.Duration(w.rnd.Int64N(int64(ready))), func() {
			a := p()
			if a.dead || a.closed {
				return
			}
			if a.m.Announce(w.now, id) == nil { // whoever announces offers or cancels
				a.perform()
				w.after(ready, func() { a.offerOrCancel(id) })
			}
		})
		return
	}
	w.after(ready, func() { p().offerOrCancel(id) })
}

// tick keeps the machines' time while they want it.
func (w *world) tick() {
	if w.now.Sub(w.start) > simLimit {
		return
	}
	for _, id := range []core.AgentID{"d1", "d2", "p1", "p2"} {
		if a := w.agents[id]; a != nil && !a.dead && a.m.Busy() {
			a.m.Tick(w.now)
			a.perform()
		}
	}
	busy := len(w.events) > 0
	for _, a := range w.agents {
		busy = busy || !a.dead && a.m.Busy()
	}
	if busy {
		w.after(core.TickInterval, w.tick)
	}
}

// kill is the end of a process: nothing of it moves, its peers' transports
// notice or not.
func (w *world) kill(id core.AgentID) {
	a := w.agents[id]
	w.note("%s is killed", id)
	a.dead = true
	for _, other := range []core.AgentID{"d1", "d2"} {
		if o := w.agents[other]; w.chance(0.5) {
			w.after(w.delay(), func() { o.event(func(m *core.Machine) { m.PeerDown(w.now, id) }) })
		}
	}
}

// event feeds a machine that lives and performs what it wants.
func (a *simAgent) event(f func(m *core.Machine)) {
	if !a.dead {
		f(a.m)
		a.perform()
	}
}

func (a *simAgent) close() {
	if !a.dead {
		a.w.note("%s is closed", a.id)
		a.closed = true
		a.event(func(m *core.Machine) { m.Close(a.w.now) })
	}
}

// take finds n free blocks for the engine.
func (a *simAgent) take(n int) []core.BlockID {
	var out []core.BlockID
	for _, i := range a.w.rnd.Perm(simBlocks) {
		if a.owner[i] == 0 && len(out) < n {
			out = append(out, core.BlockID(i))
		}
	}
	return out
}

func (a *simAgent) own(blocks []core.BlockID, token uint64) {
	for _, b := range blocks {
		a.owner[b] = token
	}
}

func content(id core.TransferID, pos int) string { return fmt.Sprint(id, "/", pos) }

const promptBlocks = 4

func (a *simAgent) load(id core.TransferID) {
	w := a.w
	first := w.rnd.IntN(promptBlocks)
	if !w.kind && w.chance(0.05) {
		first += 3 // more than will be offered
	}
	blocks := a.take(max(1, promptBlocks-first))
	if !w.kind && w.chance(0.1) {
		blocks = nil
	}
	w.token++
	h := &simHalf{id: id, blocks: [][]core.BlockID{blocks}, first: uint32(first)}
	err := a.m.Load(w.now, core.LoadRequest{ID: id, From: core.Target{EngineID: "e"}, First: []uint32{h.first}, Blocks: h.blocks, Token: w.token})
	w.note("%s load %s token=%d first=%d blocks=%v: %v", a.id, id, w.token, first, blocks, err)
	if err == nil {
		a.loads[w.token] = h
		a.own(blocks, w.token)
		for _, b := range blocks {
			a.holds[b] = ""
		}
		a.ledger.accepted(core.SideLoad, w.token)
	}
	a.perform()
}

func (a *simAgent) offerOrCancel(id core.TransferID) {
	w := a.w
	if a.dead || a.closed {
		return
	}
	blocks := a.take(promptBlocks)
	w.token++
	err := errors.New("no room")
	if len(blocks) == promptBlocks && (w.kind || !w.chance(0.1)) {
		err = a.m.Offer(w.now, core.OfferRequest{ID: id, Blocks: [][]core.BlockID{blocks}, Token: w.token})
	}
	w.note("%s offer %s token=%d blocks=%v: %v", a.id, id, w.token, blocks, err)
	switch {
	case err == nil:
		a.own(blocks, w.token)
		a.offers[id] = w.token
		for i, b := range blocks {
			a.holds[b] = content(id, i)
		}
		a.ledger.accepted(core.SideOffer, w.token)
	case errors.Is(err, core.ErrDuplicate):
	default:
		_ = a.m.Cancel(w.now, id, "")
	}
	a.perform()
}

func (a *simAgent) cancel(id core.TransferID) {
	a.event(func(m *core.Machine) { a.w.note("%s cancel %s: %v", a.id, id, m.Cancel(a.w.now, id, "")) })
}

// perform does what the machine wants as package node does: a report goes to
// the engine at once, the rest is done in its order, but some time later.
func (a *simAgent) perform() {
	w := a.w
	for _, act := range a.m.Actions() {
		if w.told {
			w.note("%s %s", a.id, describe(act))
		}
		a.ledger.action(act)
		for _, f := range a.ledger.broken {
			w.fault("%s: %s", a.id, f)
		}
		a.ledger.broken = nil
		if r, ok := act.(core.Report); ok {
			a.report(r)
			continue
		}
		if a.queue = append(a.queue, act); len(a.queue) == 1 {
			w.after(w.delay()/4, a.work)
		}
	}
}

// work does the first action of the queue.
func (a *simAgent) work() {
	if a.dead {
		return
	}
	a.act(a.queue[0])
	a.perform()
	if a.queue = a.queue[1:]; len(a.queue) > 0 {
		a.w.after(a.w.delay()/16, a.work)
	}
}

func (a *simAgent) act(act core.Action) {
	w := a.w
	switch v := act.(type) {
	case core.Resolve:
		w.after(w.delay(), func() {
			id, known := a.known[v.From]
			if !known || v.Fresh {
				id = w.registry[v.From.EngineID]
				a.known[v.From] = id
			}
			code := core.OK
			if w.chance(w.loss / 4) {
				code = core.Unreachable
			}
			a.event(func(m *core.Machine) { m.Resolved(w.now, v.ID, v.Seq, id, code, "") })
		})
	case core.Expect:
		if old := a.armed[v.ID]; old != nil && old.live {
			w.fault("%s: transport is asked to expect %q twice", a.id, v.ID)
		}
		e := &arm{peer: v.Peer, grant: fmt.Sprint("grant", w.n), blocks: v.Blocks, live: true}
		w.n++
		a.armed[v.ID] = e
		var err error
		if w.chance(w.loss / 8) {
			e.live, err = false, errors.New("cannot expect")
		}
		a.m.Expecting(w.now, v.ID, []byte(e.grant), err)
	case core.SendLoad:
		w.ask(a, v.Peer, func(p *simAgent) func(bool, error) {
			code, why := p.m.LoadArrived(w.now, core.LoadMessage{ID: v.ID, Peer: a.id, Grant: v.Grant, First: v.First, Blocks: v.Blocks, Lease: v.Lease})
			p.perform()
			return func(absent bool, err error) {
				if err != nil {
					code = core.PeerLost
				}
				a.m.LoadReplied(w.now, v.ID, v.Seq, absent, code, why)
			}
		}, func(absent bool, err error) { a.m.LoadReplied(w.now, v.ID, v.Seq, absent, core.PeerLost, err.Error()) })
	case core.SendRenew:
		w.ask(a, v.Peer, func(p *simAgent) func(bool, error) {
			answers := p.m.RenewArrived(w.now, a.id, v.Loads, v.Claims)
			p.perform()
			return func(absent bool, err error) { a.m.RenewReplied(w.now, v, answers, false, nil) }
		}, func(absent bool, err error) { a.m.RenewReplied(w.now, v, nil, absent, err) })
	case core.SendFinish:
		w.ask(a, v.Peer, func(p *simAgent) func(bool, error) {
			p.m.FinishArrived(w.now, a.id, v.ID, v.Code, v.Reason)
			p.perform()
			return func(bool, error) {}
		}, func(bool, error) {})
	case core.Forget:
		for t, id := range a.known {
			if id == v.Peer {
				delete(a.known, t)
			}
		}
	case core.Revoke:
		if e := a.armed[v.ID]; e != nil {
			e.live = false
		}
		delete(a.armed, v.ID)
		a.ledger.disarmed(v.ID)
		a.m.Revoked(w.now, v.ID)
	case core.Write:
		wr := &simWrite{owner: a.offers[v.ID]}
		a.writes[v.ID] = wr
		w.after(w.delay(), func() { a.write(v, wr, 0) })
	case core.StopWrite:
		if wr := a.writes[v.ID]; wr != nil {
			w.after(w.delay()/4, func() { wr.stopped = true })
		}
	default:
		w.fault("unknown action %T", act)
	}
}

// ask sends a request and brings its answer, or that there is none.
func (w *world) ask(from *simAgent, to core.AgentID, serve func(*simAgent) func(bool, error), failed func(absent bool, err error)) {
	answered := false
	answer := func(f func()) {
		if !answered && !from.dead {
			answered = true
			f()
			from.perform()
		}
	}
	w.after(300*time.Millisecond, func() {
		answer(func() { failed(false, errors.New("deadline exceeded")) })
	})
	deliver := func() {
		p := w.agents[to]
		if p == nil || p.dead {
			w.after(w.delay(), func() { answer(func() { failed(true, errors.New("agent is gone")) }) })
			return
		}
		reply := serve(p)
		if !w.chance(w.loss) {
			w.after(w.delay(), func() { answer(func() { reply(false, nil) }) })
		}
	}
	if !w.chance(w.loss) {
		w.after(w.delay(), deliver)
	}
	if w.chance(w.loss) {
		w.after(w.delay(), deliver)
	}
}

// write moves one block at a time. The source is read and the fence is asked
// when the block lands.
func (p *simAgent) write(v core.Write, wr *simWrite, k int) {
	w := p.w
	if p.dead {
		return
	}
	done := func(err error) {
		w.after(w.delay(), func() {
			if p.writes[v.ID] == wr {
				delete(p.writes, v.ID)
			}
			p.event(func(m *core.Machine) { m.Written(w.now, v.ID, core.TransferStats{}, err) })
		})
	}
	d := w.agents[v.Peer]
	switch {
	case wr.stopped:
		done(errors.New("stopped"))
		return
	case d == nil || d.dead:
		done(errors.New("connection reset"))
		return
	}
	e := d.armed[v.ID]
	if e == nil || !e.live || e.grant != string(v.Grant) {
		done(errors.New("revoked"))
		return
	}
	if w.chance(w.loss / 8) { // the connection breaks
		done(errors.New("connection reset"))
		if w.chance(0.5) {
			w.after(w.delay(), func() { d.receivedBy(v.ID, e, errors.New("connection reset")) })
		} else {
			w.after(w.delay(), func() { d.event(func(m *core.Machine) { m.PeerDown(w.now, p.id) }) })
		}
		return
	}
	if k == len(v.Dst[0]) {
		done(nil)
		if w.chance(w.loss / 8) {
			return // the word that all is there is lost
		}
		w.after(w.delay(), func() { d.receivedBy(v.ID, e, nil) })
		return
	}
	src, dst := v.Src[0][k], v.Dst[0][k]
	if p.owner[src] != wr.owner {
		w.fault("%s: block %d is read for %q but was given back", p.id, src, v.ID)
	}
	h := d.loads[d.owner[dst]]
	if h == nil || h.id != v.ID || !slices.Contains(h.blocks[0], dst) {
		w.fault("%s: block %d is written by %q but belongs to token %d", d.id, dst, v.ID, d.owner[dst])
	}
	d.holds[dst] = p.holds[src]
	w.after(w.delay(), func() { p.write(v, wr, k+1) })
}

// receivedBy tells the outcome of an Expect unless it was revoked.
func (d *simAgent) receivedBy(id core.TransferID, e *arm, err error) {
	if e.live && !d.dead {
		e.live = false
		if err == nil {
			d.ledger.disarmed(id)
		}
		d.event(func(m *core.Machine) { m.Received(d.w.now, id, core.TransferStats{}, err) })
	}
}

// report gives the blocks back to the engine, which uses them again at once.
func (a *simAgent) report(r core.Report) {
	a.w.codes[r.Side.String()+" "+r.Code.String()]++
	if h := a.loads[r.Token]; h != nil && r.Side == core.SideLoad {
		if e := a.armed[r.ID]; e != nil && e.live {
			a.w.fault("%s: %q is reported while the transport is armed", a.id, r.ID)
		}
		if r.Code == core.OK {
			for i, b := range h.blocks[0] {
				if want := content(r.ID, int(h.first)+i); a.holds[b] != want {
					a.w.fault("%s: %q ended well, but block %d holds %q, want %q", a.id, r.ID, b, a.holds[b], want)
				}
			}
		}
		delete(a.loads, r.Token)
	}
	for i := range a.owner {
		if a.owner[i] == r.Token {
			a.owner[i] = 0
			a.holds[i] = "free"
		}
	}
}

func (a *simAgent) end() {
	a.ledger.end()
	for _, f := range a.ledger.broken {
		a.w.fault("%s: at the end: %s", a.id, f)
	}
	left := a.m.Sizes()
	left.Ended = 0
	if left != (core.Sizes{}) {
		a.w.fault("%s: left at the end: %+v", a.id, left)
	}
	for b, token := range a.owner {
		if token != 0 {
			a.w.fault("%s: block %d still belongs to token %d", a.id, b, token)
		}
	}
}
