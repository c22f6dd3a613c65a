package synthetic

import (
	"fmt"
	"math/rand"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/shmem"
)

// Pool is a paged KV cache without an engine: some layers of blocks, more blocks
// than a transfer takes, outside Go's heap as an engine's memory is.
type Pool struct {
	mem    []byte
	shared *shmem.Memory // that mem is of; nil: ordinary memory
	layers int
	blocks int // of a layer
	block  int // bytes
}

// NewPool has that many layers, blocks of a layer, and bytes of a block.
func NewPool(layers, blocks, block int) (*Pool, error) {
	size := layers * blocks * block
	mem, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, fmt.Errorf("%d bytes of memory: %w", size, err)
	}
	// As engines' pools are, where the system lets them.
	_ = unix.Madvise(mem, unix.MADV_HUGEPAGE)
	return &Pool{mem: mem, layers: layers, blocks: blocks, block: block}, nil
}

// New is NewPool, if shared is true in memory that other processes can map.
func New(shared bool, layers, blocks, block int) (*Pool, error) {
	if !shared {
		return NewPool(layers, blocks, block)
	}
	m, err := shmem.Alloc(uint64(layers * blocks * block))
	if err != nil {
		return nil, err
	}
	return &Pool{mem: m.Bytes(), shared: m, layers: layers, blocks: blocks, block: block}, nil
}

// Free gives the memory back.
func (p *Pool) Free() {
	if p.shared != nil {
		_ = shmem.Free(p.shared.Base())
		return
	}
	_ = unix.Munmap(p.mem)
}

// Regions are what an agent registers, one a layer.
func (p *Pool) Regions() []kv.Region {
	out := make([]kv.Region, p.layers)
	for l := range out {
		out[l] = kv.Region{
			Name: fmt.Sprintf("layer.%d", l), Base: uint64(uintptr(unsafe.Pointer(&p.mem[l*p.blocks*p.block]))),
			BlockStride: uint64(p.block), BlockBytes: uint64(p.block), NumBlocks: uint32(p.blocks),
		}
	}
	return out
}

func (p *Pool) words(layer int, id kv.BlockID) []uint64 {
	off := (layer*p.blocks + int(id)) * p.block
	return unsafe.Slice((*uint64)(unsafe.Pointer(&p.mem[off])), p.block/8)
}

// word is the word of a transfer's pattern at a place. It names both, so that no byte of
// another transfer, block or place passes for it.
func word(transfer, layer, position, i int) uint64 {
	x := uint64(transfer)<<48 ^ uint64(layer)<<40 ^ uint64(position)<<20 ^ uint64(i)
	return (x + 1) * 0x9E3779B97F4A7C15
}

// Fill writes a transfer's pattern into blocks.
func (p *Pool) Fill(transfer int, ids []kv.BlockID) {
	for l := range p.layers {
		for pos, id := range ids {
			w := p.words(l, id)
			for i := range w {
				w[i] = word(transfer, l, pos, i)
			}
		}
	}
}

// idle is the word in blocks outside every transfer.
const idle = 0x5A5A5A5A5A5A5A5A

// Clear fills the whole pool with the value of blocks outside every transfer.
func (p *Pool) Clear() {
	w := unsafe.Slice((*uint64)(unsafe.Pointer(&p.mem[0])), p.layers*p.blocks*p.block/8)
	for i := range w {
		w[i] = idle
	}
}

// Check compares blocks with a transfer's pattern from its position first on,
// and every other block with idle.
func (p *Pool) Check(transfer, first int, ids []kv.BlockID) error {
	position := make(map[kv.BlockID]int, len(ids))
	for k, id := range ids {
		position[id] = first + k
	}
	for l := range p.layers {
		for b := range p.blocks {
			pos, loaded := position[kv.BlockID(b)]
			for i, got := range p.words(l, kv.BlockID(b)) {
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

// Choose picks n of the pool's blocks: scattered, or the first ones.
func (p *Pool) Choose(n int, seed int64, adjacent bool) []kv.BlockID {
	if !adjacent {
		return p.Scatter(n, seed)
	}
	out := make([]kv.BlockID, n)
	for i := range out {
		out[i] = kv.BlockID(i)
	}
	return out
}

// Scatter picks n of the pool's blocks in an order that a seed gives.
func (p *Pool) Scatter(n int, seed int64) []kv.BlockID {
	out := make([]kv.BlockID, n)
	for i, b := range rand.New(rand.NewSource(seed)).Perm(p.blocks)[:n] {
		out[i] = kv.BlockID(b)
	}
	return out
}
