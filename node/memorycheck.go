package node

import (
	"errors"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/cuda"
	"github.com/kvconn/kvconn/internal/fault"
)

// memoryCheck is one check of the engine's memory, for transfers that were to begin before it is made: is it what was registered? It asks
// the driver, for each mapping under the regions once. So it belongs to the goroutine that begins transfers, and is
// made without the lock of the machine.
type memoryCheck struct {
	t    *transports
	done bool // at all regions
	err  error
}

// newMemoryCheck is one that is not made yet.
func (t *transports) newMemoryCheck() *memoryCheck {
	return &memoryCheck{t: t, done: fault.On("node-check-kept")}
}

// checkAll checks all regions.
func (l *memoryCheck) checkAll() error {
	if !l.done {
		l.done, l.err = true, l.t.checkMemory(l.t.devices.Check)
	}
	return l.err
}

// checkWrite checks the regions that a write reads. If a check of all regions has found a change, this one may still find none, since the
// change may be in regions that only other writes read.
func (l *memoryCheck) checkWrite(op *core.WriteOp) error {
	if op.Plan != nil || l.done && l.err == nil {
		return l.checkAll()
	}
	few, ok := l.t.devices.Few(op.Pairs)
	if !ok && !fault.On("node-check-few") {
		return l.checkAll()
	}
	return l.t.checkMemory(func() error { return l.t.devices.CheckFew(few) })
}

// checkMemory says what a check finds. If a region's memory has changed, the transports that have registered it with cards give it up. If
// the agent takes the new memory while the check runs, the check has found something of the old memory, and checkMemory repeats it.
func (t *transports) checkMemory(check func() error) error {
	if t.devices == nil {
		return nil
	}
	_, err := t.checkMemoryAt(check)
	return err
}

// checkMemoryAt is checkMemory for an agent with devices. epoch is the epoch of the memory that the check has looked at.
func (t *transports) checkMemoryAt(check func() error) (epoch uint64, changed error) {
	for {
		epoch, changed = t.devices.Epoch(), check()
		if changed == nil || !isChange(changed) && t.devices.Check() == nil { // the driver has failed once
			return epoch, changed
		}
		if t.deregister(epoch, changed) {
			return epoch, changed
		}
	}
}

// deregister has the cards give up the memory of an epoch. If the agent has taken other memory since, deregister does nothing and
// returns false.
func (t *transports) deregister(epoch uint64, changed error) bool {
	t.taking.Lock()
	defer t.taking.Unlock()
	if t.devices.Epoch() != epoch && !fault.On("node-check-of-earlier-memory") {
		return false
	}
	if isChange(changed) {
		t.changed.Store(true)
	}
	for _, w := range t.list {
		if r, ok := w.(registering); ok {
			r.Forget(changed)
		}
	}
	return true
}

func isChange(err error) bool {
	var changed *cuda.ChangedError
	return errors.As(err, &changed)
}
