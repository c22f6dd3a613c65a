// What moves bytes stands behind Transport. Its errors say what has failed: the connection, this way of moving bytes,
// or the memory.

package core

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/kvconn/kvconn/kv"
)

// AgentID names one open agent: a random value made anew at each open, so that
// a restarted engine is never taken for the old one.
type AgentID string

// ErrConnectionLost is wrapped by a transport's error if the connection to the peer
// broke, and nothing is wrong with the transfer itself.
var ErrConnectionLost = errors.New("connection lost")

// ErrTransportClosed is wrapped by the errors of a Transport that is closed.
var ErrTransportClosed = errors.New("transport is closed")

// ErrNotExpected is wrapped by a sender's error if the receiver has said that it
// does not expect the transfer, or does not expect it any more.
var ErrNotExpected = errors.New("the decode agent does not expect the transfer")

// ErrOtherWay is wrapped by a sender's error if this transport cannot be used just now, and nothing is wrong
// with the transfer. The sender has told D's transport so. D is to load the transfer anew, and takes another
// transport. If D has not heard it, D may take this transport again.
var ErrOtherWay = errors.New("this way is not there now")

// ErrElsewhere is wrapped by an error of Connect if the transport is for agents of one host, and the
// peer is on another host. Then it is no fallback to take another transport.
var ErrElsewhere = errors.New("it is on another host")

// ErrMemory is wrapped by an error of Expect if the agent's own memory cannot be used: then it
// does not help to look for another P.
var ErrMemory = errors.New("device memory cannot be used")

// ErrMayLand is wrapped by an error of Revoke, and of Close, if bytes may yet land in registered memory, since the device or the
// kernel that copies them does not answer.
var ErrMayLand = errors.New("memory may still be written, until the process ends")

// mostNamed bounds the regions that an error names.
const mostNamed = 8

// MayLandIn is the error of a Close for regions to which copies have not ended, by their names.
func MayLandIn(regions map[string]bool) error {
	names, more := slices.Sorted(maps.Keys(regions)), ""
	if n := len(names) - mostNamed; n > 0 {
		names, more = names[:mostNamed], fmt.Sprintf(" and %d more", n)
	}
	return fmt.Errorf("copies to region %q%s have not ended: %w", names, more, ErrMayLand)
}

// TransferID names one transfer; minted by the router. Of a transfer in parts each part has its own, which is the engine's id, a
// PartSeparator and the part.
type TransferID string

// PartSeparator ends the engine's id in the id of a part: no engine's id holds it.
const PartSeparator = "\x00"

// Name is the id as the engine knows it, for errors and logs.
func (id TransferID) Name() string {
	name, _, _ := strings.Cut(string(id), PartSeparator)
	return name
}

// MaxTransferID is the longest TransferID, in bytes.
const MaxTransferID = 128

// Bounds that the bus and all transports have in common, unless they are configured.
const (
	DefaultConnectTimeout = 3 * time.Second  // to find a peer, say hello to it and connect
	DefaultStallTimeout   = 10 * time.Second // of a stream without progress
)

// Transport moves bytes between two agents: P writes, D receives. One Transport
// serves all peers of an agent. Methods may be called from any goroutine. Only
// Revoke and Close may wait; their comments say for how long.
//
// coretest.TransportSuite is the contract as a test; every Transport passes it.
type Transport interface {
	// Name is "tcp", "rdma", "local" …, as in configuration and statistics.
	Name() string

	// Endpoint is what a peer needs to reach this agent, for the registry. An
	// empty host means the host at which the peer found the registry.
	Endpoint() string

	// Admit lets a peer that has said hello connect, and returns the ticket that the peer
	// must show: random, 16 to 64 bytes, the same one until the peer is dismissed. Nothing
	// is written to a peer that was not admitted. A peer that shows no ticket gets no
	// connection.
	Admit(peer AgentID) (ticket []byte, err error)

	// Dismiss forgets a peer on either side: its ticket is dead, its connections
	// are closed, and transfers with it end with an error. What the transport has mapped of the
	// peer's memory is let go of, as soon as no copy reads it. An unknown peer is no
	// error. Sink.Written may be called before Dismiss returns.
	Dismiss(peer AgentID)

	// Connect makes a peer's Endpoint usable before the first transfer, with the
	// ticket that the peer's Admit gave for this agent. It returns at once; a
	// failure is told by Sink.PeerDown with its cause. For a known peer the new
	// endpoint and ticket hold for the connections that are made from now on.
	Connect(peer AgentID, endpoint string, ticket []byte) error

	// Expect arms the receiver: bytes that arrive with the returned grant go
	// into dst, whose segments are in the transfer's linear order. The grant is
	// random, is for this transfer only, and is dead when the transfer has ended. If bytes
	// with the grant come from another peer's connections, the receiver does not accept them.
	// The outcome is one Sink.Received, unless Revoke comes first.
	Expect(id TransferID, peer AgentID, dst []kv.Segment) (grant []byte, err error)

	// Revoke disarms a transfer that Expect has armed. When Revoke has returned nil, no byte of the
	// transfer can land any more and Sink.Received will not be called for it, also when the peer
	// is stopped in the middle of a write. An unknown id is no error. Revoke waits for a copy
	// that is under way, and for a call of Sink.Received that has begun. A Signaller also waits
	// for the peer's word, two seconds at most, and cuts the peer off if none comes. So the caller
	// must hold no lock that the Sink takes, and must call Revoke where nobody waits behind the call.
	// If a device or the kernel does not end a copy, Revoke waits until Close gives the copy up.
	// Then the error wraps ErrMayLand, and nobody may report an end of the transfer: the engine
	// would use its blocks again.
	Revoke(id TransferID) error

	// Write starts to send to a peer that was admitted; the outcome is one
	// Sink.Written. The source bytes must stay unchanged until then.
	Write(op WriteOp)

	// Extend gives further bytes of a write that was begun with some of its bytes. The write is
	// over when all bytes have been given and have arrived. Each byte is given once: a byte too
	// many ends the write with an error. When all bytes that were given are sent, the write may
	// rest for minutes, and neither side counts as silent. If the id is unknown, the write has
	// ended already: that is no error. op.Bytes and op.Grant are the same as in Write.
	Extend(op WriteOp)

	// Stop ends a write early, with an error unless the write had ended. Its
	// Sink.Written comes within a second or so, also when the peer takes no bytes.
	// An unknown id is no error.
	Stop(id TransferID)

	// Close ends all transfers, tells the outcome of each write, and waits, at
	// most a few seconds, until no byte can move. If bytes may land all the same,
	// its error wraps ErrMayLand and names the regions, or the peers whose bytes
	// they are. No Sink method is called after Close has returned.
	Close() error
}

// Cutter is a Transport that takes Plans: in WriteOp.Plan, and in place of the segments of
// Expect.
type Cutter interface {
	Transport
	ExpectPlan(id TransferID, peer AgentID, dst kv.Plan) (grant []byte, err error)
}

// Settler is a Transport that finds out after Connect whether bytes can move. Only it knows what
// its Endpoint means.
type Settler interface {
	Transport

	// Usable says whether new transfers with a peer can go this way; the error says why they
	// cannot. While the transport is finding that out, Usable waits. If ctx ends first, Usable
	// returns the cause of that.
	Usable(ctx context.Context, peer AgentID) error
}

// Signaller is a Settler whose two ends must agree before bytes move, and again before that
// ends: in RDMA they agree on queue pairs and keys. Its messages go over the control plane,
// which has authenticated both agents; only the transport knows what they mean. A Signaller
// gets its Signal when it is made.
type Signaller interface {
	Settler

	// Signalled handles a message of a peer's transport of the same name and
	// returns the answer; the peer gets an error as text. Signalled does not wait
	// for the network. Messages may be lost, doubled and reordered.
	Signalled(from AgentID, msg []byte) (answer []byte, err error)
}

// Signal sends a message to a peer's transport of the same name and waits for
// the answer, bounded by ctx. ErrAbsent means the same as in Bus.Request.
type Signal func(ctx context.Context, to AgentID, msg []byte) (answer []byte, err error)

// WriteOp says what a Transport of the sender is to write.
type WriteOp struct {
	ID    TransferID
	Peer  AgentID
	Grant []byte    // as the receiver's Expect returned it
	Pairs []kv.Pair // in the transfer's linear order; transports that trust no address use only the source half
	// Bytes of the whole transfer, if more of it follows by Extend; 0: Pairs are all.
	Bytes uint64
	// At says where in the linear order Pairs lie; nil: from its begin on, without gaps.
	At []kv.Extent
	// Plan stands in place of Pairs and At; for a Cutter.
	Plan kv.Plan
}

// Extents is At, also where it was left out.
func (op *WriteOp) Extents() []kv.Extent {
	if op.At == nil && len(op.Pairs) > 0 {
		return []kv.Extent{{Pairs: len(op.Pairs)}}
	}
	return op.At
}

// Total is the number of bytes of the whole transfer.
func (op *WriteOp) Total() uint64 {
	if op.Bytes > 0 {
		return op.Bytes
	}
	return op.Payload()
}

// Payload is the number of bytes of Pairs, or of Plan.
func (op *WriteOp) Payload() (n uint64) {
	if op.Plan != nil {
		return kv.PlanBytes(op.Plan)
	}
	for i := range op.Pairs {
		n += op.Pairs[i].Length
	}
	return n
}

// TransferStats is what a transport measured of one transfer.
type TransferStats struct {
	Bytes    uint64
	Segments int // contiguous runs on this side
	// Nanos is how long bytes were under way. If a write is given bit by bit, the times in which all bytes given so far had
	// arrived do not count, as far as a side can know them. P knows them by tcp. D knows them by local, and by tcp, where it
	// counts bytes of the peer's other transfers too. Else Nanos is the time from the first byte to the last.
	Nanos int64
	Via   string // the transport's name; set by the user of the Machine
}

// Sink takes a transport's outcomes. Its methods return at once and may be
// called from any goroutine.
type Sink interface {
	Received(id TransferID, s TransferStats, err error)
	Written(id TransferID, s TransferStats, err error)
	// PeerDown says that the connection to a peer broke. On D it means that D cannot connect,
	// or is not connected any more. On P it means that an admitted peer is not connected any
	// more, and comes once for each such loss; the peer may come back with the same ticket. If
	// the transport knows which transfers this ends, they end by a Received or Written of their
	// own. What the transport has mapped of the peer's memory is let go of before that is told, and before an
	// end of a transfer that the loss causes: a dead engine's memory is free without anybody's asking, and its successor can start.
	// If only cards move a transport's bytes, P may not see that a peer has died until it
	// writes to that peer: leases and renewals find out who lives.
	PeerDown(peer AgentID, err error)
}
