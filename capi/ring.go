package main

// #include "slots.h"
import "C"

import (
	"unsafe"

	"github.com/kvconn/kvconn/core"
)

// ring is the node.Reports whose records wait in C memory.
type ring struct {
	handle   C.kvconn_agent
	capacity int
}

func (r *ring) Capacity() int { return r.capacity }

func (r *ring) Unread() int { return max(int(C.slot_count(r.handle)), 0) }

func (r *ring) Push(rep core.Report) {
	c := C.kvconn_completion{
		token: C.uint64_t(rep.Token), code: C.int32_t(rep.Code), side: C.int32_t(rep.Side),
		bytes: C.uint64_t(rep.Stats.Bytes), wait_ns: C.uint64_t(rep.Wait), transfer_ns: C.uint64_t(rep.Stats.Nanos),
		blocks: C.uint32_t(rep.Blocks), segments: C.uint32_t(rep.Stats.Segments),
	}
	text(c.transport[:], rep.Transport)
	text(c.transfer_id[:], string(rep.ID))
	text(c.reason[:], rep.Reason)
	// There is room: the agent counts what it accepts against the capacity.
	if C.slot_push(r.handle, &c) != 0 {
		panic("completion ring is full or closed before its agent")
	}
}

// text copies s into a C array that is zero, cut so that a NUL is left.
func text(dst []C.char, s string) {
	b := unsafe.Slice((*byte)(unsafe.Pointer(&dst[0])), len(dst))
	copy(b[:len(b)-1], s)
}
