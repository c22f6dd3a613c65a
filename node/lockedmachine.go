// The machine and its lock: each event goes in here; reports go to the engine at once, other actions to the goroutines
// of run.go.

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

// lockedMachine holds an agent's halves of transfers: the machine that decides about them,
// its lock and clock, and the actions that wait to be performed.
type lockedMachine struct {
	clock   core.Clock
	reports Reports
	ended   func(core.Report) core.Report // completes a report for the engine; called under the lock

	mu          sync.Mutex
	state       agentState
	inner       *machine.Machine
	outstanding int         // accepted offers and loads without a report
	memory      actionQueue // actions of core.OfMemory
	control     actionQueue // all other actions; its goroutine is also woken while the machine is busy
	reads       []*readWait
}

// actionQueue holds actions that wait for the goroutine that performs them, in their order. The lock of the halves guards it.
type actionQueue struct {
	wake       chan struct{} // holds a value when there are actions
	list       []core.Action
	writes     map[core.TransferID]int // by transfer: the index of a Write that further blocks may be added to
	performing bool                    // the goroutine has taken actions and is not done with them
}

func newActionQueue() actionQueue {
	return actionQueue{wake: make(chan struct{}, 1), writes: map[core.TransferID]int{}}
}

// add adds an action. If a Write extends one that waits too, the two become one: so the list does not grow with each layer while the
// driver does not answer.
func (q *actionQueue) add(act core.Action) {
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

func (q *actionQueue) signal() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

func (q *actionQueue) idle() bool { return len(q.list) == 0 && !q.performing }

// readWait is the wait of a call until nothing reads blocks any more.
type readWait struct {
	ids  []core.TransferID // whose blocks may be read
	done chan struct{}
}

// mayCall says why a call is not possible now; the lock is held.
func (m *lockedMachine) mayCall(want agentState) error {
	switch {
	case m.state >= stateClosing:
		return core.ErrClosed
	case want == stateOpen && m.state != stateOpen:
		return fmt.Errorf("%w: KV caches are registered already", core.ErrDuplicate)
	case want == stateRegistered && m.state != stateRegistered:
		return fmt.Errorf("%w: call register_kv_caches first", ErrNotRegistered)
	}
	return nil
}

// setState changes the agent's state and calls with, both under the lock. If the agent is in another
// state than from, because it was closed meanwhile, setState changes nothing and does not call with.
func (m *lockedMachine) setState(from, to agentState, with func()) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if from == stateOpen {
		if err := m.mayCall(stateOpen); err != nil {
			return err
		}
	}
	if m.state != from {
		return core.ErrClosed
	}
	m.state = to
	if with != nil {
		with()
	}
	return nil
}

// close ends all halves. It returns false if the machine was closed before.
func (m *lockedMachine) close() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.state >= stateClosing {
		return false
	}
	m.state = stateClosing
	if m.inner != nil {
		m.step(m.clock.Now(), core.Close{})
	}
	return true
}

// whileRegistered calls f under the lock and says that it did, if calls of the
// engine are possible now.
func (m *lockedMachine) whileRegistered(f func()) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.state != stateRegistered {
		return false
	}
	f()
	return true
}

// call is a call of the engine: f runs under the lock.
func (m *lockedMachine) call(f func(now time.Time) error) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.mayCall(stateRegistered); err != nil {
		return err
	}
	return f(m.clock.Now())
}

// request tells the machine an event of the engine. If the machine refuses the event, the error says why; the lock is held.
func (m *lockedMachine) request(now time.Time, e core.Event) error {
	if refused, ok := m.step(now, e).(core.Refuse); ok {
		return refused.Err
	}
	return nil
}

// each accepts a batch in order, up to the first element that is refused; n is the
// number of elements before that. reports is how many reports the engine gets of each element.
func each[T any](m *lockedMachine, list []T, reports int, accept func(now time.Time, v T) error) (n int, err error) {
	err = m.call(func(now time.Time) error {
		for _, v := range list {
			if err := m.fits(reports); err != nil {
				return err
			}
			m.outstanding += reports
			if err := accept(now, v); err != nil {
				m.outstanding -= reports
				return err
			}
			n++
		}
		return nil
	})
	return n, err
}

// OfferPartial accepts parts of transfers.
func (m *lockedMachine) OfferPartial(parts []core.PartialOffer) (int, error) {
	return each(m, parts, 0, func(now time.Time, p core.PartialOffer) error { return m.request(now, p) })
}

// fits says why n more reports may not fit; the lock is held. The machine counts
// the claims that may be reported, since most end without a report.
func (m *lockedMachine) fits(n int) error {
	busy, unread := m.outstanding+m.inner.Untold(), m.reports.Unread()
	if busy+unread+n > m.reports.Capacity() {
		return fmt.Errorf("%w: %d transfers are under way and %d finished ones are not collected, so %d more do not fit (max_transfers)", core.ErrOverload, busy, unread, n)
	}
	return nil
}

// tell tells the machine an event that has happened now, and returns the answer. It does so even while the agent
// closes. If there is no machine yet, it does nothing.
func (m *lockedMachine) tell(e core.Event) (answer core.Action) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.inner == nil {
		return nil
	}
	return m.step(m.clock.Now(), e)
}

// finished tells the machine a peer's messages about transfers that have ended. It gives the lock back after each of them, since each
// may be about a share of a transfer that nobody has heard of, and so take some time.
func (m *lockedMachine) finished(from core.AgentID, account core.Account, list []wire.Finish) {
	for _, f := range list {
		if id := core.TransferID(f.TransferID); f.Restart != "" {
			m.tell(core.RestartMessage{From: from, ID: id, Digest: f.Restart})
		} else {
			m.tell(core.FinishMessage{From: from, Account: account, ID: id, Code: core.Code(f.Code), Reason: f.Reason})
		}
	}
}

// renewReplied tells the machine the answer to a renewal. It gives the lock back between the parts of a long answer.
func (m *lockedMachine) renewReplied(v core.SendRenew, answers []core.Answer, absent bool, err error) {
	for part, some := range v.Parts(answers) {
		m.tell(core.RenewReplied{Renewal: part, Answers: some, Absent: absent, Err: err})
	}
}

// step tells the machine one event and passes its actions on; the lock is held. It returns the answer to the
// caller. Reports go to the engine at once; the other actions go to the goroutines that perform them, in order.
func (m *lockedMachine) step(now time.Time, e core.Event) core.Action {
	answer, rest := core.Split(m.inner.Step(now, e))
	for _, act := range rest {
		if r, ok := act.(core.Report); ok {
			m.report(r)
		} else if core.OfMemory(act) {
			m.memory.add(act)
		} else {
			m.control.add(act)
		}
	}
	if len(m.reads) > 0 {
		m.checkReads()
	}
	if len(m.memory.list) > 0 {
		m.memory.signal()
	}
	if len(m.control.list) > 0 || m.inner.Busy() {
		m.control.signal()
	}
	return answer
}

// report gives the engine a report; the lock is held. If the agent is closed, nobody takes reports any more: one may still come, when
// a transport closes later that Close has given up.
func (m *lockedMachine) report(r core.Report) {
	if m.state == stateClosed {
		return
	}
	if r.Side != core.SideClaim { // the machine counts these itself
		m.outstanding--
	}
	m.reports.Push(m.ended(r))
}

// take returns the actions that wait. busy says that the machine must be told the time.
// The caller performs the actions and then calls performed.
func (m *lockedMachine) take(q *actionQueue) (list []core.Action, busy bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	list, q.list, q.performing = q.list, nil, true
	clear(q.writes)
	return list, m.inner != nil && m.inner.Busy()
}

func (m *lockedMachine) performed(q *actionQueue) {
	m.mu.Lock()
	defer m.mu.Unlock()
	q.performing = false
}

// idle says whether the machine holds nothing, and all its actions are performed.
func (m *lockedMachine) idle() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.inner == nil || !m.inner.Busy() && m.control.idle() && m.memory.idle()
}

// waitForReads returns a wait that ends when nothing reads the blocks of ids any more; nil if
// nothing reads them now.
func (m *lockedMachine) waitForReads(ids []core.TransferID) *readWait {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.inner == nil {
		return nil
	}
	read := slices.DeleteFunc(slices.Clone(ids), func(id core.TransferID) bool { return !m.inner.Reading(id) })
	if len(read) == 0 {
		return nil
	}
	w := &readWait{read, make(chan struct{})}
	m.reads = append(m.reads, w)
	return w
}

// abandonRead gives a wait up. If blocks are still read, it returns the id of one such transfer.
func (m *lockedMachine) abandonRead(w *readWait) (id core.TransferID, read bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.reads = slices.DeleteFunc(m.reads, func(r *readWait) bool { return r == w })
	if len(w.ids) == 0 { // the wait has ended just now
		return "", false
	}
	return w.ids[0], true
}

// checkReads ends the waits whose blocks nothing reads any more; the lock is held.
func (m *lockedMachine) checkReads() {
	m.reads = slices.DeleteFunc(m.reads, func(w *readWait) bool {
		w.ids = slices.DeleteFunc(w.ids, func(id core.TransferID) bool { return !m.inner.Reading(id) })
		if len(w.ids) == 0 {
			close(w.done)
		}
		return len(w.ids) == 0
	})
}

// Tick also wakes the goroutine of run, which stops the ticker of an idle machine.
func (m *lockedMachine) Tick() {
	m.tell(core.Tick{})
	m.control.signal()
}

var _ core.Sink = (*lockedMachine)(nil)

// Received implements core.Sink.
func (m *lockedMachine) Received(id core.TransferID, s core.TransferStats, err error) {
	m.tell(core.Received{ID: id, Stats: s, Err: err})
}

// Written implements core.Sink.
func (m *lockedMachine) Written(id core.TransferID, s core.TransferStats, err error) {
	m.tell(core.Written{ID: id, Stats: s, Err: err})
}

// PeerDown implements core.Sink.
func (m *lockedMachine) PeerDown(peer core.AgentID, _ error) {
	m.tell(core.PeerDown{Peer: peer})
}
