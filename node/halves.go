package node

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/wire"
)

// ErrNotRegistered: a transfer was asked for before RegisterKVCaches.
var ErrNotRegistered = errors.New("no KV caches are registered")

type agentState int

const (
	stateOpen agentState = iota
	stateRegistering
	stateRegistered
	stateClosing
	stateClosed
)

// halves are an agent's halves of transfers: the machine that decides about them,
// its lock and clock, and the actions that wait to be performed. A method with the
// name of one of core.Machine calls the machine's at this instant, also while the
// agent closes, and does nothing while there is no machine.
type halves struct {
	clock   core.Clock
	reports Reports
	ended   func(core.Report) core.Report // completes a report for the engine; called under the lock
	wake    chan struct{}                 // holds a value when there are actions, or the machine is busy

	mu          sync.Mutex
	state       agentState
	machine     *core.Machine
	outstanding int           // accepted offers and loads without a report
	actions     []core.Action // in order
	performing  bool          // the run goroutine has taken actions and is not done
	reads       []*readWait
}

// readWait is a call that waits until blocks are read no more.
type readWait struct {
	ids  []core.TransferID // whose blocks may be read
	done chan struct{}
}

// enter says why a call is not possible now; the lock is held.
func (h *halves) enter(want agentState) error {
	switch {
	case h.state >= stateClosing:
		return core.ErrClosed
	case want == stateOpen && h.state != stateOpen:
		return fmt.Errorf("%w: KV caches are registered already", core.ErrDuplicate)
	case want == stateRegistered && h.state != stateRegistered:
		return fmt.Errorf("%w: call register_kv_caches first", ErrNotRegistered)
	}
	return nil
}

// move goes from one state to another and calls with under the lock. If the agent is in
// another state than from, because it was closed meanwhile, move does neither.
func (h *halves) move(from, to agentState, with func()) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if from == stateOpen {
		if err := h.enter(stateOpen); err != nil {
			return err
		}
	}
	if h.state != from {
		return core.ErrClosed
	}
	h.state = to
	if with != nil {
		with()
	}
	return nil
}

// close ends all halves; false if they were closed before.
func (h *halves) close() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.state >= stateClosing {
		return false
	}
	h.state = stateClosing
	if h.machine != nil {
		h.machine.Close(h.clock.Now())
		h.collect()
	}
	return true
}

// whileRegistered calls f under the lock and says that it did, if calls of the
// engine are possible now.
func (h *halves) whileRegistered(f func()) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.state != stateRegistered {
		return false
	}
	f()
	return true
}

// call makes calls of the engine.
func (h *halves) call(f func(m *core.Machine, now time.Time) error) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.enter(stateRegistered); err != nil {
		return err
	}
	err := f(h.machine, h.clock.Now())
	h.collect()
	return err
}

// each accepts a batch in order, up to the first element that is refused; n is the
// number of elements before it. The engine gets as many reports of each element.
func each[T any](h *halves, list []T, reports int, f func(m *core.Machine, now time.Time, v T) error) (n int, err error) {
	err = h.call(func(m *core.Machine, now time.Time) error {
		for _, v := range list {
			if err := h.fits(reports); err != nil {
				return err
			}
			h.outstanding += reports
			if err := f(m, now, v); err != nil {
				h.outstanding -= reports
				return err
			}
			n++
		}
		return nil
	})
	return n, err
}

// OfferPartial accepts parts of transfers.
func (h *halves) OfferPartial(parts []core.PartialOffer) (int, error) {
	return each(h, parts, 0, func(m *core.Machine, now time.Time, g core.PartialOffer) error { return m.OfferPartial(now, g) })
}

// fits says why n more reports may not fit; the lock is held. The machine counts
// the claims that may be reported, since most end without a report.
func (h *halves) fits(n int) error {
	busy, unread := h.outstanding+h.machine.Untold(), h.reports.Unread()
	if busy+unread+n > h.reports.Capacity() {
		return fmt.Errorf("%w: %d transfers are under way and %d finished ones are not collected, so %d more do not fit (max_transfers)", core.ErrOverload, busy, unread, n)
	}
	return nil
}

// event tells the machine of an event.
func (h *halves) event(f func(m *core.Machine, now time.Time)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.machine != nil {
		f(h.machine, h.clock.Now())
		h.collect()
	}
}

// collect moves the machine's actions on; the lock is held. Reports go to the
// engine at once, the rest to the run goroutine, in order.
func (h *halves) collect() {
	n := len(h.actions)
	for _, act := range h.machine.Actions() {
		r, ok := act.(core.Report)
		if !ok {
			h.actions = append(h.actions, act)
			continue
		}
		if r.Side != core.SideClaim { // the machine counts these itself
			h.outstanding--
		}
		h.reports.Push(h.ended(r))
	}
	if len(h.reads) > 0 {
		h.checkReads()
	}
	if len(h.actions) > n || h.machine.Busy() {
		h.signal()
	}
}

func (h *halves) signal() {
	select {
	case h.wake <- struct{}{}:
	default:
	}
}

// take gives the actions that wait, and whether the machine must be told the time.
// The caller performs them and then calls performed.
func (h *halves) take() (list []core.Action, busy bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	list, h.actions, h.performing = h.actions, nil, true
	return list, h.machine != nil && h.machine.Busy()
}

func (h *halves) performed() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.performing = false
}

// idle: the machine holds nothing, and all that it wanted is done.
func (h *halves) idle() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.machine == nil || !h.machine.Busy() && len(h.actions) == 0 && !h.performing
}

// reading returns a wait until the blocks of ids are not read; nil if none is read
// now.
func (h *halves) reading(ids []core.TransferID) *readWait {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.machine == nil {
		return nil
	}
	read := slices.DeleteFunc(slices.Clone(ids), func(id core.TransferID) bool { return !h.machine.Reading(id) })
	if len(read) == 0 {
		return nil
	}
	w := &readWait{read, make(chan struct{})}
	h.reads = append(h.reads, w)
	return w
}

// giveUp ends a wait; it returns an id whose blocks are still read, if there is one.
func (h *halves) giveUp(w *readWait) (id core.TransferID, read bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.reads = slices.DeleteFunc(h.reads, func(r *readWait) bool { return r == w })
	if len(w.ids) == 0 { // just now
		return "", false
	}
	return w.ids[0], true
}

// checkReads wakes the calls whose blocks are read no more; the lock is held.
func (h *halves) checkReads() {
	h.reads = slices.DeleteFunc(h.reads, func(w *readWait) bool {
		w.ids = slices.DeleteFunc(w.ids, func(id core.TransferID) bool { return !h.machine.Reading(id) })
		if len(w.ids) == 0 {
			close(w.done)
		}
		return len(w.ids) == 0
	})
}

// Tick also wakes the run goroutine, which stops the ticker of an idle machine.
func (h *halves) Tick() {
	h.event(func(m *core.Machine, now time.Time) { m.Tick(now) })
	h.signal()
}

func (h *halves) Abandon() { h.event(func(m *core.Machine, now time.Time) { m.Abandon(now) }) }
func (h *halves) Resolved(r core.Resolve, peer core.AgentID, opened time.Time, code core.Code, reason string) {
	h.event(func(m *core.Machine, now time.Time) { m.Resolved(now, r.ID, r.Seq, peer, opened, code, reason) })
}
func (h *halves) ResolvedParts(r core.Resolve, found []core.FoundPart) {
	h.event(func(m *core.Machine, now time.Time) { m.ResolvedParts(now, r.ID, r.Seq, found) })
}
func (h *halves) Expecting(id core.TransferID, grant []byte, err error) {
	h.event(func(m *core.Machine, now time.Time) { m.Expecting(now, id, grant, err) })
}
func (h *halves) LoadAnswered(v core.SendLoad, answer core.LoadAnswer, code core.Code, reason string) {
	h.event(func(m *core.Machine, now time.Time) { m.LoadAnswered(now, v.ID, v.Seq, answer, code, reason) })
}
func (h *halves) RenewReplied(v core.SendRenew, answers []core.Answer, absent bool, err error) {
	for part, some := range v.Parts(answers) {
		h.event(func(m *core.Machine, now time.Time) { m.RenewReplied(now, part, some, absent, err) })
	}
}
func (h *halves) ProbeReplied(peer core.AgentID, absent, away bool, err error) {
	h.event(func(m *core.Machine, now time.Time) { m.ProbeReplied(now, peer, absent, away, err) })
}
func (h *halves) Revoked(id core.TransferID) {
	h.event(func(m *core.Machine, now time.Time) { m.Revoked(now, id) })
}

// moment tells that a moment has passed, or why nobody will know.
func (h *halves) moment(at core.Moment, err error) {
	h.event(func(m *core.Machine, now time.Time) {
		if err != nil {
			m.MomentFailed(now, at, err)
		} else {
			m.MomentPassed(now, at)
		}
	})
}

func (h *halves) LoadArrived(msg core.LoadMessage) (code core.Code, reason string) {
	h.event(func(m *core.Machine, now time.Time) { code, reason = m.LoadArrived(now, msg) })
	return code, reason
}

func (h *halves) RenewArrived(from core.AgentID, loads, claims []core.TransferID) (answers []core.Answer) {
	h.event(func(m *core.Machine, now time.Time) { answers = m.RenewArrived(now, from, loads, claims) })
	return answers
}

// FinishArrived takes all of a message at once.
func (h *halves) FinishArrived(from core.AgentID, list []wire.Finish) {
	h.event(func(m *core.Machine, now time.Time) {
		for _, f := range list {
			if id := core.TransferID(f.TransferID); f.Restart != "" {
				m.RestartArrived(from, id, f.Restart)
			} else {
				m.FinishArrived(now, from, id, core.Code(f.Code), f.Reason)
			}
		}
	})
}

var _ core.Sink = (*halves)(nil)

// Received implements core.Sink.
func (h *halves) Received(id core.TransferID, s core.TransferStats, err error) {
	h.event(func(m *core.Machine, now time.Time) { m.Received(now, id, s, err) })
}

// Written implements core.Sink.
func (h *halves) Written(id core.TransferID, s core.TransferStats, err error) {
	h.event(func(m *core.Machine, now time.Time) { m.Written(now, id, s, err) })
}

// PeerDown implements core.Sink.
func (h *halves) PeerDown(peer core.AgentID, _ error) {
	h.event(func(m *core.Machine, now time.Time) { m.PeerDown(now, peer) })
}
