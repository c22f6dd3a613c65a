package hostmem

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/lowmem"
)

const page = 4096

// pages maps memory of this test.
func pages(t *testing.T, n int) (b []byte, base uint64) {
	t.Helper()
	b = lowmem.Map(t, n*page) // some tests unmap a part of it
	return b, uint64(uintptr(unsafe.Pointer(&b[0])))
}

func protect(t *testing.T, b []byte, prot int) {
	t.Helper()
	if err := unix.Mprotect(b, prot); err != nil {
		t.Fatal(err)
	}
}

func wants(t *testing.T, err error, parts ...string) {
	t.Helper()
	for _, p := range parts {
		if err == nil || !strings.Contains(err.Error(), p) {
			t.Fatalf("%v, want %q in it", err, p)
		}
	}
}

func TestCheck(t *testing.T) {
	b, base := pages(t, 16)
	regions := []kv.Region{
		{Name: "good", Base: base, BlockStride: page, BlockBytes: page, NumBlocks: 8},
		{Name: "k", Base: base + 8*page, BlockStride: 2 * page, BlockBytes: page, NumBlocks: 4},
	}
	for _, write := range []bool{false, true} {
		if err := Check(regions, write); err != nil {
			t.Fatal(err)
		}
	}
	protect(t, b[9*page:10*page], unix.PROT_NONE) // between two blocks
	if err := Check(regions, true); err != nil {
		t.Fatal(err)
	}
	protect(t, b[12*page:13*page], unix.PROT_READ)
	if err := Check(regions, false); err != nil {
		t.Fatal(err)
	}
	wants(t, Check(regions, true), `region "k"`, "are not writable", "block 2 of 4", "decode engine")
	protect(t, b[12*page:13*page], unix.PROT_NONE)
	wants(t, Check(regions, false), `region "k"`, "are not readable", "block 2 of 4", "prefill engine")
	protect(t, b, unix.PROT_READ|unix.PROT_WRITE)
	if _, _, errno := unix.Syscall(unix.SYS_MUNMAP, uintptr(base+3*page), page, 0); errno != 0 {
		t.Fatal(errno)
	}
	wants(t, Check(regions[:1], false), `region "good"`, "are not mapped", "block 3 of 8")
}

func TestNothingIsKnownOfAnUnreadableList(t *testing.T) {
	if _, err := parse([]byte("7f0000-8f0000 rw-p 0\nnonsense\n")); err == nil {
		t.Fatal("a line that is none was taken")
	}
	list, err := parse([]byte("1000-3000 r--p 0 00:00 0\n3000-4000 rw-p 0 00:00 0  [heap]\n"))
	if err != nil || len(list) != 2 || find(list, 0x1800, 0x3800, false) != nil {
		t.Fatal(list, err)
	}
	if g := find(list, 0x1800, 0x3800, true); g == nil || *g != (gap{0x1800, 0x3000, "not writable"}) {
		t.Fatal(g)
	}
	if g := find(list, 0x3800, 0x4800, true); g == nil || *g != (gap{0x4000, 0x4800, "not mapped"}) {
		t.Fatal(g)
	}
}

func TestFault(t *testing.T) {
	b, base := pages(t, 8)
	regions := []kv.Region{
		{Name: "a", Base: base, BlockStride: page, BlockBytes: page, NumBlocks: 4},
		{Name: "b", Base: base + 4*page, BlockStride: page, BlockBytes: page, NumBlocks: 4},
	}
	spans := []Span{{base + 100, page}, {base + 4*page, 4 * page}}
	protect(t, b[6*page:7*page], unix.PROT_READ)
	wants(t, Fault(regions, spans, true, unix.EFAULT), `region "b" cannot be written`, "not writable")
	wants(t, Fault(regions, spans, false, unix.EFAULT), `region "a" cannot be read`, "bad address") // nothing is wrong any more
}

// A mapping may be longer than its file. Touching what lies behind would end this process.
func TestFaultBehindAFile(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "kv"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(8 * page); err != nil {
		t.Fatal(err)
	}
	b, err := unix.Mmap(int(f.Fd()), 0, 8*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(b) }()
	if err := f.Truncate(5 * page); err != nil {
		t.Fatal(err)
	}
	base := uint64(uintptr(unsafe.Pointer(&b[0])))
	regions := []kv.Region{
		{Name: "a", Base: base, BlockStride: page, BlockBytes: page, NumBlocks: 4},
		{Name: "b", Base: base + 4*page, BlockStride: page, BlockBytes: page, NumBlocks: 4},
	}
	if err := Check(regions, true); err != nil {
		t.Fatal(err)
	}
	for _, write := range []bool{false, true} {
		wants(t, Fault(regions, []Span{{base, 2 * page}, {base + 4*page, 4 * page}}, write, unix.EFAULT), `region "b"`, "nothing behind it")
	}
}
