package shmem

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
)

func alloc(t *testing.T, n uint64) *Memory {
	t.Helper()
	m, err := Alloc(n)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func free(t *testing.T, m *Memory) {
	t.Helper()
	if err := Free(m.Base()); err != nil {
		t.Error(err)
	}
}

// nothing checks that a test leaves neither memory nor descriptors.
func nothing(t *testing.T) {
	t.Helper()
	before := descriptors(t)
	t.Cleanup(func() {
		if n, b := Allocated(); n != 0 || b != 0 {
			t.Errorf("%d memories of %d bytes are left", n, b)
		}
		if after := descriptors(t); after != before {
			t.Errorf("%d descriptors, %d before", after, before)
		}
	})
}

func descriptors(t *testing.T) (n int) {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range all {
		if to, _ := os.Readlink("/proc/self/fd/" + e.Name()); strings.Contains(to, "memfd:") {
			n++
		}
	}
	return n
}

// isMapped says whether a memory of ours lies at an address. Others of the process may map theirs where one was.
func isMapped(t *testing.T, at uint64) bool {
	t.Helper()
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(maps)) {
		var from, to uint64
		if _, err := fmt.Sscanf(line, "%x-%x", &from, &to); err == nil && from <= at && at < to {
			return strings.Contains(line, "memfd:kvconn")
		}
	}
	return false
}

func TestAlloc(t *testing.T) {
	nothing(t)
	for _, n := range []uint64{1, 4096, 4097, huge - 1, huge, huge + 1, 5*huge + 12345} {
		m := alloc(t, n)
		if m.Size() < n || m.Size() >= n+4096 || m.Base()%4096 != 0 || n >= huge && m.Base()%huge != 0 {
			t.Errorf("%d bytes: %d at %#x", n, m.Size(), m.Base())
		}
		if b := m.Bytes(); len(b) != int(m.Size()) || !bytes.Equal(b, make([]byte, len(b))) {
			t.Error("it is not zeroed")
		}
		m.Bytes()[m.Size()-1] = 7
		free(t, m)
		if isMapped(t, m.Base()) {
			t.Error("it is mapped after Free")
		}
	}
}

func TestFile(t *testing.T) {
	nothing(t)
	m := alloc(t, 10_000)
	defer free(t, m)
	copy(m.Bytes()[5000:], "here")
	f, err := m.File()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := make([]byte, 4)
	if _, err := f.ReadAt(b, 5000); err != nil || string(b) != "here" {
		t.Errorf("%q, %v", b, err)
	}
	if _, err := f.WriteAt([]byte("x"), 0); err == nil {
		t.Error("who gets the file can write")
	}
	if _, err := unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err == nil {
		t.Error("who gets the file can write by a mapping")
	}
	if err := f.Truncate(0); err == nil {
		t.Error("the file can be cut")
	}
	const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL
	if has, err := unix.FcntlInt(f.Fd(), unix.F_GET_SEALS, 0); err != nil || has&seals != seals {
		t.Errorf("seals %#x, %v", has, err)
	}
	if flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
		t.Error("a program that is started gets it")
	}
	var is unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &is); err != nil || uint64(is.Size) != m.Size() || uint64(is.Blocks)*512 < m.Size() {
		t.Errorf("%d bytes, %d blocks of %d are there", is.Size, is.Blocks, m.Size())
	}
}

func TestLimits(t *testing.T) {
	nothing(t)
	for _, n := range []uint64{0, MostBytes + 1, 1 << 63, 1<<64 - 1} {
		if _, err := Alloc(n); err == nil || !strings.Contains(err.Error(), "want 1 to") {
			t.Errorf("%d bytes: %v", n, err)
		}
	}
	if _, err := Alloc(MostBytes); err == nil || !strings.Contains(err.Error(), "bytes available") {
		t.Error(err)
	}
	var all []*Memory
	for range Most {
		all = append(all, alloc(t, 1))
	}
	if _, err := Alloc(1); !errors.Is(err, core.ErrOverload) {
		t.Error(err)
	}
	free(t, all[0])
	all[0] = alloc(t, 1)
	for _, m := range all {
		free(t, m)
	}
}

func TestFree(t *testing.T) {
	nothing(t)
	m := alloc(t, 8192)
	var other int
	for _, at := range []uint64{0, 1, m.Base() + 4096, uint64(uintptr(unsafe.Pointer(&other)))} {
		if err := Free(at); !errors.Is(err, core.ErrInvalid) {
			t.Errorf("%#x: %v", at, err)
		}
	}
	free(t, m)
	if err := Free(m.Base()); !errors.Is(err, core.ErrInvalid) {
		t.Error(err)
	}
}

// TestHold: memory that somebody holds stays, and nobody else gets it.
func TestHold(t *testing.T) {
	nothing(t)
	m := alloc(t, 8192)
	hold := func(base, length uint64, want ...*Memory) []*Memory {
		t.Helper()
		held, err := Hold(base, length)
		if err != nil || len(held) != len(want) {
			t.Fatalf("%v, %v; want %v", held, err, want)
		}
		return held
	}
	hold(m.Base()-4096, 4096)
	hold(m.Base()+8192, 4096)
	n := alloc(t, 4096)
	first := hold(m.Base()+8191, 1, m)
	again := hold(m.Base(), 8192, m)
	hold(n.Base(), 1, n)[0].Release()
	m.Bytes()[0] = 5
	free(t, m)
	if err := Free(m.Base()); !errors.Is(err, core.ErrInvalid) {
		t.Errorf("freed twice: %v", err)
	}
	if _, err := Hold(m.Base(), 1); err == nil || !strings.Contains(err.Error(), "was freed") {
		t.Error(err)
	}
	if low, high := min(m.Base(), n.Base()), max(m.Base()+8192, n.Base()+4096); high-low == 12288 { // also what was held before it is given back
		if _, err := Hold(low, high-low); err == nil {
			t.Error("freed memory is held")
		}
	}
	first[0].Release()
	if m.Bytes()[0] != 5 {
		t.Error("it is another")
	}
	again[0].Release()
	if isMapped(t, m.Base()) {
		t.Error("it is mapped after the last Release")
	}
	free(t, n)
}

func TestManyThreads(t *testing.T) {
	nothing(t)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for i := range 100 {
				m, err := Alloc(uint64(i*1000 + 1))
				if err != nil {
					t.Error(err)
					return
				}
				held, err := Hold(m.Base(), m.Size())
				if err != nil || len(held) != 1 || held[0] != m {
					t.Errorf("%v, %v", held, err)
					return
				}
				m.Bytes()[0] = 1
				if err := Free(m.Base()); err != nil {
					t.Error(err)
				}
				m.Bytes()[m.Size()-1] = 1
				m.Release()
			}
		})
	}
	wg.Wait()
}

// TestNoChild: a child does not get the memory by exec.
func TestNoChild(t *testing.T) {
	nothing(t)
	m := alloc(t, 4096)
	defer free(t, m)
	out, err := exec.Command("ls", "-l", "/proc/self/fd").CombinedOutput()
	if err != nil || strings.Contains(string(out), "memfd:kvconn") {
		t.Errorf("%v\n%s", err, out)
	}
}
