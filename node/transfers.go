// D chooses one transport for each transfer. The grant names it, so that P writes by the same one.

package node

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
)

// errClosing ends what would begin after Close.
var errClosing = fmt.Errorf("agent: %w", core.ErrTransportClosed)

// Expect arms the first transport that is usable with the peer now.
func (t *transports) Expect(id core.TransferID, peer core.AgentID, to *receivePlan, l *memoryCheck) ([]byte, error) {
	if err := l.checkAll(); err != nil && !fault.On("node-load-unchecked") {
		return nil, err
	}
	if t.closing.Load() { // while the driver was asked
		return nil, errClosing
	}
	var passed []passedOver
	for _, w := range t.list {
		err := t.usable(w, peer)
		if err == nil {
			t.begin(half{id, core.SideLoad}, peer, w) // it may be received before Expect returns
			var grant []byte
			if grant, err = to.expect(w, id, peer); err == nil {
				t.chosen(peer, core.SideLoad, w.Name(), passed, true)
				return addTransportName(w.Name(), grant), nil
			}
		}
		passed = append(passed, passedOver{w.Name(), err})
	}
	return nil, ownFault(passed, t.noTransport(peer, passed))
}

// ownFault marks an error as this agent's own fault, if nothing but its own memory is in the way: another prefill agent would not help.
func ownFault(passed []passedOver, err error) error {
	others := func(o passedOver) bool { return !errors.Is(o.why, core.ErrMemory) }
	if fault.On("node-own-fault") || len(passed) == 0 || slices.ContainsFunc(passed, others) {
		return err
	}
	return fmt.Errorf("%w: %w", core.ErrMemory, err)
}

// Revoke may wait, but holds up its caller only: see core.Transport.
func (t *transports) Revoke(id core.TransferID) error {
	if w := t.of(half{id, core.SideLoad}); w != nil {
		return w.Revoke(id)
	}
	return nil
}

// Write starts to send by the transport that the grant names.
func (t *transports) Write(op core.WriteOp, l *memoryCheck) {
	name, grant := splitTransportName(op.Grant)
	w := t.named(name)
	if w == nil {
		t.sink(name).Written(op.ID, core.TransferStats{}, fmt.Errorf("the grant of transfer %q is for transport %q, but this agent has %s", string(op.ID), name, t))
		return
	}
	if err := l.checkWrite(&op); err != nil && !fault.On("node-write-unchecked") {
		t.sink(name).Written(op.ID, core.TransferStats{}, err)
		return
	}
	if t.closing.Load() {
		t.sink(name).Written(op.ID, core.TransferStats{}, errClosing)
		return
	}
	t.begin(half{op.ID, core.SideOffer}, op.Peer, w)
	t.chosen(op.Peer, core.SideOffer, name, nil, false)
	op.Grant = grant
	w.Write(op)
}

// Extend gives more of a write.
func (t *transports) Extend(op core.WriteOp, l *memoryCheck) {
	w := t.of(half{op.ID, core.SideOffer})
	if w == nil {
		return
	}
	if err := l.checkWrite(&op); err != nil && !fault.On("node-more-unchecked") {
		t.mu.Lock()
		t.memoryChanged[op.ID] = err
		t.mu.Unlock()
		w.Stop(op.ID)
		return
	}
	if t.closing.Load() {
		return // the transport tells how the write has ended
	}
	_, op.Grant = splitTransportName(op.Grant)
	w.Extend(op)
}

// Stop ends a write early.
func (t *transports) Stop(id core.TransferID) {
	if w := t.of(half{id, core.SideOffer}); w != nil {
		w.Stop(id)
	}
}

func (t *transports) begin(h half, peer core.AgentID, w core.Transport) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if h.side == core.SideOffer {
		delete(t.memoryChanged, h.id) // of a write of the same id that ended by itself
		delete(t.failedWrites, h)
	}
	t.active[h] = transportOf{peer, w}
}

func (t *transports) of(h half) core.Transport {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.active[h].via
}

// ended takes a report and returns the name of the transport that moved the bytes, ""
// if none was chosen. From now on the id may be used again.
func (t *transports) ended(r core.Report) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	name := ""
	for _, id := range slices.Concat(r.Parts, []core.TransferID{r.ID}) {
		h := half{id, r.Side}
		c, ok := t.active[h]
		if !ok {
			if c, ok = t.failedWrites[h]; !ok {
				continue
			}
		}
		delete(t.active, h)
		delete(t.failedWrites, h)
		if p := t.pairs[c.peer]; p != nil && r.Code == core.OK {
			p.transfers[c.via.Name()]++
		}
		name = cmp.Or(name, c.via.Name())
	}
	if name = cmp.Or(r.Stats.Via, name); name != "" { // the report's figures are those of all parts
		t.moved[name].add(r)
	}
	return name
}

// written notes that an offer's write has ended, and returns the error to tell the machine. The offer's report
// may come long after that. If the engine has not offered the transfer yet, it may never come.
func (t *transports) written(id core.TransferID, name string, err error) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err != nil {
		err = cmp.Or(t.memoryChanged[id], err)
	}
	delete(t.memoryChanged, id)
	h := half{id, core.SideOffer}
	c, ok := t.active[h]
	delete(t.active, h)
	switch p := t.pairs[c.peer]; {
	case err != nil && ok: // D may still say that it has all bytes: only the report tells how the offer ended
		if len(t.failedWrites) == maxFailedWrites {
			for old := range t.failedWrites {
				delete(t.failedWrites, old)
				break
			}
		}
		t.failedWrites[h] = c
	case err == nil && p != nil:
		p.transfers[name]++
	}
	return err
}

// maxFailedWrites bounds the writes with an error whose reports are awaited. Most reports come at once. Some never do: see written.
const maxFailedWrites = 64

// sink feeds one transport's outcomes to the machine.
type sink struct {
	t    *transports
	name string
}

func (t *transports) sink(name string) sink { return sink{t, name} }

// Received implements core.Sink.
func (s sink) Received(id core.TransferID, st core.TransferStats, err error) {
	s.t.machine.Received(id, st, err)
}

// Written implements core.Sink.
func (s sink) Written(id core.TransferID, st core.TransferStats, err error) {
	err = s.t.written(id, s.name, err)
	st.Via = s.name
	s.t.machine.Written(id, st, err)
}

// PeerDown implements core.Sink.
func (s sink) PeerDown(peer core.AgentID, err error) {
	s.t.log.Debug("connection to a peer ended", zap.String("peer", string(peer)), zap.String("transport", s.name), zap.Error(err))
	if s.t.connectionLost(peer, s.name) {
		s.t.suspect(peer)
	}
	s.t.machine.PeerDown(peer, err)
}
