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

// TestMemoryIsUsedAgain: tests that follow one another take as many mappings as they like.
func TestMemoryIsUsedAgain(t *testing.T) {
	const n = 8 << 30
	kept := Map(t, 4096)
	kept[0] = 1
	for range 2*room/n + 1 {
		t.Run("one", func(t *testing.T) {
			if b := Map(t, n); b[0] != 0 || b[n-1] != 0 {
				t.Error("the memory is used")
			}
		})
	}
	if kept[0] != 1 {
		t.Error("memory was given twice")
	}
}
