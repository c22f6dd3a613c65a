package natsbus

import (
	"sync"
	"sync/atomic"
	"time"
)

// seals are what an agent of a cluster seals and opens messages with.
type seals struct {
	self   *Identity
	served *served
	opened *openSessions
	refusals
	accepted atomic.Int64 // sessions that others have opened

	mu      sync.Mutex
	sweeper *time.Timer // nil while there is no session
	closed  bool
}

func newSeals(self *Identity) *seals {
	return &seals{self: self, served: newServed(), opened: newOpened()}
}
