// When the GPUs' memory changes, devices, connections and sources forget the old memory and take the new one: see
// renew.go.

package rdma

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	defect "github.com/kvconn/kvconn/internal/fault"
)

// forget deregisters the GPUs' memory.
func (d *device) forget(log *zap.Logger) {
	d.mu.Lock()
	defer d.mu.Unlock()
	m := d.memory.Load()
	if m == nil || d.closed || len(m.gpu) == 0 {
		return
	}
	d.lacksGPUs.Store(true)
	if defect.On("rdma-keeps-memory") {
		return
	}
	stripped := m.without()
	if err := closeAll(m.gpu); err != nil {
		log.Error("rdma device keeps a GPU's memory, and is not used any more", zap.String("device", d.name), zap.Error(err))
		d.keeps, stripped.mrs = true, m.mrs // closed once more with the device
	}
	d.memory.Store(stripped)
}

// without returns the memory without the part that lies on GPUs.
func (m *memory) without() *memory {
	stripped := *m
	stripped.gpu, stripped.keys, stripped.local, stripped.by = nil, nil, nil, ""
	stripped.mrs = nil
	for _, mr := range m.mrs {
		if !slices.Contains(m.gpu, mr) {
			stripped.mrs = append(stripped.mrs, mr)
		}
	}
	return &stripped
}

// renew registers the GPUs' memory that is there now. If renew fails, the device has none of the GPUs' memory.
func (d *device) renew(r *agentMemory, exports []*export) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	m := d.memory.Load()
	switch {
	case d.closed:
		return errClosed
	case d.keeps:
		return fmt.Errorf("device %s still has the memory of before", d.name)
	case defect.On("rdma-keeps-memory"):
		d.lacksGPUs.Store(false)
		return nil
	case len(m.gpu) > 0:
		return fmt.Errorf("device %s has not forgotten the memory of before", d.name)
	}
	fresh := *m
	err := d.registerExports(&fresh, r, exports)
	if err == nil {
		err = fresh.index(r)
	}
	if err != nil {
		if closing := closeAll(fresh.gpu); closing != nil {
			d.keeps = true
			err = fmt.Errorf("%w; %w", err, closing)
		}
		return err
	}
	d.memory.Store(&fresh)
	d.lacksGPUs.Store(false)
	return nil
}

// forget ends the writes in the old memory and closes the lanes. P asks D for its keys anew, and tells D that meanwhile
// nothing comes by rdma. Writes that wait already for the new memory go on waiting; cn.mu is held.
func (cn *conn) forget(cause error) {
	for w := range cn.writes {
		if !w.waits {
			cn.fail(w, cause)
		}
	}
	for _, l := range slices.Clone(cn.lanes) {
		cn.remove(l)
		cn.flush(l)
	}
	tells := cn.remote != nil || cn.tasks&makeLanes != 0
	cn.remote = nil
	cn.on(eventLost)
	if tells {
		cn.tasks |= makeLanes
	}
}

// returned has P make lanes again, if D was met before; cn.mu is held.
func (cn *conn) returned() {
	if cn.state == stateDown || cn.state == stateProbing {
		cn.tasks |= makeLanes
	}
}

// absent tells D that nothing comes by rdma now, and why. If D does not hear this, it will ask. If D is gone, the error
// says so.
func (cn *conn) absent(why error) error {
	cn.mu.Lock()
	s := &signal{Kind: signalConnected, Ticket: cn.ticket, Last: cn.lastID, Reason: shorten(why.Error())}
	cn.tasks &^= makeLanes
	cn.mu.Unlock()
	_, err := cn.t.ask(cn.peer, s, cn.t.cfg.ConnectTimeout/3)
	if errors.Is(err, core.ErrAbsent) || errors.Is(err, errRefused) {
		return err
	}
	if err != nil {
		cn.t.log.Debug("rdma: a peer does not hear that nothing can be sent to it; it will ask", zap.String("peer", string(cn.peer)), zap.Error(err))
	}
	return fmt.Errorf("%w: %w", core.ErrOtherWay, why)
}

// forget ends all lanes and transfers of a P. D makes a new secret, so P's keys of the memory are void, and so is
// whatever P yet says about lanes that it makes with them.
func (src *source) forget(cause error) {
	src.mu.Lock()
	src.beginAll()
	src.newSecret()
	src.renewed = true
	owed := src.owed
	src.owed = false // nothing is wrong with P
	tell := src.disconnecting(cause)
	src.owed = owed
	src.mu.Unlock()
	tell()
}

// returned asks P to connect anew.
func (src *source) returned() {
	src.mu.Lock()
	defer src.mu.Unlock()
	if src.cause != nil {
		src.requestAt, src.backoff = time.Time{}, 0
		src.requestConnect()
	}
}
