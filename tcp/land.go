// D reads a frame's bytes into the transfer's blocks. It holds the transfer's fence for one readv at a time.

package tcp

import (
	"errors"
	"fmt"
	"io"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
)

// payload reads a frame's bytes into the transfer's blocks. If in is nil, it throws the bytes away. It returns how
// many bytes came. If the blocks cannot be written, it ends the transfer, and returns nil in its place. If goesOn is true, copies may still be
// under way, and the next frame is the transfer's too.
func (s *inStream) payload(in *inbound, h *header) (got uint64, _ *inbound, goesOn bool, err error) {
	s.staging.grew = false
	got, in, err = s.readAll(in, h)
	if err == nil && in != nil && s.goesOn(h.key) {
		return got, in, true, nil
	}
	if e := s.landStarted(in, 0); e != nil {
		s.r.copyFailed(in, e)
		in = nil
		if err == nil {
			err = s.answered(h.key)
		}
	}
	return got, in, false, err
}

// goesOn says whether the copies of a frame can go on while the next frame is read. The next frame must be of the same transfer, and its whole
// header must have come: then the stream does not wait for its peer before it looks whether the transfer was revoked, so Revoke waits for
// copies only. A frame without bytes for the device holds no slot of the frames before: a peer could send such frames without an end. A
// sealed stream's header is not known before it is read.
func (s *inStream) goesOn(grant random) bool {
	if len(s.staging.slots) == 0 || !s.staging.grew || s.staging.ready != nil || s.sealed != nil || fault.On("tcp-frame-waits") {
		return false
	}
	var next header
	whole := false
	err := s.raw.Control(func(fd uintptr) {
		n, _, e := unix.Recvfrom(int(fd), s.buf[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
		whole = e == nil && n == headerSize
	})
	return err == nil && whole && next.decode(&s.buf) == nil && next.kind == frameData && next.key == grant
}

// settle ends the copies of the frames that were read before, and counts the bytes of these frames.
func (s *inStream) settle() error {
	in, n := s.owes, s.owed
	if in == nil {
		return nil
	}
	s.owes, s.owed = nil, 0
	if err := s.landStarted(in, 0); err != nil {
		s.r.copyFailed(in, err)
		s.cuts = 0
		return s.answered(in.grant)
	}
	return s.landed(in, n)
}

// readAll does what payload does, except that copies may still be under way when it returns.
func (s *inStream) readAll(in *inbound, h *header) (got uint64, _ *inbound, err error) {
	var cur cursor
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

// landed counts a frame's bytes. With the last ones it ends the transfer.
func (s *inStream) landed(in *inbound, n uint64) error {
	s.r.mu.Lock()
	in.got += n
	in.cuts, s.cuts = in.cuts+s.cuts, 0
	gone := s.r.byID[in.id] != in
	var end *outcome
	if in.got == in.total {
		if end = s.r.ends(in); end != nil {
			s.r.done.add(doneTransfer{grant: in.grant, total: in.total})
		}
	}
	stats := core.TransferStats{Bytes: in.got, Segments: len(in.runs) + in.cuts, Nanos: in.took().Nanoseconds()}
	s.r.mu.Unlock()
	switch {
	case gone: // another stream has brought the last frame, or the transfer has failed or was revoked: P may stop sending it
		return s.answered(in.grant)
	case end == nil:
		return nil
	}
	s.r.tell(in, end, stats, nil)
	return s.send(&header{kind: frameAck, key: in.grant, length: stats.Bytes})
}
