package cuda

import (
	"strings"
	"testing"
)

// TestExport: a region as a dma-buf, whole pages; what cannot be exported is refused with the reason.
func TestExport(t *testing.T) {
	e, d := open(t, Options{})
	p := e.Alloc(2 * grain)
	r, err := d.Register("cache", p+100, grain)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	file, offset, err := r.Export()
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if size, err := file.Seek(0, 2); err != nil || offset != 100 || size < grain+100 {
		t.Errorf("offset %d, %d bytes, %v", offset, size, err)
	}
	at := reserve(t, e, grain)
	mapAt(t, e, at, 0)
	slept, err := d.Register("slept", at, grain)
	if err != nil {
		t.Fatal(err)
	}
	defer slept.Close()
	if _, _, err := slept.Export(); err == nil || !strings.Contains(err.Error(), "region slept: its memory was not allocated for GPUDirect RDMA") {
		t.Error(err)
	}
	e.Fail("cuMemGetHandleForAddressRange", 1, noMemory)
	if _, _, err := r.Export(); err == nil || !strings.Contains(err.Error(), "region cache: 2101248 bytes") || !strings.Contains(err.Error(), "BAR1 large enough") {
		t.Error(err)
	}
	d.info.DMABuf = false // as with the closed kernel modules
	if _, _, err := r.Export(); err == nil || !strings.Contains(err.Error(), "open kernel modules") {
		t.Error(err)
	}
}

// TestFlush: what a card has written is in the device's memory after a flush.
func TestFlush(t *testing.T) {
	e, d := open(t, Options{})
	e.Bare("kvgpu_late_pcie", 1)
	t.Cleanup(func() { e.Bare("kvgpu_late_pcie", 0) })
	const n = 64 << 10
	p := e.Alloc(grain)
	r, err := d.Register("cache", p, grain)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	file, _, err := r.Export()
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	card := e.Card(int(file.Fd()))
	from, s := d.Transfer("a", FromDevice), slot(t, d, FromDevice)
	for i := range 3 {
		copy(card, e.Pattern(n, uint64(i+1)))
		if err := d.Flush(); err != nil {
			t.Fatal(err)
		}
		if err := run(t, from, Copy{Slot: s, Runs: []Run{{Addr: p, Len: n}}}); err != nil {
			t.Fatal(err)
		}
		if !same(e, s.Bytes()[:n], uint64(i+1)) {
			t.Error("the card's bytes are not there")
		}
	}
	before := e.Count("cuFlushGPUDirectRDMAWrites")
	d.info.WritesOrdered = true // as of an H100
	if err := d.Flush(); err != nil || e.Count("cuFlushGPUDirectRDMAWrites") != before {
		t.Errorf("a device that orders writes was flushed: %v", err)
	}
	d.info.WritesOrdered, d.info.FlushOnHost = false, false
	if err := d.Flush(); err == nil || !strings.Contains(err.Error(), "neither orders") {
		t.Error(err)
	}
}
