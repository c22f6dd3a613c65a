package cuda

import (
	"bytes"
	"context"
	"os"
	"strings"
	"testing"
)

// TestScratch: Scratch is memory on the device that belongs to no engine. The test copies bytes into it and
// out of it, exports it in whole pages, and gives it back.
func TestScratch(t *testing.T) {
	e, d := open(t, Options{})
	allocated := e.Count("cuMemAlloc_v2") - e.Count("cuMemFree_v2")
	const n = 300 << 10 // more than a slot
	s, err := d.Scratch(n)
	if err != nil {
		t.Fatal(err)
	}
	if s.Addr()%uint64(os.Getpagesize()) != 0 {
		t.Errorf("it begins at %#x", s.Addr())
	}
	file, offset, err := s.Export()
	if err != nil || offset != 0 {
		t.Fatal(offset, err)
	}
	card := e.Card(int(file.Fd()))
	want := e.Pattern(n-100, 3)
	if err := s.Put(context.Background(), 100, want); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(card[100:n], want) {
		t.Error("the card sees other bytes")
	}
	card[200]++
	got := make([]byte, len(want))
	if err := s.Get(context.Background(), 100, got); err != nil {
		t.Fatal(err)
	}
	if want[100]++; !bytes.Equal(got, want) {
		t.Error("other bytes came back")
	}
	if err := file.Close(); err != nil {
		t.Fatal(err)
	}
	gone, cancel := context.WithCancel(context.Background())
	cancel()
	if err := s.Get(gone, 0, got); err == nil {
		t.Error("copied for nobody")
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if n := e.Count("cuMemAlloc_v2") - e.Count("cuMemFree_v2"); n != allocated+1 { // the pattern's
		t.Errorf("%d allocations more", n-allocated)
	}
	if n := e.Count("dmabufs"); n != 0 {
		t.Errorf("%d dma-bufs are open", n)
	}
}

// TestExportRange: a range that lies in several regions is exported once, and leaves no region.
func TestExportRange(t *testing.T) {
	e, d := open(t, Options{})
	p := e.Alloc(grain)
	file, offset, err := d.ExportRange("k", uint64(p)+5, 9000)
	if err != nil || offset != 5 {
		t.Fatal(offset, err)
	}
	if err := file.Close(); err != nil {
		t.Error(err)
	}
	if len(d.regions) != 0 {
		t.Errorf("%d regions are left", len(d.regions))
	}
	if _, _, err := d.ExportRange("k", uint64(p), 2*grain); err == nil || !strings.Contains(err.Error(), "region k") {
		t.Error(err)
	}
}
