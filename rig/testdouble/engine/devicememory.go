package engine

import (
	"runtime"
	"unsafe"
)

// DeviceMemory is device memory that is filled and read by copies of the driver alone, so on any driver.
type DeviceMemory struct {
	e      *Engine
	at     uintptr
	stream uintptr
	step   uint64 // no copy crosses a multiple of it, where a mapping ends; 0: there is one mapping
}

// NewDeviceMemory gives memory of cuMemAlloc until the test ends.
func (e *Engine) NewDeviceMemory(bytes int) *DeviceMemory {
	e.tb.Helper()
	return &DeviceMemory{e: e, at: e.Alloc(bytes), stream: e.Stream()}
}

// NewMappedMemory gives memory that was mapped by many handles, until the test ends.
func (e *Engine) NewMappedMemory(bytes int) *DeviceMemory {
	e.tb.Helper()
	return &DeviceMemory{e: e, at: e.Map(bytes).At, stream: e.Stream(), step: grain}
}

// Address is its first byte's.
func (f *DeviceMemory) Address() uint64 { return uint64(f.at) }

// Read copies what lies from an offset on. It has come when this returns.
func (f *DeviceMemory) Read(at uint64, into []byte) {
	f.e.tb.Helper()
	f.copy(at, into, func(device, host, n uintptr) { f.e.Must("cuMemcpyDtoHAsync_v2", host, device, n, f.stream) })
}

// Write copies to an offset. The bytes are there when this returns, for other streams and processes too.
func (f *DeviceMemory) Write(at uint64, from []byte) {
	f.e.tb.Helper()
	f.copy(at, from, func(device, host, n uintptr) { f.e.Must("cuMemcpyHtoDAsync_v2", device, host, n, f.stream) })
}

func (f *DeviceMemory) copy(at uint64, host []byte, piece func(device, host, n uintptr)) {
	f.e.tb.Helper()
	if len(host) == 0 {
		return
	}
	var pinned runtime.Pinner
	first := unsafe.SliceData(host)
	pinned.Pin(first)
	defer pinned.Unpin()
	for done, size := uint64(0), uint64(len(host)); done < size; {
		n := size - done
		if f.step > 0 {
			n = min(n, f.step-(at+done)%f.step)
		}
		piece(f.at+uintptr(at+done), uintptr(unsafe.Pointer(first))+uintptr(done), uintptr(n))
		done += n
	}
	f.e.Sync(f.stream)
}
