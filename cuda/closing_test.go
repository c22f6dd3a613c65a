package cuda

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/testdouble/engine"
)

// TestClosingBounds: a copy that does not end counts as stuck in half of the time that a close has,
// however long a device may stall otherwise. Close ends in that time, and gives nothing back.
func TestClosingBounds(t *testing.T) {
	e := engine.New(t, 0)
	d, err := Open(0, Options{RingBytes: 16 * 4096, SlotBytes: 4096, StallTimeout: time.Hour, CloseTimeout: 200 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	p, tr, s := memory(t, e, d, grain), d.Transfer("a", ToDevice), slot(t, d, ToDevice)
	e.Hold(d.made()[ToDevice].drv.Stream())
	done := make(chan error, 1)
	tr.Start(Copy{Slot: s, Runs: []Run{{Addr: p, Len: 100}}, Done: func(err error) { done <- err }})
	d.Closing()
	if err := answer(t, done); !errors.Is(err, ErrStuck) {
		t.Errorf("the copy was told with: %v", err)
	}
	pinned, closed := e.Count("pinned"), make(chan error, 1)
	go func() { closed <- d.Close() }()
	if err := answer(t, closed); err == nil || e.Count("pinned") != pinned {
		t.Errorf("closed, and the copy may use the ring: %v", err)
	}
	e.Release(d.made()[ToDevice].drv.Stream())
	d.settled(t)
}

// TestCloseEndsCopies: a copy that begins after Closing has looked, and does not end, counts as stuck
// when Close ends. Nothing looks at the device any more, and nobody would ever hear of the copy.
func TestCloseEndsCopies(t *testing.T) {
	e := engine.New(t, 0)
	d, err := Open(0, Options{RingBytes: 16 * 4096, SlotBytes: 4096, StallTimeout: time.Hour, CloseTimeout: 200 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	p, tr, s := memory(t, e, d, grain), d.Transfer("a", ToDevice), slot(t, d, ToDevice)
	d.Closing()
	d.closeTimer.Stop() // as if it had found nothing
	stream := d.made()[ToDevice].drv.Stream()
	e.Hold(stream)
	release := sync.OnceFunc(func() { e.Release(stream) })
	t.Cleanup(release) // else a failure here would hang in the double's end
	done, closed := make(chan error, 1), make(chan error, 1)
	tr.Start(Copy{Slot: s, Runs: []Run{{Addr: p, Len: 100}}, Done: func(err error) { done <- err }})
	go func() { closed <- d.Close() }()
	if err := answer(t, closed); err == nil {
		t.Error("closed, and the copy may use the ring")
	}
	if err := answer(t, done); !errors.Is(err, ErrStuck) {
		t.Errorf("the copy was told with: %v", err)
	}
	release()
	d.settled(t)
}

// TestBegunAfterClose: Close ends the goroutine that calls Done. If a copy is begun after that, its Done is called all the same.
func TestBegunAfterClose(t *testing.T) {
	e, d := open(t, Options{CloseTimeout: patience})
	p, s, done := memory(t, e, d, grain), slot(t, d, ToDevice), make(chan error, 1)
	j, err := d.Transfer("a", ToDevice).ready(Copy{Slot: s, Runs: []Run{{Addr: p, Len: 100}}, Done: func(err error) {
		s.Release()
		done <- err
	}})
	if err != nil {
		t.Fatal(err)
	}
	closed := make(chan error, 1)
	go func() { closed <- d.Close() }()
	q := d.queue(ToDevice)
	for silent := false; !silent; runtime.Gosched() {
		q.mu.Lock()
		silent = q.silent
		q.mu.Unlock()
	}
	j.t.begin(j)
	if err := answer(t, done); !errors.Is(err, ErrClosed) {
		t.Errorf("the copy was told with: %v", err)
	}
	if err := answer(t, closed); err != nil {
		t.Error(err)
	}
}

// TestCloseWhileCopying: all that was begun is told once, and nothing is left. A caller that waits for a
// slot or a moment hears of the close.
func TestCloseWhileCopying(t *testing.T) {
	e, d := open(t, Options{RingBytes: 16 * 4096, SlotBytes: 4096})
	p, stream := e.Alloc(grain), e.Stream()
	if _, err := d.Register("cache", p, grain); err != nil {
		t.Fatal(err)
	}
	e.Hold(stream)
	late := moment(t, d, stream)
	tr := d.Transfer("a", FromDevice)
	done := make(chan error, 20)
	for range 10 {
		s := slot(t, d, FromDevice)
		tr.Start(Copy{Slot: s, Runs: []Run{{Addr: p, Len: 4096}}, Done: func(err error) { s.Release(); done <- err }})
	}
	d.Await(late, func(err error) { done <- err })
	go func() {
		for {
			s, err := d.Slot(context.Background(), FromDevice, "test")
			if err != nil {
				done <- err
				return
			}
			defer s.Release()
		}
	}()
	e.Release(stream) // the driver's wait ends; whether the copies are given to it is open
	closed := make(chan error, 1)
	go func() { closed <- d.Close() }()
	for range 12 {
		answer(t, done)
	}
	if err := answer(t, closed); err != nil {
		t.Error(err)
	}
	if _, err := d.Moment(stream); !errors.Is(err, ErrClosed) {
		t.Errorf("a moment of a closed device: %v", err)
	}
}

// TestCloseBound: a slot that is not released keeps the pinned memory, and Close says so in bounded time.
func TestCloseBound(t *testing.T) {
	e := engine.New(t, 0)
	d, err := Open(0, Options{RingBytes: 16 * 4096, SlotBytes: 4096, StallTimeout: 50 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	pinned := e.Count("pinned")
	s := slot(t, d, ToDevice)
	if err := d.Close(); err == nil || e.Count("pinned") != pinned+1 {
		t.Errorf("%v, and %d rings are left", err, e.Count("pinned")-pinned)
	}
	s.Bytes()[0] = 1 // it is still there
}

// TestCloseBesideACall: a close waits for a call that the driver does not answer, but no longer than its time. It holds up no other
// call meanwhile, and then gives nothing back.
func TestCloseBesideACall(t *testing.T) {
	for _, c := range []struct {
		what    string
		close   time.Duration
		answers bool // the driver, while the close waits
	}{{"in time", patience, true}, {"too late", 200 * time.Millisecond, false}} {
		t.Run(c.what, func(t *testing.T) {
			e := engine.New(t, 0)
			d, err := Open(0, Options{RingBytes: 16 * 4096, SlotBytes: 4096, StallTimeout: time.Hour, CloseTimeout: c.close})
			if err != nil {
				t.Fatal(err)
			}
			memory(t, e, d, grain)
			if err := d.Prepare(); err != nil {
				t.Fatal(err)
			}
			pinned := e.Count("pinned")
			unblock := sync.OnceFunc(e.Unblock)
			t.Cleanup(unblock)
			e.Block("cuPointerGetAttribute")
			looked, closed := make(chan error, 1), make(chan error, 1)
			go func() { looked <- d.Check() }()
			for e.Count("blocked") == 0 {
				runtime.Gosched()
			}
			stream := e.Stream()
			heard := make(chan error, 1)
			e.Hold(stream)
			release := sync.OnceFunc(func() { e.Release(stream) })
			t.Cleanup(release)
			d.Await(moment(t, d, stream), func(err error) { heard <- err })
			go func() { closed <- d.Close() }()
			if err := answer(t, heard); !errors.Is(err, ErrClosed) {
				t.Errorf("who waits for a moment hears %v", err)
			}
			other := make(chan error, 1)
			go func() { other <- d.Check() }()
			if err := answer(t, other); !errors.Is(err, ErrClosed) {
				t.Errorf("a look beside the close: %v", err)
			}
			release()
			if c.answers {
				unblock()
				if err := answer(t, closed); err != nil || e.Count("pinned") != pinned-1 {
					t.Errorf("the close: %v, and %d rings are left", err, e.Count("pinned")-pinned+1)
				}
			} else if err := answer(t, closed); err == nil || e.Count("pinned") != pinned ||
				!strings.Contains(err.Error(), "a call of the driver has not returned") {
				t.Errorf("the close: %v, and the driver may use the ring", err)
			}
			unblock()
			if err := answer(t, looked); err != nil {
				t.Errorf("the look: %v", err)
			}
		})
	}
}

// TestCloseWhenNothingIsTakenBack: nothing is under way, and the driver does not take back what the device has. When its time is over, Close
// says so, and so does a second one.
func TestCloseWhenNothingIsTakenBack(t *testing.T) {
	for _, function := range []string{"cuMemFreeHost", "cuModuleUnload"} {
		t.Run(function, func(t *testing.T) {
			e := engine.New(t, 0)
			pinned, modules := e.Count("pinned"), e.Count("modules")
			d, err := Open(0, Options{RingBytes: 16 * 4096, SlotBytes: 4096, StallTimeout: time.Hour, CloseTimeout: time.Hour})
			if err != nil {
				t.Fatal(err)
			}
			d.hasty = make(chan struct{})
			memory(t, e, d, grain)
			if err := d.Prepare(); err != nil {
				t.Fatal(err)
			}
			unblock := sync.OnceFunc(e.Unblock)
			t.Cleanup(unblock)
			e.Block(function)
			first, second := make(chan error, 1), make(chan error, 1)
			go func() { first <- d.Close() }()
			for e.Count("blocked") == 0 {
				runtime.Gosched()
			}
			go func() { second <- d.Close() }()
			close(d.hasty)
			for _, closed := range []chan error{first, second} {
				if err := answer(t, closed); err == nil || !strings.Contains(err.Error(), "the driver has not taken back") {
					t.Errorf("the close: %v", err)
				}
			}
			unblock()
			for e.Count("pinned") != pinned || e.Count("modules") != modules {
				runtime.Gosched()
			}
		})
	}
}

// TestCloseBesideAMoment: a close waits for a caller in C that takes a moment, and keeps the handle that the caller uses if it does not
// come out in time.
func TestCloseBesideAMoment(t *testing.T) {
	for _, c := range []struct {
		what   string
		close  time.Duration
		leaves bool // while the close waits
	}{{"in time", patience, true}, {"too late", 200 * time.Millisecond, false}} {
		t.Run(c.what, func(t *testing.T) {
			e := engine.New(t, 0)
			d, err := Open(0, Options{RingBytes: 16 * 4096, SlotBytes: 4096, StallTimeout: time.Hour, CloseTimeout: c.close})
			if err != nil {
				t.Fatal(err)
			}
			stream := e.Stream()
			m := moment(t, d, stream)
			leave, closed := d.TakingMoments(), make(chan error, 1)
			go func() { closed <- d.Close() }()
			if c.leaves {
				for !d.closed.Load() {
					runtime.Gosched()
				}
				leave()
				if err := answer(t, closed); err != nil {
					t.Error(err)
				}
				return
			}
			if err := answer(t, closed); err == nil || !strings.Contains(err.Error(), "a call of the driver has not returned") {
				t.Errorf("the close: %v", err)
			}
			if err := d.drv.Await(m); err != nil {
				t.Errorf("the caller's handle is gone: %v", err)
			}
			leave()
		})
	}
}

// TestFlushOfAStuckDevice: a device does not end a copy. What a card has written is flushed all the same. If the driver does not answer that
// either, the flush has a bound. Close waits for a flush that has begun, and refuses one that comes later.
func TestFlushOfAStuckDevice(t *testing.T) {
	e := engine.New(t, 0)
	d, err := Open(0, Options{RingBytes: 16 * 4096, SlotBytes: 4096, StallTimeout: time.Hour, CloseTimeout: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	d.info.WritesOrdered, d.info.FlushOnHost = false, true
	if err := d.Prepare(); err != nil {
		t.Fatal(err)
	}
	d.stall(errors.New("a test"))
	before := e.Count("cuFlushGPUDirectRDMAWrites")
	if err := d.Flush(); err != nil || e.Count("cuFlushGPUDirectRDMAWrites") == before {
		t.Errorf("a flush: %v, and %d have come", err, e.Count("cuFlushGPUDirectRDMAWrites")-before)
	}
	unblock := sync.OnceFunc(e.Unblock)
	t.Cleanup(unblock)
	d.o.CloseTimeout = 200 * time.Millisecond
	e.Block("cuFlushGPUDirectRDMAWrites")
	flushed := make(chan error, 1)
	for range 2 {
		go func() { flushed <- d.Flush() }()
		if err := answer(t, flushed); !errors.Is(err, ErrStuck) || !errors.Is(err, core.ErrMayLand) || !strings.Contains(err.Error(), "has not ended a flush") {
			t.Errorf("a flush that the driver does not answer: %v", err)
		}
	}
	if n := e.Count("blocked"); n != 1 {
		t.Errorf("%d flushes wait in the driver, and each keeps a thread", n)
	}
	closed := make(chan error, 1)
	go func() { closed <- d.Close() }()
	if err := answer(t, closed); err == nil || !strings.Contains(err.Error(), "a call of the driver has not returned") {
		t.Errorf("the close beside a flush: %v", err)
	}
	if err := d.Flush(); !errors.Is(err, core.ErrMayLand) {
		t.Errorf("a flush after Close: %v", err)
	}
	unblock()
	d.settled(t)
}

// blockFlushes has no flush return. One of an earlier test may be about to.
func blockFlushes(e *engine.Engine) {
	for e.Count("blocked") > 0 {
		runtime.Gosched()
	}
	e.Block("cuFlushGPUDirectRDMAWrites")
}

// TestFlushThatIsNotAnswered: a device copies, and its driver does not answer a flush, as when a call of the engine's holds the driver. The flush
// ends in its time and says that bytes may land, and the device has not failed. When the driver answers again, so does a flush.
func TestFlushThatIsNotAnswered(t *testing.T) {
	e, d := open(t, Options{StallTimeout: time.Hour})
	if err := d.Prepare(); err != nil {
		t.Fatal(err)
	}
	d.info.WritesOrdered, d.info.FlushOnHost = false, true
	unblock := sync.OnceFunc(e.Unblock)
	t.Cleanup(unblock)
	d.flushBound = 200 * time.Millisecond // a copy has an hour
	blockFlushes(e)
	flushed := make(chan error, 1)
	for range 2 {
		go func() { flushed <- d.Flush() }()
		if err := answer(t, flushed); !errors.Is(err, core.ErrMayLand) || errors.Is(err, ErrStuck) || !strings.Contains(err.Error(), "has not ended a flush") {
			t.Errorf("a flush that the driver does not answer: %v", err)
		}
	}
	if n := e.Count("blocked"); n != 1 {
		t.Errorf("%d flushes wait in the driver, and each keeps a thread", n)
	}
	p := memory(t, e, d, grain)
	if err := run(t, d.Transfer("a", FromDevice), Copy{Slot: slot(t, d, FromDevice), Runs: []Run{{Addr: p, Len: 100}}}); err != nil {
		t.Errorf("a copy beside a flush: %v", err)
	}
	d.flushBound = patience
	go func() { flushed <- d.Flush() }() // waits for its turn
	unblock()
	if err := answer(t, flushed); err != nil {
		t.Errorf("a flush that the driver answers: %v", err)
	}
}

// TestFlushBesideClosing: a transport that is closed flushes. Once half of the time of a close is over, each flush has the time of a close, also
// one that has begun before.
func TestFlushBesideClosing(t *testing.T) {
	e, d := open(t, Options{StallTimeout: time.Hour, CloseTimeout: 400 * time.Millisecond})
	d.info.WritesOrdered, d.info.FlushOnHost = false, true
	unblock := sync.OnceFunc(e.Unblock)
	t.Cleanup(unblock)
	blockFlushes(e)
	flushed := make(chan error, 2)
	for range cap(flushed) { // the second one waits for its turn
		go func() { flushed <- d.Flush() }()
	}
	for e.Count("blocked") == 0 {
		runtime.Gosched()
	}
	d.Closing()
	for range cap(flushed) {
		if err := answer(t, flushed); !errors.Is(err, core.ErrMayLand) {
			t.Errorf("a flush beside a close: %v", err)
		}
	}
	go func() { flushed <- d.Flush() }()
	if err := answer(t, flushed); !errors.Is(err, core.ErrMayLand) {
		t.Errorf("a flush late in a close: %v", err)
	}
	d.o.CloseTimeout, d.until = patience, time.Now().Add(patience)
	go func() { flushed <- d.Flush() }()
	unblock()
	if err := answer(t, flushed); err != nil {
		t.Errorf("a flush that the driver answers: %v", err)
	}
}

// TestFlushAcrossHalfway: half of the time of a close is over while a flush is under way. If the driver answers then, the flush ends well.
func TestFlushAcrossHalfway(t *testing.T) {
	e, d := open(t, Options{StallTimeout: time.Hour, CloseTimeout: time.Hour})
	d.info.WritesOrdered, d.info.FlushOnHost = false, true
	unblock := sync.OnceFunc(e.Unblock)
	t.Cleanup(unblock)
	blockFlushes(e)
	flushed := make(chan error, 1)
	go func() { flushed <- d.Flush() }()
	for e.Count("blocked") == 0 {
		runtime.Gosched()
	}
	d.closing.Do(func() {
		d.closeTimer = time.NewTimer(time.Hour)
		d.until = time.Now().Add(patience)
	})
	close(d.halfway)
	select {
	case err := <-flushed:
		t.Fatalf("the flush has ended with the half of a close: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	unblock()
	if err := answer(t, flushed); err != nil {
		t.Errorf("a flush that the driver answers: %v", err)
	}
}

// TestFlushOfAStoppedProcess: when a process goes on that was stopped, the last step of a flush's time and the driver's answer may both be there.
// Then the flush has ended. While a process is stopped, no more than one step passes.
func TestFlushOfAStoppedProcess(t *testing.T) {
	answered, ticks := make(chan struct{}), make(chan time.Time, 1)
	close(answered)
	for range 100 {
		if len(ticks) == 0 {
			ticks <- time.Now()
		}
		w := &flushWait{step: &time.Ticker{C: ticks}, left: 1}
		if !w.until(answered) {
			t.Fatal("a flush that was answered counts as late")
		}
	}
	w := (&Device{flushBound: time.Hour, o: Options{CloseTimeout: time.Hour}, stuck: make(chan struct{})}).waitForFlush()
	w.step.Stop()
	if w.left < 2 {
		t.Errorf("the time of a flush passes in %d steps", w.left)
	}
}
