// A device by way of the driver: what lies in its memory, its moments, what is exported of it.

package driver

/*
#cgo noescape kvg_moment
#cgo nocallback kvg_moment
#cgo nocallback kvg_await
#cgo noescape kvg_same
#cgo nocallback kvg_same
#include "shim.h"
*/
import "C"

import (
	"fmt"
	"unsafe"
)

// Info is what a device is.
type Info struct {
	Ordinal int // in this process: CUDA_VISIBLE_DEVICES changes it
	Name    string
	UUID    string // GPU-….: the same in every process
	PCI     string // 0000:3b:00.0, as in /sys/bus/pci/devices
	Major   int    // compute capability
	Minor   int
	Active  bool // its primary context is active in this process

	Unified        bool // host and devices share one address space
	RDMA           bool // GPUDirect RDMA
	DMABuf         bool // memory can be exported as a dma-buf: open kernel modules
	FlushOnHost    bool // Flush works
	WritesOrdered  bool // what a NIC wrote is seen by work that is launched later, without Flush
	FlushOptions   int
	WritesOrdering int
}

// Count is how many devices this process sees.
func Count() (int, error) {
	var n C.int
	err := failed(C.kvg_count(&n), "counting the devices")
	return int(n), err
}

// Inform tells about a device.
func Inform(ordinal int) (Info, error) {
	var c C.struct_kvg_info
	if err := failed(C.kvg_inform(C.int(ordinal), &c), "asking about CUDA device %d", ordinal); err != nil {
		return Info{}, err
	}
	u := c.uuid
	return Info{
		Ordinal: ordinal, Name: C.GoString(&c.name[0]), PCI: C.GoString(&c.pci[0]),
		UUID:  fmt.Sprintf("GPU-%x-%x-%x-%x-%x", u[0:4], u[4:6], u[6:8], u[8:10], u[10:16]),
		Major: int(c.major), Minor: int(c.minor), Active: c.active != 0,
		Unified: c.unified != 0, RDMA: c.rdma != 0, DMABuf: c.dma_buf != 0,
		FlushOnHost: c.flush_options&1 != 0, WritesOrdered: c.writes_ordering >= 100,
		FlushOptions: int(c.flush_options), WritesOrdering: int(c.writes_ordering),
	}, nil
}

// Kind of memory, by its allocation.
type Kind int

// Kinds of memory.
const (
	Pageable     Kind = C.KVG_PAGEABLE      // CUDA does not know it
	Host         Kind = C.KVG_HOST          // pinned or registered host memory
	Managed      Kind = C.KVG_MANAGED       // moves between host and devices
	Allocated    Kind = C.KVG_ALLOCATED     // of a device: cuMemAlloc, cudaMalloc
	Pool         Kind = C.KVG_POOL          // of a device: from a pool, in stream order
	VMM          Kind = C.KVG_VMM           // of a device: mapped by handles
	OtherContext Kind = C.KVG_OTHER_CONTEXT // of a device, but not of its primary context
	Elsewhere    Kind = C.KVG_ELSEWHERE     // mapped by handles, but not of a device
	Odd          Kind = C.KVG_ODD           // none of these
)

// Memory is what lies at an address: one mapping.
type Memory struct {
	Base, Size uint64
	ID         uint64 // of the allocation; never given twice in a process
	Block      uint64 // of the physical memory, if it was mapped by handles and the driver tells; else 0
	Kind       Kind
	Device     int
	RDMA       bool // GPUDirect RDMA may be used on it
	Files      bool // it was mapped by a handle that may be given to another process as a descriptor
}

// Locate says what lies at an address. Host memory has no base and no size.
func Locate(addr uint64) (Memory, error) {
	var c C.struct_kvg_memory
	if err := failed(C.kvg_locate(C.uint64_t(addr), &c), "asking which memory lies at %#x", addr); err != nil {
		return Memory{}, err
	}
	return Memory{Base: uint64(c.base), Size: uint64(c.size), ID: uint64(c.id), Block: uint64(c.block), Kind: Kind(c.kind), Device: int(c.device), RDMA: c.rdma != 0, Files: c.files != 0}, nil
}

// Device is a handle on a device, with a share in its primary context.
type Device struct {
	c       *C.struct_kvg_device
	ordinal int
	number  uint64 // of the handle, in its moments

	noKernel error
}

// Open gives a handle that has at most so many moments, and the copy kernel if that is wanted and the driver takes it.
func Open(ordinal, moments int, kernel bool) (*Device, error) {
	d := &Device{ordinal: ordinal}
	if err := failed(C.kvg_open(C.int(ordinal), C.int(moments), flag(kernel), &d.c), "opening CUDA device %d", ordinal); err != nil {
		return nil, err
	}
	d.number = uint64(C.kvg_number(d.c))
	d.noKernel = failed(C.kvg_no_kernel(d.c), "loading the copy kernel on CUDA device %d", ordinal)
	return d, nil
}

// Close gives the handle back. If busy is true, an Await has not ended, nothing was given back and no
// new Await begins.
func (d *Device) Close() (busy bool, err error) {
	err = failed(C.kvg_close(d.c), "closing CUDA device %d", d.ordinal)
	return err == errBusy, err
}

// Moment records one on a stream of the engine's.
func (d *Device) Moment(stream uintptr) (uint64, error) {
	var m C.uint64_t
	if s := C.kvg_moment(d.c, C.uintptr_t(stream), &m); s.code != 0 {
		return 0, failed(s, "taking a moment on stream %#x of CUDA device %d", stream, d.ordinal)
	}
	return uint64(m), nil
}

// Owns says whether a moment is one of this handle's.
func (d *Device) Owns(moment uint64) bool { return d.number == moment>>56 }

// Await returns when the moment has passed, or with the reason why it will not.
func (d *Device) Await(moment uint64) error {
	s := C.kvg_await(d.c, C.uint64_t(moment))
	if s.code != 0 {
		return failed(s, "waiting for moment %#x of CUDA device %d", moment, d.ordinal)
	}
	return nil
}

// Piece is a piece of a device's memory: its address, and the ids that it had when it was looked at.
type Piece struct {
	Addr, ID, Block uint64
}

// Piece is laid out like its twin in shim.h. If it differs, its line here does not compile.
var (
	_ = [1]struct{}{}[unsafe.Sizeof(Piece{})-C.sizeof_struct_kvg_piece]
	_ = [1]struct{}{}[unsafe.Offsetof(Piece{}.Block)-unsafe.Offsetof(C.struct_kvg_piece{}.block)]
)

// Same is how many of the pieces are still the same memory, from the first on.
func (d *Device) Same(pieces []Piece) (int, error) {
	if len(pieces) == 0 {
		return 0, nil
	}
	var n C.int
	s := C.kvg_same(d.c, (*C.struct_kvg_piece)(unsafe.Pointer(&pieces[0])), C.int(len(pieces)), &n)
	if s.code != 0 {
		return int(n), failed(s, "asking which memory lies at %#x of CUDA device %d", pieces[n].Addr, d.ordinal)
	}
	return int(n), nil
}

// Export gives a descriptor of a dma-buf of whole pages.
func (d *Device) Export(addr, bytes uint64) (fd int, err error) {
	var c C.int
	err = failed(C.kvg_export(d.c, C.uint64_t(addr), C.uint64_t(bytes), &c), "exporting %d bytes at %#x of CUDA device %d as a dma-buf", bytes, addr, d.ordinal)
	return int(c), err
}

// Flush returns when what a NIC has written to the device before is in its memory.
func (d *Device) Flush() error {
	return failed(C.kvg_flush(d.c), "flushing what was written to CUDA device %d", d.ordinal)
}

// Alloc gives memory of the device.
func (d *Device) Alloc(bytes uint64) (addr uint64, err error) {
	var c C.uint64_t
	err = failed(C.kvg_alloc(d.c, C.uint64_t(bytes), &c), "allocating %d bytes of CUDA device %d", bytes, d.ordinal)
	return uint64(c), err
}

// Free gives it back.
func (d *Device) Free(addr uint64) error {
	return failed(C.kvg_free(d.c, C.uint64_t(addr)), "freeing %#x of CUDA device %d", addr, d.ordinal)
}

// MomentEntry is the C function behind Moment and its first argument, for callers in C that
// have no time for Go: kvg_status (*)(void *, uintptr_t, uint64_t *).
func (d *Device) MomentEntry() (function, argument unsafe.Pointer) {
	return C.kvg_moment_entry(), unsafe.Pointer(d.c)
}
