// The devices as package tcp sees them: slots, and copies between these and registered memory.

package devices

import (
	"context"
	"errors"
	"fmt"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/cuda"
	"github.com/kvconn/kvconn/tcp"
)

var _ tcp.Mover = (*Devices)(nil)

// Slot implements tcp.Mover.
func (d *Devices) Slot(ctx context.Context, device int, to tcp.Direction, peer core.AgentID) (tcp.Slot, error) {
	dir := cuda.FromDevice
	if to == tcp.ToDevice {
		dir = cuda.ToDevice
	}
	s, err := slot(ctx, d.list[device], dir, peer)
	if err != nil {
		return nil, err
	}
	return &moving{s: s, t: d.list[device].Transfer("agent "+string(peer), dir)}, nil
}

// moving is a slot and the one copy that uses it.
type moving struct {
	s    *cuda.Slot
	t    *cuda.Transfer
	done chan struct{} // closed when the copy has ended
	err  error         // of it, then
}

func (m *moving) Memory() []byte { return m.s.Bytes() }

func (m *moving) Copy(runs []tcp.Run) {
	m.done = make(chan struct{})
	list := make([]cuda.Run, len(runs))
	for i, r := range runs {
		list[i] = cuda.Run{Addr: r.Addr, Len: r.Len}
	}
	m.t.Start(cuda.Copy{Slot: m.s, Runs: list, Done: func(err error) {
		m.err = err
		close(m.done)
	}})
}

func (m *moving) Wait() error {
	<-m.done
	if errors.Is(m.err, cuda.ErrStuck) {
		return fmt.Errorf("%w: %w", tcp.ErrMayCopy, m.err)
	}
	return m.err
}

func (m *moving) Release() { m.s.Release() }
