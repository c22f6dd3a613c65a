package cuda

import (
	"bytes"
	"context"
	"testing"
	"time"
	"unsafe"

	"github.com/kvconn/kvconn/rig/testdouble/engine"
)

const patience = 20 * time.Second

// open gives an engine on a device, and our handle on it. When the test has ended the handle is closed,
// nothing of it is left behind, and the double has seen nothing that a driver leaves undefined.
func open(tb testing.TB, o Options) (*engine.Engine, *Device) {
	tb.Helper()
	e := engine.New(tb, 0)
	kinds := []string{"streams", "events", "modules", "pinned", "handles", "mapped", "reserved", "ipc", "violations"}
	before := make([]uint64, len(kinds))
	for i, k := range kinds {
		before[i] = e.Count(k)
	}
	if o.RingBytes == 0 && o.SlotBytes == 0 { // tests copy whole pieces of memory at once
		o.SlotBytes = grain
	}
	d, err := Open(0, o)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := d.Close(); err != nil {
			tb.Error(err)
		}
		for i, k := range kinds {
			if n := e.Count(k); n != before[i] {
				tb.Errorf("%d %s, and there were %d before", n, k, before[i])
			}
		}
	})
	return e, d
}

// memory gives registered device memory.
func memory(t *testing.T, e *engine.Engine, d *Device, bytes int) uintptr {
	t.Helper()
	p := e.Alloc(bytes)
	r, err := d.Register("cache", p, uint64(bytes))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Close)
	return p
}

func slot(t *testing.T, d *Device, dir Direction) *Slot {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	s, err := d.Slot(ctx, dir, "test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Release)
	return s
}

// answer waits for an error that comes.
func answer(t *testing.T, c <-chan error) error {
	t.Helper()
	select {
	case err := <-c:
		return err
	case <-time.After(patience):
		t.Fatal("no answer came")
		return nil
	}
}

// run starts a copy and waits for its end.
func run(t *testing.T, tr *Transfer, c Copy) error {
	t.Helper()
	done := make(chan error, 2)
	c.Done = func(err error) { done <- err }
	tr.Start(c)
	return answer(t, done)
}

func moment(t *testing.T, d *Device, stream uintptr) uint64 {
	t.Helper()
	m, err := d.Moment(stream)
	if err != nil || m == 0 {
		t.Fatalf("moment %#x: %v", m, err)
	}
	return m
}

// hasPassed waits for a moment, as an agent does before anything is copied.
func hasPassed(t *testing.T, d *Device, m uint64) {
	t.Helper()
	heard := make(chan error, 1)
	d.Await(m, func(err error) { heard <- err })
	if err := answer(t, heard); err != nil {
		t.Fatal(err)
	}
}

// same says whether b has the pattern's bytes.
func same(e *engine.Engine, b []byte, pattern uint64) bool {
	return bytes.Equal(b, e.Pattern(len(b), pattern))
}

// word is what lies at an address of host memory.
func word(addr uintptr) uint64 { return *at(addr) }

func at(addr uintptr) *uint64 { return *(**uint64)(unsafe.Pointer(&addr)) }
