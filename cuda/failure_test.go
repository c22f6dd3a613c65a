package cuda

import (
	"errors"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/kvconn/kvconn/cuda/internal/driver"
	"github.com/kvconn/kvconn/rig/testdouble/engine"
)

// TestStuck: if the device does not end a copy, the copy says so in bounded time, and the device counts as failed. Only of the transfer whose copy
// the device has does MayCopy say that a copy may land.
func TestStuck(t *testing.T) {
	e, d := open(t, Options{StallTimeout: 100 * time.Millisecond})
	p, tr, waits, idle := memory(t, e, d, grain), d.Transfer("a", ToDevice), d.Transfer("b", ToDevice), d.Transfer("c", ToDevice)
	s := slot(t, d, ToDevice)
	ours := d.made()[ToDevice].drv.Stream()
	e.Hold(ours)
	done := make(chan error, driver.MostBatches+1)
	tell := func(err error) { done <- err }
	for range driver.MostBatches { // the driver takes no more
		tr.Start(Copy{Slot: s, Runs: []Run{{Addr: p, Len: 100}}, Done: tell})
	}
	waits.Start(Copy{Slot: s, Runs: []Run{{Addr: p, Len: 100}}, Done: tell})
	if !waits.MayCopy() && d.Err() == nil { // on a busy machine the device may have failed by now
		t.Error("a copy that has not ended does not count")
	}
	for range driver.MostBatches + 1 {
		if err := answer(t, done); !errors.Is(err, ErrStuck) || d.Err() == nil {
			t.Errorf("a copy was told with: %v, the device: %v", err, d.Err())
		}
	}
	if !tr.MayCopy() {
		t.Error("the device has copies, and it says that none may land")
	}
	if waits.MayCopy() {
		t.Error("a copy that the device never had may land, it says")
	}
	if idle.MayCopy() {
		t.Error("a transfer without copies has one that may land, it says")
	}
	if _, err := d.Slot(t.Context(), ToDevice, "test"); err == nil {
		t.Error("a failed device gives slots")
	}
	s.Release()
	if free, err := d.TrySlot(ToDevice, "test"); free != nil || err == nil {
		t.Error("a slot that a copy may use was given")
	}
	e.Release(ours) // now it ends, and Close finds nothing under way
	d.settled(t)
	for end := time.Now().Add(patience); tr.MayCopy() && time.Now().Before(end); {
		runtime.Gosched()
	}
	if tr.MayCopy() {
		t.Error("all copies have ended, and one may land, it says")
	}
}

// TestLostEvent: a copy that the driver took, and an event that it did not take: nobody knows when the copy
// ends.
func TestLostEvent(t *testing.T) {
	e := engine.New(t, 0)
	d, err := Open(0, Options{RingBytes: 16 * 4096, SlotBytes: 4096, StallTimeout: 100 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	p, tr, s := memory(t, e, d, grain), d.Transfer("a", ToDevice), slot(t, d, ToDevice)
	e.Fail("cuEventRecord", 1, 2)
	if err := run(t, tr, Copy{Slot: s, Runs: []Run{{Addr: p, Len: 100}}}); !errors.Is(err, ErrStuck) {
		t.Errorf("the copy was told with: %v", err)
	}
	if !tr.MayCopy() {
		t.Error("nobody knows whether the copy has ended, and it may not land, it says")
	}
	pinned := e.Count("pinned")
	if err := d.Close(); err == nil || e.Count("pinned") != pinned {
		t.Errorf("closed, and the copy may use the ring: %v", err)
	}
	e.Must("cuCtxSynchronize")
}

// TestLostEventOfAPeer: the same of a copy that needs no slot: the peer's memory and the kernel stay, since the copy may use them.
func TestLostEventOfAPeer(t *testing.T) {
	if os.Getenv(inside) == "" { // what stays would be in the way of other tests
		again(t, "^TestLostEventOfAPeer$", inside+"=1")
		return
	}
	e := engine.New(t, 0)
	d, err := Open(0, Options{StallTimeout: 100 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	o := start(t, 0)
	at, to := o.memory("allocate", grain, 1), memory(t, e, d, grain)
	p := o.openAll(d)
	e.Fail("cuEventRecord", 1, 2)
	if err := run(t, d.Transfer("a", FromPeer), Copy{Peer: p, Runs: apart(at, 9, 1024), To: apart(to, 9, 1024)}); !errors.Is(err, ErrStuck) {
		t.Errorf("the copy was told with: %v", err)
	}
	opened, modules := e.Count("ipc"), e.Count("modules")
	if err := d.Close(); err == nil || e.Count("ipc") != opened || e.Count("modules") != modules || opened == 0 {
		t.Errorf("closed, and the copy may use the peer's memory: %v", err)
	}
	e.Must("cuCtxSynchronize")
}

// TestStuckAfterAFailure: a device that fails first, and then does not end a copy: that the copy
// may yet land is not hidden by the first failure, nor by a close.
func TestStuckAfterAFailure(t *testing.T) {
	e, d := open(t, Options{StallTimeout: time.Hour, CloseTimeout: patience})
	p, tr, s := memory(t, e, d, grain), d.Transfer("a", ToDevice), slot(t, d, ToDevice)
	q := d.made()[ToDevice]
	e.Hold(q.drv.Stream())
	done := make(chan error, 1)
	tr.Start(Copy{Slot: s, Runs: []Run{{Addr: p, Len: 100}}, Done: func(err error) { done <- err }})
	lost := &Error{About: "of a test", Call: "cuEventQuery", Code: 700, Name: "CUDA_ERROR_ILLEGAL_ADDRESS"}
	d.suspect(lost)
	q.look()
	q.look()
	d.endAll(ErrClosed)
	if err := answer(t, done); !errors.Is(err, ErrStuck) || !errors.Is(err, lost) {
		t.Errorf("the copy was told with: %v", err)
	}
	if !tr.MayCopy() {
		t.Error("nobody knows whether the copy has ended, and it may not land, it says")
	}
	e.Release(q.drv.Stream())
	d.settled(t)
}

// TestPauseIsNoStall: one look that sees no progress may have come late; a second one may not.
func TestPauseIsNoStall(t *testing.T) {
	e, d := open(t, Options{StallTimeout: time.Hour})
	p, tr := memory(t, e, d, grain), d.Transfer("a", ToDevice)
	s := slot(t, d, ToDevice)
	q := d.made()[ToDevice]
	for range 2 { // progress begins the count anew
		e.Hold(q.drv.Stream())
		done := make(chan error, 1)
		tr.Start(Copy{Slot: s, Runs: []Run{{Addr: p, Len: 100}}, Done: func(err error) { done <- err }})
		q.look()
		if d.Err() != nil {
			t.Fatal(d.Err())
		}
		e.Release(q.drv.Stream())
		if err := answer(t, done); err != nil {
			t.Error(err)
		}
		q.look()
	}
}

// TestSticky: after an illegal address all copies and waits of the device end with that reason, new ones
// get it, and the process lives.
func TestSticky(t *testing.T) {
	e, d := open(t, Options{})
	p, stream, tr := memory(t, e, d, grain), e.Stream(), d.Transfer("a", FromDevice)
	first, second := slot(t, d, FromDevice), slot(t, d, FromDevice)
	ours := d.queue(FromDevice).drv.Stream()
	e.Hold(stream)
	e.Hold(ours)
	done := make(chan error, 3)
	tell := func(err error) { done <- err }
	waits := e.Count("cuEventSynchronize")
	d.Await(moment(t, d, stream), tell)
	tr.Start(Copy{Slot: first, Runs: []Run{{Addr: p, Len: 100}}, Done: tell})
	for e.Count("cuEventSynchronize") < waits+2 && len(done) == 0 { // until both are waited for
		runtime.Gosched()
	}
	e.Stick(700)
	t.Cleanup(func() { e.Stick(0); e.Release(stream); e.Release(ours) })
	tr.Start(Copy{Slot: second, Runs: []Run{{Addr: p, Len: 100}}, Done: tell})
	for range 3 {
		var failed *Error
		if err := answer(t, done); !errors.As(err, &failed) || failed.Code != 700 || !failed.Sticky() {
			t.Errorf("%v", err)
		}
	}
	if tr.MayCopy() {
		t.Error("no copy goes on after such a failure, and one may read, it says")
	}
	if _, err := d.Moment(stream); err == nil {
		t.Error("a failed device gives moments")
	}
	if _, err := d.TrySlot(FromDevice, "test"); err == nil {
		t.Error("a failed device gives slots")
	}
	if _, err := d.Register("k", p, grain); err == nil {
		t.Error("a failed device registers")
	}
}

// TestLateFailure: an operation that the device has already begun fails: each copy is told once, with the
// reason or as done, and none may land after that.
func TestLateFailure(t *testing.T) {
	if os.Getenv(inside) == "" { // the context stays sick
		again(t, "^TestLateFailure$", inside+"=1", "KVCONN_LIBCUDA="+engine.Library(t))
		return
	}
	e, d := open(t, Options{})
	p := memory(t, e, d, grain)
	from, to := d.Transfer("a", FromDevice), d.Transfer("b", ToDevice)
	e.Must("kvgpu_fail_operation", 0, 7, 719)
	t.Cleanup(func() { e.Stick(0) }) // so that what is left can be counted
	done := make(chan error, 16)
	for i := range 16 {
		tr := from
		if i%2 == 1 {
			tr = to
		}
		s, err := d.Slot(t.Context(), tr.dir, "test")
		if err != nil {
			done <- err // it has failed already
			continue
		}
		tr.Start(Copy{Slot: s, Runs: []Run{{Addr: p, Len: 64 << 10}}, Done: func(err error) { s.Release(); done <- err }})
	}
	bad := 0
	for range 16 {
		if err := answer(t, done); err != nil {
			var failed *Error
			if bad++; !errors.As(err, &failed) || failed.Code != 719 {
				t.Error(err)
			}
		}
	}
	if from.MayCopy() || to.MayCopy() || bad == 0 {
		t.Errorf("%d of 16 copies have failed; one may still read: %v, land: %v", bad, from.MayCopy(), to.MayCopy())
	}
}

// TestFailedCopy: an error of one copy is that transfer's alone.
func TestFailedCopy(t *testing.T) {
	e, d := open(t, Options{})
	p, tr, other := memory(t, e, d, grain), d.Transfer("a", FromDevice), d.Transfer("b", FromDevice)
	e.Fail("cuMemcpyDtoHAsync_v2", 1, 1)
	if err := run(t, tr, Copy{Slot: slot(t, d, FromDevice), Runs: []Run{{Addr: p, Len: 100}}}); err == nil {
		t.Error("no error")
	} else {
		t.Log(err)
	}
	if err := run(t, other, Copy{Slot: slot(t, d, FromDevice), Runs: []Run{{Addr: p, Len: 100}}}); err != nil {
		t.Error(err)
	}
	if tr.MayCopy() {
		t.Error("it may read, it says")
	}
}
