// Device memory that was mapped by handles, as engines that sleep have it.

package engine

import (
	"runtime"
	"unsafe"
)

// grain is the size of a mapping.
const grain = 2 << 20

// Mapping is device memory that was mapped by handles, as engines that sleep have it: many
// mappings side by side.
type Mapping struct {
	e       *Engine
	At      uintptr
	handles []uintptr // of the mappings; 0: it is not mapped
}

// Map gives mapped memory until the test ends.
func (e *Engine) Map(bytes int) *Mapping {
	e.tb.Helper()
	n := (bytes + grain - 1) / grain
	m := &Mapping{e: e, At: e.Out("cuMemAddressReserve", uintptr(n*grain), 0, 0, 0), handles: make([]uintptr, n)}
	e.tb.Cleanup(func() {
		m.Sleep()
		e.Call("cuMemAddressFree", m.At, uintptr(n*grain))
	})
	m.Wake()
	return m
}

// MapOne gives one piece of memory that is mapped n times, side by side, until the test ends: so many mappings take no more of it.
func (e *Engine) MapOne(n int) uintptr {
	e.tb.Helper()
	size := uintptr(n * grain)
	at := e.Out("cuMemAddressReserve", size, 0, 0, 0)
	handle := e.create()
	for i := range uintptr(n) {
		e.mapAt(at+i*grain, handle)
	}
	e.tb.Cleanup(func() {
		for i := range uintptr(n) {
			e.Must("cuMemUnmap", at+i*grain, grain)
		}
		e.Must("cuMemRelease", handle)
		e.Call("cuMemAddressFree", at, size)
	})
	return at
}

// create gives memory of one grain, to be mapped by its handle.
func (e *Engine) create() (handle uintptr) {
	e.tb.Helper()
	var properties [32]byte // CUmemAllocationProp: pinned, a file descriptor, on the device, for RDMA where it can be
	properties[0], properties[4], properties[8], properties[12], properties[25] = 1, 1, 1, byte(e.Device), byte(e.Attribute(rdmaOfMapped))
	var pinned runtime.Pinner
	pinned.Pin(&properties)
	defer pinned.Unpin()
	return e.Out("cuMemCreate", grain, uintptr(unsafe.Pointer(&properties)), 0)
}

// mapAt maps one grain.
func (e *Engine) mapAt(at, handle uintptr) {
	e.tb.Helper()
	var access [12]byte // CUmemAccessDesc: the device reads and writes
	access[0], access[4], access[8] = 1, byte(e.Device), 3
	var pinned runtime.Pinner
	pinned.Pin(&access)
	defer pinned.Unpin()
	e.Must("cuMemMap", at, grain, 0, handle, 0)
	e.Must("cuMemSetAccess", at, grain, uintptr(unsafe.Pointer(&access)), 1)
}

// Wake maps new memory at the same addresses.
func (m *Mapping) Wake() {
	m.e.tb.Helper()
	for i := range m.handles {
		m.handles[i] = m.e.create()
		m.e.mapAt(m.At+uintptr(i*grain), m.handles[i])
	}
}

// Sleep gives the memory back; the addresses stay.
func (m *Mapping) Sleep() {
	m.e.tb.Helper()
	for i, h := range m.handles {
		if h != 0 {
			m.e.Must("cuMemUnmap", m.At+uintptr(i*grain), grain)
			m.e.Must("cuMemRelease", h)
			m.handles[i] = 0
		}
	}
}
