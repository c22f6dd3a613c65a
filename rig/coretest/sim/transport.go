package sim

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
)

// transport is a model of tcp and rdma, and with pull.go of local. D dials links to P's host with the ticket that P's
// agent gave it. P cuts a transfer into as many frames as D has blocks. A stream takes a
// frame and reads its bytes when the socket has room. The bytes land some time later, in
// whatever process has the address then: only the grant says whether that process wants
// them.
type transport struct {
	shut    bool
	out     map[core.AgentID]*link // D: to P agents
	in      map[core.AgentID]*link // P: from D agents
	tickets map[core.AgentID]string
	armed   map[core.TransferID]*arm
	byGrant map[string]*arm
	grants  int
	writes  map[core.TransferID]*write
}

// arm is one Expect.
type arm struct {
	id     core.TransferID
	peer   core.AgentID
	grant  string
	dst    []place // in the transfer's linear order
	has    []bool  // of them, those that have landed
	token  uint64  // of the half that owns dst
	landed int     // of them, in memory
	got    int     // of them, those that the process has heard of
	pulling
}

// link is D's way to P: streams that break together.
type link struct {
	w        *world
	d        *agent
	peer     core.AgentID // the agent that D means
	host     *host        // where it is
	ticket   string
	p        *agent // the process that has accepted; nil: not connected
	gen      int    // grows with each connection
	dialling bool
	streams  [2]stream
	queue    []*write // with blocks that no stream has taken yet
}

type stream struct {
	busy     bool   // a frame is being written
	parked   *frame // it waits for room in the socket
	inflight int
	last     time.Duration // when the newest bytes arrive
}

// window is how many blocks the sockets hold before the sender waits.
const window = 2

type write struct {
	v         core.Write
	token     uint64 // of the offer that owns the source
	link      *link  // nil: D's first stream is waited for
	gen       int
	src       []place // in the transfer's linear order, as far as it was given
	dst       []place // as P thinks
	positions []int   // in them, that were given
	next      int     // first of positions that no stream has taken
	queued    bool    // for a stream
	frames    int     // taken, and not read whole
	err       error
	acked     bool
	drips     bool
	by        *agent
	pulled
}

type frame struct {
	wr     *write
	link   *link
	gen    int
	n      int   // stream
	at     []int // of the transfer's places
	grant  string
	holds  []content
	proved bool          // the page was valid when all was copied
	late   time.Duration // how long a cut has held it up
}

var (
	errReset  = fmt.Errorf("%w: connection reset", core.ErrConnectionLost)
	errNotYet = fmt.Errorf("%w: no stream was opened", core.ErrConnectionLost)
	errShut   = errors.New("transport is closed")
	errStop   = errors.New("write was stopped")
	errBroken = errors.New("completion with error")
)

func (t *transport) init() {
	t.out, t.in, t.tickets = map[core.AgentID]*link{}, map[core.AgentID]*link{}, map[core.AgentID]string{}
	t.armed, t.byGrant, t.writes = map[core.TransferID]*arm{}, map[string]*arm{}, map[core.TransferID]*write{}
}

// --- links --------------------------------------------------------------------

// admit gives a D agent that says hello the ticket for its streams.
func (a *agent) admit(d *agent) string {
	a.tickets[d.id] = a.ticketFor(d.id)
	return a.tickets[d.id]
}

func (a *agent) ticketFor(d core.AgentID) string {
	return fault.Pick("ticket-shared", string(a.id)+"/"+string(d), string(a.id))
}

func (a *agent) connect(peer core.AgentID, ticket string) {
	l := a.out[peer]
	if l == nil {
		l = &link{w: a.w, d: a, peer: peer, host: a.w.byID[peer].host}
		a.out[peer] = l
		a.w.links = append(a.w.links, l)
	}
	l.ticket = ticket
	l.dial()
}

// arms lists what is expected from a peer, in one order.
func (a *agent) arms(peer core.AgentID) []*arm {
	var out []*arm
	for _, e := range a.armed {
		if e.peer == peer {
			out = append(out, e)
		}
	}
	slices.SortFunc(out, func(x, y *arm) int { return compare(x.id, y.id) })
	return out
}

func (a *agent) writing() []*write {
	var out []*write
	for _, wr := range a.writes {
		out = append(out, wr)
	}
	slices.SortFunc(out, func(x, y *write) int { return compare(x.v.ID, y.v.ID) })
	return out
}

// --- the receiver ---------------------------------------------------------------

func (a *agent) newGrant() string {
	a.grants++
	return fmt.Sprintf("%s/%d", fault.Pick("old-grant", string(a.id), a.host.name), a.grants)
}

func (a *agent) expect(v core.Expect) (string, error) {
	id, peer := v.ID, v.Peer
	switch {
	case a.shut:
		return "", errShut
	case a.armed[id] != nil:
		a.w.fault(id, "%s: the transport is asked to expect %q twice", a.id, id)
	case a.out[peer] == nil:
		return "", errors.New("no connection was asked for")
	case a.w.chance(a.w.plan.errors):
		return "", errors.New("cannot be registered")
	}
	e := &arm{id: id, peer: peer, grant: a.newGrant(), token: a.loading[base(id)]}
	segments, err := a.landing(a.w.match(a.w.byID[peer].host, a.host), v.Selection)
	for _, s := range segments {
		e.dst = places(e.dst, s.Region, s.Offset, s.Length)
	}
	if err != nil || len(e.dst) == 0 {
		a.w.fault(id, "%s: %q is of %d places in memory (%v)", a.id, id, len(e.dst), err)
	}
	e.has = make([]bool, len(e.dst))
	a.armed[id], a.byGrant[e.grant] = e, e
	a.out[peer].dial()
	return e.grant, nil
}

// revoke is the fence: no byte lands after it.
func (a *agent) revoke(id core.TransferID) {
	if e := a.armed[id]; e != nil {
		if fault.On("late-fence") {
			delete(a.armed, id)
			a.after(20*time.Millisecond, func() { delete(a.byGrant, e.grant) })
			return
		}
		a.forget(e)
	}
}

func (a *agent) forget(e *arm) {
	delete(a.armed, e.id)
	delete(a.byGrant, e.grant)
}

func (a *agent) received(e *arm, err error) {
	a.forget(e)
	if err == nil {
		a.ledger.disarmed(e.id)
		a.complete[e.token]++
		delete(a.promises, partOf{e.token, e.id})
		delete(a.towards, partOf{e.token, e.id})
	}
	stats := core.TransferStats{Bytes: uint64(e.got) << 10, Segments: 1}
	a.event(core.Received{ID: e.id, Stats: stats, Err: err},
		"received %s bytes=%d%s", e.id, stats.Bytes, failure(err))
}

// arrive takes a frame that has come to D's address.
func (f *frame) arrive() {
	l, w := f.link, f.link.w
	if l.gen != f.gen {
		return // lost with its connection
	}
	if w.chance(w.plan.breaks) {
		l.breaks()
		return
	}
	if w.cut[way{l.host, l.d.host}] > 0 {
		if f.late += 20 * time.Millisecond; f.late > stallTimeout {
			l.breaks()
			return
		}
		w.after(20*time.Millisecond, f.arrive)
		return
	}
	d := l.d.host.agent // who is there now
	switch {
	case d == nil:
	case w.plan.pulls:
		d.run(func() { d.pull(f) })
	case w.plan.oneSided: // the card does it, whether the process runs or not
		e := d.land(f)
		if e != nil && e.landed == len(e.dst) {
			l.back(f.gen, func(p *agent) { p.acked(f.wr) }) // so P's card knows
		}
		d.after(w.delay(), func() { d.landed(f, e) })
	default:
		d.run(func() { d.landed(f, d.land(f)) })
	}
}

// land writes a frame's bytes, if its grant is good.
func (a *agent) land(f *frame) *arm {
	e := a.byGrant[f.grant]
	if e == nil || e.peer != f.link.peer {
		return nil
	}
	if f.wr.v.ID != e.id {
		a.w.fault(e.id, "%s: the blocks of %q are written by %q", a.id, e.id, f.wr.v.ID)
		return nil
	}
	to := e.dst
	if a.w.plan.oneSided {
		to = f.wr.dst
	}
	if len(f.wr.src) != len(e.dst) {
		a.w.fault(e.id, "%s: %q has %d places here, and %d at its sender", a.id, e.id, len(e.dst), len(f.wr.src))
		return nil
	}
	if p := f.wr.host(); p.index != a.host.index {
		a.w.fault(e.id, "%s: bytes of %q land, though its ids name %v here and %v at %s", a.id, e.id, a.host.index, p.index, p.name)
	}
	if w := a.w; w.prompts[base(e.id)].crossed() {
		w.fault(base(e.id), "%s: bytes of %q land, though prefill has another prompt than this engine has asked for", a.id, e.id)
	}
	for i, pos := range f.at {
		at := to[pos]
		if e.has[pos] {
			a.w.fault(e.id, "%s: place %d of %q is written twice", a.id, pos, e.id)
		}
		e.has[pos] = true
		a.checkWritten(e, at)
		if b := &a.host.mem[a.host.block(at)]; b.owner != e.token {
			a.w.fault(e.id, "%s: block %d is written by %q, whose load has token %d, but belongs to token %d", a.id, a.host.block(at), e.id, e.token, b.owner)
		}
		a.host.cells[at.region][at.cell] = f.holds[i]
	}
	e.landed += len(f.holds)
	return e
}

// landed counts a frame and answers P when it was the last.
func (a *agent) landed(f *frame, e *arm) {
	l := f.link
	if l.gen == f.gen && l.p != nil {
		l.streams[f.n].inflight--
		l.p.run(func() { l.kick(f.gen) })
	}
	if e != nil {
		e.got += len(f.holds)
	}
	switch {
	case e == nil || a.armed[e.id] != e:
		l.back(f.gen, func(p *agent) { p.nacked(f.wr) })
	case a.w.chance(a.w.plan.errors):
		a.received(e, errBroken)
	case e.got == len(e.dst),
		fault.On("notification-alone") && f.at[len(f.at)-1] == len(e.dst)-1,
		fault.On("early-completion") && e.got >= max(1, len(e.dst)-len(f.holds)):
		a.received(e, nil)
		l.back(f.gen, func(p *agent) { p.acked(f.wr) })
	}
}

// back brings D's word to P on the stream.
func (l *link) back(gen int, f func(p *agent)) {
	w, late := l.w, time.Duration(0)
	var try func()
	try = func() {
		switch {
		case l.gen != gen || l.p == nil:
		case w.cut[way{l.d.host, l.host}] > 0 && late > stallTimeout:
			l.breaks()
		case w.cut[way{l.d.host, l.host}] > 0:
			late += 20 * time.Millisecond
			w.after(20*time.Millisecond, try)
		default:
			p := l.p
			p.run(func() { f(p) })
		}
	}
	w.after(w.delay(), try)
}

// --- the sender -----------------------------------------------------------------
