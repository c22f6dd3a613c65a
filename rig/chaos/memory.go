package chaos

import (
	"fmt"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/kv"
)

// memory is an engine's paged cache, outside Go's heap. Every block always holds a known
// pattern: its transfer's or, if no transfer has it, nobody's.
type memory struct {
	mem        []byte
	gpu        *gpu   // nil: it is host memory
	base       uint64 // where the agent finds it
	regions    int
	blocks     int // of a region
	blockBytes int
	paint      []uint64 // per block: the tag of nobody's pattern, anew after each use
	free       []kv.BlockID
	given      uint64
}

// The kinds of memory.
const (
	memoryHost   = "host"
	memoryDouble = "double"
)

func newMemory(kind string, regions, blocks, blockBytes int) (*memory, error) {
	size := regions * blocks * blockBytes
	var mem []byte
	var on *gpu
	var base uint64
	var err error
	if kind == memoryDouble {
		on, mem, base, err = newGPU(size)
	} else if mem, err = unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE); err == nil {
		base = uint64(uintptr(unsafe.Pointer(&mem[0])))
	}
	if err != nil {
		return nil, fmt.Errorf("%d bytes of memory: %w", size, err)
	}
	m := &memory{mem: mem, gpu: on, base: base, regions: regions, blocks: blocks, blockBytes: blockBytes, paint: make([]uint64, blocks)}
	ids := make([]kv.BlockID, blocks)
	for i := range ids {
		ids[i] = kv.BlockID(i)
	}
	m.give(ids)
	return m, nil
}

func (m *memory) unmap() { _ = unix.Munmap(m.mem) }

func (m *memory) layout() []kv.Region {
	out := make([]kv.Region, m.regions)
	for r := range out {
		out[r] = kv.Region{
			Name: fmt.Sprintf("layer.%d", r), Base: m.base + uint64(r*m.blocks*m.blockBytes),
			BlockStride: uint64(m.blockBytes), BlockBytes: uint64(m.blockBytes), NumBlocks: uint32(m.blocks),
		}
		if m.gpu != nil {
			out[r].Memory = kv.DeviceMemory(0)
		}
	}
	return out
}

func (m *memory) words(region int, id kv.BlockID) []uint64 {
	off := (region*m.blocks + int(id)) * m.blockBytes
	return unsafe.Slice((*uint64)(unsafe.Pointer(&m.mem[off])), m.blockBytes/8)
}

// mix spreads a number over all bits.
func mix(x uint64) uint64 {
	x ^= x >> 30
	x *= 0xBF58476D1CE4E5B9
	x ^= x >> 27
	x *= 0x94D049BB133111EB
	return x ^ x>>31
}

const golden = 0x9E3779B97F4A7C15

// base is the first word of a block's pattern; each next one is golden more. It
// names the tag, the region and the position in the prompt.
func base(tag uint64, region, position int) uint64 {
	return mix(mix(tag+golden) ^ uint64(region)<<32 ^ uint64(position))
}

func (m *memory) fill(id kv.BlockID, tag uint64, position int) {
	for r := range m.regions {
		x := base(tag, r, position)
		w := m.words(r, id)
		for i := range w {
			w[i] = x
			x += golden
		}
	}
}

// check says which byte of a block is not the pattern's.
func (m *memory) check(id kv.BlockID, tag uint64, position int) error {
	for r := range m.regions {
		x := base(tag, r, position)
		for i, got := range m.words(r, id) {
			if got != x {
				return fmt.Errorf("region %d, block %d, byte %d is %#x, want %#x (position %d of tag %#x)", r, id, i*8, got, x, position, tag)
			}
			x += golden
		}
	}
	return nil
}

// nobody marks the tags of blocks without an owner.
const nobody = 1 << 63

// take gives n free blocks; the block that was given back last comes first. If fewer are
// free, it gives none. The error says that someone has written into one.
func (m *memory) take(n int) ([]kv.BlockID, error) {
	if n > len(m.free) {
		return nil, nil
	}
	ids := make([]kv.BlockID, n)
	var wrong error
	for i := range ids {
		ids[i] = m.free[len(m.free)-1]
		m.free = m.free[:len(m.free)-1]
		if err := m.check(ids[i], m.paint[ids[i]], 0); err != nil && wrong == nil {
			wrong = fmt.Errorf("a block that nobody had was written: %w", err)
		}
	}
	if wrong != nil {
		wrong = fmt.Errorf("%w; all that was written: %s", wrong, m.written(append(slices.Clone(ids), m.free...)))
	}
	return ids, wrong
}

// mostTold is how many places written tells of.
const mostTold = 16

// written says where blocks differ from nobody's pattern: a whole part that came again
// looks otherwise than a packet.
func (m *memory) written(ids []kv.BlockID) string {
	var places []string
	for _, id := range ids {
		for r := range m.regions {
			x := base(m.paint[id], r, 0)
			n, first, last := 0, 0, 0
			for i, got := range m.words(r, id) {
				if got != x+uint64(i)*golden {
					if n++; n == 1 {
						first = i
					}
					last = i
				}
			}
			if n > 0 {
				places = append(places, fmt.Sprintf("region %d, block %d: %d bytes from %d to %d", r, id, n*8, first*8, last*8+8))
			}
		}
	}
	if more := len(places) - mostTold; more > 0 {
		places = append(places[:mostTold], fmt.Sprintf("and %d more", more))
	}
	return strings.Join(places, "; ")
}

// give makes blocks free again and paints them over.
func (m *memory) give(ids []kv.BlockID) {
	for _, id := range ids {
		m.given++
		m.paint[id] = nobody | m.given
		m.fill(id, m.paint[id], 0)
	}
	m.free = append(m.free, ids...)
}

// checkFree says whether someone has written into a free block.
func (m *memory) checkFree() error {
	for _, id := range m.free {
		if err := m.check(id, m.paint[id], 0); err != nil {
			return fmt.Errorf("a block that nobody has was written: %w", err)
		}
	}
	return nil
}
