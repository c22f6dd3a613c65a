package coretest

import (
	"testing"
	"unsafe"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
)

func TestMemoryTransport(t *testing.T) { TransportSuite(t, fakes()) }

// fakeMemory is device memory for fakes, which copy from and to its address.
type fakeMemory struct{ mem []byte }

func newFakeMemory(t *testing.T, size int) DeviceMemory {
	return fakeMemory{mapMemory(t, nil, uint64(size))}
}

func (f fakeMemory) Address() uint64 { return uint64(uintptr(unsafe.Pointer(&f.mem[0]))) }

//go:norace
func (f fakeMemory) Read(at uint64, into []byte) { copy(into, f.mem[at:]) }

//go:norace
func (f fakeMemory) Write(at uint64, from []byte) { copy(f.mem[at:], from) }

// The suite sees device memory as it sees its own: two pieces of it, and host memory beside them.
func TestDeviceMemory(t *testing.T) {
	f := fakes()
	f.BigBytes = 8 << 20
	f.Device = &Device{Memories: []func(*testing.T, int) DeviceMemory{newFakeMemory, newFakeMemory}, Holds: func(region int) bool { return region != 2 }}
	TransportSuite(t, f)
}

// What is wrong in device memory is seen, in each region and between them, and what is right is not.
func TestDeviceMemoryIsCompared(t *testing.T) {
	specs := []regionSpec{{bytes: 4096, stride: 8192, blocks: 4}, {bytes: 512, blocks: 9}, {bytes: 64, blocks: 9}}
	a := newArena(t, specs, nil, &Device{Memories: []func(*testing.T, int) DeviceMemory{newFakeMemory, newFakeMemory}, Holds: func(region int) bool { return region != 2 }})
	blocks := [][]kv.BlockID{{3, 0, 1}}
	a.paint(5, blocks)
	a.check(t, delivery{transfer: 5, blocks: blocks})
	before := a.snapshot()
	for _, at := range []uint64{0, a.starts[0], a.starts[0] + 5000, a.starts[1] - 1, a.starts[1] + 511, uint64(len(a.mem) - 1)} {
		region := 0
		for region+1 < len(a.starts) && at >= a.starts[region+1]-guardBytes {
			region++
		}
		real := a.mem
		if onDevice := a.onDevice[region]; onDevice != nil {
			real = onDevice.(fakeMemory).mem
		}
		was := real[at]
		real[at] = was + 1
		if got := a.changed(before); got != int(at) {
			t.Errorf("byte %d was changed, and %d is said to be", at, got)
		}
		real[at] = was
	}
	a.wipe()
	a.check(t)
	if a.touched(blocks) {
		t.Error("wiped blocks are touched")
	}
	a.onDevice[1].(fakeMemory).mem[a.starts[1]+3*512] = 1
	if !a.touched(blocks) {
		t.Error("a byte that has landed was not seen")
	}
}

// fakes is the suite's fixture of the fakes of a transport.
func fakes() Fixture {
	var n *Network
	var owner string
	return Fixture{
		Open: func(t *testing.T, id core.AgentID, l *kv.Layout, sink core.Sink, _ core.Signal) core.Transport {
			if owner != t.Name() {
				n, owner = NewNetwork(), t.Name()
			}
			return n.NewTransport(id, l, sink)
		},
	}
}
