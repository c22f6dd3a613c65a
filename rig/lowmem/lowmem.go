// Package lowmem has memory for tests that unmap a part of it.
//
// The kernel gives a new mapping the highest hole that has room. If a test unmaps memory that lies among the process's other
// mappings, the Go runtime may be given it next, and a transfer that is still meant for the old memory writes over the runtime's
// own. Memory of this package lies below all that the kernel chooses itself, so what a test unmaps stays unmapped.
package lowmem

import (
	"errors"
	"sync/atomic"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The addresses: above Go's heap (0xc0 << 32), which goes on at 0x1c0 << 32, and far below where the kernel begins.
const (
	first = 0x100 << 32
	room  = 0x80 << 32
	apart = 2 << 20 // no mapping follows another one directly
)

var next atomic.Uint64

// Map maps n bytes until the test ends, readable and writable, all zero. What uses them must be closed before: by a clean-up that
// is registered after Map has returned.
func Map(t testing.TB, n int) []byte {
	t.Helper()
	step := (uint64(n)/apart + 2) * apart
	for range room / apart { // once round, at most: what other tests have left is free again
		at := (next.Add(step) - step) % room
		if at+step > room {
			continue
		}
		p, err := unix.MmapPtr(-1, 0, unsafe.Add(nil, first+at), uintptr(n), unix.PROT_READ|unix.PROT_WRITE,
			unix.MAP_ANON|unix.MAP_PRIVATE|unix.MAP_NORESERVE|unix.MAP_FIXED_NOREPLACE)
		if errors.Is(err, unix.EEXIST) {
			continue
		}
		if err != nil {
			t.Fatalf("mmap of %d bytes at %#x: %v", n, first+at, err)
		}
		t.Cleanup(func() {
			if err := unix.MunmapPtr(p, uintptr(n)); err != nil {
				t.Errorf("munmap: %v", err)
			}
		})
		return unsafe.Slice((*byte)(p), n)
	}
	t.Fatalf("no room for %d bytes from %#x on", n, uint64(first))
	return nil
}
