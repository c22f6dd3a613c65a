package rdma_test

import (
	"runtime"
	"testing"
	"unsafe"

	"github.com/kvconn/kvconn/rig/testdouble/engine"
)

// mapGPU maps new memory.
func mapGPU(t *testing.T, e *engine.Engine, at uintptr, bytes uintptr, capable byte) (unmap func()) {
	t.Helper()
	var prop [32]byte // CUmemAllocationProp: pinned, a file descriptor, on device 0
	prop[0], prop[4], prop[8], prop[25] = 1, 1, 1, capable
	var access [12]byte // CUmemAccessDesc: device 0, read and write
	access[0], access[8] = 1, 3
	var pin runtime.Pinner
	pin.Pin(&prop)
	pin.Pin(&access)
	defer pin.Unpin()
	handle := e.Out("cuMemCreate", bytes, uintptr(unsafe.Pointer(&prop)), 0)
	e.Must("cuMemMap", at, bytes, 0, handle, 0)
	e.Must("cuMemSetAccess", at, bytes, uintptr(unsafe.Pointer(&access)), 1)
	return func() {
		e.Must("cuMemUnmap", at, bytes)
		e.Must("cuMemRelease", handle)
	}
}

const gpuGrain = 2 << 20

func reserveGPU(t *testing.T, e *engine.Engine, bytes uintptr) uintptr {
	t.Helper()
	at := e.Out("cuMemAddressReserve", bytes, 0, 0, 0)
	t.Cleanup(func() { e.Must("cuMemAddressFree", at, bytes) })
	return at
}

// TestGPUMapped: memory that was mapped by several handles, as expandable segments are, and as an engine
// that sleeps has.
func TestGPUMapped(t *testing.T) {
	e := needsGPU(t)
	at := reserveGPU(t, e, 4*gpuGrain)
	for i := range uintptr(3) {
		t.Cleanup(mapGPU(t, e, at+i*gpuGrain, gpuGrain, 1))
	}
	t.Cleanup(mapGPU(t, e, at+3*gpuGrain, gpuGrain, 0))
	to := e.Alloc(3 * gpuGrain)
	p, d := gpuPair(t, 3*gpuGrain, at, to)
	for i := range 3 {
		e.Fill(at+uintptr(i)*gpuGrain, gpuGrain, uint64(i))
	}
	if err := move(p, d, "a"); err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		if n := e.Wrong(to+uintptr(i)*gpuGrain, gpuGrain, uint64(i)); n != 0 {
			t.Errorf("%d bytes of the mapping %d were wrong", n, i)
		}
	}
	refused(t, at+3*gpuGrain, gpuGrain, `"layer 3"`, "gpuDirectRDMACapable")
}
