package tcp

import "golang.org/x/sys/unix"

// batch is how many bytes of a frame D waits for at a time, or the frame's rest. If D is woken for
// each packet, it takes many more system calls, and two streams of one host are at times on
// processors between which all bytes cross: BENCHMARKS.md has the figures.
const batch = 1 << 20

// waitsForMore has the kernel call the socket readable when a batch of a frame's bytes is there. Each
// step of a wait ends with a read of what is there, so that a slow peer's bytes count as progress. After
// the last step nothing is read, so that one waits for any byte.
func (s *inStream) waitsForMore(fd uintptr, left uint64, idle *stall) {
	if idle.last() {
		left = 1
	}
	s.waitsFor(fd, left)
}

// waitsFor has the kernel call the socket readable when so many bytes are there. Memory of devices
// is left out: its reads ask poll(2) first, which says no until then.
func (s *inStream) waitsFor(fd uintptr, bytes uint64) {
	n := int(min(bytes, batch))
	if n == s.least || s.r.t.devices.mover != nil {
		return
	}
	if unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVLOWAT, n) == nil {
		s.least = n
	}
}
