// P takes a stream once its hello has proved the ticket of an admitted D. Any other connection has little time.

package tcp

import (
	"context"
	"crypto/hmac"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"syscall"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/internal/quota"
)

// pendingConns are the accepted connections that have shown no ticket yet. Anyone may open
// such a connection. So they are few, have little time, and rarely fill a log line.
type pendingConns struct {
	conns     quota.Places[netip.Prefix, *net.TCPConn] // by address
	logAt     time.Time                                // not before
	notLogged int                                      // refused since the last line
}

// errUnwanted refuses a stream so that its peer does not try again.
var errUnwanted = errors.New("refused")

// accept takes the streams that D agents open.
func (s *sender) accept() {
	for {
		conn, err := s.t.ln.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return
			}
			// the process is out of descriptors, most likely: the next accept may have better luck
			s.warn("accept", zap.Error(err))
			if !s.t.pause(100 * time.Millisecond) {
				return
			}
			continue
		}
		s.addPending(conn.(*net.TCPConn))
	}
}

// addPending gives a connection its time for a hello. If all places are taken, the oldest pending connection of the address that has the
// most loses its place: a decode agent says hello at once.
func (s *sender) addPending(conn *net.TCPConn) {
	var victim *net.TCPConn
	from := fault.Pick("stream-pending-alike", quota.AddressOf(conn.RemoteAddr()), netip.Prefix{})
	s.mu.Lock()
	closed := s.closed
	if !closed {
		victim, _ = s.pending.conns.Add(from, conn, s.t.cfg.MaxUnauthenticated)
	}
	s.mu.Unlock()
	if closed {
		conn.Close()
		return
	}
	if victim != nil {
		victim.Close()
	}
	s.t.goRun("tcp accepted", func() {
		defer conn.Close()
		st, err := s.authenticate(conn)
		if err != nil {
			if errors.Is(err, errUnwanted) {
				var b [headerSize]byte
				(&header{kind: frameLeave}).encode(&b)
				conn.SetWriteDeadline(time.Now().Add(s.t.cfg.DialTimeout))
				_, _ = conn.Write(b[:]) // if this fails, the peer learns the same by the end of the connection
			}
			s.warn("stream refused", zap.Stringer("from", conn.RemoteAddr()), zap.Error(err))
			return
		}
		s.serve(st)
	})
}

// closedByPeer says whether the peer has closed a connection and nothing of it is left to read. P asks
// this since a stream that came late must not take a part of the next transfer.
func closedByPeer(raw syscall.RawConn) bool {
	closed := false
	_ = raw.Control(func(fd uintptr) {
		var b [1]byte
		n, _, err := unix.Recvfrom(int(fd), b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
		closed = n == 0 && err == nil
	})
	return closed
}

// authenticate reads the hello and makes the connection one of its peer's streams. The previous
// stream of the same number is over, whether this side saw its end or not.
func (s *sender) authenticate(conn *net.TCPConn) (*outStream, error) {
	s.t.tune(conn)
	conn.SetReadDeadline(time.Now().Add(s.t.cfg.DialTimeout))
	h, proof, err := readHello(conn)
	conn.SetReadDeadline(time.Time{})
	raw, rawErr := conn.SyscallConn()

	s.mu.Lock()
	defer s.mu.Unlock()
	s.pending.conns.Remove(conn)
	p := s.byTicket[h.key]
	number, attempt := h.stream()
	switch {
	case s.closed:
		return nil, errClosed
	case err != nil:
		return nil, fmt.Errorf("no hello came within %v, or before a newer stream needed the place (%d may wait for their hello): %w", s.t.cfg.DialTimeout, s.t.cfg.MaxUnauthenticated, err)
	case h.kind != frameHello && h.kind != frameSealedHello:
		return nil, fmt.Errorf("it begins with a frame of kind %d, want a hello", h.kind)
	case p == nil:
		return nil, fmt.Errorf("%w: this agent does not know the stream's ticket: the peer must say hello first", errUnwanted)
	case !proof.verify(p.ticket, p.secret) && !fault.On("stream-unproved"):
		return nil, errors.New("it names a ticket of this agent, but does not prove that it has the ticket")
	case proof.sealed != p.secret.sealed() && !fault.On("stream-in-the-clear"):
		return nil, errors.New("its hello is of another kind than its ticket: a stream must be encrypted on both sides, or on none")
	case rawErr != nil:
		return nil, rawErr
	case closedByPeer(raw):
		return nil, errors.New("the peer has closed it already")
	case attempt <= p.slots[number].attempt && !fault.On("stream-attempt-again"):
		return nil, fmt.Errorf("attempt %[3]d to open stream %[1]d of decode agent %[2]s comes late: attempt %[4]d was accepted before", number, p.id, attempt, p.slots[number].attempt)
	case s.streams >= s.t.cfg.MaxStreams && p.slots[number].stream == nil && !s.evict(p, quota.AddressOf(conn.RemoteAddr())):
		return nil, fmt.Errorf("%w: %d streams are open, the most that this process's limit of descriptors allows", errUnwanted, s.streams)
	}
	st := &outStream{conn: conn, raw: raw, peer: p, from: quota.AddressOf(conn.RemoteAddr()), number: number, offset: h.position, outFrame: newOutFrame(), next: &outFrame{}}
	if proof.sealed {
		if err := st.acceptSealed(&proof); err != nil {
			return nil, err
		}
	}
	s.addStream(st, attempt)
	return st, nil
}

// warn logs the errors that unauthenticated peers cause, one line a second: they must not fill the
// log.
func (s *sender) warn(what string, fields ...zap.Field) {
	now := time.Now()
	s.mu.Lock()
	if s.closed || now.Before(s.pending.logAt) {
		s.pending.notLogged++
		s.mu.Unlock()
		return
	}
	notLogged := s.pending.notLogged
	s.pending.logAt, s.pending.notLogged = now.Add(time.Second), 0
	s.mu.Unlock()
	s.t.cfg.Logger.Warn(what, append(fields, zap.Int("not_logged", notLogged))...)
}

// addStream puts a stream into the slot of its number; s.mu is held.
func (s *sender) addStream(st *outStream, attempt uint64) {
	p := st.peer
	slot := &p.slots[st.number]
	if old := slot.stream; old != nil {
		old.shutDown()
		old.abort()
		s.discount(old)
		s.t.cfg.Logger.Debug("stream replaced", zap.String("peer", string(p.id)), zap.Int("number", st.number))
	}
	st.life, st.end = context.WithCancel(s.t.ctx)
	s.count(st)
	slot.attempt, slot.stream = attempt, st
	p.tuner.opened(len(p.usable()))
	for _, out := range p.byGrant {
		s.resume(out, st.number, st.offset)
		if out.rests() {
			st.rested = append(st.rested, out.grant)
		}
	}
	p.wake.Broadcast()
}

// helloProof is the proof that follows a hello.
type helloProof struct {
	of     [headerSize]byte
	sealed bool
	salt   random // only after the hello of a sealed stream
	got    random
}

func (p *helloProof) verify(ticket random, key secret) bool {
	want := p.want(ticket, key)
	return hmac.Equal(p.got[:], want[:])
}

func (p *helloProof) want(ticket random, key secret) random {
	if p.sealed {
		return random(key).derive("sealed hello", slices.Concat(p.of[:], p.salt[:], ticket[:]))
	}
	return ticket.proof(&p.of)
}

// readHello reads a stream's first frame. If the frame is a hello, readHello also reads the proof.
func readHello(conn net.Conn) (h header, p helloProof, err error) {
	if _, err = io.ReadFull(conn, p.of[:]); err == nil {
		err = h.decode(&p.of)
	}
	p.sealed = h.kind == frameSealedHello
	if err == nil && p.sealed {
		_, err = io.ReadFull(conn, p.salt[:])
	}
	if err == nil && (p.sealed || h.kind == frameHello) {
		_, err = io.ReadFull(conn, p.got[:])
	}
	return h, p, err
}

func readHeader(conn net.Conn) (h header, err error) {
	var b [headerSize]byte
	if _, err = io.ReadFull(conn, b[:]); err != nil {
		return h, err
	}
	return h, h.decode(&b)
}
