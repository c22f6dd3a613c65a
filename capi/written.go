// The marks by which a host says which regions it has written lie in C memory, and the agent takes them from there.

package main

// #include "slots.h"
import "C"

import (
	"slices"
	"unsafe"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/node"
)

// An agent's slot has room for the regions that it may register.
var _ [C.KVCONN_MAX_REGIONS - kv.MaxRegions]struct{}

// written reads the marks that a host makes, at kvconn_written_address or by
// kvconn_written_after.
type written struct {
	handle  C.kvconn_agent
	regions []uint32
	moments []uint64
}

func newWritten(h C.kvconn_agent) *written {
	n := C.slot_regions(h)
	return &written{h, make([]uint32, n), make([]uint64, n)}
}

// take gives each region once. Those of one moment are together, in ascending order.
func (w *written) take() (list []node.Written) {
	if len(w.regions) == 0 {
		return nil
	}
	n := C.slot_take_written(w.handle, (*C.uint32_t)(unsafe.SliceData(w.regions)), (*C.uint64_t)(unsafe.SliceData(w.moments)), C.size_t(len(w.regions)))
	for i, region := range w.regions[:n] {
		after := core.Moment(w.moments[i])
		k := slices.IndexFunc(list, func(o node.Written) bool { return o.After == after })
		if k < 0 {
			k, list = len(list), append(list, node.Written{After: after})
		}
		list[k].Regions = append(list[k].Regions, region)
	}
	return list
}
