// A stream of kvconn's own takes batches of copies, each with an event behind it.

package driver

/*
#cgo noescape kvg_copy
#cgo nocallback kvg_copy
#cgo nocallback kvg_copied
#include "shim.h"
*/
import "C"

import "unsafe"

// Limits of a Queue.
const (
	MostRuns    = C.KVG_MOST_RUNS    // of one Copy
	MostBatches = C.KVG_MOST_BATCHES // at a time
)

// Run is a piece of a device's memory.
type Run struct {
	Addr uintptr
	Len  uint64
}

// Run is laid out like its twin in shim.h. If it differs, its line here does not compile.
var (
	_ = [1]struct{}{}[unsafe.Sizeof(Run{})-C.sizeof_struct_kvg_run]
	_ = [1]struct{}{}[unsafe.Offsetof(Run{}.Len)-unsafe.Offsetof(C.struct_kvg_run{}.len)]
)

// Ring allocates pinned host memory.
func (d *Device) Ring(bytes uint64) (unsafe.Pointer, error) {
	var p unsafe.Pointer
	err := failed(C.kvg_ring(d.c, C.uint64_t(bytes), &p), "pinning %d bytes of host memory for CUDA device %d", bytes, d.ordinal)
	return p, err
}

// FreeRing gives it back.
func (d *Device) FreeRing(ring unsafe.Pointer) error {
	return failed(C.kvg_ring_free(d.c, ring), "giving the pinned memory of CUDA device %d back", d.ordinal)
}

// Queue is a stream of our own, for copies in one direction.
type Queue struct {
	c        *C.struct_kvg_queue
	ordinal  int
	toDevice bool
}

// OpenQueue makes one.
func (d *Device) OpenQueue(toDevice bool) (*Queue, error) {
	q := &Queue{ordinal: d.ordinal, toDevice: toDevice}
	if err := failed(C.kvg_queue_open(d.c, flag(toDevice), &q.c), "making a stream on CUDA device %d", d.ordinal); err != nil {
		return nil, err
	}
	return q, nil
}

// Stream is its handle, for tests that hold it.
func (q *Queue) Stream() uintptr { return uintptr(C.kvg_queue_stream(q.c)) }

// Close gives the queue back. No call of Copied may be under way.
func (q *Queue) Close() { C.kvg_queue_close(q.c) }

// Copy queues the copies between the runs and the host memory, which has their bytes one after
// the other, and behind them the event of the batch, a number below MostBatches. If the event is
// queued, Copied says when everything that was queued is over, also after an error. There may be at
// most MostRuns runs. near says that they are all in the device's own memory.
func (q *Queue) Copy(batch int, host unsafe.Pointer, runs []Run, near bool) (queued bool, err error) {
	var c C.int
	s := C.kvg_copy(q.c, C.int(batch), C.uintptr_t(uintptr(host)), (*C.struct_kvg_run)(unsafe.Pointer(&runs[0])), C.int(len(runs)), flag(near), &c)
	if s.code != 0 {
		bytes := uint64(0)
		for _, r := range runs {
			bytes += r.Len
		}
		to := "from"
		if q.toDevice {
			to = "to"
		}
		err = failed(s, "copying %d bytes %s %d places on CUDA device %d, the first at %#x", bytes, to, len(runs), q.ordinal, runs[0].Addr)
	}
	return c != 0, err
}

// Copied returns when the batch's event has passed, or with the reason why it will not.
func (q *Queue) Copied(batch int) error {
	s := C.kvg_copied(q.c, C.int(batch))
	if s.code != 0 {
		return failed(s, "waiting for copies on CUDA device %d", q.ordinal)
	}
	return nil
}
