package node

import (
	"errors"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/cuda"
	"github.com/kvconn/kvconn/internal/fault"
)

// look is one look at the engine's memory, for transfers that were to begin before it is made: is it what was registered? It asks
// the driver, for each mapping under the regions once. So it belongs to the goroutine that begins transfers, and is
// made without the lock of the machine.
type look struct {
	t     *transports
	made  bool // at all regions
	found error
}

// look is one that is not made yet.
func (t *transports) look() *look { return &look{t: t, made: fault.On("node-look-kept")} }

// all looks at all regions.
func (l *look) all() error {
	if !l.made {
		l.made, l.found = true, l.t.checked(l.t.devices.Check)
	}
	return l.found
}

// of looks at the regions that a write reads. If a look at all has found something, it may be in the way of other writes only.
func (l *look) of(op *core.WriteOp) error {
	if op.Plan != nil || l.made && l.found == nil {
		return l.all()
	}
	few, ok := l.t.devices.Few(op.Pairs)
	if !ok && !fault.On("node-look-few") {
		return l.all()
	}
	return l.t.checked(func() error { return l.t.devices.CheckFew(few) })
}

// checked says what a look finds. If a region's memory has changed, a transport that has registered it with cards gives it up. If the
// agent takes the new memory while the look is made, what the look has found is of before, and it is made once more.
func (t *transports) checked(look func() error) error {
	if t.devices == nil {
		return nil
	}
	_, err := t.checkedAt(look)
	return err
}

// checkedAt is checked where there are devices. The epoch is that of which the look has found something.
func (t *transports) checkedAt(look func() error) (epoch uint64, changed error) {
	for {
		epoch, changed = t.devices.Epoch(), look()
		if changed == nil || !isChange(changed) && t.devices.Check() == nil { // the driver has failed once
			return epoch, changed
		}
		if t.giveUp(epoch, changed) {
			return epoch, changed
		}
	}
}

// giveUp has cards give up the memory of an epoch. It does nothing if the agent has taken other memory since.
func (t *transports) giveUp(epoch uint64, changed error) bool {
	t.taking.Lock()
	defer t.taking.Unlock()
	if t.devices.Epoch() != epoch && !fault.On("node-look-of-before") {
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
