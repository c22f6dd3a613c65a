package node

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/core/machine"
	"github.com/kvconn/kvconn/internal/fault"
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
// its lock and clock, and the actions that wait to be performed.
type halves struct {
	clock   core.Clock
	reports Reports
	ended   func(core.Report) core.Report // completes a report for the engine; called under the lock

	mu          sync.Mutex
	state       agentState
	machine     *machine.Machine
	outstanding int  // accepted offers and loads without a report
	memory      todo // actions of core.OfMemory
	control     todo // the others; it is woken while the machine is busy, too
	reads       []*readWait
}

// todo are actions that wait for the goroutine that performs them, in their order. The lock of the halves guards it.
type todo struct {
	wake       chan struct{} // holds a value when there are some
	list       []core.Action
	writes     map[core.TransferID]int // of each transfer, the place of a Write to which more may be given
	performing bool                    // the goroutine has taken some and is not done
}

func newTodo() todo { return todo{wake: make(chan struct{}, 1), writes: map[core.TransferID]int{}} }

// add adds an action. If a Write extends one that waits too, the two become one: so the list does not grow with each layer while the
// driver does not answer.
func (q *todo) add(act core.Action) {
	switch v := act.(type) {
	case core.Write:
		if i, waits := q.writes[v.ID]; waits && v.Extends && !fault.On("node-writes-apart") {
			first := q.list[i].(core.Write)
			v.Begin, v.Extends = first.Begin, first.Extends
			q.list[i] = v
			return
		}
		q.writes[v.ID] = len(q.list)
	case core.StopWrite:
		delete(q.writes, v.ID)
	}
	q.list = append(q.list, act)
}

func (q *todo) signal() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

func (q *todo) idle() bool { return len(q.list) == 0 && !q.performing }

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
		h.step(h.clock.Now(), core.Close{})
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

// call is a call of the engine: f runs under the lock.
func (h *halves) call(f func(now time.Time) error) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.enter(stateRegistered); err != nil {
		return err
	}
	return f(h.clock.Now())
}

// request takes an event of the engine, or says why not; the lock is held.
func (h *halves) request(now time.Time, e core.Event) error {
	if refused, ok := h.step(now, e).(core.Refuse); ok {
		return refused.Err
	}
	return nil
}

// each accepts a batch in order, up to the first element that is refused; n is the
// number of elements before it. The engine gets as many reports of each element.
func each[T any](h *halves, list []T, reports int, accept func(now time.Time, v T) error) (n int, err error) {
	err = h.call(func(now time.Time) error {
		for _, v := range list {
			if err := h.fits(reports); err != nil {
				return err
			}
			h.outstanding += reports
			if err := accept(now, v); err != nil {
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
	return each(h, parts, 0, func(now time.Time, p core.PartialOffer) error { return h.request(now, p) })
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

// tell tells the machine of an event of this instant and returns the answer. It does so also while the agent
// closes, and does nothing while there is no machine.
func (h *halves) tell(e core.Event) (answer core.Action) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.machine == nil {
		return nil
	}
	return h.step(h.clock.Now(), e)
}

// finished tells what a peer says of transfers' ends. It gives the lock back between them: each may be of a share of a transfer that
// nobody has heard of.
func (h *halves) finished(from core.AgentID, account core.Account, list []wire.Finish) {
	for _, f := range list {
		if id := core.TransferID(f.TransferID); f.Restart != "" {
			h.tell(core.RestartMessage{From: from, ID: id, Digest: f.Restart})
		} else {
			h.tell(core.FinishMessage{From: from, Account: account, ID: id, Code: core.Code(f.Code), Reason: f.Reason})
		}
	}
}

// renewReplied gives the lock back between the parts of a long answer.
func (h *halves) renewReplied(v core.SendRenew, answers []core.Answer, absent bool, err error) {
	for part, some := range v.Parts(answers) {
		h.tell(core.RenewReplied{Renewal: part, Answers: some, Absent: absent, Err: err})
	}
}

// step tells the machine of one event and moves its actions on; the lock is held. The answer is the
// caller's. Reports go to the engine at once, the rest to the goroutines that perform them, in order.
func (h *halves) step(now time.Time, e core.Event) core.Action {
	answer, rest := core.Split(h.machine.Step(now, e))
	for _, act := range rest {
		if r, ok := act.(core.Report); ok {
			h.report(r)
		} else if core.OfMemory(act) {
			h.memory.add(act)
		} else {
			h.control.add(act)
		}
	}
	if len(h.reads) > 0 {
		h.checkReads()
	}
	if len(h.memory.list) > 0 {
		h.memory.signal()
	}
	if len(h.control.list) > 0 || h.machine.Busy() {
		h.control.signal()
	}
	return answer
}

// report tells the engine an end; the lock is held. When the agent is closed nobody takes it: a transport that Close has given up may
// close later.
func (h *halves) report(r core.Report) {
	if h.state == stateClosed {
		return
	}
	if r.Side != core.SideClaim { // the machine counts these itself
		h.outstanding--
	}
	h.reports.Push(h.ended(r))
}

// take gives the actions that wait, and whether the machine must be told the time.
// The caller performs them and then calls performed.
func (h *halves) take(q *todo) (list []core.Action, busy bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	list, q.list, q.performing = q.list, nil, true
	clear(q.writes)
	return list, h.machine != nil && h.machine.Busy()
}

func (h *halves) performed(q *todo) {
	h.mu.Lock()
	defer h.mu.Unlock()
	q.performing = false
}

// idle: the machine holds nothing, and all that it wanted is done.
func (h *halves) idle() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.machine == nil || !h.machine.Busy() && h.control.idle() && h.memory.idle()
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

// Tick also wakes the goroutine of run, which stops the ticker of an idle machine.
func (h *halves) Tick() {
	h.tell(core.Tick{})
	h.control.signal()
}

var _ core.Sink = (*halves)(nil)

// Received implements core.Sink.
func (h *halves) Received(id core.TransferID, s core.TransferStats, err error) {
	h.tell(core.Received{ID: id, Stats: s, Err: err})
}

// Written implements core.Sink.
func (h *halves) Written(id core.TransferID, s core.TransferStats, err error) {
	h.tell(core.Written{ID: id, Stats: s, Err: err})
}

// PeerDown implements core.Sink.
func (h *halves) PeerDown(peer core.AgentID, _ error) {
	h.tell(core.PeerDown{Peer: peer})
}
