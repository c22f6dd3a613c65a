package main

// #include "slots.h"
import "C"

import (
	"slices"
	"unsafe"

	"github.com/kvconn/kvconn/core"
)

// An agent's slot has room for the regions that it may register.
var _ [C.KVCONN_MAX_REGIONS - core.MaxRegions]struct{}

// written reads the marks that a host makes at kvconn_written_address.
type written struct {
	handle  C.kvconn_agent
	regions []uint32
}

func newWritten(h C.kvconn_agent) *written {
	return &written{h, make([]uint32, C.slot_regions(h))}
}

// take gives each region once, in ascending order.
func (w *written) take() []uint32 {
	if len(w.regions) == 0 {
		return nil
	}
	n := C.slot_take_written(w.handle, (*C.uint32_t)(unsafe.SliceData(w.regions)), C.size_t(len(w.regions)))
	return slices.Clone(w.regions[:n])
}
