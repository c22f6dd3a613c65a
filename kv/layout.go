// The memory that an engine registers, checked: regions, in groups that share their block ids.

package kv

import (
	"errors"
	"fmt"
	"math/bits"
	"slices"

	"github.com/kvconn/kvconn/internal/fault"
)

// BlockID numbers a block within its KV cache group, from 0.
type BlockID = uint32

// Region is a memory range that holds a piece of every block of one KV cache
// group at a fixed stride: one layer's K, V, fused KV, latent or state, or one
// head of it where the engine's layout keeps heads apart.
type Region struct {
	Name        string // same on both sides of a transfer, in its group unique but for regions of other heads
	Base        uint64 // address of block 0 in this process, bytes
	BlockStride uint64 // bytes from one block's start to the next one's
	BlockBytes  uint64 // bytes of a block in this region, at most BlockStride
	NumBlocks   uint32
	Group       uint32    // KV cache group
	Memory      Memory    // in which it lies
	IndexKind   IndexKind // what the group's block ids name

	// What lies where in a block, as geometry.go has it; all 0: an opaque block,
	// which is copied whole. Both TotalHeads and FirstHead 0: all heads of the model.
	Tokens      uint32
	Heads       uint32
	FirstHead   uint32 // of the model's TotalHeads, the first that this region holds
	TotalHeads  uint32
	TokenStride uint64 // bytes from one token's item of a head to the next one's
	HeadStride  uint64 // bytes from one head's item of a token to the next one's
}

// Memory says where a region lies: in the host's memory, or in a device's. The agent knows
// what the numbers of devices mean.
type Memory uint32

// HostMemory is memory that the processor reads and writes itself.
const HostMemory Memory = 0

// MaxDevices bounds the devices that an agent's regions lie on.
const MaxDevices = 64

// DeviceMemory is the memory of the device with this number, from 0.
func DeviceMemory(device int) Memory { return Memory(1 + device) }

// Device is the number of the device; ok is false for the host's memory.
func (m Memory) Device() (device int, ok bool) { return int(m) - 1, m != HostMemory }

func (m Memory) String() string {
	if device, ok := m.Device(); ok {
		return fmt.Sprintf("device %d", device)
	}
	return "host"
}

// Extent is the number of bytes from Base to the end of the last block.
func (r *Region) Extent() uint64 {
	if r.NumBlocks == 0 {
		return 0
	}
	return uint64(r.NumBlocks-1)*r.BlockStride + r.BlockBytes
}

// fits says whether the region ends within the address space. Until fits was asked, Extent
// may overflow.
func (r *Region) fits() bool {
	high, span := bits.Mul64(uint64(r.NumBlocks-1), r.BlockStride)
	end, carry := bits.Add64(r.Base, span, 0)
	_, carry2 := bits.Add64(end, r.BlockBytes, 0)
	return high == 0 && carry == 0 && carry2 == 0
}

func (r *Region) String() string {
	where := ""
	if r.Memory != HostMemory {
		where = ", " + r.Memory.String()
	}
	return fmt.Sprintf("region %q (group %d, base %#x, %d blocks of %d bytes, stride %d%s)",
		r.Name, r.Group, r.Base, r.NumBlocks, r.BlockBytes, r.BlockStride, where)
}

// Layout is the whole registered KV cache of one agent. It does not change
// after NewLayout, so it may be read from any goroutine.
type Layout struct {
	Regions []Region
	// Groups[g] is what the regions of group g have in common.
	Groups []Group
}

// Group is a set of regions that share their block ids.
type Group struct {
	NumBlocks  uint32   // the least of its regions: a block id must be below it
	BlockBytes uint64   // bytes of one block over all regions of the group
	Regions    []uint32 // indices into Layout.Regions
	Tokens     uint32   // of a block; 0 if all its regions are opaque
}

// NewLayout checks regions and groups them. Groups must be numbered from 0
// without a gap.
func NewLayout(regions []Region) (*Layout, error) {
	if len(regions) == 0 {
		return nil, errors.New("no regions: register at least one KV cache region")
	}
	if len(regions) > MaxRegions {
		return nil, fmt.Errorf("%d regions, at most %d are supported", len(regions), MaxRegions)
	}
	l := &Layout{Regions: slices.Clone(regions)}
	for i := range l.Regions {
		r := &l.Regions[i]
		if err := r.check(); err != nil {
			return nil, err
		}
		for int(r.Group) >= len(l.Groups) {
			l.Groups = append(l.Groups, Group{NumBlocks: ^uint32(0)})
		}
		g := &l.Groups[r.Group]
		g.Tokens = max(g.Tokens, r.Tokens)
		g.NumBlocks = min(g.NumBlocks, r.NumBlocks)
		g.BlockBytes += r.BlockBytes
		g.Regions = append(g.Regions, uint32(i))
	}
	if _, _, err := checkShapes(l.Shapes()); err != nil {
		return nil, err
	}
	for g := range l.Groups {
		if len(l.Groups[g].Regions) == 0 {
			return nil, fmt.Errorf("KV cache group %d has no region: number groups from 0 without a gap", g)
		}
		if err := l.checkOverlap(l.Groups[g].Regions); err != nil {
			return nil, err
		}
	}
	return l, nil
}

func (r *Region) check() error {
	switch {
	case r.Name == "" || len(r.Name) > MaxRegionName:
		return fmt.Errorf("region name %.40q: want 1 to %d bytes", r.Name, MaxRegionName)
	case r.Group >= MaxGroups:
		return fmt.Errorf("%v: group must be below %d", r, MaxGroups)
	case r.Memory > MaxDevices:
		return fmt.Errorf("%v: devices are numbered from 0 to %d", r, MaxDevices-1)
	case r.Base == 0:
		return fmt.Errorf("%v: address is null", r)
	case r.BlockBytes == 0 || r.NumBlocks == 0:
		return fmt.Errorf("%v: block bytes and number of blocks must not be 0", r)
	case r.BlockStride < r.BlockBytes:
		return fmt.Errorf("%v: stride is less than the block's length", r)
	case r.Base%RegionAlign != 0 || r.BlockStride%RegionAlign != 0 || r.BlockBytes%RegionAlign != 0:
		return fmt.Errorf("%v is unaligned: base, stride and block bytes must be multiples of %d", r, RegionAlign)
	case r.BlockStride > 1<<40 || !r.fits():
		return fmt.Errorf("%v does not fit into the address space", r)
	}
	s := r.shape()
	s.complete()
	r.TotalHeads = s.TotalHeads
	return nil
}

// checkOverlap finds two regions of a group that share a byte of one memory. Regions of different groups
// may share bytes: hybrid models keep several groups in one storage.
func (l *Layout) checkOverlap(index []uint32) error {
	order := slices.Clone(index)
	slices.SortFunc(order, func(a, b uint32) int {
		switch x, y := l.Regions[a].Base, l.Regions[b].Base; {
		case x < y:
			return -1
		case x > y:
			return 1
		}
		return 0
	})
	var open []uint32 // regions whose extent reaches past the current base
	for _, i := range order {
		r := &l.Regions[i]
		open = slices.DeleteFunc(open, func(j uint32) bool {
			return l.Regions[j].Base+l.Regions[j].Extent() <= r.Base
		})
		for _, j := range open {
			if l.Regions[j].Memory == r.Memory && overlap(&l.Regions[j], r) {
				return fmt.Errorf("%v overlaps %v", r, &l.Regions[j])
			}
		}
		open = append(open, i)
	}
	return nil
}

// overlap says whether b, whose base is not below a's and within a's extent,
// shares a byte with a. Strided views of one storage interleave without overlap.
func overlap(a, b *Region) bool {
	if a.BlockStride != b.BlockStride {
		return true // nothing lays regions of a group out like that
	}
	d := (b.Base - a.Base) % a.BlockStride
	return d < a.BlockBytes || d+b.BlockBytes > a.BlockStride
}

// CheckBlocks says why block ids, one list per group, cannot be used with this
// layout: too many groups, or an id out of range.
func (l *Layout) CheckBlocks(blocks [][]BlockID) error {
	if len(blocks) > len(l.Groups) {
		return fmt.Errorf("block ids for %d KV cache groups, but %d are registered", len(blocks), len(l.Groups))
	}
	for g, ids := range blocks {
		if len(ids) > MaxBlocks {
			return fmt.Errorf("%d block ids in group %d, at most %d are supported in one transfer", len(ids), g, MaxBlocks)
		}
		n := l.Groups[g].NumBlocks
		for i, id := range ids {
			if id >= n {
				return fmt.Errorf("block id %d (position %d, group %d) is out of range: the group has %d blocks", id, i, g, n)
			}
		}
	}
	return nil
}

// CheckEntries says which entries of a ring are not where their positions in the prompt
// lie. first is the position of ids[0], held are the group's entries of earlier calls. A
// part of a ring that wraps is a list whose ids begin anew in the middle.
func (l *Layout) CheckEntries(g int, held []BlockID, first uint64, ids []BlockID) error {
	ring := l.Regions[l.Groups[g].Regions[0]].IndexKind.ring()
	if ring == 0 || len(ids) == 0 || fault.On("ring-unchecked") {
		return nil
	}
	if n := len(held) + len(ids); n > int(ring) {
		return fmt.Errorf("%d entries in group %d, whose rings have %d: later positions would lie on earlier ones", n, g, ring)
	}
	of := ids[0] / ring
	if len(held) > 0 {
		of = held[0] / ring
	}
	for i, id := range ids {
		position := first + uint64(i)
		if want := uint32(position % uint64(ring)); id/ring != of || id%ring != want {
			return fmt.Errorf("id %d of group %d is entry %d of ring %d, but position %d of the prompt lies in entry %d of ring %d (rings of %d entries)",
				id, g, id%ring, id/ring, position, want, of, ring)
		}
	}
	return nil
}

// CheckUnique says which block id stands twice in one list. Reading a block twice is
// harmless, but two writes into one block would leave either content. The ids must have
// passed CheckBlocks.
func (l *Layout) CheckUnique(blocks [][]BlockID) error {
	for g, ids := range blocks {
		seen := make([]uint64, (l.Groups[g].NumBlocks+63)/64)
		for _, id := range ids {
			if seen[id/64]&(1<<(id%64)) != 0 {
				return fmt.Errorf("block id %d stands twice in the load of group %d", id, g)
			}
			seen[id/64] |= 1 << (id % 64)
		}
	}
	return nil
}

// Bytes is what a transfer of these blocks carries.
func (l *Layout) Bytes(blocks [][]BlockID) uint64 {
	var n uint64
	for g, ids := range blocks {
		n += uint64(len(ids)) * l.Groups[g].BlockBytes
	}
	return n
}

func (r *Region) shape() Shape {
	return Shape{Name: r.Name, BlockStride: r.BlockStride, BlockBytes: r.BlockBytes, NumBlocks: r.NumBlocks, Group: r.Group,
		Tokens: r.Tokens, Heads: r.Heads, FirstHead: r.FirstHead, TotalHeads: r.TotalHeads, TokenStride: r.TokenStride, HeadStride: r.HeadStride, IndexKind: r.IndexKind}
}

// Shapes describes the layout to peers.
func (l *Layout) Shapes() []Shape {
	out := make([]Shape, len(l.Regions))
	for i := range l.Regions {
		out[i] = l.Regions[i].shape()
	}
	return out
}
