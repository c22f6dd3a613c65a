package tcp

import (
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// mostBatch is how many bytes of a frame D waits for at a time, or the frame's rest. If D is woken for
// each packet, it takes more system calls, and two streams of one host are at times on processors
// between which all bytes cross: see BENCHMARKS.md.
const mostBatch = 1 << 20

// batch is mostBatch, but no more than half of the largest window that this host gives a peer, which is
// half of the largest receive buffer. If D waited for a whole window, P would stop for each.
var batch = sync.OnceValue(func() uint64 {
	var least, usual, most uint64
	text, err := os.ReadFile("/proc/sys/net/ipv4/tcp_rmem")
	if _, scan := fmt.Sscan(string(text), &least, &usual, &most); err != nil || scan != nil {
		most = 0 // no batches
	}
	return max(1, min(mostBatch, most/4))
})

// waitsForMore has the kernel call the socket readable when a batch of a frame's bytes is there. Each
// step of a wait ends with a read of what is there, so that a slow peer's bytes count as progress. After
// the last step nothing is read, so that one waits for any byte. A sealed stream reads records and does not
// ask. An agent with device memory has no batches: its reads ask poll(2) first, which says no until the
// batch is there.
func (s *inStream) waitsForMore(fd uintptr, left uint64, idle *stall) {
	if s.r.t.devices.mover != nil {
		return
	}
	if idle.last() {
		left = 1
	}
	_ = s.waitsFor(fd, left) // it is a matter of speed
}

// waitsFor has the kernel call the socket readable when so many bytes are there, or a batch.
func (s *inStream) waitsFor(fd uintptr, bytes uint64) error {
	n := int(min(bytes, batch()))
	if n == s.least || n == 1 && s.least == 0 {
		return nil
	}
	if err := unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVLOWAT, n); err != nil {
		return fmt.Errorf("SO_RCVLOWAT of %d: %w", n, err)
	}
	s.least = n
	return nil
}

// waitsForAny undoes waitsForMore, before a wait that has no steps.
func (s *inStream) waitsForAny() (err error) {
	if s.least <= 1 {
		return nil
	}
	if e := s.raw.Control(func(fd uintptr) { err = s.waitsFor(fd, 1) }); e != nil {
		return e
	}
	return err
}
