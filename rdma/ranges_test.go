package rdma

import (
	"errors"
	"math"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/rig/seed"
)

func TestMergePages(t *testing.T) {
	const top = math.MaxUint64
	for _, c := range []struct {
		name     string
		in, want []memRange
	}{
		{"nothing", nil, nil},
		{"empty ones", []memRange{{5, 0}, {0x1000, 0}}, nil},
		{"one", []memRange{{0x1010, 16}}, []memRange{{0x1010, 16}}},
		{"adjacent", []memRange{{0x1000, 0x1000}, {0x2000, 0x1000}}, []memRange{{0x1000, 0x2000}}},
		{"adjacent, the other way round", []memRange{{0x2000, 0x1000}, {0x1000, 0x1000}}, []memRange{{0x1000, 0x2000}}},
		{"overlapping", []memRange{{0x1000, 0x3000}, {0x2000, 0x4000}}, []memRange{{0x1000, 0x5000}}},
		{"one within the other", []memRange{{0x1000, 0x9000}, {0x2000, 0x10}}, []memRange{{0x1000, 0x9000}}},
		{"the same twice", []memRange{{0x1000, 0x10}, {0x1000, 0x10}}, []memRange{{0x1000, 0x10}}},
		{"in one page", []memRange{{0x1000, 0x10}, {0x1ff0, 0x10}}, []memRange{{0x1000, 0x1000}}},
		{"meeting in a page", []memRange{{0x1000, 0x1010}, {0x2800, 0x1000}}, []memRange{{0x1000, 0x2800}}},
		{"a page between", []memRange{{0x1000, 0x1000}, {0x3000, 0x1000}}, []memRange{{0x1000, 0x1000}, {0x3000, 0x1000}}},
		{"neighbour pages with a gap", []memRange{{0x1000, 0xff0}, {0x2010, 0x10}}, []memRange{{0x1000, 0xff0}, {0x2010, 0x10}}},
		{"three to one", []memRange{{0x3000, 0x1000}, {0x1000, 0x1000}, {0x2000, 0x1000}}, []memRange{{0x1000, 0x3000}}},
		{"at the very top", []memRange{{top - 15, 16}, {top - 31, 16}}, []memRange{{top - 31, 32}}},
	} {
		in := slices.Clone(c.in)
		got := mergePages(c.in, 0x1000)
		if len(got)+len(c.want) > 0 && !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: got %v, want %v", c.name, got, c.want)
		}
		if !slices.Equal(in, c.in) {
			t.Errorf("%s: the input is changed", c.name)
		}
	}
}

func TestSplitRanges(t *testing.T) {
	const mb = 1 << 20
	for _, c := range []struct {
		name string
		in   memRange
		most uint64
		want []memRange
	}{
		{"no limit", memRange{0x1000, 1 << 40}, 0, []memRange{{0x1000, 1 << 40}}},
		{"fits", memRange{0x1000, 8 * mb}, 8 * mb, []memRange{{0x1000, 8 * mb}}},
		{"at huge pages", memRange{0x1000, 8 * mb}, 4 * mb, []memRange{{0x1000, 4*mb - 0x1000}, {4 * mb, 4 * mb}, {8 * mb, 0x1000}}},
		{"most is no multiple", memRange{0, 8 * mb}, 5 * mb, []memRange{{0, 4 * mb}, {4 * mb, 4 * mb}}},
		{"a huge page each", memRange{mb, 4 * mb}, 2 * mb, []memRange{{mb, mb}, {2 * mb, 2 * mb}, {4 * mb, mb}}},
		{"too small for huge pages", memRange{0x1800, 0x3000}, 0x1800, []memRange{{0x1800, 0x1800}, {0x3000, 0x1800}}},
		{"less than a page", memRange{0x1800, 0x1000}, 1, []memRange{{0x1800, 0x1000}}},
	} {
		if got := splitRanges([]memRange{c.in}, c.most, 0x1000); !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: got %v, want %v", c.name, got, c.want)
		}
	}
}

// TestMergeRangesRandom: however regions lie, the registered pages are the regions' pages,
// each region in one piece unless that is too long. A key table can be made of them.
func TestMergeRangesRandom(t *testing.T) {
	rnd := seed.Rand(t)
	page := uint64(os.Getpagesize())
	for range 500 {
		regions := make([]memRange, 1+rnd.IntN(12))
		pages := map[uint64]bool{}
		for i := range regions {
			regions[i] = memRange{1<<30 + uint64(rnd.IntN(80))*page/2, 1 + uint64(rnd.IntN(8))*page/2}
			for p := regions[i].Base / page; p <= (regions[i].Base+regions[i].Length-1)/page; p++ {
				pages[p] = true
			}
		}
		most := page * uint64(rnd.IntN(6))
		if rnd.IntN(3) == 0 {
			most = 0
		}
		got := mergeRanges(regions, most)
		var keys []keyRange
		for i, r := range got {
			if most > 0 && r.Length > most {
				t.Fatalf("%v is longer than %d", r, most)
			}
			keys = append(keys, keyRange{r, uint32(i)})
			for p := r.Base / page; p <= (r.Base+r.Length-1)/page; p++ {
				if !pages[p] && (most == 0 || i == 0 || got[i-1].Base+got[i-1].Length != r.Base) {
					t.Fatalf("page %#x is registered twice or for nothing: %v for %v", p*page, got, regions)
				}
				delete(pages, p)
			}
		}
		if len(pages) > 0 {
			t.Fatalf("%d pages are missing: %v for %v", len(pages), got, regions)
		}
		if _, err := newKeyTable("here", regions, keys); err != nil {
			t.Fatalf("%v for %v: %v", got, regions, err)
		}
		if n := rangeBytes(got); n < regions[0].Length {
			t.Fatalf("%d bytes in all", n)
		}
	}
}

func TestRegionRanges(t *testing.T) {
	l, err := kv.NewLayout([]kv.Region{
		{Name: "k", Base: 0x1000, BlockStride: 128, BlockBytes: 64, NumBlocks: 3},
		{Name: "v", Base: 0x1000 + 64, BlockStride: 128, BlockBytes: 64, NumBlocks: 3},
	})
	if err != nil {
		t.Fatal(err)
	}
	if got, want := regionRanges(l), []memRange{{0x1000, 320}, {0x1040, 320}}; !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestMemlock(t *testing.T) {
	const mb, unlimited = 1 << 20, math.MaxUint64
	for _, c := range []struct {
		name string
		m    memlock
		need uint64
		want []string // parts of the error
	}{
		{"no limit", memlock{Soft: unlimited, Hard: unlimited}, 1 << 62, nil},
		{"enough", memlock{Soft: 8 * mb, Hard: 8 * mb}, 8 * mb, nil},
		{"enough beside the rest", memlock{Soft: 8 * mb, Hard: 8 * mb, Locked: 3 * mb}, 5 * mb, nil},
		{"a capability", memlock{Soft: 0, Capable: true}, 1 << 40, nil},
		{"too little", memlock{Soft: 8 * mb, Hard: 64 * mb}, 8*mb + 1, []string{
			"RLIMIT_MEMLOCK allows 8 MiB of locked memory, but registering the KV cache needs 8.0 MiB (8388609 bytes)",
			"run `ulimit -l unlimited` (as root: the hard limit is 64 MiB) before the engine", "`--ulimit memlock=-1`", "CAP_IPC_LOCK"}},
		{"too little beside the rest", memlock{Soft: 8 * mb, Hard: unlimited, Locked: 4 * mb}, 1 << 30, []string{
			"allows 8 MiB of locked memory and 4 MiB are locked already, but registering the KV cache needs 1 GiB: run `ulimit -l unlimited` before"}},
		{"one byte beside the rest", memlock{Soft: 8 * mb, Hard: 8 * mb, Locked: 3 * mb}, 5*mb + 1, []string{"needs 5.0 MiB (5242881 bytes)"}},
		{"more locked than allowed", memlock{Soft: mb, Hard: mb, Locked: 2 * mb}, 1, []string{"needs 1 bytes"}},
		{"so much that it wraps", memlock{Soft: 8 * mb, Hard: mb, Locked: mb}, unlimited, []string{"allows 8 MiB"}},
	} {
		err := c.m.check(c.need)
		if (err != nil) != (c.want != nil) {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		for _, want := range c.want {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v, want %q", c.name, err, want)
			}
		}
	}
}

func TestParseStatus(t *testing.T) {
	for text, want := range map[string]memlock{
		"": {},
		"Name:\tx\nVmLck:\t     4 kB\nVmPin:\t   128 kB\nCapEff:\t0000000000004000\n": {Locked: 128 << 10, Capable: true},
		"VmPin:\t0 kB\nCapEff:\t000001ffffffbfff\nCapBnd:\t0000000000004000\n":        {},
		"VmPin:\twhat\nCapEff:\tno\nVmPin":                                            {},
		"VmPin:\t99999999999999999999 kB\n":                                           {},
	} {
		if got := parseStatus([]byte(text)); got != want {
			t.Errorf("%q: %+v, want %+v", text, got, want)
		}
	}
	m, err := readMemlock()
	if err != nil || m.Soft > m.Hard {
		t.Errorf("of this process: %+v, %v", m, err)
	}
}

func mapped(t *testing.T, size int) []byte {
	t.Helper()
	mem, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(mem) })
	return mem
}

// resident counts the pages that have memory of their own: those that nobody wrote
// to have none.
func resident(t *testing.T, mem []byte) (n int) {
	t.Helper()
	vec := make([]byte, len(mem)/os.Getpagesize())
	if _, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&mem[0])), uintptr(len(mem)), uintptr(unsafe.Pointer(&vec[0]))); errno != 0 {
		t.Fatal(errno)
	}
	for _, v := range vec {
		n += int(v & 1)
	}
	return n
}

// touchers are the ways to touch a range: one of them is pretouch's.
var touchers = map[string]func([]memRange, int) error{
	"chosen":      pretouch,
	"populate":    func(r []memRange, workers int) error { return touchAll(r, workers, populate) },
	"add nothing": func(r []memRange, workers int) error { return touchAll(r, workers, addNothing) },
}

func forTouchers(t *testing.T, f func(t *testing.T, touch func([]memRange, int) error)) {
	for name, touch := range touchers {
		t.Run(name, func(t *testing.T) {
			leaktest.Check(t)
			if name == "populate" && populate(0, 0) != nil {
				t.Skip("this kernel is older than 5.14, which has no MADV_POPULATE_WRITE")
			}
			f(t, touch)
		})
	}
}

func TestPretouch(t *testing.T) {
	probe := mapped(t, 2*os.Getpagesize())
	if err := unix.Madvise(probe, unix.MADV_NOHUGEPAGE); err != nil && !errors.Is(err, unix.EINVAL) {
		t.Fatal(err)
	}
	if resident(t, probe) != 0 {
		t.Skip("NOT RUN: this kernel says of each page that it has memory")
	}
	if probe[0] = 1; resident(t, probe) != 1 {
		t.Fatalf("%d pages have memory when one was written", resident(t, probe))
	}
	forTouchers(t, func(t *testing.T, touch func([]memRange, int) error) {
		page := os.Getpagesize()
		const size = 3*touchChunk + 1<<20
		mem := mapped(t, size)
		if err := unix.Madvise(mem, unix.MADV_NOHUGEPAGE); err != nil && !errors.Is(err, unix.EINVAL) {
			t.Fatal(err)
		}
		mem[5] = 7
		base := uint64(uintptr(unsafe.Pointer(&mem[0])))
		// From the middle of the second page on, to the first byte of the last but one.
		r := memRange{base + uint64(page) + 64, size - 3*uint64(page) - 63}
		if err := touch([]memRange{r, {}}, 4); err != nil {
			t.Fatal(err)
		}
		if got, want := resident(t, mem), size/page-1; got != want {
			t.Errorf("%d pages have memory, want %d", got, want)
		}
		for i, b := range mem {
			if b != 0 && i != 5 || i == 5 && b != 7 {
				t.Fatalf("byte %d is %d now", i, b)
			}
		}
		if err := touch(nil, 4); err != nil {
			t.Error(err)
		}
	})
}

// Writers lose nothing by it.
func TestPretouchBesideWriters(t *testing.T) {
	forTouchers(t, func(t *testing.T, touch func([]memRange, int) error) {
		page := os.Getpagesize()
		mem := mapped(t, 16*page)
		counter := (*uint32)(unsafe.Pointer(&mem[4*page]))
		r := memRange{uint64(uintptr(unsafe.Pointer(&mem[0]))), uint64(len(mem))}
		const writes = 20000
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() {
				for range writes {
					atomic.AddUint32(counter, 1)
				}
			})
			wg.Go(func() {
				for range writes / 20 {
					if err := touch([]memRange{r}, 1); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		wg.Wait()
		if *counter != 2*writes {
			t.Errorf("%d of %d writes are left", *counter, 2*writes)
		}
	})
}

// Memory that cannot be written is an error, not the process's end.
func TestPretouchRefuses(t *testing.T) {
	forTouchers(t, func(t *testing.T, touch func([]memRange, int) error) {
		page := os.Getpagesize()
		for name, prot := range map[string]int{"read-only": unix.PROT_READ, "no access": unix.PROT_NONE} {
			mem := mapped(t, 8*page)
			if err := unix.Mprotect(mem[4*page:], prot); err != nil {
				t.Fatal(err)
			}
			base := uint64(uintptr(unsafe.Pointer(&mem[0])))
			err := touch([]memRange{{base, uint64(len(mem))}, {base, 16}}, 2)
			if err == nil || !strings.Contains(err.Error(), "cannot be written") {
				t.Errorf("%s: %v", name, err)
			}
			if err := touch([]memRange{{base, 4 * uint64(page)}}, 2); err != nil {
				t.Errorf("%s: the writable half: %v", name, err)
			}
		}
		if err := touch([]memRange{{4096, 4096}}, 2); err == nil {
			t.Error("what is not mapped can be written")
		}
	})
}

func BenchmarkPretouch(b *testing.B) {
	const size = 256 << 20
	for name, touch := range touchers {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(size)
			for b.Loop() {
				mem, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
				if err != nil {
					b.Fatal(err)
				}
				if err := touch([]memRange{{uint64(uintptr(unsafe.Pointer(&mem[0]))), size}}, 2); err != nil {
					b.Fatal(err)
				}
				if err := unix.Munmap(mem); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
