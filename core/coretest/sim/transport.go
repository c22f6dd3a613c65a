package sim

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
)

// transport is a model of tcp and rdma. D dials links to P's host with the
// ticket that P's agent gave it. P cuts a transfer into as many frames as D has
// blocks; a
// stream takes a frame, reads its bytes when the socket has room, and they land
// some time later, in whatever process has the address then: only the grant says
// whether it wants them.
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
}

// link is D's way to P: streams that break together.
type link struct {
	w        *world
	d        *agent
	peer     core.AgentID // whom D means
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
	v      core.Write
	token  uint64 // of the offer that owns the source
	link   *link  // nil: D's first stream is waited for
	gen    int
	src    []place // in the transfer's linear order, as far as it was given
	dst    []place // as P thinks
	given  []int   // positions in them
	next   int     // first of given that no stream has taken
	queued bool    // for a stream
	frames int     // taken, and not read whole
	err    error
	acked  bool
}

type frame struct {
	wr    *write
	link  *link
	gen   int
	n     int   // stream
	at    []int // of the transfer's places
	grant string
	holds []content
	late  time.Duration // how long a cut has held it up
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
	a.tickets[d.id] = string(a.id) + "/" + string(d.id)
	return a.tickets[d.id]
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

// dial opens the streams, if they are not there.
func (l *link) dial() {
	if l.p != nil || l.dialling {
		return
	}
	l.dialling = true
	w, d := l.w, l.d
	d.after(2*w.delay(), func() {
		p := l.host.agent
		switch {
		case w.cut[way{d.host, l.host}]+w.cut[way{l.host, d.host}] > 0:
			d.after(connectTimeout, l.dialFailed)
		case p == nil || p.shut || p.tickets[d.id] != l.ticket:
			d.after(w.delay(), l.dialFailed)
		default:
			l.dialling = false
			l.p = p
			l.gen++
			gen := l.gen
			p.run(func() {
				if l.gen == gen {
					p.in[d.id] = l
					p.streamsCame(l)
				}
			})
		}
	})
}

func (l *link) dialFailed() {
	l.dialling = false
	if l.d.out[l.peer] == l {
		l.d.linkGone(l)
	}
}

// breaks ends the connection; both ends notice, each in its time.
func (l *link) breaks() {
	p, d, gen, w := l.p, l.d, l.gen, l.w
	if p == nil {
		return
	}
	w.faults["break"]++
	l.p = nil
	l.gen++
	l.queue = nil
	parked := []*frame{l.streams[0].parked, l.streams[1].parked}
	l.streams = [2]stream{}
	d.after(w.delay(), func() { d.linkBroke(l) })
	p.after(w.delay(), func() {
		for _, f := range parked {
			if f != nil {
				f.wr.frames--
			}
		}
		p.streamsBroke(l, gen)
	})
}

// linkBroke is D's side: transfers that have begun are lost, the rest waits for new
// streams.
func (a *agent) linkBroke(l *link) {
	if l.p != nil || a.out[l.peer] != l {
		return
	}
	again := false
	for _, e := range a.arms(l.peer) {
		if e.got > 0 {
			a.received(e, errReset)
		} else {
			again = true
		}
	}
	if again {
		l.dial()
		return
	}
	a.linkGone(l)
}

func (a *agent) linkGone(l *link) {
	delete(a.out, l.peer)
	for _, e := range a.arms(l.peer) {
		a.received(e, errReset)
	}
	a.peerDown(l.peer)
}

func (a *agent) peerDown(id core.AgentID) {
	a.unmap(id)
	a.event(func(m *core.Machine, now time.Time) { m.PeerDown(now, id) }, "down peer=%s", id)
}

// streamsBroke is P's side.
func (a *agent) streamsBroke(l *link, gen int) {
	for _, wr := range a.writing() {
		if wr.link == l && wr.gen == gen {
			a.endWrite(wr, errReset)
		}
	}
	if a.in[l.d.id] == l && l.p != a {
		delete(a.in, l.d.id)
		a.peerDown(l.d.id)
		a.expectProbe(l.d)
	}
}

// linksOfDead breaks what a process that has ended had, at once where its host
// says so (which has the probability seen), else when the other end stalls.
func (a *agent) linksOfDead(seen float64) {
	for _, l := range a.w.links {
		if l.d != a && l.p != a {
			continue
		}
		gen, d := l.gen, stallTimeout
		if a.w.chance(seen) {
			d = a.w.delay()
		}
		a.w.after(d, func() {
			if l.gen == gen {
				l.breaks()
			}
		})
	}
}

// breakLinks breaks all connections of a process that lives.
func (a *agent) breakLinks() {
	for _, l := range a.w.links {
		if l.d == a || l.p == a {
			l.breaks()
		}
	}
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
	segments, err := a.w.match(a.w.byID[peer].host, a.host).Segments(v.Selection)
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
	a.event(func(m *core.Machine, now time.Time) { m.Received(now, e.id, stats, err) },
		"received %s bytes=%d%s", e.id, stats.Bytes, failure(err))
}

// arrive is a frame at D's address.
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
	if w := a.w; w.prompts[base(e.id)].crossed() {
		w.fault(base(e.id), "%s: bytes of %q land, though prefill has another prompt than this engine has asked for", a.id, e.id)
	}
	for i, pos := range f.at {
		at := to[pos]
		if e.has[pos] {
			a.w.fault(e.id, "%s: place %d of %q is written twice", a.id, pos, e.id)
		}
		e.has[pos] = true
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

func (a *agent) write(v core.Write, token uint64) {
	if v.Extends {
		if wr := a.writes[v.ID]; wr != nil && wr.err == nil && !a.shut {
			a.give(wr, v)
		}
		return
	}
	switch {
	case a.shut:
		a.written(v.ID, errShut)
		return
	case a.writes[v.ID] != nil:
		a.w.fault(v.ID, "%s: the transport is asked to write %q twice", a.id, v.ID)
		return
	}
	wr := &write{v: v, token: token}
	n := v.Match.Bytes(v.Dst) / cellBytes
	if wr.src, wr.dst = make([]place, n), make([]place, n); n == 0 {
		a.w.fault(v.ID, "%s: %q is planned into no places", a.id, v.ID)
	}
	a.writes[v.ID] = wr
	a.give(wr, v)
	if l := a.in[v.Peer]; l != nil && l.p == a {
		a.begin(wr, l)
		return
	}
	a.after(connectTimeout, func() {
		if wr.link == nil {
			a.endWrite(wr, errNotYet)
		}
	})
}

// give adds what has become ready to a write.
func (a *agent) give(wr *write, v core.Write) {
	pairs, extents, err := v.Match.PairsBetween(v.Src, v.Dst, v.Begin, v.End)
	if err != nil {
		a.w.fault(v.ID, "%s: %q is not planned: %v", a.id, v.ID, err)
		return
	}
	for _, e := range extents {
		pos := int(e.Position / cellBytes)
		for _, p := range pairs[:e.Pairs] {
			src, dst := places(nil, p.SrcRegion, p.SrcOffset, p.Length), places(nil, p.DstRegion, p.DstOffset, p.Length)
			for i := range src {
				wr.src[pos], wr.dst[pos] = src[i], dst[i]
				wr.given = append(wr.given, pos)
				pos++
			}
		}
		pairs = pairs[e.Pairs:]
	}
	if v.End == nil && len(wr.given) != len(wr.src) {
		a.w.fault(v.ID, "%s: %q has %d places, %d of them are given", a.id, v.ID, len(wr.src), len(wr.given))
	}
	if l := wr.link; l != nil && l.gen == wr.gen && l.p == a {
		l.enqueue(wr)
		l.pump()
	}
}

func (l *link) enqueue(wr *write) {
	if !wr.queued && wr.next < len(wr.given) {
		wr.queued = true
		l.queue = append(l.queue, wr)
	}
}

func (a *agent) streamsCame(l *link) {
	for _, wr := range a.writing() {
		if wr.link == nil && wr.v.Peer == l.d.id && wr.err == nil {
			a.begin(wr, l)
		}
	}
}

func (a *agent) begin(wr *write, l *link) {
	wr.link, wr.gen = l, l.gen
	l.enqueue(wr)
	l.pump()
}

// pump gives idle streams their next frames; it runs in P's process.
func (l *link) pump() {
	for n := range l.streams {
		s := &l.streams[n]
		for !s.busy && len(l.queue) > 0 {
			wr := l.queue[0]
			l.queue, wr.queued = l.queue[1:], false
			if wr.err != nil {
				continue
			}
			blocks := len(wr.v.Dst.Blocks[0])
			upTo := min(wr.next+(len(wr.src)+blocks-1)/blocks, len(wr.given))
			f := &frame{wr: wr, link: l, gen: l.gen, n: n, at: wr.given[wr.next:upTo], grant: string(wr.v.Grant)}
			wr.next = upTo
			l.enqueue(wr)
			wr.frames++
			s.busy = true
			p := l.p
			p.after(l.w.delay()/8, func() { p.leave(f) })
		}
	}
}

// leave reads a frame's bytes from the blocks into the socket, when it has room.
func (a *agent) leave(f *frame) {
	l, wr := f.link, f.wr
	if l.gen != f.gen || l.p != a || a.shut {
		wr.frames--
		a.settle(wr)
		return
	}
	s := &l.streams[f.n]
	if s.inflight >= window {
		s.parked = f
		a.after(stallTimeout, func() {
			if l.gen == f.gen && l.streams[f.n].parked == f {
				l.breaks()
			}
		})
		return
	}
	for _, pos := range f.at {
		at := wr.src[pos]
		if b := &a.host.mem[a.host.block(at)]; b.owner != wr.token {
			a.w.fault(wr.v.ID, "%s: block %d is read for %q, whose offer has token %d, but belongs to token %d", a.id, a.host.block(at), wr.v.ID, wr.token, b.owner)
		}
		f.holds = append(f.holds, a.host.cells[at.region][at.cell])
	}
	s.busy = false
	s.inflight++
	s.last = max(s.last, a.w.now+a.w.delay())
	a.w.after(s.last-a.w.now, f.arrive)
	wr.frames--
	a.settle(wr)
	l.pump()
}

// kick lets parked frames go on: there is room again.
func (l *link) kick(gen int) {
	if l.gen != gen || l.p == nil {
		return
	}
	for n := range l.streams {
		if f := l.streams[n].parked; f != nil && l.streams[n].inflight < window {
			l.streams[n].parked = nil
			l.p.leave(f)
		}
	}
}

func (a *agent) acked(wr *write) {
	if wr.err == nil && wr.next == len(wr.given) && len(wr.given) == len(wr.src) {
		wr.acked = true
		a.settle(wr)
	}
}

func (a *agent) nacked(wr *write) { a.endWrite(wr, core.ErrNotExpected) }

func (a *agent) stopWrite(id core.TransferID) {
	if wr := a.writes[id]; wr != nil {
		a.endWrite(wr, errStop)
	}
}

// endWrite gives a transfer up; it is told when no stream reads its blocks.
func (a *agent) endWrite(wr *write, err error) {
	if wr.err == nil {
		wr.err = err
	}
	a.settle(wr)
}

func (a *agent) settle(wr *write) {
	if wr.err == nil && !wr.acked || wr.frames > 0 || a.writes[wr.v.ID] != wr {
		return
	}
	delete(a.writes, wr.v.ID)
	a.written(wr.v.ID, wr.err)
}

func (a *agent) written(id core.TransferID, err error) {
	a.event(func(m *core.Machine, now time.Time) { m.Written(now, id, core.TransferStats{Segments: 1}, err) },
		"written %s%s", id, failure(err))
}

// shutTransport is the transport's Close: nothing lands and nothing is told.
func (a *agent) shutTransport() {
	a.shut = true
	clear(a.armed)
	clear(a.byGrant)
	clear(a.writes)
}
