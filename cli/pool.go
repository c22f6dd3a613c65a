package cli

import (
	"fmt"
	"math/rand"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
)

// pool is a synthetic paged KV cache: some layers of blocks, more blocks than a
// transfer takes, outside Go's heap as an engine's memory is.
type pool struct {
	mem    []byte
	layers int
	blocks int // of a layer
	block  int // bytes
}

func newPool(layers, blocks, block int) (*pool, error) {
	size := layers * blocks * block
	mem, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, fmt.Errorf("%d bytes of memory: %w", size, err)
	}
	// As engines' pools are, where the system lets them.
	_ = unix.Madvise(mem, unix.MADV_HUGEPAGE)
	return &pool{mem: mem, layers: layers, blocks: blocks, block: block}, nil
}

func (p *pool) free() { _ = unix.Munmap(p.mem) }

func (p *pool) regions() []core.Region {
	out := make([]core.Region, p.layers)
	for l := range out {
		out[l] = core.Region{
			Name: fmt.Sprintf("layer.%d", l), Base: uint64(uintptr(unsafe.Pointer(&p.mem[l*p.blocks*p.block]))),
			BlockStride: uint64(p.block), BlockBytes: uint64(p.block), NumBlocks: uint32(p.blocks),
		}
	}
	return out
}

func (p *pool) words(layer int, id core.BlockID) []uint64 {
	off := (layer*p.blocks + int(id)) * p.block
	return unsafe.Slice((*uint64)(unsafe.Pointer(&p.mem[off])), p.block/8)
}

// word is what the pattern of a transfer has at a place: it names both, so that
// no byte of another transfer, block or place passes for it.
func word(transfer, layer, position, i int) uint64 {
	x := uint64(transfer)<<48 ^ uint64(layer)<<40 ^ uint64(position)<<20 ^ uint64(i)
	return (x + 1) * 0x9E3779B97F4A7C15
}

// fill writes a transfer's pattern into blocks.
func (p *pool) fill(transfer int, ids []core.BlockID) {
	for l := range p.layers {
		for pos, id := range ids {
			w := p.words(l, id)
			for i := range w {
				w[i] = word(transfer, l, pos, i)
			}
		}
	}
}

// idle is what blocks outside every transfer hold.
const idle = 0x5A5A5A5A5A5A5A5A

func (p *pool) clear() {
	w := unsafe.Slice((*uint64)(unsafe.Pointer(&p.mem[0])), len(p.mem)/8)
	for i := range w {
		w[i] = idle
	}
}

// check compares blocks with a transfer's pattern from its position first on,
// and every other block with idle.
func (p *pool) check(transfer, first int, ids []core.BlockID) error {
	position := make(map[core.BlockID]int, len(ids))
	for k, id := range ids {
		position[id] = first + k
	}
	for l := range p.layers {
		for b := range p.blocks {
			pos, loaded := position[core.BlockID(b)]
			for i, got := range p.words(l, core.BlockID(b)) {
				want := uint64(idle)
				if loaded {
					want = word(transfer, l, pos, i)
				}
				if got != want {
					return fmt.Errorf("layer %d, block %d, byte %d is wrong: got %#x, want %#x (loaded: %v)", l, b, i*8, got, want, loaded)
				}
			}
		}
	}
	return nil
}

// choose picks n of the pool's blocks: scattered, or the first ones.
func (p *pool) choose(n int, seed int64, adjacent bool) []core.BlockID {
	if !adjacent {
		return p.scatter(n, seed)
	}
	out := make([]core.BlockID, n)
	for i := range out {
		out[i] = core.BlockID(i)
	}
	return out
}

// scatter picks n of the pool's blocks in an order that a seed gives.
func (p *pool) scatter(n int, seed int64) []core.BlockID {
	out := make([]core.BlockID, n)
	for i, b := range rand.New(rand.NewSource(seed)).Perm(p.blocks)[:n] {
		out[i] = core.BlockID(b)
	}
	return out
}
