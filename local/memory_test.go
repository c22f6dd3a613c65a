package local

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/coretest"
)

// hide takes memory of an agent away, as an engine does that frees its caches too early.
func (a *agent) hide(from, length int) {
	a.t.Helper()
	if err := unix.Mprotect(a.mem[from:from+length], unix.PROT_NONE); err != nil {
		a.t.Fatal(err)
	}
	a.t.Cleanup(func() { _ = unix.Mprotect(a.mem[from:from+length], unix.PROT_READ|unix.PROT_WRITE) })
}

// TestUnreadable: if P's memory is not there, that transfer ends on both sides with the region's
// name, and the next one goes well.
func TestUnreadable(t *testing.T) {
	p, d := two(t, nil)
	whole := func() { _ = unix.Mprotect(p.mem, unix.PROT_READ|unix.PROT_WRITE) }
	for name, from := range map[string]int{"first": 0, "last": 15 * blockBytes, "of v": 20*blockBytes + 8192, "of v, the end": 32*blockBytes - 4096} {
		t.Run(name, func(t *testing.T) {
			region := "k"
			if from >= blocks*blockBytes {
				region = "v"
			}
			p.hide(from, 4096)
			p.write(core.TransferID("t "+name), "d", d.expect(core.TransferID("t "+name), "p"))
			wants(t, d.sink.Wait("received", core.TransferID("t "+name), 1).Err, "region \""+region+"\" of prefill agent p cannot be read")
			wants(t, p.sink.Wait("written", core.TransferID("t "+name), 1).Err, "region \""+region+"\" cannot be read", "not readable")
			whole()
			moves(t, core.TransferID("after "+name), p, d)
		})
	}
}

// TestTruncated: P's memory may be a file that ends too soon. Who touches what is not there gets a signal, and the
// kernel, which copies here, an error.
func TestTruncated(t *testing.T) {
	p, d := two(t, nil)
	fd, err := unix.MemfdCreate("kvconn-test", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	over := func(fd, flags int) {
		t.Helper()
		if _, err := unix.MmapPtr(fd, 0, unsafe.Pointer(&p.mem[0]), blockBytes, unix.PROT_READ|unix.PROT_WRITE, flags|unix.MAP_FIXED); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Ftruncate(fd, blockBytes); err != nil {
		t.Fatal(err)
	}
	over(fd, unix.MAP_SHARED)
	moves(t, "whole", p, d)
	if err := unix.Ftruncate(fd, 4096); err != nil {
		t.Fatal(err)
	}
	p.write("t", "d", d.expect("t", "p"))
	wants(t, d.sink.Wait("received", "t", 1).Err, `region "k" of prefill agent p cannot be read`)
	wants(t, p.sink.Wait("written", "t", 1).Err, `region "k" cannot be read`, "nothing behind it")
	over(-1, unix.MAP_PRIVATE|unix.MAP_ANON)
	moves(t, "after", p, d)
}

// TestUnwritable: if it is D's memory that is not there, the same.
func TestUnwritable(t *testing.T) {
	p, d := two(t, nil)
	d.hide(18*blockBytes, 4096)
	p.write("t", "d", d.expect("t", "p"))
	wants(t, d.sink.Wait("received", "t", 1).Err, `region "v" cannot be written`)
	wants(t, p.sink.Wait("written", "t", 1).Err, "decode agent d", `region "v" cannot be written`)
	_ = unix.Mprotect(d.mem, unix.PROT_READ|unix.PROT_WRITE)
	moves(t, "after", p, d)
}

// TestValidityPage: the kernel reads nothing in a call that begins with a page that is invalidated.
func TestValidityPage(t *testing.T) {
	var g validityPages
	one, number, err := g.take()
	if err != nil {
		t.Fatal(err)
	}
	value, into := newRandom(), new([17]byte)
	kept := &value
	defer held(kept)()
	defer held(into)()
	from := []iovec{{uintptr(one.address), 1}, {uintptr(unsafe.Pointer(kept)), 16}}
	read := func() (uint64, bool) {
		*into = [17]byte{}
		n, errno := linux{}.readv(unix.Getpid(), []iovec{{uintptr(unsafe.Pointer(into)), 17}}, from)
		return n, errno == 0 && random(into[1:]) == value
	}
	if n, ok := read(); n != 17 || !ok {
		t.Errorf("%d bytes through a valid page", n)
	}
	g.invalidate(one)
	if _, ok := read(); ok || *into != [17]byte{} {
		t.Error("bytes come through an invalidated page")
	}
	g.give(one)
	if again, other, err := g.take(); err != nil || again != one || other == number || *one.word() != other {
		t.Errorf("%p, %d, %v; want the page that was given back, with another number than %d", again, other, err, number)
	}
	if n, ok := read(); n != 17 || !ok {
		t.Errorf("%d bytes through a page that was valid again", n)
	}
	g.invalidate(one)
	g.lose(one)
	for range 3 * pagesAtOnce {
		other, _, err := g.take()
		if err != nil || other == one || other.address == one.address {
			t.Fatalf("a page that is lost is taken again: %v, %v", other, err)
		}
	}
	late, _, err := g.take()
	if err != nil {
		t.Fatal(err)
	}
	g.freeAll()
	g.give(late) // a Write that came while the transport was closed
	g.invalidate(late)
	if _, _, err := g.take(); !errors.Is(err, errClosed) {
		t.Errorf("a page is taken after the end: %v", err)
	}
	if _, ok := read(); ok {
		t.Error("bytes come through a lost page when the others are freed")
	}
}

// TestDriversMemory: memory that the kernel copies for no other process is refused at New. The kernel's own page of clocks is
// such memory, which this process reads.
func TestDriversMemory(t *testing.T) {
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	var base uint64
	for line := range strings.Lines(string(maps)) {
		if strings.Contains(line, "[vvar]") {
			_, _ = fmt.Sscanf(line, "%x-", &base)
		}
	}
	if base == 0 {
		t.Fatal("there is no page of clocks")
	}
	l, err := kv.NewLayout([]kv.Region{
		{Name: "clocks", Base: base, BlockStride: 4096, BlockBytes: 4096, NumBlocks: 1},
	})
	if err != nil {
		t.Fatal(err)
	}
	tr, err := New(Config{Listen: true}, l, coretest.NewRecorder(t, "p"))
	if err == nil {
		_ = tr.Close()
	}
	wants(t, err, `region "clocks" cannot be read out of this process`, "bad address", "take tcp")
	if tr, err = New(Config{}, l, coretest.NewRecorder(t, "d")); err != nil {
		t.Fatal(err) // nobody reads the memory of an agent that only receives
	}
	_ = tr.Close()
}
