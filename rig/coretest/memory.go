// The suite's memory: regions with guards around each, painted with patterns and compared whole.

package coretest

import (
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/kv"
)

const (
	guardByte  = 0xA5     // what no transfer writes is full of it
	guardBytes = 64 << 10 // between regions and at both ends
)

// regionSpec describes a region to be allocated.
type regionSpec struct {
	group         uint32
	bytes, stride uint64 // stride 0: dense
	blocks        uint32
	name          string // empty: layer0, layer1 …
	geometrySpec
}

// arena is memory outside of the Go heap that holds the regions of a layout
// with guards around each. It is unmapped when the test and what it opened end.
type arena struct {
	mem      []byte         // as the suite sees it
	starts   []uint64       // of the regions in mem
	onDevice []DeviceMemory // by region, for those of which mem is a copy; nil: none is
	layout   *kv.Layout
}

// Device says how a transport finds a suite's memory as device memory.
type Device struct {
	// Expose gives bytes of a file a second address. The file has size bytes.
	Expose func(file *os.File, size int) (address uint64, err error)
	// Hide, if set, takes an address of Expose back, when no transport uses it any more.
	Hide func(address uint64)
	// Second, if set, is Expose of another device, on which every second region lies.
	Second func(file *os.File, size int) (address uint64, err error)
	// Alloc, if set, is used in place of Expose for agents of this process: memory as the suite
	// sees it, and its address, until the test ends.
	Alloc func(t *testing.T, size int) (mem []byte, address uint64)
	// Memories, if set, is used in place of all of these: memory of which the suite sees copies. Regions
	// are dealt out to its entries in turn.
	Memories []func(t *testing.T, size int) DeviceMemory
	// Holds says which regions lie in device memory; the others lie in host memory. If it
	// is nil, all regions lie in device memory.
	Holds func(region int) bool
	// Halt is for HaltedSuite.
	Halt *Halt
}

// place gives regions their bases in the memory that they lie in. Before, the bases count
// from the memory's start. hide undoes it.
func (d *Device) place(regions []kv.Region, mem []byte, file *os.File) (hide func(), err error) {
	host := uint64(uintptr(unsafe.Pointer(&mem[0])))
	if d == nil {
		put(regions, func(int) uint64 { return host })
		return func() {}, nil
	}
	var addresses []uint64
	for _, expose := range []func(*os.File, int) (uint64, error){d.Expose, d.Second} {
		if expose == nil {
			continue
		}
		address, err := expose(file, len(mem))
		if err != nil {
			return nil, err
		}
		addresses = append(addresses, address)
	}
	put(regions, func(i int) uint64 { return d.at(i, host, addresses) })
	return func() {
		for _, a := range addresses {
			if d.Hide != nil {
				d.Hide(a)
			}
		}
	}, nil
}

func (d *Device) at(region int, host uint64, addresses []uint64) uint64 {
	if d.Holds != nil && !d.Holds(region) {
		return host
	}
	return addresses[region%len(addresses)]
}

func put(regions []kv.Region, at func(region int) uint64) {
	for i := range regions {
		regions[i].Base += at(i)
	}
}

// newMemory is a file without a name.
func newMemory(t *testing.T) *os.File {
	t.Helper()
	fd, err := unix.MemfdCreate("kvconn-test", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	file := os.NewFile(uintptr(fd), "memory")
	t.Cleanup(func() { file.Close() })
	return file
}

// newArena makes an arena of a file, which other processes may share, or of none. Device
// memory needs a file.
func newArena(t *testing.T, specs []regionSpec, file *os.File, device *Device) *arena {
	t.Helper()
	size := uint64(guardBytes)
	regions, starts := make([]kv.Region, len(specs)), make([]uint64, len(specs))
	for i, s := range specs {
		r := &regions[i]
		*r = kv.Region{Name: fmt.Sprintf("layer%d", i), Group: s.group, BlockBytes: s.bytes, BlockStride: max(s.stride, s.bytes), NumBlocks: s.blocks}
		if s.name != "" {
			r.Name = s.name
		}
		s.apply(r)
		r.Base, starts[i] = size, size
		size += (r.Extent()+guardBytes-1)/4096*4096 + guardBytes
	}
	a := &arena{starts: starts}
	if device != nil && len(device.Memories) > 0 {
		mem := mapMemory(t, nil, size)
		a.placeOnDevice(t, mem, regions, device)
		return a.over(t, mem, regions).push()
	}
	if device != nil && device.Alloc != nil {
		mem, address := device.Alloc(t, int(size))
		fill(mem, guardByte)
		host := uint64(uintptr(unsafe.Pointer(&mem[0])))
		put(regions, func(i int) uint64 { return device.at(i, host, []uint64{address}) })
		return a.over(t, mem, regions)
	}
	mem := mapMemory(t, file, size)
	hide, err := device.place(regions, mem, file)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(hide)
	return a.over(t, mem, regions)
}

// mapMemory maps a file of that size, or memory of no file, until the test ends. It is full of guards.
func mapMemory(t *testing.T, file *os.File, size uint64) []byte {
	t.Helper()
	fd, flags := -1, unix.MAP_ANON|unix.MAP_PRIVATE
	if file != nil {
		fd, flags = int(file.Fd()), unix.MAP_SHARED
		if err := file.Truncate(int64(size)); err != nil {
			t.Fatal(err)
		}
	}
	mem, err := unix.Mmap(fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, flags)
	if err != nil {
		t.Fatalf("mmap of %d bytes: %v", size, err)
	}
	t.Cleanup(func() {
		if err := unix.Munmap(mem); err != nil {
			t.Errorf("munmap: %v", err)
		}
	})
	fill(mem, guardByte)
	return mem
}

func (a *arena) over(t *testing.T, mem []byte, regions []kv.Region) *arena {
	t.Helper()
	l, err := kv.NewLayout(regions)
	if err != nil {
		t.Fatal(err)
	}
	a.mem, a.layout = mem, l
	return a
}

func fill(b []byte, v byte) {
	b[0] = v
	for n := 1; n < len(b); n *= 2 {
		copy(b[n:], b[:n])
	}
}

// block is the memory of a block in a region.
func (a *arena) block(region int, id kv.BlockID) []byte {
	r := &a.layout.Regions[region]
	off := a.starts[region] + uint64(id)*r.BlockStride
	return a.mem[off : off+r.BlockBytes]
}

// each calls f for every piece of blocks: the region, the block's position in
// the transfer, and its memory.
func (a *arena) each(blocks [][]kv.BlockID, f func(region, pos int, b []byte)) {
	for i, r := range a.layout.Regions {
		if int(r.Group) < len(blocks) {
			for k, id := range blocks[r.Group] {
				f(i, k, a.block(i, id))
			}
		}
	}
}

// A pattern's words name the transfer (12 bits), the region (12), the block's
// position in the transfer (20) and the word within the block (20). The first
// byte of a block is never guardByte.
func word(transfer, region, pos, w int) uint64 {
	return uint64(transfer)<<52 | uint64(region)<<40 | uint64(pos)<<20 | uint64(w)
}

// The race detector does not watch this, which would cost more than the transfers. A block
// that is read too late shows by its pattern.
//
//go:norace
func paint(b []byte, transfer, region, pos int) {
	i := 0
	for ; i+8 <= len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], word(transfer, region, pos, i/8))
	}
	if i < len(b) {
		binary.LittleEndian.PutUint32(b[i:], uint32(word(transfer, region, pos, i/8)))
	}
}

// paint fills blocks with the pattern of a transfer.
func (a *arena) paint(transfer int, blocks [][]kv.BlockID) {
	a.paintFrom(transfer, blocks, 0, math.MaxInt)
}

// paintFrom is paint of the blocks at the positions from begin to end.
func (a *arena) paintFrom(transfer int, blocks [][]kv.BlockID, begin, end int) {
	a.each(blocks, func(region, pos int, b []byte) {
		if pos >= begin && pos < end {
			paint(b, transfer, region, pos)
		}
	})
	a.pushBlocks(blocks, begin, end)
}

// delivery is what some blocks should hold.
type delivery struct {
	transfer int
	blocks   [][]kv.BlockID
	part     bool // bytes may be untouched still
	later    int  // of a part: bytes may be those of this transfer, which the sender's blocks had afterwards; 0: none
}

// check compares the whole arena, guards and gaps too.
func (a *arena) check(t *testing.T, want ...delivery) {
	t.Helper()
	a.pull()
	expected := make([]byte, len(a.mem))
	fill(expected, guardByte)
	base := uintptr(unsafe.Pointer(&a.mem[0]))
	for _, d := range want {
		a.each(d.blocks, func(region, pos int, b []byte) {
			off := uintptr(unsafe.Pointer(&b[0])) - base
			e := expected[off : off+uintptr(len(b))]
			paint(e, d.transfer, region, pos)
			if d.part {
				leaveUntouched(e, b)
			}
			if d.part && d.later != 0 {
				later := make([]byte, len(e))
				paint(later, d.later, region, pos)
				takeOver(e, b, later)
			}
		})
	}
	if i := differ(a.mem, expected); i >= 0 {
		place, w := a.place(i)
		t.Errorf("memory differs at byte %d, %s: %s, want %s", i, place, meaning(a.mem[w:]), meaning(expected[w:]))
	}
}

// leaveUntouched expects guards where b has them.
//
//go:norace
func leaveUntouched(expected, b []byte) {
	for i := range b {
		if b[i] == guardByte {
			expected[i] = guardByte
		}
	}
}

// takeOver expects what b has where that is another transfer's.
//
//go:norace
func takeOver(expected, b, later []byte) {
	for i := range b {
		if b[i] == later[i] {
			expected[i] = later[i]
		}
	}
}

// differ is the first index at which two equally long slices differ, or -1.
//
//go:norace
func differ(a, b []byte) int {
	if string(a) == string(b) { // no copy is made
		return -1
	}
	for i := range a {
		if a[i] != b[i] {
			return i
		}
	}
	return -1
}

// place says where byte i is, and where the pattern's word that holds byte i begins.
func (a *arena) place(i int) (place string, start int) {
	for k := range a.layout.Regions {
		r, at := &a.layout.Regions[k], uint64(i)-a.starts[k]
		if uint64(i) >= a.starts[k] && at < r.Extent() {
			off := at % r.BlockStride
			return fmt.Sprintf("region %d, block %d, offset %d of %d", k, at/r.BlockStride, off, r.BlockBytes), i - int(off%8)
		}
	}
	return "outside of all regions", i - i%8
}

// meaning reads the word of the pattern that mem begins with.
func meaning(mem []byte) string {
	w := binary.LittleEndian.Uint64(mem)
	if w == 0x0101010101010101*guardByte {
		return "nothing written"
	}
	return fmt.Sprintf("%#016x (transfer %d, region %d, position %d, offset %d)", w, w>>52, w>>40&0xfff, w>>20&0xfffff, w&0xfffff*8)
}

// touched says whether the first byte of any block was written. Transports may
// write by system calls that the race detector does not see, hence norace.
//
//go:norace
func (a *arena) touched(blocks [][]kv.BlockID) bool {
	for i, r := range a.layout.Regions {
		if int(r.Group) < len(blocks) {
			for _, id := range blocks[r.Group] {
				at := a.starts[i] + uint64(id)*r.BlockStride
				a.pullBytes(i, at, at+1)
				if a.mem[at] != guardByte {
					return true
				}
			}
		}
	}
	return false
}

// snapshot copies the arena as it is now.
//
//go:norace
func (a *arena) snapshot() []byte {
	a.pull()
	out := make([]byte, len(a.mem))
	copy(out, a.mem)
	return out
}
