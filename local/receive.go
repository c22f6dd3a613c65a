package local

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/internal/intervals"
	"github.com/kvconn/kvconn/internal/stopwatch"
	"github.com/kvconn/kvconn/kv"
)

// receiver is D's half: the P agents that it was told to connect to, and the transfers that it
// copies from them.
type receiver struct {
	t       *Transport
	mu      sync.Mutex
	byID    map[core.TransferID]*inbound
	byGrant map[random]*inbound
	telling map[core.TransferID]chan struct{} // transfers whose outcome the sink is being told
	sources map[core.AgentID]*source
	ready   []*inbound // that have something to copy; served in turn
	workers int        // that run
	copiers sync.Pool  // of *copier
	redial  time.Duration
	closed  bool
	came    [copyMethods]uint64 // bytes
	past    uint64              // bytes of these that passed the caches

	copies   map[*batch]struct{}  // under way, out of P's processes
	watchdog *delayed             // looks at them; nil: there is none
	armed    time.Time            // when that one was
	hung     map[core.AgentID]int // copies that have not ended long after their begin
	unread   map[core.AgentID]int // values of P's whose reading has not ended in time; it writes nothing of the caches

	flying  int             // copies of all transfers
	mayLand map[string]bool // names of regions to which a device has not ended a copy
}

// inbound is one transfer that is expected. Its fields are guarded by receiver.mu.
type inbound struct {
	id     core.TransferID
	grant  random
	source *source
	into   destination

	covered  intervals.Set // positions that P has said
	todo     []piece
	off      uint64 // bytes of todo[0].runs[0] that are copied, or being copied
	queued   bool   // in receiver.ready
	validity uint64
	proof    uint64    // what is in the page while P keeps the blocks; 0: P is to be asked
	first    time.Time // when P said anything of it
	copied   uint64
	flying   int             // copies under way
	hung     int             // of them, those that were given up
	moves    stopwatch.Watch // while anything is to be copied
	untold   chan struct{}   // of ends, if the end is told when these have ended
	quiet    chan struct{}   // closed when none is; nil: nobody waits
	over     bool            // no copy begins any more
	ended    atomic.Bool     // the same, for copies that have several parts
	stuck    bool            // a device does not end a copy: it may land for ever, and so nobody hears of an end
	gone     bool            // it is not expected any more: its grant is known while a copy is under way
	stopped  bool            // as P asked; D says when no copy is under way
	asks     bool            // a copy did not prove by itself that P has kept the blocks
	done     bool            // P was asked whether it has
}

// paces says whether there is anything that P has said and that is not copied, or whether P is asked if it has kept its blocks;
// receiver.mu is held.
func (in *inbound) paces() {
	in.moves.Run(len(in.todo) > 0 || in.flying > 0 || in.done || fault.On("local-rest-counts"), time.Now())
}

// mostIntervals bounds the intervals that are kept of what P says, which leaves holes only where its blocks
// become ready in another order.
func (in *inbound) mostIntervals() int {
	return int(min(max(1<<10, in.into.total>>12, uint64(in.into.pieces())), 1<<16))
}

func (r *receiver) init(t *Transport) {
	r.t, r.redial = t, redialAfter
	r.byID, r.byGrant, r.telling = map[core.TransferID]*inbound{}, map[random]*inbound{}, map[core.TransferID]chan struct{}{}
	r.sources, r.copies = map[core.AgentID]*source{}, map[*batch]struct{}{}
	r.hung, r.unread, r.mayLand = map[core.AgentID]int{}, map[core.AgentID]int{}, map[string]bool{}
}

// Expect implements core.Transport.
func (t *Transport) Expect(id core.TransferID, peer core.AgentID, dst []kv.Segment) ([]byte, error) {
	return t.receiver.expect(id, peer, destinationOf(t.layout, dst))
}

// ExpectPlan implements core.Cutter.
func (t *Transport) ExpectPlan(id core.TransferID, peer core.AgentID, dst kv.Plan) ([]byte, error) {
	return t.receiver.expect(id, peer, planned(t.layout, dst))
}

func (r *receiver) expect(id core.TransferID, peer core.AgentID, into destination) ([]byte, error) {
	in := &inbound{id: id, grant: newRandom(), into: into}
	r.mu.Lock()
	defer r.mu.Unlock()
	src := r.sources[peer]
	switch {
	case r.closed:
		return nil, errClosed
	case r.byID[id] != nil:
		return nil, fmt.Errorf("local: transfer %q is expected already", id.Name())
	case src == nil:
		return nil, fmt.Errorf("local: no connection to prefill agent %s was asked for", peer)
	case src.state == sourceDown:
		r.again(src)
		return nil, src.err
	}
	in.source = src
	r.byID[id], r.byGrant[in.grant] = in, in
	return slices.Clone(in.grant[:]), nil
}

// Revoke implements core.Transport.
func (t *Transport) Revoke(id core.TransferID) error {
	r := &t.receiver
	r.mu.Lock()
	in, told := r.byID[id], r.telling[id]
	var quiet chan struct{}
	var link *link
	switch {
	case in == nil:
	case r.closed: // another revoke is to find it too
		quiet = r.halt(in)
	default:
		quiet = r.forget(in)
		if link = in.source.link; in.first.IsZero() {
			link = nil
		}
	}
	r.mu.Unlock()
	ended := quiet == nil || fault.On("local-unfenced") || t.settled(quiet) // a copy is bounded, unless a device is stuck
	if told != nil {
		ended = t.settled(told) && ended // the sink returns at once
	}
	if link != nil {
		link.say((&ending{cause: overUnexpected}).bytes(in.grant))
		link.flush()
	}
	if !ended && !fault.On("local-revoke-unsure") {
		return fmt.Errorf("local: transfer %q is revoked, but its memory is copied to: %w", id.Name(), core.ErrMayLand)
	}
	return nil
}

// forget ends the knowledge of a transfer. The channel, if any, is closed when no copy is under way;
// r.mu is held.
func (r *receiver) forget(in *inbound) chan struct{} {
	if r.byID[in.id] == in {
		delete(r.byID, in.id)
	}
	in.gone = true
	r.bury(in)
	return r.halt(in)
}

// bury forgets a grant that is of no use and whose copies have ended: until then P must not hear
// that nothing is copied; r.mu is held.
func (r *receiver) bury(in *inbound) {
	if in.gone && (in.flying == 0 || fault.On("local-buried-alive")) {
		delete(r.byGrant, in.grant)
	}
}

// halt has no copy begin any more.
func (r *receiver) halt(in *inbound) chan struct{} {
	in.over = true
	in.ended.Store(true)
	if runs := in.drop(); runs > 0 {
		in.source.owe(runs)
	}
	if in.flying > 0 && in.quiet == nil {
		in.quiet = make(chan struct{})
	}
	return in.quiet
}

// drop throws away what is to be copied yet, and says how many runs that is.
func (in *inbound) drop() (runs int) {
	for i := range in.todo {
		runs += len(in.todo[i].runs)
	}
	in.todo, in.off = nil, 0
	return runs
}

// ends forgets a transfer. Just one caller gets the channel with which it tells the outcome; nobody does when the
// transport is closed; r.mu is held.
func (r *receiver) ends(in *inbound) chan struct{} {
	if r.closed || r.byID[in.id] != in {
		return nil
	}
	r.forget(in)
	told := make(chan struct{})
	r.telling[in.id] = told
	return told
}

func (r *receiver) tell(in *inbound, told chan struct{}, s core.TransferStats, err error) {
	r.t.sink.Received(in.id, s, err)
	r.mu.Lock()
	if r.telling[in.id] == told {
		delete(r.telling, in.id)
	}
	r.mu.Unlock()
	close(told)
}

// fail ends a transfer with an error, when none of its copies is under way.
func (r *receiver) fail(in *inbound, err error) {
	r.mu.Lock()
	told := r.ends(in)
	quiet := in.quiet
	r.mu.Unlock()
	if told == nil {
		return
	}
	if quiet != nil && !r.t.settled(quiet) {
		return // a copy of it may land for ever
	}
	r.tell(in, told, core.TransferStats{}, err)
}

// dismiss forgets a P agent: its link is closed, and what is expected of it is lost.
func (r *receiver) dismiss(peer core.AgentID) {
	r.mu.Lock()
	src := r.sources[peer]
	delete(r.sources, peer)
	r.mu.Unlock()
	if src != nil {
		src.leave(errDismissed)
	}
}

func (r *receiver) close() {
	r.mu.Lock()
	r.closed = true
	r.rest()
	var quiets []chan struct{}
	for _, in := range r.byID { // they stay there, for whoever revokes one beside Close
		in.gone = true
		r.bury(in)
		if q := r.halt(in); q != nil {
			quiets = append(quiets, q)
		}
	}
	var all []*source
	for _, src := range r.sources {
		all = append(all, src)
	}
	r.mu.Unlock()
	for _, q := range quiets {
		r.t.settled(q)
	}
	for _, src := range all {
		src.leave(errClosed)
	}
}

// linkEnded ends what is expected of a source, when no copy from it is under way.
func (r *receiver) linkEnded(src *source, err error) {
	var lost []*inbound
	var tolds []chan struct{}
	r.mu.Lock()
	if src.state == sourceDown { // its reader hangs, or did
		r.mu.Unlock()
		return
	}
	closed := r.closed
	down := !closed && r.sources[src.id] == src
	src.state, src.err, src.ended = sourceDown, err, time.Now()
	if down && src.anew && (src.again < fault.Pick("local-anew-always", mostAgain, 1<<30) || time.Since(src.begun) >= r.redial) {
		down = false // if they do not meet, that is told
		r.meetAnew(src)
	}
	for _, in := range r.byID {
		if in.source != src || in.stuck || in.hung > 0 {
			continue
		}
		if told := r.ends(in); told != nil {
			lost, tolds = append(lost, in), append(tolds, told)
		}
	}
	for waits := true; waits && src.flying > 0; { // also of transfers that were forgotten before
		if src.quiet == nil {
			src.quiet = make(chan struct{})
		}
		quiet := src.quiet
		r.mu.Unlock()
		waits = r.t.settled(quiet)
		r.mu.Lock()
	}
	for i := len(lost) - 1; i >= 0; i-- {
		if lost[i].stuck || lost[i].flying > 0 {
			lost[i].untold = tolds[i]
			lost, tolds = slices.Delete(lost, i, i+1), slices.Delete(tolds, i, i+1)
		}
	}
	r.mu.Unlock()
	if !fault.On("local-keeps-dead") {
		src.access.close() // first, since P waits for the socket's end: then nothing of its memory is open here
	}
	if src.link != nil {
		src.link.close()
	}
	src.settle()
	r.t.cfg.Logger.Debug("link ended", zap.String("peer", string(src.id)), zap.Error(err))
	for i, in := range lost {
		if closed {
			close(tolds[i])
			continue
		}
		r.tell(in, tolds[i], core.TransferStats{}, err)
	}
	if down {
		r.t.sink.PeerDown(src.id, err)
	}
}

// meetAnew connects anew, at once, to an agent that has asked for it. Transfers that the agent has not begun on the old link
// come on the new one; r.mu is held.
func (r *receiver) meetAnew(src *source) {
	next := &source{id: src.id, endpoint: src.endpoint, place: src.place, ticket: src.ticket, again: src.again + 1}
	if time.Since(src.begun) >= r.redial {
		next.again = 1
	}
	r.dial(next)
	for _, in := range r.byID {
		if in.source == src && in.first.IsZero() {
			in.source = next
		}
	}
}

// Usable implements core.Settler: while the two are meeting, it waits.
func (t *Transport) Usable(ctx context.Context, peer core.AgentID) error {
	r := &t.receiver
	for {
		r.mu.Lock()
		src := r.sources[peer]
		if src == nil {
			r.mu.Unlock()
			return fmt.Errorf("local: prefill agent %s is not connected", peer)
		}
		state, err := src.state, src.err
		if state == sourceMeeting && src.again > 0 {
			state = sourceUp // for new transfers, which wait
		}
		if state == sourceDown {
			r.again(src) // for a later transfer
		}
		r.mu.Unlock()
		switch state {
		case sourceUp:
			return nil
		case sourceDown:
			return err
		}
		select {
		case <-src.settled:
		case <-ctx.Done():
			return fmt.Errorf("local: prefill agent %s has not answered yet: %w", peer, ctx.Err())
		}
	}
}
