package devices

import (
	"fmt"
	"testing"

	"github.com/kvconn/kvconn/cuda"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/testdouble/engine"
)

// In a cache of one block after the other each region lies in all mappings, in one of one layer after the other in a few.
var orders = map[string]func(layers, mappings int) (base func(layer int) uint64, stride uint64){
	"block after block": func(layers, mappings int) (func(int) uint64, uint64) {
		return func(layer int) uint64 { return uint64(layer) * grain / uint64(layers) }, grain
	},
	"layer after layer": func(layers, mappings int) (func(int) uint64, uint64) {
		each := uint64(mappings) * grain / uint64(layers)
		return func(layer int) uint64 { return uint64(layer) * each }, each / uint64(mappings)
	},
}

const grain = 2 << 20

var options = cuda.Options{RingBytes: 1 << 20, SlotBytes: 32 << 10}

// cache opens the devices of a cache whose layers lie over so many mappings.
func cache(tb testing.TB, order string, layers, mappings int) (*Devices, *engine.Engine, []kv.Region) {
	tb.Helper()
	e := engine.New(tb, 0)
	at := uint64(e.MapOne(mappings))
	base, stride := orders[order](layers, mappings)
	regions := make([]kv.Region, layers)
	for i := range regions {
		regions[i] = kv.Region{Name: fmt.Sprint("layer.", i), Base: at + base(i), Memory: kv.DeviceMemory(0),
			BlockStride: stride, BlockBytes: 1024, NumBlocks: uint32(mappings)}
	}
	d, err := Open(regions, options)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = d.Close() })
	return d, e, regions
}

// asks counts the questions about addresses that f asks.
func asks(e *engine.Engine, f func()) uint64 {
	before := e.Count("cuPointerGetAttribute")
	f()
	return e.Count("cuPointerGetAttribute") - before
}

// TestLookAsksOnce: however many regions lie in a mapping, and whatever is looked at, each mapping is asked for once.
func TestLookAsksOnce(t *testing.T) {
	const layers, mappings, each = 32, 40, 2 // a mapping has two ids
	for order := range orders {
		t.Run(order, func(t *testing.T) {
			d, e, regions := cache(t, order, layers, mappings)
			all := make([]kv.Pair, layers)
			for i := range all {
				all[i].SrcRegion = uint32(i)
			}
			for what, of := range map[string][]kv.Pair{"all layers": all, "two layers": all[:2], "one layer": all[:1]} {
				var err error
				n := asks(e, func() {
					if few, ok := d.Few(of); ok {
						err = d.CheckFew(few)
					} else {
						err = d.Check()
					}
				})
				most := uint64(each * mappings)
				if order == "layer after layer" {
					most = min(most, uint64(each*len(of)*(mappings/layers+2)))
				}
				if err != nil || n > most || n == 0 {
					t.Errorf("%s: %d questions, want at most %d; %v", what, n, most, err)
				}
			}
			located := asks(e, func() { // one mapping, by itself
				if _, err := cuda.Locate(uintptr(regions[0].Base), 1); err != nil {
					t.Error(err)
				}
			})
			if n := asks(e, func() {
				again, err := Open(regions, options)
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { _ = again.Close() })
			}); n > located*mappings || n == 0 {
				t.Errorf("a registration asks %d questions, want at most %d for each of %d mappings", n, located, mappings)
			}
			if n := asks(e, func() {
				if _, err := d.Look(); err != nil {
					t.Error(err)
				}
			}); n > located*mappings {
				t.Errorf("a look for other memory asks %d questions, want at most %d for each of %d mappings", n, located, mappings)
			}
		})
	}
}

// BenchmarkLook is a look at a cache of 160 regions over 3,000 mappings, an expandable segment of 60 GiB in pieces of 20 MiB: the one
// before transfers begin, and the one for other memory after an engine has slept. The questions are the driver's time: the double
// answers each under a lock, from a table.
func BenchmarkLook(b *testing.B) {
	for order := range orders {
		d, e, _ := cache(b, order, 160, 3000)
		for what, look := range map[string]func() error{
			"before transfers": d.Check,
			"for other memory": func() error { _, err := d.Look(); return err },
		} {
			b.Run(order+", "+what, func(b *testing.B) {
				questions := asks(e, func() {
					for b.Loop() {
						if err := look(); err != nil {
							b.Fatal(err)
						}
					}
				})
				b.ReportMetric(float64(questions)/float64(b.N), "questions/op")
				b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N), "us/op")
			})
		}
	}
}

// TestEpoch: the epoch grows when other memory takes the place of what was registered. It does not grow when a transport makes memory to
// probe with.
func TestEpoch(t *testing.T) {
	e := engine.New(t, 0)
	m := e.Map(grain)
	d, err := Open([]kv.Region{{Name: "layer.0", Base: uint64(m.At), Memory: kv.DeviceMemory(0), BlockStride: 1024, BlockBytes: 1024,
		NumBlocks: 8}}, options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	before := d.Epoch()
	s, err := d.Scratch(0, 4096)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if n := d.Epoch(); n != before {
		t.Errorf("the epoch was %d, and is %d after a probe", before, n)
	}
	m.Sleep()
	m.Wake()
	if now, err := d.Look(); err != nil || !now.Take() || d.Epoch() == before {
		t.Errorf("other memory was not taken: %v, epoch %d", err, d.Epoch())
	}
}
