package tcp

import (
	"fmt"
	"syscall"

	"golang.org/x/sys/unix"
)

// unsealer opens the records that D reads. A record's bytes lie in a recordBuffer until its tag is
// known to be right. Then they are read from there, as from a plain stream, into the blocks.
type unsealer struct {
	*seals
	buffer *recordBuffer // nil between frames
	have   int           // bytes of a record that have come
	plain  int           // bytes of an opened record that are not read yet
}

// some reads some of a frame's bytes into the blocks, or away. It may wait for the peer.
// EAGAIN: landSome is to be called first.
func (s *inStream) some(in *inbound, cur *cursor, left uint64, idle *stall) (n uintptr, errno syscall.Errno, err error) {
	if s.sealed == nil {
		err = s.raw.Read(func(fd uintptr) bool {
			n, errno = s.read(fd, in, cur, left)
			if errno != syscall.EAGAIN || s.staging.busy() {
				return true
			}
			s.waitsForMore(fd, left, idle)
			return false
		})
		return n, errno, err
	}
	u := s.sealed
	for u.plain == 0 {
		if n, errno, err = s.record(left, idle); err != nil || errno != 0 || n == 0 {
			return n, errno, err
		}
	}
	n, errno = s.read(uintptr(u.buffer.fd), in, cur, min(left, uint64(u.plain)))
	if errno == 0 {
		u.plain -= int(n)
		if uint64(n) == left {
			s.rest()
		}
	}
	return n, errno, nil
}

// record reads more of the next record, and opens it when it is whole.
func (s *inStream) record(left uint64, idle *stall) (n uintptr, errno syscall.Errno, err error) {
	u := s.sealed
	if u.buffer == nil {
		if u.buffer, err = s.r.t.buffers.take(); err != nil {
			return 0, 0, err
		}
	}
	size := int(min(left, recordBytes))
	whole := u.buffer.box[:size+tagBytes]
	err = s.raw.Read(func(fd uintptr) bool {
		n, errno = receive(fd, whole[u.have:])
		return errno != syscall.EAGAIN || s.staging.busy()
	})
	if err != nil || errno != 0 || n == 0 {
		return n, errno, err
	}
	idle.since = 0
	s.conn.SetReadDeadline(idle.deadline())
	if u.have += int(n); u.have < len(whole) {
		return n, 0, nil
	}
	u.have = 0
	// The bytes end where the file ends, so that nothing reads beyond them.
	begin := recordBytes - size
	if _, err := u.data.open(u.buffer.mem[begin:begin:recordBytes], whole); err != nil {
		return 0, 0, err
	}
	if _, err := unix.Seek(u.buffer.fd, int64(begin), unix.SEEK_SET); err != nil {
		return 0, 0, fmt.Errorf("lseek: %w", err)
	}
	u.plain = size
	return n, 0, nil
}

// rest gives the buffer back until the next frame.
func (s *inStream) rest() {
	if u := s.sealed; u != nil && u.buffer != nil {
		s.r.t.buffers.give(u.buffer)
		u.buffer = nil
	}
}

// receive reads from a stream, without a wait.
func receive(fd uintptr, b []byte) (uintptr, syscall.Errno) {
	for {
		n, err := syscall.Read(int(fd), b)
		if err == nil {
			return uintptr(n), 0
		}
		if errno, ok := err.(syscall.Errno); ok && errno != syscall.EINTR {
			return 0, errno
		}
	}
}

// forged ends all transfers with a peer if one of its streams has brought a forged record.
// Nobody knows which transfer the record was of, since nothing in it can be believed.
func (r *receiver) forged(p *inPeer, err error) {
	r.mu.Lock()
	var lost []*inbound
	for _, in := range r.byID {
		if in.peer == p && !in.stuck {
			lost = append(lost, in)
		}
	}
	r.mu.Unlock()
	for _, in := range lost {
		r.fail(in, err)
	}
}
