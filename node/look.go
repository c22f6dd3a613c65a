package node

import (
	"errors"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/cuda"
)

// look is one look at the engine's memory, for transfers that were to begin before it is made: is it what was registered? It asks
// the driver, for each mapping under the regions once. So it belongs to the goroutine that begins transfers, and is
// made without the lock of the machine.
type look struct {
	t     *transports
	made  bool
	found error
}

// all looks at all regions.
func (l *look) all() error {
	if !l.made {
		l.made, l.found = true, l.t.sound(l.t.devices.Check())
	}
	return l.found
}

// of looks at the regions that a write reads.
func (l *look) of(op *core.WriteOp) error {
	few, ok := l.t.devices.Few(op.Pairs)
	if op.Plan != nil || !ok || l.made && l.found == nil {
		return l.all()
	}
	return l.t.sound(l.t.devices.CheckFew(few))
}

// sound hands on what a look has found. If a region's memory has changed, a transport that
// has registered it with cards gives it up, unless the agent has taken the new memory since.
func (t *transports) sound(changed error) error {
	if changed == nil || t.devices.Check() == nil {
		return changed
	}
	if isChange(changed) {
		t.changed.Store(true)
	}
	for _, w := range t.list {
		if r, ok := w.(registering); ok {
			r.Forget(changed)
		}
	}
	return changed
}

func isChange(err error) bool {
	var changed *cuda.ChangedError
	return errors.As(err, &changed)
}
