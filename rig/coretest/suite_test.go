package coretest

import (
	"testing"
	"unsafe"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
)

func TestMemoryTransport(t *testing.T) { TransportSuite(t, twins()) }

// farTwin is far memory for twins, which copy from and to its address.
type farTwin struct{ mem []byte }

func newFarTwin(t *testing.T, size int) Far { return farTwin{mapMemory(t, nil, uint64(size))} }

func (f farTwin) Address() uint64 { return uint64(uintptr(unsafe.Pointer(&f.mem[0]))) }

//go:norace
func (f farTwin) Read(at uint64, into []byte) { copy(into, f.mem[at:]) }

//go:norace
func (f farTwin) Write(at uint64, from []byte) { copy(f.mem[at:], from) }

// The suite sees far memory as it sees its own: two pieces of it, and host memory beside them.
func TestFarMemory(t *testing.T) {
	f := twins()
	f.BigBytes = 8 << 20
	f.Device = &Device{Far: []func(*testing.T, int) Far{newFarTwin, newFarTwin}, Holds: func(region int) bool { return region != 2 }}
	TransportSuite(t, f)
}

// What is wrong in far memory is seen, in each region and between them, and what is right is not.
func TestFarMemoryIsCompared(t *testing.T) {
	specs := []regionSpec{{bytes: 4096, stride: 8192, blocks: 4}, {bytes: 512, blocks: 9}, {bytes: 64, blocks: 9}}
	a := newArena(t, specs, nil, &Device{Far: []func(*testing.T, int) Far{newFarTwin, newFarTwin}, Holds: func(region int) bool { return region != 2 }})
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
		if far := a.far[region]; far != nil {
			real = far.(farTwin).mem
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
	a.far[1].(farTwin).mem[a.starts[1]+3*512] = 1
	if !a.touched(blocks) {
		t.Error("a byte that has landed was not seen")
	}
}

// twins is the suite's fixture of the twins of a transport.
func twins() Fixture {
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
