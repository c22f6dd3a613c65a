package natsbus

import "sync/atomic"

// seals are what an agent of a cluster seals and opens messages with.
type seals struct {
	self   *Identity
	served *served
	opened *openSessions
	// What came and was not taken, by the reason.
	plain, foreign, repeated, forged, unknown, strange, crowded atomic.Int64

	accepted atomic.Int64 // sessions that others have opened
}

func newSeals(self *Identity) *seals {
	return &seals{self: self, served: newServed(), opened: newOpened()}
}
