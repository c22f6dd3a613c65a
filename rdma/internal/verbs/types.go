// The types that cross into C have the layout of their C twins; verbs.go asserts
// that. None of them holds a Go pointer.

package verbs

import "strconv"

// SGE is a piece of registered local memory: struct ibv_sge.
type SGE struct {
	Addr   uint64
	Length uint32
	Key    uint32 // MR.LKey
}

// WriteFlags of a Write.
type WriteFlags uint16

// The flags of a Write.
const (
	Signaled WriteFlags = 1 << iota // tell its completion; every failed one is told anyway
	WithImm                         // the receiver gets Imm and uses up one of its posted receives
)

// Write is one RDMA write: local pieces into one contiguous remote range.
type Write struct {
	ID         uint64 // given back in its Completion
	RemoteAddr uint64
	RemoteKey  uint32
	Imm        uint32 // in host order, WithImm
	First      uint32 // index of its first piece in the list that is posted with it
	Pieces     uint16
	Flags      WriteFlags
}

// Status of a Completion: enum ibv_wc_status.
type Status uint32

// The statuses that decisions depend on; String names all.
const (
	Success         Status = 0
	LocalProtection Status = 4
	Flushed         Status = 5
	RemoteAccess    Status = 10
	RetryExceeded   Status = 12
	RNRExceeded     Status = 13
	Fatal           Status = 19
)

func (s Status) String() string {
	names := [...]string{"success", "local length error", "local queue pair operation error", "local EE context operation error",
		"local protection error", "flushed: the queue pair is in error", "memory window bind error", "bad response", "local access error",
		"remote invalid request", "remote access error: wrong key or range", "remote operation error",
		"retries exceeded: the peer does not answer", "RNR retries exceeded: the peer has no receive posted", "local RDD violation",
		"remote invalid read request", "remote aborted", "invalid EE context number", "invalid EE context state", "fatal error",
		"response timeout", "general error", "tag matching error", "tag matching rendezvous incomplete"}
	text := "unknown"
	if int(s) < len(names) {
		text = names[s]
	}
	return text + " (status " + strconv.Itoa(int(s)) + ")"
}

// Opcode of a Completion; valid with Success only.
type Opcode uint32

// The opcodes that come here: enum ibv_wc_opcode.
const (
	OpWrite      Opcode = 1
	OpReceiveImm Opcode = 129 // a write with immediate has landed, and all before it on its queue pair
)

// Completion tells how a posted request ended.
type Completion struct {
	ID        uint64
	Status    Status
	Opcode    Opcode
	QueuePair uint32 // number of the local queue pair
	Imm       uint32 // in host order, with OpReceiveImm
	Bytes     uint32
	Vendor    uint32 // the device's own error code
}
