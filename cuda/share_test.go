package cuda

import (
	"strings"
	"testing"
)

// TestShareRefuses: what no other process can open is named.
func TestShareRefuses(t *testing.T) {
	e, d := open(t, Options{})
	pooled := e.Out("cuMemAllocAsync", grain, e.Stream())
	t.Cleanup(func() { e.Must("cuMemFreeAsync", pooled, 2) })
	at := reserve(t, e, grain)
	mapWith(t, e, at, 0, 0)
	plain := e.Alloc(grain)
	for name, c := range map[string]struct {
		at   uintptr
		says string
	}{"pooled": {pooled, "cudaMallocAsync"}, "mapped": {at, "requestedHandleTypes"}, "refused": {plain, "cuIpcGetMemHandle"}} {
		r, err := d.Register(name, c.at, grain)
		if err != nil {
			t.Fatal(err)
		}
		if name == "refused" {
			e.Fail("cuIpcGetMemHandle", 1, 801)
		}
		if _, err := d.Share(); err == nil || !strings.Contains(err.Error(), "region "+name+": it cannot be shared") || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", name, err)
		}
		r.Close()
	}
	if s, err := d.Share(); err != nil || len(s.Allocations) != 0 {
		t.Errorf("no regions: %v", err)
	}
}

// TestShareOnce: regions side by side share their allocations.
func TestShareOnce(t *testing.T) {
	e, d := open(t, Options{})
	p, m := e.Alloc(2*grain), e.Map(2*grain)
	for _, at := range []uintptr{p, p + grain, m.At + 100, m.At + grain} {
		r, err := d.Register("layer", at, grain-100)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
	}
	s, err := d.Share()
	if err != nil || len(s.Allocations) != 3 || s.Allocations[0].Bytes != 2*grain || s.Allocations[2].Bytes != grain {
		t.Fatalf("%+v, %v", s, err)
	}
	if err := s.Check(); err != nil {
		t.Error(err)
	}
	m.Sleep()
	if err := s.Check(); !isChanged(err, "layer") {
		t.Errorf("it was not noticed: %v", err)
	}
	if f, err := s.File(1); err == nil {
		f.Close()
		t.Error("memory that is not there was shared")
	}
	m.Wake()
	if f, err := s.File(1); !isChanged(err, "layer") {
		t.Errorf("other memory was shared: %v, %v", f, err)
	}
}
