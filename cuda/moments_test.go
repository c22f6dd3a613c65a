package cuda

import (
	"errors"
	"runtime"
	"testing"

	"github.com/kvconn/kvconn/rig/testdouble/engine"
)

// TestMoments: a moment passes when its stream has done what it was given before, whatever other
// streams do, and settles the older ones of its stream.
func TestMoments(t *testing.T) {
	e, d := open(t, Options{})
	late, soon := e.Stream(), e.Stream()
	e.Hold(late)
	first, second := moment(t, d, late), moment(t, d, late)
	if second <= first {
		t.Errorf("moments %#x and %#x of one stream are not in order", first, second)
	}
	order := make(chan uint64, 4)
	await := func(m uint64) {
		d.Await(m, func(err error) {
			if err != nil {
				t.Error(err)
			}
			order <- m
		})
	}
	await(second)
	await(first)
	other := moment(t, d, soon)
	await(other)
	if got := <-order; got != other {
		t.Errorf("%#x has passed, and its stream is held", got)
	}
	e.Release(late)
	if a, b := <-order, <-order; a != first || b != second {
		t.Errorf("%#x passed before %#x", a, b)
	}
	for _, m := range []uint64{first, second, other} { // once more
		hasPassed(t, d, m)
	}
}

// TestMomentsSubsume: a wait for the newest moment alone settles all moments before it.
func TestMomentsSubsume(t *testing.T) {
	e, d := open(t, Options{Moments: 8})
	stream, before := e.Stream(), e.Count("events")
	for range 50 {
		var all []uint64
		for range 8 {
			all = append(all, moment(t, d, stream))
		}
		done := make(chan error, 1)
		d.Await(all[7], func(err error) { done <- err })
		if err := answer(t, done); err != nil {
			t.Fatal(err)
		}
		asked := func() uint64 { return e.Count("cuEventQuery") + e.Count("cuEventSynchronize") }
		known := asked()
		for _, m := range all {
			hasPassed(t, d, m)
		}
		if n := asked() - known; n != 0 {
			t.Errorf("the driver was asked %d times for what is known", n)
		}
	}
	if n := e.Count("events") - before; n > 8 {
		t.Errorf("%d events for 8 moments", n)
	}
}

// TestMomentsBound: moments that nobody awaits are taken back when they have passed; the bound is told.
func TestMomentsBound(t *testing.T) {
	e, d := open(t, Options{Moments: 64})
	stream := e.Stream()
	e.Delay(0)
	t.Cleanup(func() { e.Delay(300) })
	for i := range 1000 {
		moment(t, d, stream)
		if i%32 == 31 {
			e.Sync(stream)
		}
	}
	e.Sync(stream)
	e.Hold(stream)
	for range 64 {
		moment(t, d, stream)
	}
	if _, err := d.Moment(stream); !errors.Is(err, ErrMoments) {
		t.Errorf("one moment too many: %v", err)
	}
	if _, err := d.Moment(e.Stream()); !errors.Is(err, ErrMoments) {
		t.Errorf("one moment too many, on another stream: %v", err)
	}
	e.Release(stream)
	e.Sync(stream)
	moment(t, d, stream)
}

// TestManyStreams: the places of streams whose moments have passed are used again, and their moments
// stay passed.
func TestManyStreams(t *testing.T) {
	e, d := open(t, Options{})
	var all []uint64
	for range 200 {
		stream := e.Stream()
		all = append(all, moment(t, d, stream))
		e.Sync(stream)
	}
	for _, m := range all {
		hasPassed(t, d, m)
	}
	held := e.Stream()
	e.Hold(held)
	last, heard := moment(t, d, held), make(chan error, 1)
	for range 100 {
		s := e.Stream()
		moment(t, d, s)
		e.Sync(s)
	}
	hasPassed(t, d, moment(t, d, e.Stream()))
	asked := e.Count("cuEventSynchronize")
	d.Await(last, func(err error) { heard <- err }) // only now: what the handle knows says whether the driver is asked
	for e.Count("cuEventSynchronize") == asked && len(heard) == 0 {
		runtime.Gosched()
	}
	if len(heard) > 0 {
		t.Errorf("a moment of a stream that is held has passed: %v", <-heard)
	}
	e.Release(held)
	if err := answer(t, heard); err != nil {
		t.Error(err)
	}
}

// TestNoSuchMoment: numbers that were never given, or that another handle gave.
func TestNoSuchMoment(t *testing.T) {
	e, d := open(t, Options{})
	other, err := Open(0, Options{})
	if err != nil {
		t.Fatal(err)
	}
	old := moment(t, other, e.Stream())
	e.Must("cuCtxSynchronize")
	if err := other.Close(); err != nil {
		t.Fatal(err)
	}
	again, err := Open(0, Options{}) // has the number of the closed one
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	mine := moment(t, d, e.Stream())
	moment(t, again, e.Stream())
	for _, c := range []struct {
		d *Device
		m uint64
	}{{d, old}, {again, old}, {again, mine}, {d, mine + 1}, {d, 12345}, {d, 0}} {
		if c.d.Owns(c.m) != (c.m>>56 == mine>>56 && c.d == d || c.m == old && c.d == again) {
			t.Errorf("%#x is owned: %v", c.m, c.d.Owns(c.m))
		}
		done := make(chan error, 1)
		c.d.Await(c.m, func(err error) { done <- err })
		if err := answer(t, done); !errors.Is(err, ErrMoment) {
			t.Errorf("%#x: %v", c.m, err)
		}
	}
}

// TestWrongStream: a stream of another device, or a destroyed one, is an error and no crash.
func TestWrongStream(t *testing.T) {
	e, d := open(t, Options{})
	gone := e.Out("cuStreamCreate", 1)
	e.Must("cuStreamDestroy_v2", gone)
	var failed *Error
	if _, err := d.Moment(gone); !errors.As(err, &failed) || failed.Code != 400 {
		t.Errorf("a destroyed stream: %v", err)
	}
	if d.Err() != nil {
		t.Errorf("the device has failed: %v", d.Err())
	}
	for _, special := range []uintptr{0, 1, 2} { // the legacy stream twice, and the thread's
		moment(t, d, special)
	}
}

// TestThreadAsBefore: the engine's thread keeps its context, another device's here, and its capture mode.
func TestThreadAsBefore(t *testing.T) {
	e, d := open(t, Options{})
	other := engine.New(t, 1)
	stream, words := e.Stream(), e.Out("cuMemHostAlloc", 16, 0)
	t.Cleanup(func() { e.Must("cuMemFreeHost", words) })
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if rc := e.Bare("cuCtxSetCurrent", other.Context()); rc != 0 {
		t.Fatal(rc)
	}
	defer e.Bare("cuCtxSetCurrent", 0)
	const threadLocal = 1
	mode := words + 8
	*at(mode) = threadLocal
	e.Bare("cuThreadExchangeStreamCaptureMode", mode)
	moment(t, d, stream)
	if _, err := d.Moment(12345); err == nil { // an error leaves the thread alone too
		t.Error("a moment on a stream that is none")
	}
	e.Bare("cuCtxGetCurrent", words)
	if word(words) != uint64(other.Context()) {
		t.Errorf("the thread's context was %#x and is %#x", other.Context(), word(words))
	}
	*at(mode) = 0
	e.Bare("cuThreadExchangeStreamCaptureMode", mode)
	if got := uint32(word(mode)); got != threadLocal {
		t.Errorf("the thread's capture mode was %d and is %d", threadLocal, got)
	}
}

// BenchmarkMoment: all but the driver's own calls, which the double makes slower than a driver does.
func BenchmarkMoment(b *testing.B) {
	e, d := open(b, Options{})
	stream := e.Stream()
	e.Delay(0)
	b.Cleanup(func() { e.Delay(300) })
	b.ReportAllocs()
	for b.Loop() {
		if _, err := d.Moment(stream); err != nil {
			b.Fatal(err)
		}
	}
}
