package tcp

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/internal/fault"
)

// landing is what a stream has read for device memory: slots whose bytes are being copied to
// their blocks, the oldest first. Those of a frame may still be copied while the next frames are
// read. While a stream waits for its peer, for a slot, or for the end of a transfer, it holds no slot.
// So Revoke waits for copies only, and a slow peer holds no slot.
type landing struct {
	now   *arrival   // the frame that is read
	rests []*arrival // that are not used
	slots []landed
	spare [][]Run // of slots that have landed
	ready Slot    // for the next bytes
	wants int     // nothing can be read before there is a slot: the device's number and 1
}

// landed is a slot whose bytes are being copied to these runs.
type landed struct {
	Slot
	device int
	in     *inbound
	frame  *arrival
	to     []Run
}

// takeRuns gives room for the runs of a slot.
func (l *landing) takeRuns() []Run {
	n := len(l.spare)
	if n == 0 {
		return nil
	}
	runs := l.spare[n-1]
	l.spare = l.spare[:n-1]
	return runs[:0]
}

// unready gives the slot for the next bytes back.
func (l *landing) unready() {
	if l.ready != nil && !fault.On("tcp-land-ready") {
		l.ready.Release()
		l.ready = nil
	}
}

// elsewhere says whether bytes of former frames are copied to another device: it may not answer, and
// nothing is copied behind them.
func (l *landing) elsewhere(device int) bool {
	return slices.ContainsFunc(l.slots, func(s landed) bool { return s.frame != l.now && s.device != device }) && !fault.On("tcp-land-elsewhere")
}

// busy says whether something is to be done before the stream may wait for its peer.
func (l *landing) busy() bool { return len(l.slots) > 0 || l.ready != nil || l.wants > 0 }

// landStaged reads bytes of a transfer into a slot, without a wait, and has them copied to the
// device. EAGAIN: the peer has sent nothing, or landSome is to be called.
func (s *inStream) landStaged(fd uintptr, in *inbound, cur *cursor, left uint64, device int) (uintptr, syscall.Errno) {
	d, l := &s.r.t.devices, &s.landing
	if !polled(fd, unix.POLLIN) {
		return 0, syscall.EAGAIN
	}
	if l.ready == nil && len(l.slots) < window && !l.elsewhere(device) {
		l.ready, _ = d.mover.Slot(noWait, device, ToDevice, s.peer.id)
	}
	if l.ready == nil {
		l.wants = device + 1
		return 0, syscall.EAGAIN
	}
	slot := l.ready
	mem := slot.Memory()
	vec, _ := cur.fill(s.vec[:0], min(left, uint64(len(mem))))
	_, _, room := d.alike(vec, min(left, uint64(len(mem))))
	var got uint64
	var errno syscall.Errno
	for got < room && errno == 0 {
		one := [1]iovec{{entry(slot, 0).base + uintptr(got), uintptr(room - got)}}
		var n uintptr
		if n, errno = vectored(syscall.SYS_READV, fd, one[:]); errno == 0 && n == 0 {
			break // the peer has closed the connection
		}
		if errno == 0 {
			got += uint64(n)
		}
	}
	if got == 0 {
		return 0, errno
	}
	l.ready = nil
	cur.advance(got)
	in.fence.RLock()
	defer in.fence.RUnlock()
	if in.revoked {
		slot.Release()
		return uintptr(got), 0
	}
	in.copies.add()
	to := runs(l.takeRuns(), vec, got)
	slot.Copy(to)
	l.slots = append(l.slots, landed{slot, device, in, l.now, to})
	l.now.slots++
	return uintptr(got), 0
}

// landSome does what the stream may have to wait for, but not for its peer: it ends copies,
// and takes the slot that the next bytes need.
func (s *inStream) landSome(f *arrival) error {
	l := &s.landing
	device := l.wants - 1
	l.wants = 0
	if device < 0 || len(l.slots) == window {
		return s.landStarted(max(len(l.slots)-1, 0))
	}
	if err := s.landStarted(0); err != nil || f.in == nil {
		return err
	}
	ctx, cancel := context.WithTimeout(s.r.t.ctx, s.r.t.cfg.StallTimeout)
	defer cancel()
	var err error
	if l.ready, err = s.r.t.devices.mover.Slot(ctx, device, ToDevice, s.peer.id); err != nil {
		l.ready = nil
		return s.fails(f, s.r.t.noSlot(err))
	}
	return nil
}

// noSlot is the error of a wait for a slot.
func (t *Transport) noSlot(err error) error {
	if t.ctx.Err() != nil {
		return errClosed
	}
	return &copyError{"wait for a slot of pinned memory", err}
}

// polled says whether a read (POLLIN), or a write (POLLOUT), would not wait.
func polled(fd uintptr, events int16) bool {
	list := [1]unix.PollFd{{Fd: int32(fd), Events: events}}
	for {
		n, err := unix.Poll(list[:], 0)
		if err != unix.EINTR {
			return n > 0
		}
	}
}

// copyFailed ends a transfer for its memory's fault. If a copy may still land, the engine
// must not hear of an end: no stream knows the transfer any more, and Revoke waits until
// Close.
func (r *receiver) copyFailed(in *inbound, err error) {
	if errors.Is(err, ErrMayCopy) {
		r.mu.Lock()
		in.stuck = true
		delete(r.byGrant, in.grant)
		r.done.add(doneTransfer{grant: in.grant, fault: "the decode engine's device does not answer"})
		r.mu.Unlock()
		r.t.cfg.Logger.Error("the blocks of a transfer may be written for ever", zap.String("transfer_id", string(in.id)), zap.Error(err))
		return
	}
	r.failed(in, err)
}

// stuck notes the regions to which a device does not end a copy.
func (r *receiver) stuck(to []Run) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, at := range to {
		for i := range r.t.layout.Regions {
			if g := &r.t.layout.Regions[i]; uint64(at.Addr) < g.Base+g.Extent() && uint64(at.Addr)+at.Len > g.Base {
				r.mayLand[g.Name] = true
			}
		}
	}
}

// copies counts what is being copied.
type copies struct {
	mu    sync.Mutex
	n     int
	idle  chan struct{}   // closed when n is 0 again; nil while nobody waits
	late  <-chan struct{} // closed CloseGrace after the transport's Close has begun
	never chan struct{}   // closed when one of them may not end
	stuck bool            // it is closed
	all   *atomic.Int64   // those of all transfers
}

func (c *copies) add() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n++
	c.all.Add(1)
}

func (c *copies) done() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.all.Add(-1)
	if c.n--; c.n == 0 && c.idle != nil {
		close(c.idle)
		c.idle = nil
	}
}

// stays says that one of them may not end: nobody says done for it.
func (c *copies) stays() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.stuck && !fault.On("tcp-stuck-unsaid") {
		c.stuck = true
		close(c.never)
	}
}

// wait returns when nothing is copied, or with false when Close waits no longer, or when unless is closed.
func (c *copies) wait(unless <-chan struct{}) bool {
	c.mu.Lock()
	if c.n == 0 || fault.On("tcp-revoke-at-once") {
		c.mu.Unlock()
		return true
	}
	if c.idle == nil {
		c.idle = make(chan struct{})
	}
	idle := c.idle
	c.mu.Unlock()
	select {
	case <-idle:
		return true
	case <-c.late:
	case <-unless:
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.n == 0 // both may have come
}
