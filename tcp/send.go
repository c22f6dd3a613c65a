package tcp

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/safe"
)

// sender is P's half: links of D agents, and the transfers that go to them.
type sender struct {
	t         *Transport
	mu        sync.Mutex
	links     map[core.AgentID]*outLink // of the admitted peers
	byTicket  map[token]*outLink        // the same
	byID      map[core.TransferID]*outbound
	streams   int // of all links
	strangers strangers
	closed    bool
}

// outLink is an admitted D agent, and the streams that it has opened.
type outLink struct {
	peer    core.AgentID
	ticket  token
	streams map[*outStream]bool
	queue   []*outbound // with bytes that no frame has taken yet; served in turn
	byGrant map[token]*outbound
	wake    *sync.Cond // on sender.mu: the queue grew, or a stream ended
}

// outbound is one transfer that is sent. Its fields are guarded by sender.mu.
type outbound struct {
	id       core.TransferID
	grant    token
	link     *outLink
	cur      cursor
	position uint64 // of the next frame
	left     uint64 // bytes that no frame has taken
	total    uint64
	segments int
	frames   int // taken by a stream and not yet written whole
	used     map[*outStream]bool
	started  time.Time
	waiting  *time.Timer // bounds the wait for D's first stream
	err      error       // ends the transfer when frames is 0
	acked    bool        // so does D's word that all bytes are in
	empty    bool        // no bytes at all: one frame without any
}

// outStream is one accepted connection.
type outStream struct {
	conn *net.TCPConn
	raw  syscall.RawConn
	link *outLink
	dead bool
	// vec[0] is the frame's header in hdr.
	vec []iovec
	hdr [headerSize]byte
}

func (s *sender) init(t *Transport) {
	s.t = t
	s.links = map[core.AgentID]*outLink{}
	s.byTicket = map[token]*outLink{}
	s.byID = map[core.TransferID]*outbound{}
}

// Admit implements core.Transport.
func (t *Transport) Admit(peer core.AgentID) ([]byte, error) {
	s := &t.sender
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, errClosed
	}
	l := s.links[peer]
	if l == nil {
		l = &outLink{peer: peer, ticket: newToken(), streams: map[*outStream]bool{}, byGrant: map[token]*outbound{}, wake: sync.NewCond(&s.mu)}
		s.links[peer], s.byTicket[l.ticket] = l, l
	}
	return bytes.Clone(l.ticket[:]), nil
}

// dismiss forgets a D agent: its streams are closed, its writes end.
func (s *sender) dismiss(peer core.AgentID) {
	s.mu.Lock()
	l := s.links[peer]
	if l == nil || s.closed {
		s.mu.Unlock()
		return
	}
	s.t.wg.Add(1) // Close waits for what is told below
	defer s.t.wg.Done()
	delete(s.links, peer)
	delete(s.byTicket, l.ticket)
	lost := slices.Collect(maps.Values(l.byGrant))
	for _, out := range lost {
		out.fail(fmt.Errorf("tcp: decode agent %s was dismissed: %w", peer, core.ErrConnectionLost))
	}
	for st := range l.streams {
		st.conn.Close()
	}
	s.mu.Unlock()
	for _, out := range lost {
		s.end(out, nil)
	}
}

// Write implements core.Transport.
func (t *Transport) Write(op core.WriteOp) {
	s := &t.sender
	if len(op.Grant) != len(token{}) {
		t.sink.Written(op.ID, core.TransferStats{}, fmt.Errorf("tcp: grant of %d bytes, want %d", len(op.Grant), len(token{})))
		return
	}
	out := &outbound{id: op.ID, cur: cursor{runs: sourceRuns(t.layout, op.Pairs)}, used: map[*outStream]bool{}, started: time.Now()}
	out.segments = len(out.cur.runs)
	for _, r := range out.cur.runs {
		out.total += r.len
	}
	out.left, out.empty = out.total, out.total == 0
	out.grant = token(op.Grant)
	var err error
	s.mu.Lock()
	l := s.links[op.Peer]
	switch {
	case s.closed:
		err = errClosed
	case s.byID[op.ID] != nil:
		err = fmt.Errorf("tcp: transfer %q is being written already", string(op.ID))
	case l == nil:
		err = fmt.Errorf("tcp: decode agent %s is not admitted, it must say hello: %w", op.Peer, core.ErrConnectionLost)
	case l.byGrant[out.grant] != nil:
		err = fmt.Errorf("tcp: transfer %q has the grant of transfer %q", string(op.ID), string(l.byGrant[out.grant].id))
	default:
		out.link = l
		s.byID[op.ID], l.byGrant[out.grant] = out, out
		l.queue = append(l.queue, out)
		if len(l.streams) == 0 {
			t.wg.Add(1)
			out.waiting = time.AfterFunc(t.cfg.DialTimeout, func() {
				defer t.wg.Done()
				defer safe.Recover("tcp wait for a stream")
				s.end(out, fmt.Errorf("tcp: decode agent %s has opened no stream within %v: %w", op.Peer, t.cfg.DialTimeout, core.ErrConnectionLost))
			})
		}
		l.wake.Broadcast()
	}
	s.mu.Unlock()
	if err != nil {
		t.sink.Written(op.ID, core.TransferStats{}, err)
	}
}

// Stop implements core.Transport.
func (t *Transport) Stop(id core.TransferID) {
	s := &t.sender
	s.mu.Lock()
	out := s.byID[id]
	if out == nil || s.closed {
		s.mu.Unlock()
		return
	}
	t.wg.Add(1) // Close waits for what is told below
	defer t.wg.Done()
	s.mu.Unlock()
	s.end(out, errors.New("tcp: stopped"))
}

// fail gives a transfer up; sender.mu is held. The first cause is the one that
// is told.
func (out *outbound) fail(err error) {
	if out.err == nil {
		out.err = err
	}
	out.left, out.empty = 0, false
}

// end gives a transfer up with err; it is told when no stream reads its blocks.
func (s *sender) end(out *outbound, err error) {
	s.mu.Lock()
	out.fail(err)
	tell := s.settle(out)
	s.mu.Unlock()
	s.tell(out, tell)
}

// settle forgets a transfer that has ended, once no frame of it is under way;
// s.mu is held. The one that gets true must tell the sink.
func (s *sender) settle(out *outbound) bool {
	if out.err == nil && !out.acked || out.frames > 0 || s.byID[out.id] != out {
		return false
	}
	s.forget(out)
	return true
}

// stopWaiting ends the wait for D's first stream; s.mu is held.
func (s *sender) stopWaiting(out *outbound) {
	if out.waiting != nil && out.waiting.Stop() {
		s.t.wg.Done()
	}
	out.waiting = nil
}

func (s *sender) forget(out *outbound) {
	delete(s.byID, out.id)
	delete(out.link.byGrant, out.grant)
	s.stopWaiting(out)
}

func (s *sender) tell(out *outbound, really bool) {
	if !really {
		return
	}
	stats := core.TransferStats{Segments: out.segments}
	if out.err == nil {
		stats.Bytes, stats.Nanos = out.total, time.Since(out.started).Nanoseconds()
	}
	s.t.sink.Written(out.id, stats, out.err)
}

func (s *sender) close() {
	s.mu.Lock()
	s.closed = true
	left := slices.Collect(maps.Values(s.byID))
	for _, out := range left {
		out.fail(errClosed)
	}
	for _, c := range s.strangers.conns {
		c.Close()
	}
	for _, l := range s.links {
		for st := range l.streams {
			st.conn.Close()
		}
		l.wake.Broadcast()
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
		h, err := readHeader(st.conn)
		switch {
		case err != nil:
		case h.kind == frameAck:
			s.acked(st.link, &h)
		case h.kind == frameNack:
			s.nacked(st.link, &h)
		default:
			err = fmt.Errorf("frame of kind %d, want an acknowledgement", h.kind)
		}
		if err != nil {
			s.streamEnded(st, err)
			return
		}
	}
}

func (s *sender) acked(l *outLink, h *header) {
	s.mu.Lock()
	out := l.byGrant[h.key]
	tell := false
	// Only of a transfer whose every byte was sent is it the truth.
	if out != nil && out.err == nil && out.left == 0 && !out.empty && h.length == out.total {
		out.acked = true
		tell = s.settle(out)
	}
	s.mu.Unlock()
	s.tell(out, tell)
}

func (s *sender) nacked(l *outLink, h *header) {
	s.mu.Lock()
	out := l.byGrant[h.key]
	s.mu.Unlock()
	if out != nil {
		s.end(out, core.ErrNotExpected)
	}
}

// streamEnded fails what the stream may have lost, and tells when it was the
// peer's last one.
func (s *sender) streamEnded(st *outStream, err error) {
	err = fmt.Errorf("tcp stream from %s: %w: %w", st.conn.RemoteAddr(), core.ErrConnectionLost, s.t.describe(err))
	s.mu.Lock()
	if st.dead {
		s.mu.Unlock()
		return
	}
	st.dead = true
	st.conn.Close() // not before: its other goroutine would tell that as the cause
	l := st.link
	delete(l.streams, st)
	s.streams--
	var lost []*outbound
	for _, out := range l.byGrant {
		if out.used[st] || len(l.streams) == 0 {
			lost = append(lost, out)
		}
	}
	down := len(l.streams) == 0 && !s.closed && s.links[l.peer] == l
	l.wake.Broadcast()
	s.mu.Unlock()
	for _, out := range lost {
		s.end(out, err)
	}
	if down {
		s.t.sink.PeerDown(l.peer, err)
	}
}

// run writes frames to one stream until it ends.
func (s *sender) run(st *outStream) {
	for {
		out, left := s.take(st)
		if out == nil {
			return
		}
		err := s.write(st, left)
		s.mu.Lock()
		out.frames--
		tell := s.settle(out)
		s.mu.Unlock()
		s.tell(out, tell)
		if err != nil {
			s.streamEnded(st, err)
			return
		}
	}
}

// take waits for a transfer with bytes to send and cuts a frame off it into the
// stream's vector. It returns nil when the stream ends.
func (s *sender) take(st *outStream) (*outbound, uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := st.link
	var out *outbound
	for out == nil {
		switch {
		case st.dead || s.closed:
			return nil, 0
		case len(l.queue) == 0:
			l.wake.Wait()
		default:
			if l.queue[0].left > 0 || l.queue[0].empty { // else given up while it stood in the queue
				out = l.queue[0]
			}
			l.queue = l.queue[1:]
		}
	}
	out.empty = false
	vec, n := out.cur.fill(append(st.vec[:0], iovec{}), min(s.t.cfg.FrameBytes, out.left))
	out.cur.advance(n)
	h := header{kind: frameData, key: out.grant, position: out.position, length: n}
	h.encode(&st.hdr)
	vec[0] = iovec{uintptr(unsafe.Pointer(&st.hdr)), headerSize}
	st.vec = vec
	out.position += n
	out.left -= n
	out.frames++
	out.used[st] = true
	if out.left > 0 {
		l.queue = append(l.queue, out)
	}
	return out, headerSize + n
}

// write sends a frame whole; each step must make progress within the bound.
func (s *sender) write(st *outStream, left uint64) error {
	vec := st.vec
	for left > 0 {
		st.conn.SetWriteDeadline(time.Now().Add(s.t.cfg.StallTimeout))
		var n uintptr
		var errno syscall.Errno
		err := st.raw.Write(func(fd uintptr) bool {
			n, errno = vectored(syscall.SYS_WRITEV, fd, vec)
			return errno != syscall.EAGAIN
		})
		if err != nil {
			return err
		}
		if errno != 0 {
			return fmt.Errorf("writev: %w", errno)
		}
		vec = drop(vec, n)
		left -= uint64(n)
	}
	return nil
}
