package coretest

import (
	"slices"
	"testing"
	"unsafe"

	"github.com/kvconn/kvconn/kv"
)

// DeviceMemory is memory that nobody in this process can touch, as a GPU's is: the suite fills it and looks at it
// by copies, and keeps a copy of its own.
type DeviceMemory interface {
	// Address is where transports find its first byte.
	Address() uint64
	// Read copies what lies from an offset on; when it returns, into holds it.
	Read(at uint64, into []byte)
	// Write copies to an offset; when it returns, the bytes are there.
	Write(at uint64, from []byte)
}

// placeOnDevice gives regions their bases: in device memory where the device holds them, else in mem.
func (a *arena) placeOnDevice(t *testing.T, mem []byte, regions []kv.Region, device *Device) {
	t.Helper()
	var memories []DeviceMemory
	for _, alloc := range device.Memories {
		memories = append(memories, alloc(t, len(mem)))
	}
	a.onDevice = make([]DeviceMemory, len(regions))
	put(regions, func(i int) uint64 {
		if device.Holds != nil && !device.Holds(i) {
			return uint64(uintptr(unsafe.Pointer(&mem[0])))
		}
		a.onDevice[i] = memories[i%len(memories)]
		return a.onDevice[i].Address()
	})
}

// around is where a region lies in mem, with the guards before it, and those behind the last one.
func (a *arena) around(region int) (begin, end uint64) {
	if end = uint64(len(a.mem)); region+1 < len(a.starts) {
		end = a.starts[region+1] - guardBytes
	}
	return a.starts[region] - guardBytes, end
}

// pullBytes has a part of mem, in one region, be what the memory holds now. Where mem is the memory, there
// is nothing to do, here and below.
func (a *arena) pullBytes(region int, begin, end uint64) {
	if a.onDevice != nil && a.onDevice[region] != nil {
		a.onDevice[region].Read(begin, a.mem[begin:end])
	}
}

// pull is pullBytes of everything.
func (a *arena) pull() {
	for i := range a.onDevice {
		begin, end := a.around(i)
		a.pullBytes(i, begin, end)
	}
}

func (a *arena) pushBytes(region int, begin, end uint64) {
	if a.onDevice != nil && a.onDevice[region] != nil {
		a.onDevice[region].Write(begin, a.mem[begin:end])
	}
}

// push has the memory hold what mem does.
func (a *arena) push() *arena {
	for i := range a.onDevice {
		begin, end := a.around(i)
		a.pushBytes(i, begin, end)
	}
	return a
}

// pushBlocks is push of the blocks at the positions from begin to end. Neighbours go by one copy.
func (a *arena) pushBlocks(blocks [][]kv.BlockID, begin, end int) {
	for i := range a.onDevice {
		r := &a.layout.Regions[i]
		if int(r.Group) >= len(blocks) {
			continue
		}
		ids := blocks[r.Group]
		ids = slices.Clone(ids[min(begin, len(ids)):min(end, len(ids))])
		slices.Sort(ids)
		for len(ids) > 0 {
			n := 1
			for n < len(ids) && ids[n] == ids[n-1]+1 {
				n++
			}
			at := a.starts[i]
			a.pushBytes(i, at+uint64(ids[0])*r.BlockStride, at+uint64(ids[n-1])*r.BlockStride+r.BlockBytes)
			ids = ids[n:]
		}
	}
}

// wipe fills all of it with guards.
func (a *arena) wipe() {
	fill(a.mem, guardByte)
	a.push()
}

// changed is the first byte that is not as it was, or -1.
func (a *arena) changed(since []byte) int {
	a.pull()
	return differ(since, a.mem)
}
