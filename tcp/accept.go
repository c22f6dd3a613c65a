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
	"golang.org/x/sys/unix"
)

// strangers are the accepted connections that have shown no ticket yet: anyone
// may open one, so they are few, have little time, and rarely fill a log line.
type strangers struct {
	conns  []*net.TCPConn // oldest first
	logAt  time.Time      // not before
	silent int            // refused since the last line
}

// maxPeerStreams bounds what one ticket opens: twice the most that an agent is
// configured with, since it may know of broken ones before this side does.
const maxPeerStreams = 128

// errUnwanted refuses a stream so that its peer does not try again.
var errUnwanted = errors.New("refused")

// accept takes D agents' streams.
func (s *sender) accept() {
	for {
		conn, err := s.t.ln.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return
			}
			// Out of descriptors, most likely: the next one may have better luck.
			s.warn("accept", zap.Error(err))
			select {
			case <-s.t.ctx.Done():
				return
			case <-time.After(100 * time.Millisecond):
			}
			continue
		}
		s.enter(conn.(*net.TCPConn))
	}
}

// enter gives a connection its time for a hello. The place that it needs may be
// the oldest stranger's: a decode agent says hello at once.
func (s *sender) enter(conn *net.TCPConn) {
	var oldest *net.TCPConn
	s.mu.Lock()
	closed := s.closed
	if !closed {
		s.strangers.conns = append(s.strangers.conns, conn)
		if len(s.strangers.conns) > s.t.cfg.MaxGreeting {
			oldest = s.strangers.conns[0]
			s.strangers.conns = slices.Delete(s.strangers.conns, 0, 1)
		}
	}
	s.mu.Unlock()
	if closed {
		conn.Close()
		return
	}
	if oldest != nil {
		oldest.Close()
	}
	s.t.goRun("tcp accepted", func() {
		defer conn.Close()
		st, err := s.greet(conn)
		if err != nil {
			if errors.Is(err, errUnwanted) {
				var b [headerSize]byte
				(&header{kind: frameLeave}).encode(&b)
				conn.SetWriteDeadline(time.Now().Add(s.t.cfg.DialTimeout))
				_, _ = conn.Write(b[:]) // it learns the end of the connection anyhow
			}
			s.warn("stream refused", zap.Stringer("from", conn.RemoteAddr()), zap.Error(err))
			return
		}
		s.serve(st)
	})
}

// left says whether the peer has closed a connection of which nothing is unread:
// a stream that came late must not take a part of the next transfer.
func left(raw syscall.RawConn) bool {
	closed := false
	_ = raw.Control(func(fd uintptr) {
		var b [1]byte
		n, _, err := unix.Recvfrom(int(fd), b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
		closed = n == 0 && err == nil
	})
	return closed
}

// greet reads the hello and makes the connection a stream of its peer's link.
func (s *sender) greet(conn *net.TCPConn) (*outStream, error) {
	s.t.tune(conn)
	conn.SetReadDeadline(time.Now().Add(s.t.cfg.DialTimeout))
	h, err := readHeader(conn)
	conn.SetReadDeadline(time.Time{})
	raw, rawErr := conn.SyscallConn()

	s.mu.Lock()
	defer s.mu.Unlock()
	s.strangers.conns = slices.DeleteFunc(s.strangers.conns, func(c *net.TCPConn) bool { return c == conn })
	l := s.byTicket[h.key]
	switch {
	case s.closed:
		return nil, errClosed
	case err != nil:
		return nil, fmt.Errorf("no hello within %v, or until its place was needed (%d): %w", s.t.cfg.DialTimeout, s.t.cfg.MaxGreeting, err)
	case h.kind != frameHello:
		return nil, fmt.Errorf("it begins with a frame of kind %d, want a hello", h.kind)
	case l == nil:
		return nil, fmt.Errorf("%w: its ticket is none of this agent's: the peer must say hello", errUnwanted)
	case rawErr != nil:
		return nil, rawErr
	case left(raw):
		return nil, errors.New("the peer has closed it already")
	case s.streams >= s.t.cfg.MaxStreams:
		return nil, fmt.Errorf("%w: %d streams are open, the most that this process's limit of descriptors allows", errUnwanted, s.streams)
	case len(l.streams) >= maxPeerStreams:
		return nil, fmt.Errorf("%w: decode agent %s has %d streams already", errUnwanted, l.peer, len(l.streams))
	}
	s.streams++
	st := &outStream{conn: conn, raw: raw, link: l, vec: make([]iovec, 0, maxVector)}
	l.streams[st] = true
	for _, out := range l.queue {
		s.stopWaiting(out)
	}
	return st, nil
}

// warn logs what strangers cause, one line a second: they must not fill the log.
func (s *sender) warn(what string, fields ...zap.Field) {
	now := time.Now()
	s.mu.Lock()
	if s.closed || now.Before(s.strangers.logAt) {
		s.strangers.silent++
		s.mu.Unlock()
		return
	}
	silent := s.strangers.silent
	s.strangers.logAt, s.strangers.silent = now.Add(time.Second), 0
	s.mu.Unlock()
	s.t.cfg.Logger.Warn(what, append(fields, zap.Int("not_logged", silent))...)
}

func readHeader(conn net.Conn) (h header, err error) {
	var b [headerSize]byte
	if _, err = io.ReadFull(conn, b[:]); err != nil {
		return h, err
	}
	return h, h.decode(&b)
}
