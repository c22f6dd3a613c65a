// P's transfers share D's streams: each stream cuts its next frame off one of them.

package tcp

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/internal/quota"
)

// sender is P's half: the admitted D agents, and the transfers that go to them.
type sender struct {
	t        *Transport
	mu       sync.Mutex
	peers    map[core.AgentID]*outPeer // of the admitted peers
	byTicket map[random]*outPeer       // the same, by the names of tickets
	byID     map[core.TransferID]*outbound
	streams  int          // of all peers
	from     quota.Counts // the same, by the addresses that they come from
	watchdog *time.Timer  // while there are transfers; see checkStreams
	pending  pendingConns
	grace    time.Duration              // see returnGrace
	late     time.Duration              // see awaitCause
	stop     time.Duration              // see stopBound
	meter    func([]*outStream) reading // see meter
	closed   bool
}

// outPeer is an admitted D agent, and the streams that it has opened.
type outPeer struct {
	id      core.AgentID
	ticket  random
	secret  secret                  // if the streams are sealed: the second half of the ticket
	slots   [maxPeerStreams]outSlot // by number
	open    int                     // how many slots have a stream
	stuck   *outStream              // the stream that D is to open anew; another stream tells D
	tuner   streamTuner
	asks    bool        // D is to open one more stream
	queue   []*outbound // transfers that have a frame to send; served in turn
	byGrant map[random]*outbound
	wake    *sync.Cond // on sender.mu: a stream has something to do, or may have: queue, asks, stuck, what takes frames, the end of a stream
}

// outSlot is what P knows of D's streams of one number.
type outSlot struct {
	attempt uint64     // of the newest stream
	stream  *outStream // the newest stream; nil when it has ended
}

// outStream is one accepted connection.
type outStream struct {
	conn      *net.TCPConn
	raw       syscall.RawConn
	peer      *outPeer
	from      netip.Prefix // the address that it counts under
	number    int
	offset    uint64 // of the next frame, as D counts received bytes
	dead      bool
	shut      bool             // P has said that it writes no more
	stalled   bool             // it makes no progress: D is to open it anew, and meanwhile P uses other streams
	life      context.Context  // ends when dead is set
	end       func()           // ends life
	acked     uint64           // bytes that D's kernel had acknowledged at the last look
	still     int              // how many looks since then have seen no further ones
	rested    []random         // transfers that rested when it was opened: the stream is to say of each that it lives
	*outFrame                  // that is written
	next      *outFrame        // the one after it, if one is cut; see lookAhead
	slow      bool             // the peer is slow; see tenure
	yielded   bool             // slots of this frame were given back
	mayCopy   bool             // a slot's copy may read a transfer's blocks for ever: the stream ends, and nobody is told that this write has ended
	sealed    *seals           // nil: the stream is plain
	sealing   sealing          // of the frame that is written
	first     [headerSize]byte // of a sealed stream: P's answer to the hello
}

// outFrame is a frame that a stream has taken: the one that it writes, or the next one.
type outFrame struct {
	out    *outbound // the next one's: whose it is; nil: none is cut
	length uint64    // the next one's, header included
	vec    []iovec   // vec[0] is the header in hdr
	hdr    [headerSize]byte
	source source
}

func newOutFrame() *outFrame { return &outFrame{vec: make([]iovec, 0, maxVector)} }

func (s *sender) init(t *Transport) {
	s.t, s.grace, s.late, s.stop, s.meter = t, returnGrace, step, stopBound, meter
	s.peers = map[core.AgentID]*outPeer{}
	s.byTicket = map[random]*outPeer{}
	s.byID = map[core.TransferID]*outbound{}
	s.from = quota.Counts{}
}

// Admit implements core.Transport.
func (t *Transport) Admit(peer core.AgentID) ([]byte, error) {
	return t.sender.admit(peer, t.cfg.Encrypt == EncryptMust)
}

func (s *sender) admit(peer core.AgentID, sealed bool) ([]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, errClosed
	}
	p := s.peers[peer]
	if p == nil {
		p = &outPeer{id: peer, ticket: newRandom(), byGrant: map[random]*outbound{}, wake: sync.NewCond(&s.mu)}
		s.applyFound(p)
		if sealed {
			p.secret = secret(newRandom())
		}
		if fault.On("stream-ticket-shared") {
			p.ticket = random{1}
		}
		s.peers[peer], s.byTicket[p.ticket.name()] = p, p
	}
	return p.showTicket(sealed)
}

// forgetPeer forgets a D agent: its streams are closed, its writes end.
func (s *sender) forgetPeer(peer core.AgentID) {
	s.mu.Lock()
	p := s.peers[peer]
	if p == nil || s.closed {
		s.mu.Unlock()
		return
	}
	s.t.wg.Add(1) // Close waits for the outcomes that are told below
	defer s.t.wg.Done()
	delete(s.peers, peer)
	delete(s.byTicket, p.ticket.name())
	lost := slices.Collect(maps.Values(p.byGrant))
	for _, out := range lost {
		out.fail(fmt.Errorf("tcp: decode agent %s was dismissed: %w", peer, core.ErrConnectionLost))
	}
	p.closeAll()
	s.mu.Unlock()
	for _, out := range lost {
		s.end(out, nil)
	}
}

func (p *outPeer) closeAll() {
	for i := range p.slots {
		if st := p.slots[i].stream; st != nil {
			st.conn.Close()
		}
	}
}

// shutDown says that the stream is over; sender.mu is held.
func (st *outStream) shutDown() {
	st.dead = true
	st.end()
}

// abort ends a connection at once. What its socket still has to send is not needed any more.
func (st *outStream) abort() {
	_ = st.conn.SetLinger(0) // else the kernel would go on sending its buffer
	st.conn.Close()
}

// settle forgets a transfer that has ended, once no frame of it is under way; s.mu is
// held. The caller that gets true must tell the sink.
func (s *sender) settle(out *outbound) bool {
	if out.err == nil && !out.acked || out.frames > 0 && !fault.On("tcp-stop-at-once") || s.byID[out.id] != out {
		return false
	}
	s.forget(out)
	return true
}

func (s *sender) forget(out *outbound) {
	delete(s.byID, out.id)
	delete(out.peer.byGrant, out.grant)
	s.stopWaiting(out)
}

func (s *sender) tell(out *outbound, really bool) {
	if !really {
		return
	}
	stats := core.TransferStats{Segments: out.ranges.runs}
	if out.err == nil {
		stats.Bytes, stats.Nanos = out.total, out.moves.Sum(time.Now()).Nanoseconds()
	}
	s.t.sink.Written(out.id, stats, out.err)
}

func (s *sender) close() {
	s.mu.Lock()
	s.closed = true
	if s.watchdog != nil && s.watchdog.Stop() {
		s.t.wg.Done()
	}
	left := slices.Collect(maps.Values(s.byID))
	for _, out := range left {
		out.fail(errClosed)
	}
	for c := range s.pending.conns.All() {
		c.Close()
	}
	for _, p := range s.peers {
		p.closeAll()
		p.wake.Broadcast()
	}
	s.mu.Unlock()
	for _, out := range left {
		s.end(out, nil) // told now, or when its last frame has ended
	}
}

// serve reads a stream's acknowledgements until it ends.
func (s *sender) serve(st *outStream) {
	s.t.goRun("tcp send", func() { s.run(st) })
	for {
		h, err := st.answer()
		switch {
		case err != nil:
		case h.kind == frameAck:
			s.acked(st.peer, &h)
		case h.kind == frameNack:
			s.nacked(st.peer, &h)
		case h.kind == frameFault:
			err = s.faulted(st, &h)
		default:
			err = fmt.Errorf("frame of kind %d, want an acknowledgement", h.kind)
		}
		if err != nil {
			s.streamEnded(st, err)
			return
		}
	}
}

func (s *sender) acked(p *outPeer, h *header) {
	s.mu.Lock()
	out := p.byGrant[h.key]
	tell := false
	// The acknowledgement is true only if every byte of the transfer was given and sent.
	if out != nil && out.err == nil && !out.due() && out.ranges.bytes == out.total && h.length == out.total {
		out.acked = true
		tell = s.settle(out)
	}
	s.mu.Unlock()
	s.tell(out, tell)
}

func (s *sender) nacked(p *outPeer, h *header) {
	s.mu.Lock()
	out := p.byGrant[h.key]
	s.mu.Unlock()
	if out != nil {
		s.end(out, core.ErrNotExpected)
	}
}

// run writes frames to one stream until it ends.
func (s *sender) run(st *outStream) {
	if err := s.sendHelloReply(st); err != nil {
		s.streamEnded(st, err)
		return
	}
	defer s.giveBack(st) // if the stream ends between two frames
	for {
		out, left := s.take(st)
		if left == 0 {
			return
		}
		sent, err := s.write(st, out, left)
		if out != nil {
			s.wrote(st.peer, sent)
		}
		switch {
		case errors.Is(err, ErrMayCopy):
			s.streamEnded(st, err)
			return
		case out != nil && ofMemory(err):
			if !s.cannotRead(st, out, left, sent, err) {
				return
			}
			continue
		case out != nil:
			s.mu.Lock()
			out.frames--
			out.paces()
			tell := s.settle(out)
			s.mu.Unlock()
			s.tell(out, tell)
		}
		if err != nil {
			_ = st.conn.SetLinger(0) // the bytes that the kernel still has are of no use
			s.streamEnded(st, err)
			return
		}
	}
}

// take waits for a transfer with bytes to send and cuts a frame off it into the stream's
// vector. If a frame was cut ahead, it is that one. The frame may also belong to no transfer. It returns the number
// of bytes, 0 when the stream ends.
func (s *sender) take(st *outStream) (*outbound, uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := st.peer
	if n := st.next; n.out != nil && !st.dead && !s.closed { // its copies are under way
		st.outFrame, st.next = n, st.outFrame
		out := n.out
		n.out = nil
		return out, n.length
	}
	var out *outbound
	for out == nil {
		switch {
		case st.dead || s.closed:
			return nil, 0
		case p.stuck != nil && p.stuck != st && !st.stalled: // D would not hear it
			stuck := p.stuck
			p.stuck = nil
			if !stuck.dead {
				h := again(stuck.number, p.slots[stuck.number].attempt)
				st.frame(st.outFrame, &h)
				return nil, headerSize
			}
		case p.asks && !st.stalled:
			p.asks = false
			if n := p.unopened(); n > 0 {
				h := again(n, 0)
				st.frame(st.outFrame, &h)
				return nil, headerSize
			}
		case len(st.rested) > 0:
			h := header{kind: frameData, key: st.rested[0]}
			st.rested = st.rested[1:]
			if lives := p.byGrant[h.key]; lives != nil && lives.err == nil {
				st.vec = append(st.vec[:0], iovec{})
				st.frame(st.outFrame, &h)
				return nil, headerSize
			}
		case !p.uses(st):
			p.wake.Wait()
		case len(p.queue) == 0:
			p.tuner.reset()
			p.wake.Wait()
		default:
			if p.queue[0].due() { // else it was given up while it stood in the queue
				out = p.queue[0]
			}
			p.queue = p.queue[1:]
		}
	}
	return out, s.cut(st, st.outFrame, out)
}

// cut cuts a transfer's next frame off it. It returns the number of bytes; s.mu is held.
func (s *sender) cut(st *outStream, f *outFrame, out *outbound) uint64 {
	out.ask = false
	h := header{kind: frameData, key: out.grant}
	f.vec, h.position, h.length = out.cut(append(f.vec[:0], iovec{}), s.t.cfg.FrameBytes)
	out.sent = append(out.sent, sentFrame{st.number, st.offset, piece{h.position, h.length}})
	st.frame(f, &h)
	if s.t.devices.mover != nil {
		f.source.begins(f.vec)
	}
	out.frames++
	if out.left > 0 {
		out.peer.queue = append(out.peer.queue, out)
	}
	return headerSize + h.length
}

// takeAhead cuts the frame that follows one of this transfer, if no other transfer, nor another stream, would have it.
func (s *sender) takeAhead(st *outStream, out *outbound) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := st.peer
	switch {
	case st.dead, s.closed, st.stalled, p.stuck != nil, p.asks, len(st.rested) > 0, !p.uses(st), len(p.queue) != 1, p.queue[0] != out, !out.due(),
		out.left <= uint64(min(p.tuner.use, p.open)-1)*s.t.cfg.FrameBytes, fault.On("tcp-frame-dry"):
		return false
	}
	p.queue = p.queue[1:]
	n := st.next
	if n.vec == nil { // a stream that never looks ahead has no use for it
		n.vec = make([]iovec, 0, maxVector)
	}
	n.out, n.length = out, s.cut(st, n, out)
	return true
}

// giveBack gives the frame that follows back, if one is cut. It returns when no copy of it goes on. The stream has ended, or the transfer of
// this frame and the one before has.
func (s *sender) giveBack(st *outStream) {
	n := st.next
	out := n.out
	if out == nil {
		return
	}
	n.out = nil
	if n.source.end(); st.mayCopy {
		return
	}
	s.mu.Lock()
	st.offset -= n.length
	out.frames--
	out.paces()
	tell := s.settle(out)
	s.mu.Unlock()
	s.tell(out, tell)
}

// frame puts a frame's header into its vector, before the bytes that are in it. It is the stream's next one.
func (st *outStream) frame(f *outFrame, h *header) {
	h.encode(&f.hdr)
	if h.kind != frameData {
		f.vec = append(f.vec[:0], iovec{})
		st.offset += headerSize
	} else {
		st.offset += headerSize + h.length
	}
	f.vec[0] = iovec{uintptr(unsafe.Pointer(&f.hdr)), headerSize}
}
