// If an engine has slept, other memory lies at its addresses: the old memory's transfers end before new ones begin.

package node

import (
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/core/machine"
	"github.com/kvconn/kvconn/internal/fault"
)

// registering is a transport that has registered device memory with cards.
type registering interface {
	// Forget gives the registered memory up, since the engine's memory is not what was registered any more.
	// Transfers that are under way end with the cause. Forget is called under the agent's lock, and returns at once.
	Forget(cause error)
	// Renew registers the memory that is there now, in the background.
	Renew()
	// Lacks says why the transport does not have the memory; nil: it has it. again says that the agent should call Renew.
	Lacks() (why error, again bool)
}

// endedAtOnce is how many transfers end in one hold of the agent's lock.
const endedAtOnce = 64

// renew is called before each call that gives blocks to transfers. If an engine has slept, other memory
// lies at the addresses of its caches. Transfers that were begun before are for the old memory: renew ends
// them, and refuses the call until all of them have ended, so that no transfer begins in the new memory before
// that. Once they have ended, if renew cannot take the new memory, it refuses nothing: the transfers that the call begins tell what is
// wrong with the memory. A question to the driver may take milliseconds, so renew asks none under the lock.
func (t *transports) renew(m *lockedMachine) error {
	if t.devices == nil || !t.devices.Moved() && !t.changed.Load() && !t.unregistered() {
		return nil
	}
	epoch, changed := t.checkMemoryAt(t.devices.Check)
	if changed == nil { // another call has renewed it
		t.changed.Store(false)
		t.registerAgain()
		return nil
	}
	if !isChange(changed) {
		return nil
	}
	if err := t.endInUse(m, epoch, changed); err != nil {
		return err
	}
	remapping, err := t.devices.Look()
	if err != nil {
		t.logLimit.Do(func(note string) { t.log.Warn("the KV caches' memory is not there"+note, zap.Error(err)) })
	}
	return m.call(func(time.Time) error {
		if t.devices.Epoch() != epoch { // another thread's call has renewed it, and may have begun in the new memory
			return nil
		}
		if err := inUse(m.inner, changed); err != nil {
			return err
		}
		if err != nil || !remapping.Take() {
			return nil
		}
		t.changed.Store(false)
		t.registerAgain()
		t.log.Info("the engine has mapped memory anew under its KV caches: transfers use it from now on", zap.NamedError("was", changed))
		return nil
	})
}

// inUse refuses a call while a transfer in the old memory is left.
func inUse(m *machine.Machine, changed error) error {
	left := unique(m.InUse())
	if len(left) == 0 || fault.On("renewed-in-use") {
		return nil
	}
	return fmt.Errorf("%w: %d transfers of before have not ended yet: call again in a moment", changed, len(left))
}

// endInUse ends the transfers that were begun in the old memory.
func (t *transports) endInUse(m *lockedMachine, epoch uint64, changed error) error {
	var left []core.TransferID
	err := m.call(func(time.Time) error {
		if t.devices.Epoch() == epoch {
			left = m.inner.InUse()
		}
		return nil
	})
	if left = unique(left); len(left) > 0 {
		t.logLimit.Do(func(note string) {
			t.log.Warn("transfers end, since the engine has mapped memory anew under its KV caches"+note, zap.Int("transfers", len(left)), zap.Error(changed))
		})
	}
	for some := range slices.Chunk(left, endedAtOnce) {
		if err != nil {
			return err
		}
		err = m.call(func(now time.Time) error {
			for _, id := range some {
				if t.devices.Epoch() == epoch { // else the id may be in use again, in the new memory
					m.step(now, core.Remapped{ID: id, Reason: changed.Error()})
				}
			}
			if some[len(some)-1] == left[len(left)-1] && t.devices.Epoch() == epoch {
				return inUse(m.inner, changed)
			}
			return nil
		})
	}
	return err
}

func unique(ids []core.TransferID) []core.TransferID {
	slices.Sort(ids)
	return slices.Compact(ids)
}

// registerAgain has the transports that lack the new memory register it.
func (t *transports) registerAgain() {
	for _, w := range t.list {
		if r, ok := w.(registering); ok {
			r.Renew()
		}
	}
}

// unregistered says whether a transport lacks the memory and should try to register it now.
func (t *transports) unregistered() bool {
	return slices.ContainsFunc(t.list, func(w core.Transport) bool {
		r, ok := w.(registering)
		if !ok {
			return false
		}
		_, again := r.Lacks()
		return again
	})
}
