package main

// #include "slots.h"
import "C"

import (
	"fmt"
	"unsafe"

	"github.com/kvconn/kvconn/node"
)

// setDevices gives the agent's slot the functions that record moments, so that kvconn_moment
// does not enter Go.
func setDevices(h C.kvconn_agent, a *node.Agent) error {
	of, entries := a.MomentEntries()
	if len(entries) == 0 {
		return nil
	}
	list := make([]C.struct_slot_device, len(entries))
	for i, e := range entries {
		*(*unsafe.Pointer)(unsafe.Pointer(&list[i].record)) = e.Function
		list[i].argument = e.Argument
	}
	switch C.slot_set_devices(h, (*C.uint8_t)(unsafe.SliceData(of)), unsafe.SliceData(list), C.uint32_t(len(list))) {
	case -1:
		return errHandle
	case -2:
		return fmt.Errorf("%w: no memory for the devices of %d regions", errSystem, len(of))
	}
	return nil
}
