package tcp

import (
	"context"
	"fmt"
	"syscall"

	"golang.org/x/sys/unix"
)

// landing is what a stream has read for device memory: slots whose bytes are being copied to
// their blocks, the oldest first. While a stream waits for its peer, or for a slot, it has
// none: so Revoke waits for copies only, and a slow peer holds no slot.
type landing struct {
	slots []Slot
	vec   []iovec
	runs  []Run
}

// readStaged reads bytes of a transfer into a slot, without waiting for the peer, and has
// them copied to the device.
func (s *inStream) readStaged(fd uintptr, in *inbound, cur *cursor, left uint64, device int) (uintptr, syscall.Errno, error) {
	d := &s.r.t.devices
	if !readable(fd) {
		return 0, syscall.EAGAIN, s.land(in, 0)
	}
	if err := s.land(in, window-1); err != nil {
		return 0, 0, err
	}
	ctx := noWait
	slot, err := d.mover.Slot(ctx, device, ToDevice)
	if err != nil {
		if err := s.land(in, 0); err != nil {
			return 0, 0, err
		}
		ctx, cancel := context.WithTimeout(s.r.t.ctx, s.r.t.cfg.StallTimeout)
		defer cancel()
		if slot, err = d.mover.Slot(ctx, device, ToDevice); err != nil {
			return 0, 0, fmt.Errorf("no slot of pinned memory for device memory: %w", err)
		}
	}
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
		slot.Release()
		return 0, errno, nil
	}
	cur.advance(got)
	s.landing.runs = runs(s.landing.runs[:0], vec, got)
	in.fence.RLock()
	defer in.fence.RUnlock()
	if in.revoked {
		slot.Release()
		return uintptr(got), 0, nil
	}
	in.copies.Add(1)
	slot.Copy(s.landing.runs)
	s.landing.slots = append(s.landing.slots, slot)
	return uintptr(got), 0, nil
}

// land waits until at most so many slots of a transfer are under way.
func (s *inStream) land(in *inbound, most int) (err error) {
	for len(s.landing.slots) > most {
		slot := s.landing.slots[0]
		s.landing.slots = append(s.landing.slots[:0], s.landing.slots[1:]...)
		if e := slot.Wait(); e != nil && err == nil {
			err, most = fmt.Errorf("copy into device memory: %w", e), 0
		}
		slot.Release()
		in.copies.Done()
	}
	return err
}

// readable says whether a read would not wait.
func readable(fd uintptr) bool {
	list := [1]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(list[:], 0)
		if err != unix.EINTR {
			return n > 0
		}
	}
}
