// A long transfer passes the processor's caches, since it would put out what the engine works with.

package local

import (
	"unsafe"

	"github.com/kvconn/kvconn/internal/fault"
)

const (
	// streamFrom is the size of a transfer from which its bytes pass the caches on their way: they would put out what the engine
	// works with, and be put out themselves before it reads them. Go's copy does so from 1 MiB on, but blocks are smaller.
	streamFrom  = 16 << 20
	streamLeast = 256 // bytes of one piece
)

// copyOf copies a piece of a transfer of total bytes. The piece is as long as the shorter of dst and src. copyOf returns its length, and
// how many of the bytes have passed the caches.
func copyOf(total uint64, dst, src []byte) (n, past int) {
	n = min(len(dst), len(src))
	if total < streamFrom || n < streamLeast {
		return copy(dst, src), 0
	}
	stream(unsafe.Pointer(&dst[0]), unsafe.Pointer(&src[0]), uintptr(fault.Pick("local-stream-batch", n, n-1)))
	return n, fault.Pick("local-stream-uncounted", n*streams, 0)
}
