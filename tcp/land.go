// D reads a frame's bytes into the transfer's blocks. It holds the transfer's fence for one readv at a time.

package tcp

import (
	"errors"
	"fmt"
	"io"
	"syscall"
)

// payload reads a frame's bytes into the transfer's blocks. If in is nil, it throws the bytes away. It returns how
// many bytes came. If the blocks cannot be written, it ends the transfer, and returns nil in its place.
func (s *inStream) payload(in *inbound, h *header) (got uint64, _ *inbound, err error) {
	got, in, err = s.readAll(in, h)
	if e := s.landStarted(in, 0); e != nil {
		s.r.copyFailed(in, e)
		in = nil
		if err == nil {
			err = s.answered(h.key)
		}
	}
	return got, in, err
}

// readAll does what payload does, except that copies may still be under way when it returns.
func (s *inStream) readAll(in *inbound, h *header) (got uint64, _ *inbound, err error) {
	var cur cursor
	s.cuts = 0
	// fails ends the transfer since its memory cannot be written, when none of its copies is under way.
	fails := func(err error) error {
		if e := s.landStarted(in, 0); errors.Is(e, ErrMayCopy) { // another error is no news
			err = e
		}
		s.r.copyFailed(in, err)
		in = nil
		return s.answered(h.key)
	}
	idle := stall{bound: s.r.t.cfg.StallTimeout}
	for got < h.length {
		left := h.length - got
		if in != nil && len(cur.runs) == 0 {
			cur = s.cursor(in, h.position+got, left)
		}
		s.conn.SetReadDeadline(idle.deadline())
		n, errno, err := s.some(in, &cur, left, &idle)
		if err == nil && errno == syscall.EAGAIN { // copies are waited for here: in Read, a close of the connection would wait too
			if err := s.landSome(in); err != nil {
				if err := fails(err); err != nil {
					return got, in, err
				}
			}
			continue
		}
		switch {
		case err != nil && idle.goesOn(err):
			continue
		case err != nil:
			return got, in, err
		case errno == syscall.EFAULT && in != nil: // nothing was read
			vec, _ := cur.fill(s.vec[:0], left)
			if err := fails(s.r.t.fault(vec, true)); err != nil {
				return got, in, err
			}
			continue
		case errno != 0:
			return got, in, fmt.Errorf("readv: %w", errno)
		case n == 0:
			return got, in, fmt.Errorf("%d bytes before the end of a frame: %w", left, io.ErrUnexpectedEOF)
		}
		got += uint64(n)
		idle.since = 0
	}
	return got, in, nil
}

// read takes some of a frame's bytes, without a wait.
func (s *inStream) read(fd uintptr, in *inbound, cur *cursor, left uint64) (uintptr, syscall.Errno) {
	room := left
	if d := &s.r.t.devices; d.mover != nil && in != nil {
		vec, _ := cur.fill(s.vec[:0], left)
		var device int
		if device, _, room = d.alike(vec, left); device >= 0 && !in.isRevoked() {
			return s.landStaged(fd, in, cur, left, device)
		}
	}
	if n, errno, landed := s.land(fd, in, cur, room); landed {
		return n, errno
	}
	return s.discard(fd, left)
}

func (in *inbound) isRevoked() bool {
	in.fence.RLock()
	defer in.fence.RUnlock()
	return in.revoked
}

// land makes one readv into the transfer's blocks, which does not wait. It returns false if the blocks may not be
// written any more. It holds the fence for this readv only, so Revoke waits for no more than
// one readv. On P, put is its counterpart.
func (s *inStream) land(fd uintptr, in *inbound, cur *cursor, left uint64) (n uintptr, errno syscall.Errno, landed bool) {
	if in == nil {
		return 0, 0, false
	}
	in.fence.RLock()
	defer in.fence.RUnlock()
	if in.revoked {
		return 0, 0, false
	}
	vec, _ := cur.fill(s.vec[:0], left)
	if n, errno = vectored(syscall.SYS_READV, fd, vec); errno == 0 {
		cur.advance(uint64(n))
	}
	return n, errno, true
}

// discard reads bytes away that belong to no transfer, without a wait.
func (s *inStream) discard(fd uintptr, left uint64) (uintptr, syscall.Errno) {
	if s.scratch == nil {
		s.scratch = make([]byte, 64<<10)
	}
	n, err := syscall.Read(int(fd), s.scratch[:min(left, uint64(len(s.scratch)))])
	if err != nil {
		var errno syscall.Errno
		if errors.As(err, &errno) {
			if errno == syscall.EINTR {
				errno = syscall.EAGAIN
			}
			return 0, errno
		}
	}
	return uintptr(max(n, 0)), 0
}
