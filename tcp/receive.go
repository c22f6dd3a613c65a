package tcp

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"syscall"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
)

// receiver is D's half: links to P agents, and the transfers that they fill.
type receiver struct {
	t  *Transport
	mu sync.Mutex
	// inbound by transfer, and by grant for the streams.
	byID    map[core.TransferID]*inbound
	byGrant map[token]*inbound
	// telling holds the transfers whose outcome the sink is being told.
	telling map[core.TransferID]chan struct{}
	links   map[core.AgentID]*inLink
	closed  bool
}

// inbound is one transfer that is expected.
type inbound struct {
	id    core.TransferID
	grant token
	link  *inLink
	runs  []run
	ends  []uint64 // ends[i]: position after runs[i]
	total uint64

	// fence is held for reading while bytes are copied into the runs, and for
	// writing to set revoked.
	fence   sync.RWMutex
	revoked bool

	// Guarded by receiver.mu.
	spans []span // positions that frames have claimed, sorted, merged
	got   uint64
	first time.Time
}

type span struct{ from, to uint64 }

// inLink is D's set of streams to one P agent.
type inLink struct {
	peer     core.AgentID
	endpoint string
	ticket   token
	met      bool              // a stream has got through to P
	tries    int               // streams that have not, while none has
	up       bool              // one is open, or its end was not told yet
	streams  map[int]net.Conn  // by number; nil while it is dialled
	retryAt  map[int]time.Time // not before, of those that failed
}

// redialAfter is the least time between two dials of one stream.
const redialAfter = time.Second

// maxTries is how often each stream of a link is dialled that P was never reached
// by, while transfers wait for it.
const maxTries = 3

// maxSpans bounds what is kept of a transfer's frames. A sender needs about one
// span for each of its streams.
const maxSpans = 1024

func (r *receiver) init(t *Transport) {
	r.t = t
	r.byID = map[core.TransferID]*inbound{}
	r.byGrant = map[token]*inbound{}
	r.telling = map[core.TransferID]chan struct{}{}
	r.links = map[core.AgentID]*inLink{}
}

// Connect implements core.Transport.
func (t *Transport) Connect(peer core.AgentID, endpoint string, ticket []byte) error {
	host, port, err := net.SplitHostPort(endpoint)
	if err != nil || host == "" || port == "" {
		return fmt.Errorf("tcp: prefill agent %s has the endpoint %q, want host:port", peer, endpoint)
	}
	if len(ticket) != len(token{}) {
		return fmt.Errorf("tcp: prefill agent %s gave a ticket of %d bytes, want %d: run the same kvconn on both", peer, len(ticket), len(token{}))
	}
	r := &t.receiver
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return errClosed
	}
	link := r.links[peer]
	if link == nil {
		link = &inLink{peer: peer, streams: map[int]net.Conn{}, retryAt: map[int]time.Time{}}
		r.links[peer] = link
	}
	if link.endpoint != endpoint || link.ticket != token(ticket) {
		link.endpoint, link.ticket = endpoint, token(ticket)
		clear(link.retryAt) // what failed before says nothing of the new ones
		link.tries = 0
	}
	r.dialMissing(link)
	return nil
}

// dialMissing starts the streams of a link that are not there; r.mu is held.
func (r *receiver) dialMissing(link *inLink) {
	for n := range r.t.cfg.Streams {
		_, there := link.streams[n]
		if there || len(link.streams) > 0 && time.Now().Before(link.retryAt[n]) {
			continue
		}
		link.streams[n] = nil
		r.t.goRun("tcp receive", func() { r.stream(link, n) })
	}
}

// Expect implements core.Transport.
func (t *Transport) Expect(id core.TransferID, peer core.AgentID, dst []core.Segment) ([]byte, error) {
	in := &inbound{id: id, grant: newToken(), runs: runsOf(t.layout, dst)}
	in.ends = make([]uint64, len(in.runs))
	for i, r := range in.runs {
		in.total += r.len
		in.ends[i] = in.total
	}
	r := &t.receiver
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.closed:
		return nil, errClosed
	case r.byID[id] != nil:
		return nil, fmt.Errorf("tcp: transfer %q is expected already", string(id))
	case r.links[peer] == nil:
		return nil, fmt.Errorf("tcp: no connection to prefill agent %s was asked for", peer)
	}
	in.link = r.links[peer]
	r.byID[id], r.byGrant[in.grant] = in, in
	r.dialMissing(in.link)
	return bytes.Clone(in.grant[:]), nil
}

// dismiss forgets a P agent: its streams are closed, and what waits for them is
// lost.
func (r *receiver) dismiss(peer core.AgentID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if link := r.links[peer]; link != nil {
		delete(r.links, peer)
		for _, c := range link.streams {
			if c != nil {
				c.Close()
			}
		}
	}
}

// Revoke implements core.Transport.
func (t *Transport) Revoke(id core.TransferID) {
	r := &t.receiver
	r.mu.Lock()
	in, told := r.byID[id], r.telling[id]
	r.forget(in)
	r.mu.Unlock()
	if in != nil {
		in.revoke()
	}
	if told != nil {
		<-told // the sink returns at once
	}
}

// revoke returns when no stream reads into the runs any more.
func (in *inbound) revoke() {
	in.fence.Lock()
	in.revoked = true
	in.fence.Unlock()
}

// forget ends the streams' knowledge of a transfer; r.mu is held.
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
	defer r.mu.Unlock()
	r.closed = true
	for _, l := range r.links {
		for _, c := range l.streams {
			if c != nil {
				c.Close()
			}
		}
	}
	for _, in := range r.byID {
		r.forget(in)
		in.revoke()
	}
}

// stream is the life of one connection to P, and of the next ones while
// transfers wait for it.
func (r *receiver) stream(link *inLink, n int) {
	for {
		began := time.Now()
		r.mu.Lock()
		endpoint, ticket, dismissed := link.endpoint, link.ticket, r.links[link.peer] != link
		r.mu.Unlock()
		cause := errDismissed
		if !dismissed {
			cause = r.runStream(link, n, endpoint, ticket)
		}
		err := fmt.Errorf("tcp stream to %s: %w: %w", endpoint, core.ErrConnectionLost, cause)
		if errors.Is(cause, syscall.EMFILE) || errors.Is(cause, syscall.ENFILE) {
			err = fmt.Errorf("tcp stream to %s: this process has no descriptor left (ulimit -n): %w", endpoint, cause)
		}
		again, down, lost := r.streamEnded(link, n, !broken(cause))
		r.t.cfg.Logger.Debug("stream ended", zap.String("peer", string(link.peer)), zap.Bool("again", again), zap.Error(err))
		for _, in := range lost {
			r.fail(in, err)
		}
		if down {
			r.t.sink.PeerDown(link.peer, err)
		}
		if !again || !r.t.pause(redialAfter-time.Since(began)) {
			return
		}
	}
}

// broken: the connection ended, or was never made. Other errors are what the peer
// has said: that it knows no such ticket, or what no sender says.
func broken(cause error) bool {
	var network net.Error
	var errno syscall.Errno
	return errors.Is(cause, io.EOF) || errors.Is(cause, io.ErrUnexpectedEOF) || errors.Is(cause, net.ErrClosed) ||
		errors.As(cause, &network) || errors.As(cause, &errno)
}

// streamEnded decides whether a stream is dialled again, whether the way to P
// is down with it, and which transfers are lost. A transfer of which no byte has
// come loses nothing by a broken connection: P still works on it, or the control
// plane tells that it does not. One that has begun is lost with the last stream.
// Where no stream gets through at all, or P says what it should not, all are.
func (r *receiver) streamEnded(link *inLink, n int, hostile bool) (again, down bool, lost []*inbound) {
	r.mu.Lock()
	defer r.mu.Unlock()
	link.streams[n] = nil
	if r.closed {
		delete(link.streams, n)
		return false, false, nil
	}
	open := false
	for _, c := range link.streams {
		open = open || c != nil
	}
	if !link.met {
		link.tries++
	}
	hopeful := (link.met || link.tries < maxTries*r.t.cfg.Streams) && !hostile && r.links[link.peer] == link
	for _, in := range r.byID {
		switch {
		case in.link != link:
		case in.first.IsZero() && hopeful:
			again = true
		case !open:
			lost = append(lost, in)
		}
	}
	if !open && link.up {
		link.up, down = false, true
	}
	if again {
		return true, down, lost
	}
	delete(link.streams, n)
	down = down || len(link.streams) == 0 && !link.met
	link.retryAt[n] = time.Now().Add(redialAfter)
	if !hopeful && len(link.streams) > 0 {
		return false, down, nil // the last one decides
	}
	return false, down, lost
}

func (r *receiver) fail(in *inbound, err error) {
	r.mu.Lock()
	told := r.ends(in)
	r.mu.Unlock()
	if told != nil {
		in.revoke()
		r.tell(in, told, core.TransferStats{}, err)
	}
}

// ends forgets a transfer, so that just one caller gets a channel to tell its
// outcome with; r.mu is held.
func (r *receiver) ends(in *inbound) chan struct{} {
	if !r.forget(in) {
		return nil
	}
	told := make(chan struct{})
	r.telling[in.id] = told
	return told
}

func (r *receiver) tell(in *inbound, told chan struct{}, s core.TransferStats, err error) {
	r.t.sink.Received(in.id, s, err)
	r.mu.Lock()
	if r.telling[in.id] == told {
		delete(r.telling, in.id)
	}
	r.mu.Unlock()
	close(told)
}

func (r *receiver) runStream(link *inLink, n int, endpoint string, ticket token) error {
	d := net.Dialer{Timeout: r.t.cfg.DialTimeout, Control: r.t.cfg.guard(endpoint)}
	conn, err := d.DialContext(r.t.ctx, "tcp", endpoint)
	if err != nil {
		return err
	}
	defer conn.Close()
	r.mu.Lock()
	if r.closed || r.links[link.peer] != link { // while it was dialled
		r.mu.Unlock()
		return errDismissed
	}
	link.streams[n], link.met, link.up = conn, true, true
	r.mu.Unlock()
	c := conn.(*net.TCPConn)
	r.t.tune(c)
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	s := &inStream{r: r, conn: c, raw: raw, link: link, vec: make([]iovec, 0, maxVector)}
	hello := header{kind: frameHello, key: ticket}
	err = s.send(&hello)
	for err == nil {
		err = s.frame()
	}
	return r.t.describe(err)
}

// inStream reads one connection.
type inStream struct {
	r       *receiver
	conn    *net.TCPConn
	raw     syscall.RawConn
	link    *inLink
	vec     []iovec
	buf     [headerSize]byte
	scratch []byte // what no transfer wants is read into it
}

func (s *inStream) send(h *header) error {
	var b [headerSize]byte
	h.encode(&b)
	s.conn.SetWriteDeadline(time.Now().Add(s.r.t.cfg.StallTimeout))
	_, err := s.conn.Write(b[:])
	return err
}

// errTicket ends a stream that P did not take.
var errTicket = errors.New("the prefill agent does not know our ticket (any more), or has too many streams; its log says which")

// errDismissed ends a stream whose peer is not wanted any more.
var errDismissed = errors.New("the prefill agent was dismissed, or the transport is closed")

// frame reads one frame. Between frames a stream may be idle for as long as the
// connection lives; within one it must not stall.
func (s *inStream) frame() error {
	s.conn.SetReadDeadline(time.Time{})
	if _, err := io.ReadFull(s.conn, s.buf[:]); err != nil {
		return err
	}
	var h header
	if err := h.decode(&s.buf); err != nil {
		return err
	}
	switch h.kind {
	case frameData:
	case frameLeave:
		return errTicket
	default:
		return fmt.Errorf("frame of kind %d, want data", h.kind)
	}
	if h.length > maxFrame {
		return fmt.Errorf("frame of %d bytes, at most %d are read", h.length, maxFrame)
	}
	s.r.mu.Lock()
	in := s.r.byGrant[h.key]
	if in != nil {
		if in.link != s.link {
			in = nil // a grant of another peer
		} else if err := in.claim(h.position, h.length); err != nil {
			s.r.mu.Unlock()
			s.r.fail(in, err)
			return err
		}
	}
	s.r.mu.Unlock()
	if in == nil {
		if err := s.send(&header{kind: frameNack, key: h.key}); err != nil {
			return err
		}
	}
	if err := s.payload(in, &h); err != nil {
		return err
	}
	if in != nil {
		return s.landed(in, h.length)
	}
	return nil
}

// claim checks a frame's place; receiver.mu is held. Bytes that were claimed
// before would be counted twice, and a hole would go unseen.
func (in *inbound) claim(pos, length uint64) error {
	end := pos + length
	if end < pos || end > in.total {
		return fmt.Errorf("transfer %q: frame of bytes %d to %d, but it has %d", string(in.id), pos, end, in.total)
	}
	if in.first.IsZero() {
		in.first = time.Now()
	}
	if length == 0 {
		return nil
	}
	i, _ := slices.BinarySearchFunc(in.spans, pos, func(s span, p uint64) int {
		if s.to <= p {
			return -1
		}
		return 1
	})
	if i < len(in.spans) && in.spans[i].from < end {
		return fmt.Errorf("transfer %q: bytes %d to %d came twice", string(in.id), pos, end)
	}
	joinsLeft := i > 0 && in.spans[i-1].to == pos
	joinsRight := i < len(in.spans) && in.spans[i].from == end
	switch {
	case joinsLeft && joinsRight:
		in.spans[i-1].to = in.spans[i].to
		in.spans = slices.Delete(in.spans, i, i+1)
	case joinsLeft:
		in.spans[i-1].to = end
	case joinsRight:
		in.spans[i].from = pos
	case len(in.spans) == maxSpans:
		return fmt.Errorf("transfer %q: its frames leave more than %d holes", string(in.id), maxSpans)
	default:
		in.spans = slices.Insert(in.spans, i, span{pos, end})
	}
	return nil
}

// payload reads a frame's bytes into the transfer's blocks, or away.
func (s *inStream) payload(in *inbound, h *header) error {
	var cur cursor
	if in != nil && h.length > 0 {
		i, _ := slices.BinarySearchFunc(in.ends, h.position, func(end, p uint64) int {
			if end <= p {
				return -1
			}
			return 1
		})
		cur = cursor{runs: in.runs[i:], off: h.position - (in.ends[i] - in.runs[i].len)}
	}
	for left := h.length; left > 0; {
		s.conn.SetReadDeadline(time.Now().Add(s.r.t.cfg.StallTimeout))
		var n uintptr
		var errno syscall.Errno
		err := s.raw.Read(func(fd uintptr) bool {
			n, errno = s.read(fd, in, &cur, left)
			return errno != syscall.EAGAIN
		})
		switch {
		case err != nil:
			return err
		case errno != 0:
			return fmt.Errorf("readv: %w", errno)
		case n == 0:
			return fmt.Errorf("%d bytes before the end of a frame: %w", left, io.ErrUnexpectedEOF)
		}
		left -= uint64(n)
	}
	return nil
}

// read is one readv that does not wait. The fence is held just for it: that is
// all that Revoke can have to wait for.
func (s *inStream) read(fd uintptr, in *inbound, cur *cursor, left uint64) (uintptr, syscall.Errno) {
	if in != nil {
		in.fence.RLock()
		defer in.fence.RUnlock()
		if !in.revoked {
			vec, _ := cur.fill(s.vec[:0], left)
			n, errno := vectored(syscall.SYS_READV, fd, vec)
			if errno == 0 {
				cur.advance(uint64(n))
			}
			return n, errno
		}
	}
	if s.scratch == nil {
		s.scratch = make([]byte, 64<<10)
	}
	n, err := syscall.Read(int(fd), s.scratch[:min(left, uint64(len(s.scratch)))])
	if err != nil {
		var errno syscall.Errno
		if errors.As(err, &errno) {
			if errno == syscall.EINTR {
				errno = syscall.EAGAIN
			}
			return 0, errno
		}
	}
	return uintptr(max(n, 0)), 0
}

// landed counts a frame's bytes and, with the last ones, ends the transfer.
func (s *inStream) landed(in *inbound, n uint64) error {
	s.r.mu.Lock()
	in.got += n
	gone := s.r.byID[in.id] != in
	var told chan struct{}
	if in.got == in.total {
		told = s.r.ends(in)
	}
	stats := core.TransferStats{Bytes: in.got, Segments: len(in.runs), Nanos: time.Since(in.first).Nanoseconds()}
	s.r.mu.Unlock()
	switch {
	case gone: // revoked meanwhile: the sender may stop
		return s.send(&header{kind: frameNack, key: in.grant})
	case told == nil:
		return nil
	}
	s.r.tell(in, told, stats, nil)
	return s.send(&header{kind: frameAck, key: in.grant, length: stats.Bytes})
}
