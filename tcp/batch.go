package tcp

import "golang.org/x/sys/unix"

// batch is how many bytes of a frame D waits for at a time, or the frame's rest. If D is woken for
// each packet, it takes many more system calls, and two streams of one host are at times on
// processors between which all bytes cross: BENCHMARKS.md has the figures. A deadline's step reads
// what is there, so a slow peer's bytes count as before.
const batch = 1 << 20

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
