// D opens its streams to a P, and decides whether a stream that has ended is opened anew.

package tcp

import (
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"syscall"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/stopwatch"
)

// inPeer is a P agent, and D's streams to it.
type inPeer struct {
	id       core.AgentID
	endpoint string
	ticket   random
	secret   secret          // if the streams are sealed: the second half of the ticket
	met      bool            // a stream has got through to P
	tries    int             // how many streams have not got through, as long as none has
	up       bool            // a stream is open, or nobody has told yet that the last one has ended
	moved    bool            // bytes have come since all streams were broken
	reading  int             // how many frames of transfers the streams are reading
	moves    stopwatch.Watch // runs while reading is not 0
	opens    int             // so many of the slots, the first ones, are opened; P asks for the others
	slots    []inSlot        // by number
}

// inSlot is D's stream of one number, and what is known of the previous ones.
type inSlot struct {
	busy     bool      // it is open or dialled, or will be
	conn     net.Conn  // nil unless it is open
	wanted   bool      // P has asked for it, so D opens it even if no transfer waits
	attempt  uint64    // of conn
	retryAt  time.Time // D does not dial it before, unless there is no other stream
	received uint64    // bytes of this number's frames, headers included
}

func (p *inPeer) busy() bool {
	return slices.ContainsFunc(p.slots, func(s inSlot) bool { return s.busy })
}

func (p *inPeer) open() bool {
	return slices.ContainsFunc(p.slots, func(s inSlot) bool { return s.conn != nil })
}

// openAgain ends a stream whose bytes from P do not get through, so that D dials its number
// anew. If attempt is 0, P asks for one more stream than there are. D opens this one only if it
// has few streams in all, since it must leave descriptors for other peers. r.mu is held.
func (r *receiver) openAgain(p *inPeer, number int, attempt uint64) {
	if number >= len(p.slots) {
		return
	}
	if attempt == 0 {
		if number == p.opens && r.busy < r.t.cfg.MaxStreams/2 && r.peers[p.id] == p && !r.closed {
			p.opens++
			r.dialMissing(p)
		}
		return
	}
	if slot := &p.slots[number]; slot.conn != nil && slot.attempt == attempt {
		slot.wanted = true
		slot.conn.Close()
	}
}

// rests notes that D does not dial a stream again; r.mu is held.
func (r *receiver) rests(slot *inSlot) {
	slot.busy = false
	r.busy--
}

func (p *inPeer) closeAll() {
	for i := range p.slots {
		if c := p.slots[i].conn; c != nil {
			c.Close()
		}
	}
}

// redialAfter is the least time from one dial of a stream to the next.
const redialAfter = time.Second

// redialSoon is the least time from the dial of a stream that has brought bytes to the next dial: P waits for the next stream.
const redialSoon = 50 * time.Millisecond

// maxTries is how often each stream to a peer is dialled while transfers wait and no
// stream has ever reached P.
const maxTries = 3

// Connect implements core.Transport.
func (t *Transport) Connect(peer core.AgentID, endpoint string, ticket []byte) error {
	host, port, err := net.SplitHostPort(endpoint)
	if err != nil || host == "" || port == "" {
		return fmt.Errorf("tcp: prefill agent %s has the endpoint %q, want host:port", peer, endpoint)
	}
	shown, key, err := t.readTicket(ticket)
	if err != nil {
		return fmt.Errorf("tcp: prefill agent %s gave %w", peer, err)
	}
	r := &t.receiver
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return errClosed
	}
	p := r.peers[peer]
	if p == nil {
		p = &inPeer{id: peer, opens: t.cfg.First, slots: make([]inSlot, t.cfg.Streams)}
		r.peers[peer] = p
	}
	if p.endpoint != endpoint || p.ticket != shown || p.secret != key {
		p.endpoint, p.ticket, p.secret = endpoint, shown, key
		for i := range p.slots {
			p.slots[i].retryAt = time.Time{} // a failure of the previous endpoint or ticket says nothing of the new ones
		}
		p.tries = 0
	}
	r.dialMissing(p)
	return nil
}

// dialMissing starts the streams to a peer that were not started yet, or have ended. Until a
// stream is replaced, P may think that the old one lives; r.mu is held.
func (r *receiver) dialMissing(p *inPeer) {
	others := p.busy()
	for n := range p.slots[:p.opens] {
		slot := &p.slots[n]
		if slot.busy {
			continue
		}
		slot.busy = true
		r.busy++
		pause := time.Duration(0)
		if others {
			pause = time.Until(slot.retryAt)
		}
		r.t.goRun("tcp receive", func() { r.stream(p, n, pause) })
	}
}

// forgetPeer forgets a P agent: its streams are closed, and the transfers that wait for them
// are lost.
func (r *receiver) forgetPeer(peer core.AgentID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p := r.peers[peer]; p != nil {
		delete(r.peers, peer)
		p.closeAll()
	}
}

// stream dials one connection to P, after a pause, and reads it until it ends. While transfers
// wait for the stream, it also dials the connections that follow.
func (r *receiver) stream(p *inPeer, n int, pause time.Duration) {
	for r.t.pause(pause) {
		began := time.Now()
		r.mu.Lock()
		to, dismissed := *p, r.peers[p.id] != p
		r.mu.Unlock()
		cause, received := errDismissed, uint64(0)
		if !dismissed {
			received, cause = r.runStream(p, n, to.endpoint, to.ticket, to.secret)
		}
		err := fmt.Errorf("tcp stream to %s: %w: %w", to.endpoint, core.ErrConnectionLost, cause)
		if errors.Is(cause, syscall.EMFILE) || errors.Is(cause, syscall.ENFILE) {
			err = fmt.Errorf("tcp stream to %s: this process has no descriptor left (ulimit -n): %w", to.endpoint, cause)
		}
		if errors.Is(cause, errForged) {
			r.forged(p, err)
		}
		again, down, lost := r.streamEnded(p, n, !broken(cause))
		r.t.cfg.Logger.Debug("stream ended", zap.String("peer", string(p.id)), zap.Bool("again", again), zap.Error(err))
		for _, in := range lost {
			r.fail(in, err)
		}
		if down {
			r.t.sink.PeerDown(p.id, err)
		}
		if !again {
			return
		}
		pause = r.redial
		if received > 0 {
			pause = min(pause, redialSoon)
		}
		pause -= time.Since(began)
	}
}

// broken says whether an error means that the connection ended, or was never made. Any other error is the
// peer's doing: the peer does not know the ticket, or sends what no sender sends.
func broken(cause error) bool {
	var network net.Error
	var errno syscall.Errno
	return errors.Is(cause, io.EOF) || errors.Is(cause, io.ErrUnexpectedEOF) || errors.Is(cause, net.ErrClosed) ||
		errors.As(cause, &network) || errors.As(cause, &errno)
}

// streamEnded decides whether a stream is dialled again, whether the connection to P is down with
// it, and which transfers are lost. A broken connection alone loses no transfer: P still
// works on it, and goes on when the stream is open again. If P does not, the control plane
// says so. If no stream is left, and no byte has come since the last time that none was
// left, the transfers that have begun are lost. If no stream gets through at all, or P
// sends what it should not, all are lost.
func (r *receiver) streamEnded(p *inPeer, n int, hostile bool) (again, down bool, lost []*inbound) {
	r.mu.Lock()
	defer r.mu.Unlock()
	slot := &p.slots[n]
	slot.conn = nil
	if r.closed {
		r.rests(slot)
		return false, false, nil
	}
	if !p.met {
		p.tries++
	}
	reachable := (p.met || p.tries < maxTries*p.opens) && !hostile && r.peers[p.id] == p
	open := p.open()
	again = slot.wanted && reachable
	goesOn := open || p.moved
	p.moved = p.moved && open
	for _, in := range r.byID {
		switch {
		case in.peer != p || in.stuck:
		case reachable && (in.first.IsZero() || goesOn):
			again = true
		case !open:
			lost = append(lost, in)
		}
	}
	if !open && p.up {
		p.up, down = false, true
	}
	if again {
		return true, down, lost
	}
	r.rests(slot)
	if hostile && open && n == p.opens-1 && n >= r.t.cfg.First { // P refuses what it has asked for
		p.opens--
	}
	busy := p.busy()
	down = down || !busy && !p.met
	slot.retryAt = time.Now().Add(r.redial)
	if !reachable && busy {
		return false, down, nil // another stream is still open or dialled: when the last one ends, that decides on the transfers
	}
	return false, down, lost
}

// runStream dials one connection and reads it until it ends. It returns how many bytes of frames came.
func (r *receiver) runStream(p *inPeer, n int, endpoint string, ticket random, key secret) (received uint64, _ error) {
	d := net.Dialer{Timeout: r.t.cfg.DialTimeout, Control: r.t.cfg.guard(endpoint)}
	conn, err := d.DialContext(r.t.ctx, "tcp", endpoint)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	r.mu.Lock()
	if r.closed || r.peers[p.id] != p { // closed or dismissed while the stream was dialled
		r.mu.Unlock()
		return 0, errDismissed
	}
	slot := &p.slots[n]
	r.attempts++
	slot.conn, slot.attempt, slot.wanted = conn, r.attempts, false
	p.met, p.up = true, true
	attempt, before := slot.attempt, slot.received
	r.mu.Unlock()
	c := conn.(*net.TCPConn)
	r.t.tune(c)
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	s := &inStream{r: r, conn: c, raw: raw, peer: p, vec: make([]iovec, 0, maxVector)}
	defer s.rest()
	conn.SetWriteDeadline(time.Now().Add(r.t.cfg.StallTimeout))
	if key.sealed() {
		err = s.helloSealed(ticket, key, n, attempt, before)
	} else {
		_, err = conn.Write(hello(ticket, n, attempt, before))
	}
	for err == nil {
		err = s.frame()
	}
	_ = s.settle() // P hears by the next stream what has come
	r.mu.Lock()
	slot.received += s.received
	r.mu.Unlock()
	return s.received, r.t.describe(err)
}

// errTicket ends a stream that P did not accept.
var errTicket = errors.New("the prefill agent refused this stream: it does not know the stream's ticket any more, or it has too many streams; its log says which of the two")

// errDismissed ends a stream whose peer was dismissed.
var errDismissed = errors.New("the prefill agent was dismissed, or the transport is closed")
