package lowmem

import (
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// TestHolesStay: the kernel gives a hole in this memory to nobody who asks for any memory, and does give away one among its own.
func TestHolesStay(t *testing.T) {
	const page, hole = 4096, 64 * 4096
	takes := func(b []byte) bool {
		at := unsafe.Pointer(&b[page])
		if err := unix.MunmapPtr(at, hole); err != nil {
			t.Fatal(err)
		}
		taken := false
		for range 1024 {
			p, err := unix.MmapPtr(-1, 0, nil, page, unix.PROT_NONE, unix.MAP_ANON|unix.MAP_PRIVATE)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = unix.MunmapPtr(p, page) }()
			taken = taken || uintptr(p) >= uintptr(at) && uintptr(p) < uintptr(at)+hole
		}
		return taken
	}
	if takes(Map(t, hole+2*page)) {
		t.Error("a hole was given away")
	}
	p, err := unix.MmapPtr(-1, 0, nil, hole+2*page, unix.PROT_NONE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	if !takes(unsafe.Slice((*byte)(p), hole+2*page)) {
		t.Error("no hole among the kernel's own mappings is given away: the package is not needed")
	}
}
