// D has the kernel wake it for a batch of a frame's bytes, and not for each packet.

package tcp

import (
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// mostBatch is how many bytes of a frame D waits for at a time. If fewer are left of the frame, D waits for
// these. If the kernel woke D for each packet, D would make more system calls, and the two ends of a stream
// within one host would at times run on processors between which all bytes must cross: see BENCHMARKS.md.
const mostBatch = 1 << 20

// batch is mostBatch, but no more than half of the largest window that this host gives a peer. That window is
// half of the largest receive buffer. If D waited for a whole window, P would have to stop after each window.
var batch = sync.OnceValue(func() uint64 {
	var least, usual, most uint64
	text, err := os.ReadFile("/proc/sys/net/ipv4/tcp_rmem")
	if _, scan := fmt.Sscan(string(text), &least, &usual, &most); err != nil || scan != nil {
		most = 0 // no batches
	}
	return max(1, min(mostBatch, most/4))
})

// waitsForMore has the kernel call the socket readable when a batch of a frame's bytes is there. At the end of
// each step of a wait D reads what is there, so that a slow peer's bytes count as progress. After the last step
// D reads nothing, so in this step it waits for any byte. A sealed stream reads records, and does not call
// waitsForMore. An agent with device memory has no batches: its reads ask poll(2) first, and poll(2) would say no
// until the batch is there.
func (s *inStream) waitsForMore(fd uintptr, left uint64, idle *stall) {
	if s.r.t.devices.mover != nil {
		return
	}
	if idle.last() {
		left = 1
	}
	_ = s.waitsFor(fd, left) // an error only makes the stream slower
}

// waitsFor has the kernel call the socket readable when so many bytes are there. If a batch is less, a batch is enough.
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
