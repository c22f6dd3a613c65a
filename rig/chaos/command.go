// What the driver and an engine's process say to each other, a line of JSON at a time.

package chaos

import (
	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
)

// Commands of the driver to an engine's process.
const (
	opOpen     = "open"
	opAnnounce = "announce"
	opOffer    = "offer"
	opClaim    = "claim"
	opLoad     = "load"
	opCancel   = "cancel"
	opInspect  = "inspect"
	opSabotage = "sabotage"
)

// command is one line of an engine's standard input.
type command struct {
	Op     string   `json:"op"`
	Seq    uint64   `json:"seq,omitempty"` // comes back with the answer, where one is wanted
	Open   *opening `json:"open,omitempty"`
	Items  []item   `json:"items,omitempty"`
	Reason string   `json:"reason,omitempty"` // of a cancel
	Paint  bool     `json:"paint,omitempty"`  // inspect: check all blocks that nobody has
	What   string   `json:"what,omitempty"`   // sabotage
}

// opening is the shape of an engine.
type opening struct {
	EngineID      string  `json:"engine_id"`
	Role          string  `json:"role"`
	Host          string  `json:"host,omitempty"` // where a prefill engine listens
	BootstrapPort int     `json:"bootstrap_port,omitempty"`
	TCPPort       int     `json:"tcp_port,omitempty"`
	Streams       int     `json:"tcp_streams,omitempty"` // 0: the default
	Lease         float64 `json:"lease_s"`
	EarlyLoad     float64 `json:"early_load_s"`
	PeerTimeout   float64 `json:"peer_timeout_s,omitempty"` // 0: the default
	MaxTransfers  int     `json:"max_transfers"`
	Regions       int     `json:"regions"`
	Blocks        int     `json:"blocks"`
	BlockBytes    int     `json:"block_bytes"`
	Transport     string  `json:"transport,omitempty"` // as in the configuration; empty for tcp
	Memory        string  `json:"memory,omitempty"`    // as in Options
	Log           bool    `json:"log,omitempty"`       // the agent's warnings go to standard error
}

// item is one transfer of a command.
type item struct {
	ID     core.TransferID `json:"id"`
	Tag    uint64          `json:"tag,omitempty"`   // names the pattern
	First  int             `json:"first,omitempty"` // load: the blocks before it are cached
	Blocks int             `json:"blocks,omitempty"`
	From   *core.Target    `json:"from,omitempty"`
}

// Events of an engine's process.
const (
	evOpened  = "opened" // or why not, in Error
	evCall    = "call"   // an offer or a load was accepted, or why not
	evReport  = "report"
	evInspect = "inspect"
	evWrong   = "wrong" // a byte is not what it must be, or the books do not add up
	evLag     = "lag"   // the process did not run from At to Until
	evDone    = "done"  // a cancel, a sabotage, or an announcement or a claim that was refused
)

// event is one line of an engine's standard output. Times are nanoseconds of
// the system's monotonic clock, which all processes share.
type event struct {
	Op         string          `json:"op"`
	Seq        uint64          `json:"seq,omitempty"`
	ID         core.TransferID `json:"id,omitempty"`
	Side       core.Side       `json:"side,omitempty"`
	Code       core.Code       `json:"code,omitempty"`
	Reason     string          `json:"reason,omitempty"`
	Error      string          `json:"error,omitempty"`
	Overload   bool            `json:"overload,omitempty"`  // the error is core.ErrOverload
	Exhausted  bool            `json:"exhausted,omitempty"` // the engine had no free blocks
	Agent      core.AgentID    `json:"agent,omitempty"`     // opened: its own; report: the peer's, as far as it was known
	Called     int64           `json:"called,omitempty"`    // report: when the call was made
	Transport  string          `json:"transport,omitempty"` // report: the one that moved the bytes
	At         int64           `json:"at,omitempty"`
	Until      int64           `json:"until,omitempty"`
	Took       int64           `json:"took,omitempty"` // how long the call took
	Inspection *inspection     `json:"inspection,omitempty"`
}

// inspection is an engine's state, as its process tells it.
type inspection struct {
	Loads       int               `json:"loads"`   // claims among them
	Waiting     int               `json:"waiting"` // of them, those that P has and whose bytes are awaited
	Claims      int               `json:"claims"`  // of them, those without blocks
	Offers      int               `json:"offers"`
	Outstanding int               `json:"outstanding"`
	Unread      int               `json:"unread"`
	Held        []core.TransferID `json:"held"` // halves that have blocks; some of them
	Free        int               `json:"free"`
	Blocks      int               `json:"blocks"`
	Goroutines  int               `json:"goroutines"`
	HeapBytes   uint64            `json:"heap_bytes"`
}

// quiet says whether nothing is under way.
func (l *inspection) quiet() bool {
	return l.Loads == 0 && l.Offers == 0 && l.Outstanding == 0 && l.Unread == 0 && len(l.Held) == 0
}

// now reads the clock that all processes share.
func now() int64 {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &t) // cannot fail with this clock
	return t.Nano()
}
