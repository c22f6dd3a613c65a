// What happens to a device besides completions.

package verbs

/*
#include "shim.h"
*/
import "C"

import (
	"fmt"
	"strconv"
	"syscall"
)

// EventType of an Event: enum ibv_event_type.
type EventType int

// The events that decisions depend on.
const (
	EventQueueError        EventType = 0 // a completion queue overran
	EventDeviceFatal       EventType = 8 // the device is lost; all that was made of it must be closed
	EventPortActive        EventType = 9
	EventPortError         EventType = 10
	EventLIDChange         EventType = 11
	EventGIDChange         EventType = 18
	EventClientReregisters EventType = 17
)

func (t EventType) String() string {
	names := [...]string{"completion queue error", "queue pair fatal error", "queue pair request error", "queue pair access error",
		"communication established", "send queue drained", "path migrated", "path migration error", "device fatal error", "port active",
		"port error", "LID change", "P_Key change", "subnet manager change", "shared receive queue error", "shared receive queue limit",
		"last work request reached", "client reregistration", "GID change", "work queue fatal error"}
	if t < 0 || int(t) >= len(names) {
		return "event " + strconv.Itoa(int(t))
	}
	return names[t]
}

// Event is something that happened to a device besides completions.
type Event struct {
	Type      EventType
	Port      int    // of a port's event
	QueuePair uint32 // number, of a queue pair's event
}

// NextEvent waits for an event, through Go's poller and for as long as it takes.
// Close ends it with ErrClosed. One goroutine calls it.
func (d *Device) NextEvent() (Event, error) {
	raw, err := d.async.SyscallConn()
	if err != nil {
		return Event{}, fmt.Errorf("wait for events of RDMA device %s: %w", d.info.Name, err)
	}
	var e C.struct_vb_event
	var rc C.int
	err = raw.Read(func(uintptr) bool {
		// No lock: Close lets the context go when nobody is in here.
		rc = C.vb_next_event(d.ctx, &e)
		return rc != C.int(syscall.EAGAIN)
	})
	if err != nil { // of the poller: closed
		return Event{}, fmt.Errorf("wait for events of RDMA device %s: %w", d.info.Name, ErrClosed)
	}
	if err := errno(rc); err != nil {
		return Event{}, fmt.Errorf("wait for events of RDMA device %s: %w", d.info.Name, err)
	}
	return Event{Type: EventType(e._type), Port: int(e.port), QueuePair: uint32(e.qp)}, nil
}
