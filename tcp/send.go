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

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/internal/quota"
)

// sender is P's half: the admitted D agents, and the transfers that go to them.
type sender struct {
	t         *Transport
	mu        sync.Mutex
	peers     map[core.AgentID]*outPeer // of the admitted peers
	byTicket  map[random]*outPeer       // the same, by the names of tickets
	byID      map[core.TransferID]*outbound
	streams   int          // of all peers
	from      quota.Counts // the same, by the addresses that they come from
	patrol    *time.Timer  // while there are transfers; see look
	strangers strangers
	grace     time.Duration              // see returnGrace
	late      time.Duration              // see hear
	tenure    time.Duration              // see until
	meter     func([]*outStream) reading // see meter
	closed    bool
}

// outPeer is an admitted D agent, and the streams that it has opened.
type outPeer struct {
	id      core.AgentID
	ticket  random
	secret  secret                  // beside the ticket, if its streams are sealed
	slots   [maxPeerStreams]outSlot // by number
	open    int                     // streams in them
	stuck   *outStream              // D is to open it anew; another stream tells D
	breadth breadth
	asks    bool        // D is to open one more
	waits   int         // streams that wait for a frame, those included that were woken for one
	queue   []*outbound // that have a frame to send; served in turn
	byGrant map[random]*outbound
	wake    *sync.Cond // on sender.mu: a stream has something to do, or may have: queue, asks, stuck, what takes frames, the end of a stream
}

// outSlot is what P knows of D's streams of one number.
type outSlot struct {
	attempt uint64     // of the newest
	stream  *outStream // nil when it has ended
}

// outStream is one accepted connection.
type outStream struct {
	conn   *net.TCPConn
	raw    syscall.RawConn
	peer   *outPeer
	from   netip.Prefix // the address that it counts under
	number int
	offset uint64 // of the next frame, as D counts received bytes
	dead   bool
	shut   bool            // P has said that it writes no more
	deaf   bool            // it makes no progress: D is to open it anew, and others are used meanwhile
	life   context.Context // ends when dead is set
	end    func()          // ends it
	acked  uint64          // bytes that D's kernel had acknowledged at the last look
	still  int             // looks since without any
	rested []random        // transfers that rested when it was opened: the stream is to say of each that it lives
	// vec[0] is the frame's header in hdr.
	vec     []iovec
	hdr     [headerSize]byte
	source  source
	ahead   *outbound        // of the frame in source.later; nil: there is none
	sealed  *seals           // nil: the stream is plain
	sealing sealing          // of the frame that is written
	first   [headerSize]byte // of a sealed stream: P's welcome
}

func (s *sender) init(t *Transport) {
	s.t, s.grace, s.late, s.tenure, s.meter = t, returnGrace, step, tenure, meter
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
		s.finds(p)
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

// dismiss forgets a D agent: its streams are closed, its writes end.
func (s *sender) dismiss(peer core.AgentID) {
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

// die says that the stream is over; sender.mu is held.
func (st *outStream) die() {
	st.dead = true
	st.end()
}

// drop ends a connection that has nothing worth sending any more.
func (st *outStream) drop() {
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
	stats := core.TransferStats{Segments: out.given.runs}
	if out.err == nil {
		stats.Bytes, stats.Nanos = out.total, out.moves.Sum(time.Now()).Nanoseconds()
	}
	s.t.sink.Written(out.id, stats, out.err)
}

func (s *sender) close() {
	s.mu.Lock()
	s.closed = true
	if s.patrol != nil && s.patrol.Stop() {
		s.t.wg.Done()
	}
	left := slices.Collect(maps.Values(s.byID))
	for _, out := range left {
		out.fail(errClosed)
	}
	for _, c := range s.strangers.conns {
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
	if out != nil && out.err == nil && !out.due() && (out.ahead == 0 || fault.On("tcp-ahead-sent")) && out.given.bytes == out.total && h.length == out.total {
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
	if err := s.welcome(st); err != nil {
		s.streamEnded(st, err)
		return
	}
	for {
		out, left := s.goesOn(st)
		if left == 0 {
			out, left = s.take(st)
		}
		if left == 0 {
			return
		}
		sent, err := s.write(st, out, left)
		if out != nil {
			s.wrote(st.peer, sent)
		}
		switch {
		case errors.Is(err, ErrMayCopy): // its blocks are never free: nobody is told that the write has ended
			s.t.cfg.Logger.Error("the blocks of a transfer may be read for ever", zap.String("transfer_id", string(out.id)), zap.Error(err))
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
// vector. The frame may also belong to no transfer. It returns the number of bytes, 0 when the
// stream ends.
func (s *sender) take(st *outStream) (*outbound, uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := st.peer
	var out *outbound
	for out == nil {
		switch {
		case st.dead || s.closed:
			return nil, 0
		case p.stuck != nil && p.stuck != st && !st.deaf: // D would not hear it
			stuck := p.stuck
			p.stuck = nil
			if !stuck.dead {
				h := again(stuck.number, p.slots[stuck.number].attempt)
				st.frame(&h)
				return nil, headerSize
			}
		case p.asks && !st.deaf:
			p.asks = false
			if n := p.unopened(); n > 0 {
				h := again(n, 0)
				st.frame(&h)
				return nil, headerSize
			}
		case len(st.rested) > 0:
			h := header{kind: frameData, key: st.rested[0]}
			st.rested = st.rested[1:]
			if lives := p.byGrant[h.key]; lives != nil && lives.err == nil {
				st.vec = append(st.vec[:0], iovec{})
				st.frame(&h)
				return nil, headerSize
			}
		case !p.uses(st):
			p.wake.Wait()
		case len(p.queue) == 0:
			p.breadth.breaks()
			p.waits++
			p.wake.Wait()
			p.waits--
		default:
			if p.queue[0].due() { // else it was given up while it stood in the queue
				out = p.queue[0]
			}
			p.queue = p.queue[1:]
		}
	}
	var cut piece
	st.vec, cut = s.cut(out, append(st.vec[:0], iovec{}))
	return out, st.begins(out, cut)
}

// cut cuts the next frame of a transfer, which has left the queue, into a stream's vector. The transfer goes to the queue's end if it
// has more; s.mu is held.
func (s *sender) cut(out *outbound, v []iovec) (_ []iovec, cut piece) {
	out.ask = false
	v, cut.position, cut.length = out.cut(v, s.t.cfg.FrameBytes)
	out.frames++
	if out.left > 0 {
		out.peer.queue = append(out.peer.queue, out)
	}
	return v, cut
}

// begins begins a frame that is cut into the stream's vector; sender.mu is held.
func (st *outStream) begins(out *outbound, cut piece) (length uint64) {
	out.sent = append(out.sent, sentFrame{st.number, st.offset, cut})
	st.frame(&header{kind: frameData, key: out.grant, position: cut.position, length: cut.length})
	return headerSize + cut.length
}

// frame begins a stream's vector, with a header before what is in it.
func (st *outStream) frame(h *header) {
	h.encode(&st.hdr)
	if h.kind != frameData {
		st.vec = append(st.vec[:0], iovec{})
		st.offset += headerSize
	} else {
		st.offset += headerSize + h.length
	}
	st.vec[0] = st.header()
}

// header is the entry of a frame's header.
func (st *outStream) header() iovec { return iovec{uintptr(unsafe.Pointer(&st.hdr)), headerSize} }
