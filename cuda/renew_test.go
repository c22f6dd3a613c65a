package cuda

import (
	"errors"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/rig/testdouble/engine"
)

func isChanged(err error, region string) bool {
	var changed *ChangedError
	return errors.As(err, &changed) && changed.Region == region
}

func renew(d *Device) error {
	n, err := d.Look()
	if err == nil {
		n.Take()
	}
	return err
}

// TestRenew: an engine sleeps, and wakes with other memory at the same addresses. While it sleeps there
// is nothing to renew. Then the region is what lies there now: checked, copied and exported.
func TestRenew(t *testing.T) {
	e, d := open(t, Options{})
	at := reserve(t, e, 2*grain)
	first, second := mapAt(t, e, at, 1), mapAt(t, e, at+grain, 1)
	plain := memory(t, e, d, grain)
	r, err := d.Register("slept", at, 2*grain)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if d.Moved() {
		t.Error("nothing has changed")
	}
	first.unmap()
	second.unmap()
	if !d.Moved() || !isChanged(d.Check(), "slept") {
		t.Errorf("that the memory is gone was not noticed: %v", d.Check())
	}
	if err := renew(d); err == nil || !strings.Contains(err.Error(), "region slept") {
		t.Errorf("memory that is not there was taken: %v", err)
	}
	mapAt(t, e, at, 1)
	mapAt(t, e, at+grain, 1)
	if !d.Moved() || !isChanged(r.Check(), "slept") {
		t.Errorf("that the memory is another was not noticed: %v", r.Check())
	}
	if err := renew(d); err != nil || d.Moved() {
		t.Fatalf("%v, and moved: %v", err, d.Moved())
	}
	if err := errors.Join(d.Check(), r.Check()); err != nil {
		t.Errorf("after it was renewed: %v", err)
	}
	for _, p := range []uintptr{plain, at + grain - 4096} {
		e.Fill(p, 8192, 3)
		s := slot(t, d, FromDevice)
		if err := run(t, d.Transfer("a", FromDevice), Copy{Slot: s, Runs: []Run{{Addr: p, Len: 8192}}}); err != nil || !same(e, s.Bytes()[:8192], 3) {
			t.Errorf("a copy from %#x: %v", p, err)
		}
	}
	file, offset, err := r.Export()
	if err != nil || offset != 0 {
		t.Fatalf("at %d, %v", offset, err)
	}
	defer file.Close()
	e.Fill(at, 2*grain, 4)
	if !same(e, e.Card(int(file.Fd())), 4) {
		t.Error("a card would reach other memory")
	}
}

// TestRenewRefuses: only memory that was mapped by handles, in the same pieces, may stand in the place of
// what was registered. A refusal changes nothing.
func TestRenewRefuses(t *testing.T) {
	e, d := open(t, Options{})
	e.Bare("kvgpu_reuse_addresses", 1)
	t.Cleanup(func() { e.Bare("kvgpu_reuse_addresses", 0) })
	register := func(name string, at, bytes uintptr) *Region {
		r, err := d.Register(name, at, uint64(bytes))
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	refused := func(r *Region, name string) {
		t.Helper()
		if err := renew(d); err == nil || !strings.Contains(err.Error(), "region "+name) {
			t.Errorf("%s was renewed: %v", name, err)
		}
		if !isChanged(r.Check(), name) {
			t.Errorf("%s: %v", name, r.Check())
		}
		r.Close()
	}
	p := e.Out("cuMemAlloc_v2", grain)
	r := register("freed", p, grain)
	e.Must("cuMemFree_v2", p)
	if again := e.Alloc(grain); again != p {
		t.Fatalf("%#x was allocated again as %#x", p, again)
	}
	refused(r, "freed")

	at := reserve(t, e, grain)
	m := mapAt(t, e, at, 1)
	r = register("not for cards", at, grain)
	m.unmap()
	mapAt(t, e, at, 0)
	refused(r, "not for cards")
}

// TestRenewOnce: of two that look, one takes the memory. What has become another since a look is noticed.
func TestRenewOnce(t *testing.T) {
	e, d := open(t, Options{})
	at := reserve(t, e, grain)
	m := mapAt(t, e, at, 1)
	r, err := d.Register("cache", at, grain)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	m.unmap()
	m = mapAt(t, e, at, 1)
	first, err := d.Look()
	if err != nil {
		t.Fatal(err)
	}
	second, err := d.Look()
	if err != nil || !first.Current() || !second.Current() {
		t.Fatal(err)
	}
	if err := d.Check(); !isChanged(err, "cache") {
		t.Errorf("a look alone has taken the memory: %v", err)
	}
	m.unmap()
	mapAt(t, e, at, 1)
	first.Take()
	if !isChanged(d.Check(), "cache") || second.Current() {
		t.Errorf("memory of after a look was taken: %v; the second look counts: %v", d.Check(), second.Current())
	}
	if err := renew(d); err != nil {
		t.Fatal(err)
	}
	second.Take()
	if err := d.Check(); err != nil {
		t.Errorf("a look of before has counted: %v", err)
	}
}

// TestCopiesStayInTheirMemory: a copy is begun, then the engine sleeps and wakes before the driver
// has it. The copy ends by the region's name, and the new memory is neither read nor written.
func TestCopiesStayInTheirMemory(t *testing.T) {
	e, d := open(t, Options{})
	at := reserve(t, e, grain)
	m := mapAt(t, e, at, 1)
	r, err := d.Register("cache", at, grain)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	for _, dir := range []Direction{ToDevice, FromDevice} {
		s, done := slot(t, d, dir), make(chan error, 1)
		clear(s.Bytes())
		j, err := d.Transfer("a", dir).ready(Copy{Slot: s, Runs: []Run{{Addr: at, Len: grain}}, Done: func(err error) { done <- err }})
		if err != nil {
			t.Fatal(err)
		}
		m.unmap()
		m = mapAt(t, e, at, 1)
		e.Fill(at, grain, 5)
		j.t.begin(j)
		err = answer(t, done)
		if n := e.Wrong(at, grain, 5); n > 0 {
			t.Errorf("%d bytes of a copy that was begun before have come", n)
		}
		if same(e, s.Bytes()[:grain], 5) {
			t.Error("the new memory was read by the end of a copy that was begun before")
		}
		if !isChanged(err, "cache") {
			t.Errorf("it ended with %v", err)
		}
		if err := renew(d); err != nil {
			t.Fatal(err)
		}
	}
}

// TestReadWhileItGoes: memory that an engine unmaps while it is copied. A driver leaves undefined what is
// read then, so the copy must not end well.
func TestReadWhileItGoes(t *testing.T) {
	e := engine.New(t, 0)
	d, err := Open(0, Options{SlotBytes: grain})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	at := reserve(t, e, grain)
	m := mapAt(t, e, at, 1)
	r, err := d.Register("cache", at, grain)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	s, done := slot(t, d, FromDevice), make(chan error, 1)
	e.Delay(20000)
	defer e.Delay(0)
	e.Block("cuEventSynchronize") // the memory goes before the copy's end is heard, however late this test is
	defer e.Unblock()
	d.Transfer("a", FromDevice).Start(Copy{Slot: s, Runs: []Run{{Addr: at, Len: grain}}, Done: func(err error) { done <- err }})
	m.unmap() // the double waits for the copy
	e.Unblock()
	if err := answer(t, done); !isChanged(err, "cache") {
		t.Errorf("it was not noticed: %v", err)
	}
}
