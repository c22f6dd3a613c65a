package sim

import (
	"fmt"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/core/machine"
)

// host is one rank of an engine. Its memory stays where it is. Its process may be stopped,
// end, and be replaced by another.
type host struct {
	w       *world
	name    string
	number  int         // of a prefill rank
	target  core.Target // under which a prefill rank is found
	prefill bool
	geometry
	agent   *agent // the open one, or nil
	opened  int
	openAt  time.Duration // when its first process starts
	stopped bool
	pending []func() // what came to the stopped process, in order
	skew    time.Duration
	mem     []block
	cells   [regions][]content // what lies in them, gaps included
	// stoppedAt is when it was stopped last, disturbed when its time last went
	// wrong: it was continued, or its clock jumped.
	stoppedAt, disturbed time.Duration
}

// block is a KV block: whom it belongs to.
type block struct {
	owner  uint64           // token of the half that the engine gave it to; 0: none
	writes [regions]*moment // until then the device writes what the half offers
	reads  *moment          // until then the device reads what the block had before it was the half's
}

// content is what an item is of, or an opaque block.
type content struct {
	id     core.TransferID
	layer  int
	pos    int // of the prompt: a token, or an opaque block
	head   uint64
	source int // number of the prefill rank that it is from
}

// agent is one process's kvconn: a machine and the models around it.
type agent struct {
	w       *world
	host    *host
	id      core.AgentID
	m       *machine.Machine
	ledger  *ledger
	opened  time.Duration // by this process's clock
	began   time.Duration // the same by the world's
	dead    bool
	deaf    time.Duration // until then nobody listens at its address: its link is made anew
	silent  bool          // when dead: its server is gone with it, and nobody says so
	closing bool
	ticking bool

	node
	transport
	engine
	device
}

// open starts a process on the host.
func (h *host) open() *agent {
	w := h.w
	h.opened++
	a := &agent{w: w, host: h, id: core.AgentID(h.name), m: machine.New(h.geometry.layout(), w.plan.opt), ledger: newLedger(), opened: w.now + h.skew, began: w.now}
	if h.opened > 1 {
		a.id = core.AgentID(fmt.Sprintf("%s.%d", h.name, h.opened))
	}
	a.node.init()
	a.transport.init()
	a.engine.init()
	a.device.init()
	h.agent = a
	w.byID[a.id] = a
	w.all = append(w.all, a)
	h.mem = make([]block, w.plan.pool) // the same addresses, nothing in them
	for r := range h.cells {
		h.cells[r] = make([]content, uint64(w.plan.pool)*h.geometry.stride())
	}
	if h.prefill {
		w.registry[h.target] = a.id
	}
	o := w.plan.opt
	report := ""
	if o.ReportClaims {
		report = " report=claims"
	}
	if o.Load > 0 {
		report += fmt.Sprintf(" load=%v", o.Load)
	}
	if o.Offer > 0 {
		report += fmt.Sprintf(" offer=%v", o.Offer)
	}
	if w.plan.devices {
		report += fmt.Sprintf(" moment=%v", o.MomentTimeout)
	}
	a.told(nil, "open%s lease=%v timeout=%v early=%v claim=%v max=%d at-once=%d%s", h.said(), o.Lease, o.PeerTimeout, o.EarlyLoad, o.Claim, o.MaxTransfers, o.Ends, report)
	return a
}

// run does f in the process now or, if the process is stopped, when it is continued. If the
// process has ended, run does nothing.
func (a *agent) run(f func()) {
	switch {
	case a.dead:
	case a.host.stopped:
		a.host.pending = append(a.host.pending, func() { a.run(f) })
	default:
		f()
	}
}

func (a *agent) after(d time.Duration, f func()) { a.w.after(d, func() { a.run(f) }) }

// now is the process's clock.
func (a *agent) now() time.Duration { return a.w.now + a.host.skew }

func (a *agent) time() time.Time { return time.Unix(0, 0).Add(a.now()) }

// tell tells the machine an event and takes what it wants then. The answer goes to taken before anything
// else happens, unless taken is nil. The transcript gets the event as format and args say it.
func (a *agent) tell(e core.Event, taken func(answer core.Action), format string, args ...any) (answer core.Action) {
	returned := false
	defer func() {
		if !returned { // it panics: the transcript ends with it
			a.told(nil, format, args...)
		}
	}()
	ended := a.watchEnds(e)
	actions := a.m.Step(a.time(), e)
	returned = true
	ended(actions)
	a.told(actions, format, args...)
	answer, rest := core.Split(actions)
	if taken != nil {
		taken(answer)
	}
	a.collect(rest)
	a.checkUntold()
	a.checkReaders()
	if a.m.Busy() && !a.ticking {
		a.ticking = true
		a.after(core.TickInterval, a.tick)
	}
	return answer
}

// try is an event of the engine. If it is not refused, taken is called before anything else happens.
func (a *agent) try(e core.Event, taken func(), format string, args ...any) error {
	answer := a.tell(e, func(answer core.Action) {
		if answer == nil {
			taken()
		}
	}, format, args...)
	refused, _ := answer.(core.Refuse)
	return refused.Err
}

// event is one without an answer.
func (a *agent) event(e core.Event, format string, args ...any) { a.tell(e, nil, format, args...) }

func (a *agent) tick() {
	if a.ticking = false; a.m.Busy() {
		a.event(core.Tick{}, "tick")
	}
}

// collect gives the reports to the engine at once and the rest, in order, to the
// node's goroutines.
func (a *agent) collect(actions []core.Action) {
	for _, act := range actions {
		a.ledger.action(act)
		if r, ok := act.(core.Report); ok {
			a.report(r)
			continue
		}
		switch v := act.(type) {
		case core.Yield:
			a.resuming = true
		case core.Resolve:
			a.asked[v.ID] = v.Seq
		case core.Expect:
			of := partOf{a.loading[base(v.ID)], v.ID}
			a.towards[of], a.askedAt[of] = v.Peer, a.w.now
			a.checkNotReleased(v.ID)
		case core.Write:
			a.owners = append(a.owners, a.offering[base(v.ID)])
		case core.SendLoad: // a load that has followed a claim
			a.asked[v.ID] = v.Seq
		}
		q := a.todoOf(act)
		if q.list = append(q.list, act); !q.working {
			q.working = true
			a.after(a.before(q, a.w.delay()/4), func() { a.work(q) })
		}
	}
	for _, f := range a.ledger.broken {
		a.w.fault(f.id, "%s: %s", a.id, f.text)
	}
	a.ledger.broken = nil
}

// crash ends the process: nothing of it moves any more.
func (h *host) crash() {
	a := h.agent
	if a == nil {
		return
	}
	h.w.note("%s crashes", a.id)
	h.w.expectLeases(a)
	a.silent = h.w.chance(0.4)
	h.end()
	a.linksOfDead(0.3)
	h.w.promiseOfDead(a)
}

// end makes the host's process gone.
func (h *host) end() {
	h.agent.dead = true
	h.agent, h.stopped, h.pending = nil, false, nil
	clear(h.mem)
	for _, c := range h.cells {
		clear(c)
	}
}

func (h *host) stop() {
	if h.stopped || h.agent == nil {
		return
	}
	h.w.note("%s is stopped", h.name)
	h.stopped = true
	h.w.promiseOfStopped(h)
}

func (h *host) cont() {
	if !h.stopped {
		return
	}
	h.w.note("%s is continued, %d things wait", h.name, len(h.pending))
	h.stopped, h.disturbed = false, h.w.now
	list := h.pending
	h.pending = nil
	for _, f := range list {
		f()
	}
}

// close is the agent's Close: all is ended, waited for within a bound, and gone.
func (a *agent) close() {
	if a.closing {
		return
	}
	a.w.note("%s is closed", a.id)
	a.closing = true
	clear(a.ledger.claims)
	a.event(core.Close{}, "close")
	a.drain(a.w.now + closeTimeout - goodbye)
}

func (a *agent) drain(until time.Duration) {
	drained := !a.m.Busy() && a.queued() == 0
	if !drained && a.w.now < until {
		a.after(20*time.Millisecond, func() { a.drain(until) })
		return
	}
	a.shutTransport()
	if !drained {
		a.ledger.shut()
		a.event(core.Abandon{}, "abandon")
	}
	a.leaveQueues(a.w.now + goodbye)
}

// leaveQueues waits for what is still to be said, and goes.
func (a *agent) leaveQueues(until time.Duration) {
	if len(a.peerQueues)+len(a.outbox) > 0 && a.w.now < until {
		a.after(20*time.Millisecond, func() { a.leaveQueues(until) })
		return
	}
	a.checkEmpty()
	if h := a.host; h.prefill && a.w.registry[h.target] == a.id {
		delete(a.w.registry, h.target)
	}
	a.host.end()
	a.linksOfDead(1)
	a.w.acted(a.w.now)
}
