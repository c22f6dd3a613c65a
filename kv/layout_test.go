package kv

import (
	"math"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/rig/seed"
)

func region(name string, group uint32, base, stride, bytes uint64, blocks uint32) Region {
	return Region{Name: name, Group: group, Base: base, BlockStride: stride, BlockBytes: bytes, NumBlocks: blocks}
}

func onDevice(device int, r Region) Region {
	r.Memory = DeviceMemory(device)
	return r
}

// TestMemories: an address names another byte in each memory, and the two sides of a
// transfer need not have the same.
func TestMemories(t *testing.T) {
	host := region("k", 0, 0x1000, 64, 64, 4)
	first, second := onDevice(0, region("l", 0, 0x1000, 64, 64, 4)), onDevice(1, region("m", 0, 0x1000, 64, 64, 4))
	mixed, err := NewLayout([]Region{host, first, second})
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []string{"host", "device 0", "device 1"} {
		if got := mixed.Regions[i].Memory.String(); got != want {
			t.Errorf("region %d lies in memory %q, want %q", i, got, want)
		}
		if device, ok := mixed.Regions[i].Memory.Device(); ok != (i > 0) || ok && device != i-1 {
			t.Errorf("region %d lies on device %d, %v", i, device, ok)
		}
	}
	hosts, err := NewLayout([]Region{host, region("l", 0, 0x2000, 64, 64, 4), region("m", 0, 0x3000, 64, 64, 4)})
	if err != nil {
		t.Fatal(err)
	}
	if m, err := NewMatch(mixed.Shapes(), hosts.Shapes()); err != nil || m.Bytes(Selection{Blocks: [][]BlockID{{0}}}) != 3*64 {
		t.Errorf("a layout on devices and one in the host's memory: %v", err)
	}
}

func TestNewLayoutRefuses(t *testing.T) {
	ok := region("k", 0, 0x1000, 64, 64, 4)
	with := func(change func(*Region)) []Region {
		r := ok
		change(&r)
		return []Region{r}
	}
	many := make([]Region, MaxRegions+1)
	for _, c := range []struct {
		name    string
		regions []Region
		want    []string // parts of the message: what is wrong and its value
	}{
		{"none", nil, []string{"no regions"}},
		{"too many", many, []string{"65537 regions", "at most 65536"}},
		{"no name", with(func(r *Region) { r.Name = "" }), []string{`""`, "1 to 256 bytes"}},
		{"long name", with(func(r *Region) { r.Name = strings.Repeat("x", 257) }), []string{"1 to 256 bytes"}},
		{"group", with(func(r *Region) { r.Group = 16 }), []string{`"k"`, "group 16", "below 16"}},
		{"device", with(func(r *Region) { r.Memory = DeviceMemory(MaxDevices) }), []string{`"k"`, "device 64", "0 to 63"}},
		{"same memory of a device", []Region{onDevice(1, ok), onDevice(1, region("v", 0, 0x1000, 64, 64, 4))}, []string{`"v"`, "overlaps", "device 1"}},
		{"null", with(func(r *Region) { r.Base = 0 }), []string{`"k"`, "null"}},
		{"no bytes", with(func(r *Region) { r.BlockBytes = 0 }), []string{`"k"`, "0 bytes"}},
		{"no blocks", with(func(r *Region) { r.NumBlocks = 0 }), []string{`"k"`, "0 blocks"}},
		{"stride", with(func(r *Region) { r.BlockStride = 60 }), []string{`"k"`, "stride 60", "64 bytes"}},
		{"unaligned base", with(func(r *Region) { r.Base = 0x1002 }), []string{"unaligned", "0x1002", "multiples of 4"}},
		{"unaligned stride", with(func(r *Region) { r.BlockStride = 66 }), []string{"unaligned", "stride 66"}},
		{"unaligned length", with(func(r *Region) { r.BlockBytes = 62 }), []string{"unaligned", "62 bytes"}},
		{"huge stride", with(func(r *Region) { r.BlockStride = 1<<40 + 4 }), []string{"address space", "1099511627780"}},
		{"past the end", with(func(r *Region) { r.Base = math.MaxUint64 - 255 }), []string{"address space"}},
		// 2^40 * 2^24 wraps round to 0.
		{"extent wraps", with(func(r *Region) { r.BlockStride, r.NumBlocks = 1<<40, 1<<24+1 }), []string{"address space", "16777217 blocks"}},
		{"twice", []Region{ok, region("k", 0, 0x9000, 64, 64, 4)}, []string{`"k"`, "registered twice", "group 0"}},
		{"gap in groups", []Region{ok, region("k", 2, 0x9000, 64, 64, 4)}, []string{"group 1 has no region"}},
		{"same memory", []Region{ok, region("v", 0, 0x1000, 64, 64, 4)}, []string{`"v"`, "overlaps", `"k"`, "0x1000"}},
		{"last block", []Region{ok, region("v", 0, 0x10fc, 64, 64, 4)}, []string{`"v"`, "overlaps", `"k"`, "0x10fc"}},
		{"interleaved, too long", []Region{region("k", 0, 0x1000, 64, 32, 4), region("v", 0, 0x1020, 64, 36, 4)}, []string{`"v"`, "overlaps", `"k"`}},
		{"interleaved, too early", []Region{region("k", 0, 0x1000, 64, 36, 4), region("v", 0, 0x1020, 64, 32, 4)}, []string{`"v"`, "overlaps", `"k"`}},
		{"other stride", []Region{region("k", 0, 0x1000, 64, 32, 4), region("v", 0, 0x1020, 128, 32, 2)}, []string{`"v"`, "overlaps", `"k"`}},
		{"behind a short one", []Region{region("a", 0, 0x1000, 64, 64, 100), region("b", 0, 0x8000, 64, 64, 4), region("c", 0, 0x1400, 64, 64, 1)},
			[]string{`"c"`, "overlaps", `"a"`}},
	} {
		t.Run(c.name, func(t *testing.T) {
			l, err := NewLayout(c.regions)
			if err == nil {
				t.Fatalf("accepted: %+v", l.Groups)
			}
			for _, part := range c.want {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("%q does not say %q", err, part)
				}
			}
		})
	}
}

func TestNewLayoutAccepts(t *testing.T) {
	for _, c := range []struct {
		name    string
		regions []Region
		groups  []Group
	}{
		{"one", []Region{region("k", 0, 0x1000, 64, 64, 4)}, []Group{{4, 64, []uint32{0}, 0}}},
		{"up to the end of memory", []Region{region("k", 0, math.MaxUint64-259, 64, 64, 4)}, []Group{{4, 64, []uint32{0}, 0}}},
		{"least of several", []Region{region("k", 0, 0x1000, 64, 64, 4), region("v", 0, 0x9000, 64, 32, 3)}, []Group{{3, 96, []uint32{0, 1}, 0}}},
		{"interleaved K and V", []Region{region("k", 0, 0x1000, 64, 32, 4), region("v", 0, 0x1020, 64, 32, 4)}, []Group{{4, 64, []uint32{0, 1}, 0}}},
		{"interleaved heads, last first", []Region{region("h2", 0, 0x1020, 64, 16, 4), region("h0", 0, 0x1000, 64, 16, 4), region("h1", 0, 0x1010, 64, 16, 4)},
			[]Group{{4, 48, []uint32{0, 1, 2}, 0}}},
		{"side by side", []Region{region("k", 0, 0x1000, 64, 64, 4), region("v", 0, 0x1100, 64, 64, 4)}, []Group{{4, 128, []uint32{0, 1}, 0}}},
		{"starts in the last gap", []Region{region("k", 0, 0x1000, 64, 32, 4), region("v", 0, 0x10e0, 64, 64, 4)}, []Group{{4, 96, []uint32{0, 1}, 0}}},
		{"groups share one storage", []Region{region("k", 0, 0x1000, 64, 64, 4), region("k", 1, 0x1000, 128, 128, 2)},
			[]Group{{4, 64, []uint32{0}, 0}, {2, 128, []uint32{1}, 0}}},
		{"groups in any order", []Region{region("a", 1, 0x1000, 64, 64, 4), region("b", 0, 0x2000, 64, 64, 5)},
			[]Group{{5, 64, []uint32{1}, 0}, {4, 64, []uint32{0}, 0}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			l, err := NewLayout(c.regions)
			if err != nil {
				t.Fatal(err)
			}
			if len(l.Groups) != len(c.groups) {
				t.Fatalf("groups %+v, want %+v", l.Groups, c.groups)
			}
			for i, g := range l.Groups {
				w := c.groups[i]
				if g.NumBlocks != w.NumBlocks || g.BlockBytes != w.BlockBytes || len(g.Regions) != len(w.Regions) {
					t.Errorf("group %d is %+v, want %+v", i, g, w)
				}
			}
		})
	}
}

func TestLayoutKeepsItsOwnRegions(t *testing.T) {
	regions := []Region{region("k", 0, 0x1000, 64, 64, 4)}
	l, err := NewLayout(regions)
	if err != nil {
		t.Fatal(err)
	}
	regions[0].Base = 0
	if l.Regions[0].Base != 0x1000 {
		t.Errorf("a change of the caller's slice changed the layout")
	}
}

func TestCheckBlocks(t *testing.T) {
	l, err := NewLayout([]Region{region("k", 0, 0x1000, 64, 64, 4), region("v", 0, 0x2000, 64, 64, 3), region("s", 1, 0x3000, 64, 64, 9)})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name   string
		blocks [][]BlockID
		want   []string
	}{
		{"nothing", nil, nil},
		{"empty groups", [][]BlockID{nil, {}}, nil},
		{"all in range", [][]BlockID{{0, 2, 1}, {8}}, nil},
		{"fewer groups", [][]BlockID{{0}}, nil},
		{"one over the least region", [][]BlockID{{0, 3}}, []string{"block id 3", "position 1", "group 0", "3 blocks"}},
		{"largest id", [][]BlockID{nil, {math.MaxUint32}}, []string{"4294967295", "group 1", "9 blocks"}},
		{"too many groups", [][]BlockID{nil, nil, nil}, []string{"3 KV cache groups", "2 are registered"}},
		{"too many blocks", [][]BlockID{make([]BlockID, MaxBlocks+1)}, []string{"262145", "group 0", "at most 262144"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := l.CheckBlocks(c.blocks)
			if (err == nil) != (c.want == nil) {
				t.Fatalf("error %v, want one: %v", err, c.want != nil)
			}
			for _, part := range c.want {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("%q does not say %q", err, part)
				}
			}
		})
	}
	if err := l.CheckUnique([][]BlockID{{0, 1}, {0, 1}}); err != nil {
		t.Errorf("the same ids in two groups: %v", err)
	}
	if err := l.CheckUnique([][]BlockID{{0, 1}, {5, 7, 5}}); err == nil || !strings.Contains(err.Error(), "block id 5") || !strings.Contains(err.Error(), "group 1") {
		t.Errorf("an id twice: %v", err)
	}
	if n := l.Bytes([][]BlockID{{0, 1}, {4}}); n != 2*128+64 {
		t.Errorf("Bytes = %d", n)
	}
}

// TestNewLayoutAgainstNaive compares the overlap check with one that marks
// every byte.
func TestNewLayoutAgainstNaive(t *testing.T) {
	rnd := seed.Rand(t)
	agreed := map[bool]int{}
	for range 20_000 {
		regions := make([]Region, 2+rnd.IntN(3))
		stride := uint64(4 * (1 + rnd.IntN(8)))
		for i := range regions {
			bytes := uint64(4 * (1 + rnd.IntN(int(stride/4))))
			regions[i] = region(string(rune('a'+i)), 0, uint64(4*(1+rnd.IntN(40))), stride, bytes, uint32(1+rnd.IntN(5)))
		}
		_, err := NewLayout(regions)
		if overlap := naiveOverlap(regions); overlap != (err != nil) {
			t.Fatalf("bytes overlap: %v, NewLayout says %v: %v", overlap, err, regions)
		}
		agreed[err != nil]++
	}
	if agreed[true] < 1000 || agreed[false] < 1000 {
		t.Errorf("too one-sided: %v", agreed)
	}
}

func naiveOverlap(regions []Region) bool {
	used := map[uint64]bool{}
	for _, r := range regions {
		for b := range uint64(r.NumBlocks) {
			for o := range r.BlockBytes {
				at := r.Base + b*r.BlockStride + o
				if used[at] {
					return true
				}
				used[at] = true
			}
		}
	}
	return false
}
