package main

// #include "slots.h"
import "C"

import (
	"fmt"
	"unsafe"

	"github.com/kvconn/kvconn/internal/safe"
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

// forgetDevices has no thread go into the functions of the agent's devices any more. If a thread is in such a function, the driver may
// keep the thread there. Close waits for it, within Close's own time. If the thread does not leave, Close keeps what the function uses.
func forgetDevices(h C.kvconn_agent, a *node.Agent) {
	var opened C.uint64_t
	if C.slot_forget_devices(h, &opened) == 0 {
		return
	}
	leave := a.TakingMoments()
	safe.Go("moments", func() {
		C.slot_wait_left(h, opened)
		leave()
	})
}
