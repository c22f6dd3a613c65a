// D expects transfers, lets a frame in by its grant and its place, and fences: when Revoke has returned, no byte lands.

package tcp

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"maps"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/internal/intervals"
	"github.com/kvconn/kvconn/kv"
)

// receiver is D's half: the P agents that it was told to connect to, and the transfers that they fill.
type receiver struct {
	t  *Transport
	mu sync.Mutex
	// inbound by transfer, and by grant for the streams.
	byID    map[core.TransferID]*inbound
	byGrant map[random]*inbound
	// telling holds the transfers whose outcome somebody is telling the sink, or will never tell it.
	telling map[core.TransferID]*outcome
	peers   map[core.AgentID]*inPeer
	// attempts counts the streams that were opened, to all peers, from the time of New on.
	// So the streams of an agent that opens again under its id are newer too.
	attempts uint64
	busy     int // slots of all peers; see inSlot
	done     doneList
	redial   time.Duration // see redialAfter
	closed   bool
	copying  atomic.Int64    // copies of all transfers to devices
	mayLand  map[string]bool // names of regions into which a device may still copy, since it has not ended a copy
}

// outcome is the end of a transfer. One caller tells it to the sink.
type outcome struct {
	told chan struct{} // closed when the sink was told, or when nobody will tell it any more
	lost *inbound      // its copies have not all ended, so nobody tells the sink: a revoke waits for them until Close; nil: all have ended
}

// inbound is one transfer that is expected.
type inbound struct {
	id    core.TransferID
	grant random
	peer  *inPeer
	destination
	total uint64

	// fence is held for reading while bytes are copied into the runs, and for
	// writing to set revoked.
	fence   sync.RWMutex
	revoked bool
	copies  copies // into the runs, out of slots; none begins when revoked is set
	covered coverage

	// Guarded by receiver.mu.
	got   uint64
	cuts  int // runs that streams have cut off its plan
	first time.Time
	since time.Duration // the peer's time under way at first
	stuck bool          // a device does not end a copy, which may land at any time: so nobody hears of an end
}

// coverage is the positions that a transfer's frames have covered. The frames of a hostile P may leave very many holes, which
// cost time. So the coverage of each transfer has a lock of its own, for which no other transfer waits. It is taken without
// receiver.mu.
type coverage struct {
	mu  sync.Mutex
	set intervals.Set
}

// reads counts the frames of transfers that are being read from a peer; receiver.mu is held.
func (p *inPeer) reads(frames int, now time.Time) {
	p.reading += frames
	p.moves.Run(p.reading > 0 || fault.On("stream-rest-counts"), now)
}

// took is the time, since the transfer's first byte, in which bytes came from the peer. Bytes of the peer's other transfers count too, since
// this transfer may have waited for its turn behind them. receiver.mu is held.
func (in *inbound) took() time.Duration { return in.peer.moves.Sum(time.Now()) - in.since }

// mostIntervals bounds the intervals that D keeps of a transfer's frames. A sender needs about
// one interval for each of its streams, and one for each place where a partial offer gives more
// bytes, which may be each region. If a stream is late and frames are small, a sender needs more: one
// interval for each second frame of 2 KiB. That is 1/256 of the transfer's own memory.
func (in *inbound) mostIntervals() int {
	return int(min(max(minIntervals, in.total>>12, uint64(in.pieces())), maxIntervals))
}

const minIntervals, maxIntervals = 1 << 10, 1 << 16

func (r *receiver) init(t *Transport) {
	r.t, r.attempts, r.redial = t, uint64(time.Now().UnixMicro()), redialAfter
	r.byID = map[core.TransferID]*inbound{}
	r.byGrant = map[random]*inbound{}
	r.telling = map[core.TransferID]*outcome{}
	r.mayLand = map[string]bool{}
	r.peers = map[core.AgentID]*inPeer{}
}

// Expect implements core.Transport.
func (t *Transport) Expect(id core.TransferID, peer core.AgentID, dst []kv.Segment) ([]byte, error) {
	return t.expect(id, peer, listed(runsOf(t.layout, dst)))
}

// ExpectPlan implements core.Cutter.
func (t *Transport) ExpectPlan(id core.TransferID, peer core.AgentID, dst kv.Plan) ([]byte, error) {
	return t.expect(id, peer, destination{plan: dst})
}

func (t *Transport) expect(id core.TransferID, peer core.AgentID, dst destination) ([]byte, error) {
	in := &inbound{id: id, grant: newRandom(), destination: dst, total: dst.bytes(), copies: copies{late: t.late, all: &t.receiver.copying}}
	r := &t.receiver
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.closed:
		return nil, errClosed
	case r.byID[id] != nil:
		return nil, fmt.Errorf("tcp: transfer %q is expected already", id.Name())
	case r.peers[peer] == nil:
		return nil, fmt.Errorf("tcp: no connection to prefill agent %s was asked for", peer)
	}
	in.peer = r.peers[peer]
	r.byID[id], r.byGrant[in.grant] = in, in
	r.dialMissing(in.peer)
	return bytes.Clone(in.grant[:]), nil
}

// Revoke implements core.Transport.
func (t *Transport) Revoke(id core.TransferID) (err error) {
	r := &t.receiver
	r.mu.Lock()
	in, end := r.byID[id], r.telling[id]
	if !r.closed { // else another revoke would not find it
		r.forget(in)
	}
	r.mu.Unlock()
	if in != nil {
		err = in.revoke()
	}
	if end != nil {
		<-end.told // the sink returns at once; or fail waits for copies, and Close bounds that wait
		if end.lost != nil {
			err = cmp.Or(err, end.lost.revoke())
		}
	}
	return err
}

// revoke waits until no stream reads or copies into the runs any more. If Close gives the copies up before that, it returns an error.
func (in *inbound) revoke() error {
	in.block()
	if !in.copies.wait() && !fault.On("tcp-revoke-unsure") {
		return fmt.Errorf("tcp: transfer %q is revoked, but its memory is copied to: %w", in.id.Name(), core.ErrMayLand)
	}
	return nil
}

// block sees to it that no stream reads, or begins a copy, into the runs any more.
func (in *inbound) block() {
	in.fence.Lock()
	defer in.fence.Unlock()
	in.revoked = true
}

// forget removes a transfer, so that no stream finds it any more; r.mu is held.
func (r *receiver) forget(in *inbound) bool {
	if in == nil || r.byID[in.id] != in {
		return false
	}
	delete(r.byID, in.id)
	delete(r.byGrant, in.grant)
	return true
}

func (r *receiver) close() {
	r.mu.Lock()
	r.closed = true
	for _, p := range r.peers {
		p.closeAll()
	}
	left := slices.Collect(maps.Values(r.byID)) // they stay in byID, since Revoke may be called beside Close
	clear(r.byGrant)
	r.mu.Unlock()
	for _, in := range left {
		in.block() // each stream waits for its own copies, and Close waits for the streams
	}
}

// after is what Close has to say of copies that have not ended.
func (r *receiver) after() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.copying.Load() == 0 { // no stream is left that could begin one
		return nil
	}
	return fmt.Errorf("tcp: closed, but %w", core.MayLandIn(r.mayLand))
}

func (r *receiver) fail(in *inbound, err error) {
	r.mu.Lock()
	end := r.ends(in)
	r.mu.Unlock()
	if end == nil {
		return
	}
	in.block()
	if !in.copies.ended() {
		end.lost = in
		close(end.told)
		return
	}
	r.tell(in, end, core.TransferStats{}, err)
}

// ends forgets a transfer. Only one caller gets the outcome, and must tell it. If the transport is closed, no caller does. r.mu is held.
func (r *receiver) ends(in *inbound) *outcome {
	if r.closed || !r.forget(in) {
		return nil
	}
	end := &outcome{told: make(chan struct{})}
	r.telling[in.id] = end
	return end
}

func (r *receiver) tell(in *inbound, end *outcome, s core.TransferStats, err error) {
	r.t.sink.Received(in.id, s, err)
	r.mu.Lock()
	if r.telling[in.id] == end {
		delete(r.telling, in.id)
	}
	r.mu.Unlock()
	close(end.told)
}

// inStream reads one connection.
type inStream struct {
	r        *receiver
	conn     *net.TCPConn
	raw      syscall.RawConn
	peer     *inPeer
	received uint64 // bytes of frames; a header counts only when all of it has come
	vec      []iovec
	buf      [headerSize]byte
	scratch  []byte // bytes that belong to no transfer are read into it
	staging  staging
	least    int       // how many bytes make the socket readable; 0 stands for 1
	window   []run     // cut off the plan of the transfer whose frame is being read
	cuts     int       // how many runs were cut off that plan since landed was called
	owes     *inbound  // the transfer whose frames were read before, and whose copies go on; see goesOn
	owed     uint64    // bytes of these frames: they count when the copies have ended
	sealed   *unsealer // nil: the stream is plain
}

func (s *inStream) send(h *header) error { return s.answer(h, "") }

// header reads a frame's header.
func (s *inStream) header() (h header, err error) {
	if s.sealed != nil {
		return s.sealed.data.readHeader(s.conn)
	}
	if _, err = io.ReadFull(s.conn, s.buf[:]); err != nil {
		return h, err
	}
	return h, h.decode(&s.buf)
}

// frame reads one frame. Between frames a stream may be idle for as long as the
// connection lives; within one it must not stall.
func (s *inStream) frame() error {
	s.conn.SetReadDeadline(time.Time{})
	if err := s.waitsForAny(); err != nil {
		return err
	}
	h, err := s.header()
	if err != nil {
		return err
	}
	s.received += headerSize
	switch h.kind {
	case frameData:
	case frameLeave:
		return errTicket
	case frameAgain:
		number, attempt := h.stream()
		s.r.mu.Lock()
		s.r.openAgain(s.peer, number, attempt)
		s.r.mu.Unlock()
		return nil
	default:
		return fmt.Errorf("frame of kind %d, want data", h.kind)
	}
	if h.length > maxFrame {
		return fmt.Errorf("frame of %d bytes, at most %d are read", h.length, maxFrame)
	}
	s.r.mu.Lock()
	in := s.r.byGrant[h.key]
	if in != nil {
		if in.peer != s.peer {
			in = nil // another peer's grant
		}
	}
	var answer header
	var fault string
	if in != nil {
		s.peer.moved = true
		if in.first.IsZero() {
			in.first = time.Now()
			in.since = in.peer.moves.Sum(in.first)
		}
		s.peer.reads(1, time.Now())
		defer func() {
			s.r.mu.Lock()
			defer s.r.mu.Unlock()
			s.peer.reads(-1, time.Now())
		}()
	} else { // an answer that was sent before may be lost
		answer, fault = s.r.done.answer(h.key)
	}
	s.r.mu.Unlock()
	if s.owes != in { // the transfer of the frames before has ended
		if err := s.settle(); err != nil {
			return err
		}
	}
	if in == nil {
		if err := s.answer(&answer, fault); err != nil {
			return err
		}
	} else if bad := in.admit(h.position, h.length); bad != nil {
		if err := s.settle(); err != nil { // fail waits for copies, so none of this stream's may be left
			return err
		}
		s.r.fail(in, bad)
		return bad
	}
	n, in, goesOn, err := s.payload(in, &h)
	s.received += n
	switch {
	case in == nil:
		s.owes, s.owed, s.cuts = nil, 0, 0
		return err
	case err != nil:
		in.covered.mu.Lock()
		in.covered.set.Remove(h.position+n, h.position+h.length) // P may send these bytes again
		in.covered.mu.Unlock()
		s.r.mu.Lock()
		in.got += n + s.owed
		s.r.mu.Unlock()
		s.owes, s.owed = nil, 0
		return err
	case goesOn:
		s.owes, s.owed = in, s.owed+n
		return nil
	}
	n += s.owed
	s.owes, s.owed = nil, 0
	return s.landed(in, n)
}

// admit checks a frame's place. If bytes could come twice they would count twice, and a
// hole would go unseen.
func (in *inbound) admit(pos, length uint64) error {
	end := pos + length
	if end < pos || end > in.total {
		return fmt.Errorf("transfer %q: frame of bytes %d to %d, but it has %d", in.id.Name(), pos, end, in.total)
	}
	in.covered.mu.Lock()
	defer in.covered.mu.Unlock()
	if !in.covered.set.Add(pos, end) {
		return fmt.Errorf("transfer %q: bytes %d to %d came twice", in.id.Name(), pos, end)
	}
	if len(in.covered.set) > in.mostIntervals() {
		return fmt.Errorf("transfer %q: its frames leave more than %d holes", in.id.Name(), in.mostIntervals())
	}
	return nil
}
