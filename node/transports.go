package node

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/ratelog"
	"github.com/kvconn/kvconn/internal/safe"
	"github.com/kvconn/kvconn/wire"
)

// The transports, as configuration, registry and statistics name them.
const (
	viaAuto = "auto" // the first of those below that both sides have and that works
	viaRDMA = "rdma"
	viaTCP  = "tcp"
)

// transports are an agent's ways to move bytes, the preferred one first, behind
// one object that is used like a core.Transport. D picks one for each transfer.
// A grant begins with that one's name, so it says by itself where P's Write goes.
//
// Its lock is taken within the agent's, and never held while a transport is called.
type transports struct {
	a     *Agent
	list  []core.Transport
	lacks []wire.Lack // what would be in the list, were it available here

	mu     sync.Mutex
	pairs  map[core.AgentID]*pair // as many as the peer table has, at most
	halves map[half]route         // of transfers that have got a transport, until their reports
	moved  map[string]*TransportStats
	lines  ratelog.Limit
}

// half names one side of a transfer: an agent may be both.
type half struct {
	id   core.TransferID
	side core.Side
}

type route struct {
	peer core.AgentID
	via  core.Transport
}

func newTransports(a *Agent, list ...core.Transport) *transports {
	t := &transports{a: a, pairs: map[core.AgentID]*pair{}, halves: map[half]route{}, moved: map[string]*TransportStats{}}
	for _, w := range list {
		t.add(w)
	}
	return t
}

// add and lack are called before anybody else knows t.
func (t *transports) add(w core.Transport) {
	t.list = append(t.list, w)
	t.moved[w.Name()] = &TransportStats{Available: true}
}

func (t *transports) lack(name string, err error) {
	reason := shorten(err.Error())
	t.lacks = append(t.lacks, wire.Lack{Transport: name, Reason: reason})
	t.moved[name] = &TransportStats{Reason: reason}
}

// named returns nil for a transport that this agent has not got.
func (t *transports) named(name string) core.Transport {
	for _, w := range t.list {
		if w.Name() == name {
			return w
		}
	}
	return nil
}

func (t *transports) names() (list []string) {
	for _, w := range t.list {
		list = append(list, w.Name())
	}
	return list
}

// String is what errors and the statistics call them: "rdma,tcp".
func (t *transports) String() string { return strings.Join(t.names(), ",") }

func (t *transports) endpoints() (list []wire.Endpoint) {
	for _, w := range t.list {
		list = append(list, wire.Endpoint{Transport: w.Name(), Address: w.Endpoint()})
	}
	return list
}

// mark puts a transport's name before its grant.
func mark(name string, grant []byte) []byte {
	return append(append(make([]byte, 0, len(name)+1+len(grant)), name+"\x00"...), grant...)
}

func unmark(marked []byte) (name string, grant []byte) {
	before, grant, _ := bytes.Cut(marked, []byte{0})
	return string(before), grant
}

// admit lets a decode agent connect by the transports that both have; an error
// says why there is none.
func (t *transports) admit(peer core.AgentID, h *wire.Agent) (tickets []wire.Ticket, err error) {
	var errs []error
	for _, w := range t.list {
		if !slices.ContainsFunc(h.Endpoints, func(e wire.Endpoint) bool { return e.Transport == w.Name() }) {
			continue
		}
		ticket, err := w.Admit(peer)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		tickets = append(tickets, wire.Ticket{Transport: w.Name(), Ticket: ticket})
	}
	switch {
	case len(tickets) == 0 && len(errs) > 0:
		return nil, errors.Join(errs...)
	case len(tickets) == 0:
		return nil, fmt.Errorf("no transport in common: prefill engine %q has %s, decode engine %q has %s", t.a.cfg.EngineID, t.have(nil), h.EngineID, t.have(h))
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.pair(peer).engine = h.EngineID
	return tickets, nil
}

// have lists the transports of an agent, nil for this one, and why it lacks others.
func (t *transports) have(h *wire.Agent) string {
	if h == nil {
		h = &wire.Agent{Endpoints: t.endpoints(), Lacks: t.lacks}
	}
	var names []string
	for _, e := range h.Endpoints {
		names = append(names, fmt.Sprintf("%.16q", e.Transport))
	}
	if len(names) == 0 {
		names = []string{"none"}
	}
	text := strings.Join(names, ", ")
	for _, l := range h.Lacks {
		text += fmt.Sprintf(" (no %.16s: %s)", l.Transport, shorten(l.Reason))
	}
	return text
}

// Dismiss forgets a peer. Sinks may be called before it returns.
func (t *transports) Dismiss(peer core.AgentID) {
	t.mu.Lock()
	delete(t.pairs, peer)
	t.mu.Unlock()
	for _, w := range t.list {
		w.Dismiss(peer)
	}
}

// Expect arms the first transport that is usable with the peer now.
func (t *transports) Expect(id core.TransferID, peer core.AgentID, dst []core.Segment) ([]byte, error) {
	var passed []passedOver
	for _, w := range t.list {
		err := t.usable(w, peer)
		if err == nil {
			t.begin(half{id, core.SideLoad}, peer, w) // it may be received before Expect returns
			var grant []byte
			if grant, err = w.Expect(id, peer, dst); err == nil {
				t.chosen(peer, core.SideLoad, w.Name(), passed, true)
				return mark(w.Name(), grant), nil
			}
		}
		passed = append(passed, passedOver{w.Name(), err})
	}
	return nil, t.noWay(peer, passed)
}

// Revoke may wait, and then keeps only its caller: see core.Transport.
func (t *transports) Revoke(id core.TransferID) {
	if w := t.of(half{id, core.SideLoad}); w != nil {
		w.Revoke(id)
	}
}

// Write starts to send by the transport that the grant names.
func (t *transports) Write(op core.WriteOp) {
	name, grant := unmark(op.Grant)
	w := t.named(name)
	if w == nil {
		sink{t.a, t, name}.Written(op.ID, core.TransferStats{}, fmt.Errorf("transfer %q is to go over %q: this agent has %s", string(op.ID), name, t))
		return
	}
	t.begin(half{op.ID, core.SideOffer}, op.Peer, w)
	t.chosen(op.Peer, core.SideOffer, name, nil, false)
	op.Grant = grant
	w.Write(op)
}

// Extend gives more of a write.
func (t *transports) Extend(op core.WriteOp) {
	if w := t.of(half{op.ID, core.SideOffer}); w != nil {
		_, op.Grant = unmark(op.Grant)
		w.Extend(op)
	}
}

// Stop ends a write early.
func (t *transports) Stop(id core.TransferID) {
	if w := t.of(half{id, core.SideOffer}); w != nil {
		w.Stop(id)
	}
}

// Close closes all at once: each may take a few seconds.
func (t *transports) Close() error {
	errs := make([]error, len(t.list))
	var wg sync.WaitGroup
	for i, w := range t.list {
		wg.Add(1)
		safe.Go("close "+w.Name(), func() {
			defer wg.Done()
			errs[i] = w.Close()
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

func (t *transports) begin(h half, peer core.AgentID, w core.Transport) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.halves[h] = route{peer, w}
}

func (t *transports) of(h half) core.Transport {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.halves[h].via
}

// ended takes a report: by its name, the transport that moved the bytes, "" if
// it came to none. An id may be used again from now on.
func (t *transports) ended(r core.Report) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	name := ""
	for _, id := range slices.Concat(r.Parts, []core.TransferID{r.ID}) {
		rt, ok := t.halves[half{id, r.Side}]
		if !ok {
			continue
		}
		delete(t.halves, half{id, r.Side})
		if p := t.pairs[rt.peer]; p != nil && r.Code == core.OK {
			p.transfers[rt.via.Name()]++
		}
		name = cmp.Or(name, rt.via.Name())
	}
	if name = cmp.Or(r.Stats.Via, name); name != "" { // the figures are of all parts together
		t.moved[name].add(r)
	}
	return name
}

// written takes the end of an offer's write. It may be long until its report, or
// there may be none, where the engine has not offered it yet.
func (t *transports) written(id core.TransferID, name string, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	h := half{id, core.SideOffer}
	if p := t.pairs[t.halves[h].peer]; p != nil && err == nil {
		p.transfers[name]++
	}
	delete(t.halves, h)
}

// Usable's answers are wanted at once where a transfer waits for them.
var errPending = errors.New("it is still being set up with that peer")

var expired = func() context.Context {
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(errPending)
	return ctx
}()

// usable says why a transport cannot take new transfers of a peer now.
func (t *transports) usable(w core.Transport, peer core.AgentID) error {
	t.mu.Lock()
	p, why := t.pairs[peer], "it is not connected with that peer"
	if p != nil && !p.connected[w.Name()] {
		why = p.absent[w.Name()]
	}
	ok := p != nil && p.connected[w.Name()]
	t.mu.Unlock()
	if !ok {
		return errors.New(why)
	}
	return usableNow(w, peer)
}

func usableNow(w core.Transport, peer core.AgentID) error {
	s, ok := w.(core.Signaller)
	if !ok {
		return nil
	}
	err := s.Usable(expired, peer)
	if errors.Is(err, context.Canceled) {
		err = errPending
	}
	return err
}

// fell notes that the way to a peer by one transport broke, and says whether it
// was the last one: its agent may have been replaced then.
func (t *transports) fell(peer core.AgentID, name string) (all bool) {
	t.mu.Lock()
	p := t.pairs[peer]
	if p == nil {
		t.mu.Unlock()
		return true
	}
	p.down[name] = true
	var others []core.Transport
	for _, w := range t.list {
		_, asked := w.(core.Signaller)
		if w.Name() != name && p.connected[w.Name()] && (asked || !p.down[w.Name()]) {
			others = append(others, w)
		}
	}
	t.mu.Unlock()
	return !slices.ContainsFunc(others, func(w core.Transport) bool { return usableNow(w, peer) == nil })
}

// sink feeds one transport's outcomes to the machine.
type sink struct {
	a    *Agent
	t    *transports
	name string
}

func (s sink) Received(id core.TransferID, st core.TransferStats, err error) {
	s.a.step(func(m *core.Machine, now time.Time) { m.Received(now, id, st, err) })
}

func (s sink) Written(id core.TransferID, st core.TransferStats, err error) {
	s.t.written(id, s.name, err)
	st.Via = s.name
	s.a.step(func(m *core.Machine, now time.Time) { m.Written(now, id, st, err) })
}

func (s sink) PeerDown(peer core.AgentID, err error) {
	s.a.log.Debug("connection to a peer ended", zap.String("peer", string(peer)), zap.String("transport", s.name), zap.Error(err))
	if s.t.fell(peer, s.name) {
		s.a.peers.suspect(peer)
	}
	s.a.step(func(m *core.Machine, now time.Time) { m.PeerDown(now, peer) })
}
