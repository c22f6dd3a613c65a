package tcp

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"syscall"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/internal/fault"
)

// staging is what a stream has read for device memory: slots whose bytes are being copied to
// their blocks, the oldest first. While a stream waits for its peer, or for a slot, it
// holds no slot. So Revoke waits for copies only, and a slow peer holds no slot.
type staging struct {
	slots []stagedSlot
	spare [][]Run // the runs of slots that have landed, to use again
	grew  bool    // by the frame that is read
	ready Slot    // for the next bytes
	wants int     // if not 0, nothing can be read before the stream has a slot; it is the device's number plus 1
}

// stagedSlot is a slot whose bytes are being copied to these runs.
type stagedSlot struct {
	Slot
	to []Run
}

// takeRuns gives room for the runs of a slot.
func (l *staging) takeRuns() []Run {
	n := len(l.spare)
	if n == 0 {
		return nil
	}
	runs := l.spare[n-1]
	l.spare = l.spare[:n-1]
	return runs[:0]
}

// busy says whether something is to be done before the stream may wait for its peer.
func (l *staging) busy() bool { return len(l.slots) > 0 || l.ready != nil || l.wants > 0 }

// landStaged reads bytes of a transfer into a slot, without a wait, and has them copied to the
// device. EAGAIN: the peer has sent nothing, or landSome is to be called.
func (s *inStream) landStaged(fd uintptr, in *inbound, cur *cursor, left uint64, device int) (uintptr, syscall.Errno) {
	d, l := &s.r.t.devices, &s.staging
	if !polled(fd, unix.POLLIN) {
		return 0, syscall.EAGAIN
	}
	if l.ready == nil && len(l.slots) < window {
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
	l.slots, l.grew = append(l.slots, stagedSlot{slot, to}), true
	return uintptr(got), 0
}

// landSome does what the stream may have to wait for, but not for its peer: it ends copies,
// and takes the slot that the next bytes need.
func (s *inStream) landSome(in *inbound) error {
	l := &s.staging
	device := l.wants - 1
	l.wants = 0
	if device >= 0 && len(l.slots) == window {
		return s.landStarted(in, window-1)
	}
	if err := s.landStarted(in, 0); err != nil || device < 0 {
		return err
	}
	ctx, cancel := context.WithTimeout(s.r.t.ctx, s.r.t.cfg.StallTimeout)
	defer cancel()
	var err error
	if l.ready, err = s.r.t.devices.mover.Slot(ctx, device, ToDevice, s.peer.id); err != nil {
		l.ready = nil
		return s.r.t.noSlot(err)
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

// landStarted waits until at most so many slots of a transfer are under way.
func (s *inStream) landStarted(in *inbound, most int) (err error) {
	if ready := s.staging.ready; ready != nil {
		ready.Release()
		s.staging.ready = nil
	}
	for len(s.staging.slots) > most {
		slot := s.staging.slots[0]
		s.staging.slots = append(s.staging.slots[:0], s.staging.slots[1:]...)
		var e error
		if !fault.On("tcp-report-early") {
			e = slot.Wait()
		}
		if e != nil && (err == nil || errors.Is(e, ErrMayCopy)) {
			err, most = &copyError{"copy into device memory", e}, 0
		}
		if errors.Is(e, ErrMayCopy) { // Revoke waits for it, and nobody else
			s.r.stuck(slot.to)
			in.copies.lose()
			continue
		}
		slot.Release()
		s.staging.spare = append(s.staging.spare, slot.to)
		in.copies.done()
	}
	return err
}

// polled says whether a read (POLLIN) or a write (POLLOUT) is possible at once.
func polled(fd uintptr, events int16) bool {
	list := [1]unix.PollFd{{Fd: int32(fd), Events: events}}
	for {
		n, err := unix.Poll(list[:], 0)
		if err != unix.EINTR {
			return n > 0
		}
	}
}

// copyFailed ends a transfer because a copy into its memory has failed. If a copy may still land,
// the engine must not hear of an end: then no stream knows the transfer any more, and Revoke waits
// until Close.
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

// stuck notes the regions into which a device may still copy, since it does not end a copy.
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
	mu   sync.Mutex
	n    int
	lost bool            // the device does not end one of them
	idle chan struct{}   // closed when n is 0 again, or one is lost; nil while nobody waits
	late <-chan struct{} // closed CloseGrace after the transport's Close has begun
	all  *atomic.Int64   // those of all transfers
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
	if c.n--; c.n == 0 {
		c.wake()
	}
}

// lose notes that the device does not end a copy: n is never 0 again.
func (c *copies) lose() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lost = true
	c.wake()
}

// wake ends the waits; mu is held.
func (c *copies) wake() {
	if c.idle != nil {
		close(c.idle)
		c.idle = nil
	}
}

// wait waits until no copy is under way, and returns true. If Close gives the copies up before that, it returns false.
func (c *copies) wait() bool {
	if c.ended() {
		return true
	}
	<-c.late
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.n == 0 // both may have come
}

// ended is wait, but it returns false too if the device does not end one of the copies. So no stream waits for such a one.
func (c *copies) ended() bool {
	c.mu.Lock()
	if c.n == 0 || fault.On("tcp-revoke-at-once") {
		c.mu.Unlock()
		return true
	}
	if c.lost && !fault.On("tcp-waits-for-lost") {
		c.mu.Unlock()
		return false
	}
	if c.idle == nil {
		c.idle = make(chan struct{})
	}
	idle := c.idle
	c.mu.Unlock()
	select {
	case <-idle:
	case <-c.late:
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.n == 0
}
