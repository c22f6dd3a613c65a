package verbs

/*
#include <stdlib.h>
#include "shim.h"
*/
import "C"

import (
	"errors"
	"unsafe"
)

// NewNullQP makes a queue pair of no device, whose posts go nowhere: it measures
// what a post costs besides the device's part. Only Post and Destroy do something.
func NewNullQP(caps Caps) (*QP, error) {
	c := C.struct_vb_caps{send_depth: C.uint32_t(caps.SendDepth), pieces: C.uint32_t(caps.Pieces)}
	q := &QP{dev: &Device{info: DeviceInfo{Name: "null"}}, caps: caps, c: C.vb_null_qp(&c)}
	if q.c == nil {
		return nil, errors.New("null queue pair: out of memory")
	}
	q.dev.qps.Add(1)
	return q, nil
}

// DestroyNull frees a queue pair of NewNullQP.
func (q *QP) DestroyNull() {
	q.mu.Lock()
	defer q.mu.Unlock()
	C.free(unsafe.Pointer(q.c))
	q.c = nil
}
