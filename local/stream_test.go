package local

import (
	"bytes"
	"math/rand/v2"
	"runtime/debug"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// TestStream: a piece of a large transfer is copied whole, and not a byte beside it, however it lies.
func TestStream(t *testing.T) {
	const room = 1 << 13
	rnd := rand.New(rand.NewPCG(1, 2))
	src, dst, want := make([]byte, room), make([]byte, room), make([]byte, room)
	for i := range src {
		src[i] = byte(rnd.Uint32())
	}
	for n := range 1200 {
		if n > 600 {
			n = rnd.IntN(room - 64)
		}
		from, to := rnd.IntN(64), rnd.IntN(64)
		for i := range dst {
			dst[i], want[i] = 0xa5, 0xa5
		}
		copy(want[to:to+n], src[from:])
		if got, _ := copyOf(streamFrom, dst[to:to+n], src[from:]); got != n || !bytes.Equal(dst, want) {
			t.Fatalf("%d bytes from %d to %d: %d are said to be copied, all right: %v", n, from, to, got, bytes.Equal(dst, want))
		}
		if got, _ := copyOf(streamFrom, dst[to:], src[from:from+n]); got != min(n, room-to) {
			t.Fatalf("%d bytes into more room: %d", n, got)
		}
	}
}

// TestStreamFaults: memory that cannot be reached is told, as with Go's copy.
func TestStreamFaults(t *testing.T) {
	page := unix.Getpagesize()
	mem, err := unix.Mmap(-1, 0, 2*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(mem) }()
	if err := unix.Mprotect(mem[page:], unix.PROT_NONE); err != nil {
		t.Fatal(err)
	}
	good := make([]byte, 2*page)
	for name, c := range map[string][2][]byte{"read": {good, mem}, "written": {mem, good}} {
		func() {
			defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
			defer func() {
				at, ok := recover().(interface{ Addr() uintptr })
				if first := addressOf(mem[page:]); !ok || at.Addr() < first || at.Addr() >= first+uintptr(page) {
					t.Errorf("memory that cannot be %s: %v", name, at)
				}
			}()
			copyOf(streamFrom, c[0], c[1])
		}()
	}
}

func addressOf(b []byte) uintptr { return uintptr(unsafe.Pointer(&b[0])) }
