// Allocations are opened from process to process, by CUDA's handles or by descriptors, and copied from.

package driver

/*
#cgo noescape kvg_copy_pairs
#cgo nocallback kvg_copy_pairs
#include "shim.h"
*/
import "C"

import (
	"fmt"
	"unsafe"
)

// IPCBytes is the size of an IPC handle.
const IPCBytes = C.KVG_IPC_BYTES

// IPCHandle names an allocation to other processes, by its first byte.
func (d *Device) IPCHandle(base uint64) ([]byte, error) {
	handle := make([]byte, IPCBytes)
	err := failed(C.kvg_ipc_get(d.c, C.uint64_t(base), unsafe.Pointer(&handle[0])), "sharing the allocation at %#x of CUDA device %d", base, d.ordinal)
	return handle, err
}

// File gives the memory that is mapped at an address as a descriptor, which another process can open.
func (d *Device) File(addr uint64) (fd int, err error) {
	var c C.int
	err = failed(C.kvg_file_get(d.c, C.uint64_t(addr), &c), "sharing the memory that is mapped at %#x of CUDA device %d", addr, d.ordinal)
	return int(c), err
}

func opened(c *C.struct_kvg_memory) Memory {
	return Memory{Base: uint64(c.base), Size: uint64(c.size), ID: uint64(c.id), Block: uint64(c.block), Device: int(c.device)}
}

// OpenIPC opens an allocation of another process. Of the Memory, Base, Size, ID, Block and Device are told.
func (d *Device) OpenIPC(handle []byte) (Memory, error) {
	if len(handle) != IPCBytes {
		return Memory{}, fmt.Errorf("a handle of %d bytes, want %d", len(handle), IPCBytes)
	}
	var c C.struct_kvg_memory
	err := failed(C.kvg_ipc_open(d.c, unsafe.Pointer(&handle[0]), &c), "opening an allocation of another process on CUDA device %d", d.ordinal)
	return opened(&c), err
}

// CloseIPC gives it back. Nothing uses it any more.
func (d *Device) CloseIPC(base uint64) error {
	return failed(C.kvg_ipc_close(d.c, C.uint64_t(base)), "closing another process's allocation at %#x of CUDA device %d", base, d.ordinal)
}

// OpenFile is OpenIPC for a File of another process. The descriptor is not needed any more then.
func (d *Device) OpenFile(fd int, bytes uint64) (Memory, error) {
	var c C.struct_kvg_memory
	err := failed(C.kvg_file_open(d.c, C.int(fd), C.uint64_t(bytes), &c), "mapping %d bytes of another process on CUDA device %d", bytes, d.ordinal)
	return opened(&c), err
}

// CloseFile gives such memory back. The caller makes sure that no copy uses it any more.
func (d *Device) CloseFile(base, bytes uint64) error {
	return failed(C.kvg_file_close(d.c, C.uint64_t(base), C.uint64_t(bytes)), "unmapping another process's %d bytes at %#x of CUDA device %d", bytes, base, d.ordinal)
}

// Pair is a piece to copy from one place to another. The device reaches both places.
type Pair struct {
	From, To uintptr
	Len      uint64
}

// Pair is laid out like its twin in shim.h. If it differs, its line here does not compile.
var (
	_ = [1]struct{}{}[unsafe.Sizeof(Pair{})-C.sizeof_struct_kvg_pair]
	_ = [1]struct{}{}[unsafe.Offsetof(Pair{}.Len)-unsafe.Offsetof(C.struct_kvg_pair{}.len)]
)

// CopyPairs is Copy between places that the device reaches; near: all of them are in its own memory. The pairs are at most MostRuns.
func (q *Queue) CopyPairs(batch int, pairs []Pair, near bool) (queued bool, err error) {
	var c C.int
	s := C.kvg_copy_pairs(q.c, C.int(batch), (*C.struct_kvg_pair)(unsafe.Pointer(&pairs[0])), C.int(len(pairs)), flag(near), &c)
	if s.code != 0 {
		bytes := uint64(0)
		for _, p := range pairs {
			bytes += p.Len
		}
		err = failed(s, "copying %d bytes in %d pieces on CUDA device %d, the first from %#x to %#x", bytes, len(pairs), q.ordinal, pairs[0].From, pairs[0].To)
	}
	return c != 0, err
}
