package local

import "unsafe"

const (
	// streamFrom is the size of a transfer from which its bytes pass the caches on their way: they would put out what the engine
	// works with, and be put out themselves before it reads them. Go's copy does so from 1 MiB on, but blocks are smaller.
	streamFrom  = 16 << 20
	streamLeast = 256 // bytes of one piece
)

// copyOf copies a piece of a transfer of total bytes, and returns the piece's size: the lesser one.
func copyOf(total uint64, dst, src []byte) int {
	n := min(len(dst), len(src))
	if total < streamFrom || n < streamLeast {
		return copy(dst, src)
	}
	stream(unsafe.Pointer(&dst[0]), unsafe.Pointer(&src[0]), uintptr(n))
	return n
}
