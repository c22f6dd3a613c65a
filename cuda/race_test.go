package cuda

import (
	"runtime"
	"testing"
)

// The known races, each with its wait. faults_test.go runs these tests on a build without the wait,
// where they count wrong reads.
const rounds = 200

// TestReadsAfterMoment: P reads what the engine's stream has been given before the moment.
func TestReadsAfterMoment(t *testing.T) {
	e, d := open(t, Options{})
	const n = 64 << 10
	p, stream, tr := memory(t, e, d, n), e.Stream(), d.Transfer("a", FromDevice)
	s := slot(t, d, FromDevice)
	wrong := 0
	for i := range rounds {
		e.Kernel(stream, p, n, uint64(i+1))
		hasPassed(t, d, moment(t, d, stream))
		if err := run(t, tr, Copy{Slot: s, Runs: []Run{{Addr: p, Len: n}}}); err != nil {
			t.Fatal(err)
		}
		if !same(e, s.Bytes()[:n], uint64(i+1)) {
			wrong++
		}
		e.Sync(stream)
	}
	if wrong > 0 {
		t.Errorf("%d of %d reads were wrong", wrong, rounds)
	}
}

// TestWritesAfterMoment: D writes no block that a kernel before the moment still reads.
func TestWritesAfterMoment(t *testing.T) {
	e, d := open(t, Options{})
	const n = 64 << 10
	p, stream, tr := memory(t, e, d, n), e.Stream(), d.Transfer("a", ToDevice)
	s := slot(t, d, ToDevice)
	counter := e.Out("cuMemHostAlloc", 8, 0)
	t.Cleanup(func() { e.Must("cuMemFreeHost", counter) })
	wrong := 0
	for i := range rounds {
		old, fresh := uint64(2*i+1), uint64(2*i+2)
		e.Fill(p, n, old)
		copy(s.Bytes(), e.Pattern(n, fresh))
		before := word(counter)
		e.Must("kvgpu_kernel_check", stream, p, n, uintptr(old), 0, counter) // the older request's kernel
		hasPassed(t, d, moment(t, d, stream))
		if err := run(t, tr, Copy{Slot: s, Runs: []Run{{Addr: p, Len: n}}}); err != nil {
			t.Fatal(err)
		}
		e.Sync(stream)
		if word(counter) != before {
			wrong++
		}
		if e.Wrong(p, n, fresh) != 0 {
			t.Fatal("the copy has not landed")
		}
	}
	if wrong > 0 {
		t.Errorf("%d of %d reads were wrong", wrong, rounds)
	}
}

// TestDoneAfterEvent: a copy is told when its bytes are in the device's memory.
func TestDoneAfterEvent(t *testing.T) {
	e, d := open(t, Options{})
	const n = 64 << 10
	p, tr := memory(t, e, d, n), d.Transfer("a", ToDevice)
	s := slot(t, d, ToDevice)
	wrong := 0
	for i := range rounds {
		pattern := uint64(i + 1)
		copy(s.Bytes(), e.Pattern(n, pattern))
		if err := run(t, tr, Copy{Slot: s, Runs: []Run{{Addr: p, Len: n}}}); err != nil {
			t.Fatal(err)
		}
		if e.Wrong(p, n, pattern) > 0 {
			wrong++
		}
		d.settled(t)
	}
	if wrong > 0 {
		t.Errorf("%d of %d reads were wrong", wrong, rounds)
	}
}

// settled waits until the driver has no copies of ours.
func (d *Device) settled(t *testing.T) {
	t.Helper()
	for _, q := range d.made() {
		for {
			q.mu.Lock()
			n := len(q.batches)
			q.mu.Unlock()
			if n == 0 {
				break
			}
			runtime.Gosched()
		}
	}
}

// TestSlotAfterCopy: a slot that is released while a copy reads it is nobody else's yet.
func TestSlotAfterCopy(t *testing.T) {
	e, d := open(t, Options{})
	const n = 256 << 10
	p, tr := memory(t, e, d, n), d.Transfer("a", ToDevice)
	wrong := 0
	for i := range rounds {
		pattern := uint64(i + 1)
		s := slot(t, d, ToDevice)
		copy(s.Bytes(), e.Pattern(n, pattern))
		done := make(chan error, 1)
		tr.Start(Copy{Slot: s, Runs: []Run{{Addr: p, Len: n}}, Done: func(err error) { done <- err }})
		s.Release()
		other := slot(t, d, ToDevice)
		clear(other.Bytes()[:n])
		other.Release()
		if err := answer(t, done); err != nil {
			t.Fatal(err)
		}
		if e.Wrong(p, n, pattern) > 0 {
			wrong++
		}
	}
	if wrong > 0 {
		t.Errorf("%d of %d reads were wrong", wrong, rounds)
	}
}
