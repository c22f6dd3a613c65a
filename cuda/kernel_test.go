package cuda

import (
	"errors"
	"os"
	"strings"
	"testing"
	"unsafe"

	"github.com/kvconn/kvconn/rig/testdouble/engine"
)

// callsIn says how often a function of the driver was called while f ran.
func callsIn(e *engine.Engine, function string, f func()) uint64 {
	count := func() uint64 {
		if n := e.Count(function); n != ^uint64(0) {
			return n
		}
		return 0 // never called
	}
	before := count()
	f()
	return count() - before
}

// apart are n runs of so many bytes with as many between them.
func apart(at uintptr, n, bytes int) (runs []Run) {
	for i := range n {
		runs = append(runs, Run{Addr: at + uintptr(2*i*bytes), Len: uint64(bytes)})
	}
	return runs
}

// TestKernelBounds: the kernel copies pieces that are small in the mean, where there are several, at most 128 in a launch.
func TestKernelBounds(t *testing.T) {
	e, d := open(t, Options{})
	const n = 8 << 20
	at := memory(t, e, d, n)
	for _, c := range []struct {
		pieces, bytes int
		launches      uint64
	}{
		{1, 64, 0}, {2, 64, 1}, {2, 32 << 10, 1}, {2, 32<<10 + 16, 0}, {128, 4992, 1}, {129, 4992, 2}, {200, 4096, 2},
		{20, 2047, 1}, {20, 2050, 0}, {2, 5001, 0}, // no multiples of 16
	} {
		e.Fill(at, n, 1)
		s := slot(t, d, FromDevice)
		launches := callsIn(e, "cuLaunchKernel", func() {
			if err := run(t, d.Transfer("from", FromDevice), Copy{Slot: s, Runs: apart(at, c.pieces, c.bytes)}); err != nil {
				t.Fatal(err)
			}
		})
		if launches != c.launches {
			t.Errorf("%d pieces of %d bytes: %d launches, want %d", c.pieces, c.bytes, launches, c.launches)
		}
		whole := e.Pattern(n, 1)
		for i := range c.pieces {
			if got, want := s.Bytes()[i*c.bytes:(i+1)*c.bytes], whole[2*i*c.bytes:(2*i+1)*c.bytes]; string(got) != string(want) {
				t.Fatalf("%d pieces of %d bytes: piece %d is wrong", c.pieces, c.bytes, i)
			}
		}
		s.Release()
	}
}

// TestKernelBoundWithinADevice: pieces that stay on the device may be of 2 MiB in the mean.
func TestKernelBoundWithinADevice(t *testing.T) {
	const n, most = 8 << 20, 2 << 20
	e, d := open(t, Options{})
	o := start(t, 0)
	at, to := o.memory("allocate", n, 3), memory(t, e, d, n)
	p := o.openAll(d)
	for bytes, launches := range map[int]uint64{most: 1, most + 16: 0} {
		got := callsIn(e, "cuLaunchKernel", func() {
			if err := run(t, d.Transfer("a", FromPeer), Copy{Peer: p, Runs: apart(at, 2, bytes), To: apart(to, 2, bytes)}); err != nil {
				t.Fatal(err)
			}
		})
		if got != launches {
			t.Errorf("2 pieces of %d bytes: %d launches, want %d", bytes, got, launches)
		}
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
}

// TestKernelOfPeers: a peer's memory on this GPU is read by the kernel, in pieces of 64 KiB; on another GPU the driver's own copies find the way.
func TestKernelOfPeers(t *testing.T) {
	const n, bytes = 4 << 20, 300<<10 + 16
	for device, launched := range map[int]bool{0: true, 1: false} {
		for _, kind := range []string{"allocate", "map"} {
			e, d := open(t, Options{})
			o := start(t, device)
			at, to := o.memory(kind, n, 3), memory(t, e, d, n)
			p := o.openAll(d)
			e.Fill(to, n, 4)
			launches := callsIn(e, "cuLaunchKernel", func() {
				if err := run(t, d.Transfer("a", FromPeer), Copy{Peer: p, Runs: apart(at, 6, bytes), To: apart(to, 6, bytes)}); err != nil {
					t.Fatal(err)
				}
			})
			if (launches > 0) != launched {
				t.Errorf("memory of device %d (%s): %d launches", device, kind, launches)
			}
			got, others, want := e.Alias(to, n), e.Pattern(n, 4), e.Pattern(n, 3)
			for i := range n {
				if which := i / bytes; which < 12 && which%2 == 0 && got[i] != want[i] || (which >= 12 || which%2 == 1) && got[i] != others[i] {
					t.Fatalf("memory of device %d (%s): byte %d is wrong", device, kind, i)
				}
			}
			s := slot(t, d, FromDevice) // for blocks in host memory
			launches = callsIn(e, "cuLaunchKernel", func() {
				if err := run(t, d.Transfer("to a slot", FromDevice), Copy{Slot: s, Peer: p, Runs: apart(at, 9, 1024)}); err != nil {
					t.Fatal(err)
				}
			})
			if (launches > 0) != launched || string(s.Bytes()[8<<10:9<<10]) != string(want[16<<10:17<<10]) {
				t.Errorf("memory of device %d (%s) to a slot: %d launches, or wrong bytes", device, kind, launches)
			}
			s.Release()
			if err := p.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}

// TestNoKernel: where the driver does not take the kernel, or nobody wants it, its own copies do all, and the first is said.
func TestNoKernel(t *testing.T) {
	engine.New(t, 0).Fail("cuModuleLoadData", 1, 222)
	e, d := open(t, Options{})
	if err := d.NoKernel(); err == nil || !strings.Contains(err.Error(), "CUDA_ERROR_UNSUPPORTED_PTX_VERSION") || !strings.Contains(err.Error(), "cuModuleLoadData") {
		t.Errorf("it says %v", err)
	}
	copies := func(e *engine.Engine, d *Device) (launches uint64) {
		const n = 1 << 20
		at := memory(t, e, d, n)
		e.Fill(at, n, 5)
		s := slot(t, d, FromDevice)
		launches = callsIn(e, "cuLaunchKernel", func() {
			if err := run(t, d.Transfer("from", FromDevice), Copy{Slot: s, Runs: apart(at, 10, 1000)}); err != nil {
				t.Error(err)
			}
		})
		for i := range 10 {
			if string(s.Bytes()[i*1000:(i+1)*1000]) != string(e.Pattern(n, 5)[2*i*1000:(2*i+1)*1000]) {
				t.Errorf("piece %d is wrong", i)
			}
		}
		return launches
	}
	if n := copies(e, d); n != 0 {
		t.Errorf("%d launches of no kernel", n)
	}
	loads := callsIn(e, "cuModuleLoadData", func() {
		e, d := open(t, Options{NoKernel: true})
		if n := copies(e, d); n != 0 || d.NoKernel() != nil {
			t.Errorf("unwanted: %d launches, and it says %v", n, d.NoKernel())
		}
	})
	if loads != 0 {
		t.Error("a kernel was loaded that nobody wants")
	}
}

// TestKernelFails: of a copy that needs two launches the second one is refused: the copy ends with that, when the first one has ended.
func TestKernelFails(t *testing.T) {
	e, d := open(t, Options{})
	const n = 4 << 20
	at := memory(t, e, d, n)
	for nth, name := range map[int]string{1: "the first", 2: "the second"} {
		e.Fail("cuLaunchKernel", nth, 1)
		s := slot(t, d, ToDevice)
		err := run(t, d.Transfer("to", ToDevice), Copy{Slot: s, Runs: apart(at, 200, 1024)})
		var refused *Error
		if !errors.As(err, &refused) || refused.Call != "cuLaunchKernel" {
			t.Errorf("%s launch was refused, and the copy ended with %v", name, err)
		}
		s.Release()
	}
	e.Fill(at, n, 6)
	s := slot(t, d, FromDevice)
	if err := run(t, d.Transfer("from", FromDevice), Copy{Slot: s, Runs: apart(at, 200, 1024)}); err != nil || string(s.Bytes()[:1024]) != string(e.Pattern(1024, 6)) {
		t.Errorf("after it: %v, or wrong bytes", err)
	}
	s.Release()
}

// TestKernelGoesAstray: a kernel that reads what is not there ends the device, by name, and no copy is told as done.
func TestKernelGoesAstray(t *testing.T) {
	if os.Getenv(inside) == "" { // the context is lost
		again(t, "^TestKernelGoesAstray$", inside+"=1")
		return
	}
	e := engine.New(t, 0)
	d, err := Open(0, Options{})
	if err != nil {
		t.Fatal(err)
	}
	at := memory(t, e, d, grain)
	s := slot(t, d, FromDevice)
	if err := d.Prepare(); err != nil {
		t.Fatal(err)
	}
	_, err = d.queue(FromDevice).drv.Copy(0, unsafe.Pointer(unsafe.SliceData(s.Bytes())), []Run{{Addr: at, Len: 64}, {Addr: 4096, Len: 64}}, true)
	if err == nil { // else the kernel had run before its event was recorded
		err = d.queue(FromDevice).drv.Copied(0)
	}
	if !isSticky(err) || !strings.Contains(err.Error(), "ILLEGAL_ADDRESS") {
		t.Errorf("the copy ended with %v", err)
	}
	d.suspect(err)
	s.Release()
	if err := d.Close(); err != nil || d.Err() == nil {
		t.Errorf("closed: %v; the device's end: %v", err, d.Err())
	}
}
