// P writes a frame out of the transfer's blocks. If the transfer is given up, the rest of the frame has a bound.

package tcp

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"github.com/kvconn/kvconn/internal/fault"
)

// stopGrace is how long a frame of a transfer that was given up may stay without progress.
// Its source is read until it is written whole, or its stream ends, and an engine may wait
// for that. So stopBound bounds the whole for a D that takes a few bytes now and then.
const (
	stopGrace = 500 * time.Millisecond
	stopBound = time.Second
)

var errGivenUp = errors.New("the transfer was given up")

var errStuck = errors.New("a transfer was given up, and the decode agent does not take the rest of its frame")

// write sends a frame whole. With an error it says how many bytes were written.
func (s *sender) write(st *outStream, out *outbound, length uint64) (sent uint64, err error) {
	w := frameWriter{s: s, st: st, out: out, idle: stall{bound: s.t.cfg.StallTimeout}}
	defer func() { sent = w.sealed(sent) }()
	if s.t.devices.mover != nil && out != nil {
		return w.writeStaged(length)
	}
	if err := w.seal(length); err != nil {
		return 0, err
	}
	return w.write(st.vec, length, time.Time{})
}

// frameWriter writes parts of a frame to its stream.
type frameWriter struct {
	s    *sender
	st   *outStream
	out  *outbound
	idle stall
	// A socket that poll(2) calls writable has refused all bytes, as it may where the host is short of
	// memory for sockets.
	refused bool

	sealing *sealing // nil: the stream is plain
}

// errSlow: the peer has not taken all bytes in time.
var errSlow = errors.New("the decode agent is slow")

// send writes bytes; each step must make progress within the bound. Each step looks
// whether the transfer was given up meanwhile. What the peer has not taken until then is given
// back: errSlow. One system call is made in any case. The zero time is never.
func (w *frameWriter) send(vec []iovec, length uint64, until time.Time) (sent uint64, _ error) {
	left := length
	for left > 0 {
		waits := until.IsZero() || time.Now().Before(until)
		n, errno, err := w.attempt(waits, func(fd uintptr) (uintptr, syscall.Errno) { return w.st.put(fd, vec) })
		switch {
		case err != nil:
			return length - left, err
		case errno == syscall.EFAULT:
			return length - left, w.s.t.fault(vec, false)
		case errno != 0 && errno != syscall.EAGAIN:
			return length - left, fmt.Errorf("writev: %w", errno)
		case errno == syscall.EAGAIN:
			w.refused = !waits
		case errno == 0:
			w.idle.since, w.refused = 0, false
			vec = drop(vec, n)
			left -= uint64(n)
		}
		if left == 0 {
			break
		}
		if err := w.givenUp(); err != nil {
			return length - left, err
		}
		if !waits {
			return length - left, errSlow
		}
	}
	return length, nil
}

// attempt makes a system call until it need not wait, for one step of the bound: then the
// answer is EAGAIN. Unless it waits, the call is made once.
func (w *frameWriter) attempt(waits bool, call func(fd uintptr) (uintptr, syscall.Errno)) (n uintptr, errno syscall.Errno, err error) {
	w.st.conn.SetWriteDeadline(time.Now().Add(min(w.idle.next(), w.rest())))
	err = w.st.raw.Write(func(fd uintptr) bool {
		n, errno = call(fd)
		return errno != syscall.EAGAIN || !waits
	})
	if err != nil && w.idle.goesOn(err) {
		return 0, syscall.EAGAIN, nil
	}
	return n, errno, err
}

// givenUp says whether the frame must end because its transfer was given up.
func (w *frameWriter) givenUp() error {
	if w.idle.since >= stopGrace && w.stops() || w.rest() <= 0 {
		return fmt.Errorf("%w: %w", errStuck, os.ErrDeadlineExceeded)
	}
	return nil
}

// stops says whether the transfer was given up.
func (w *frameWriter) stops() bool { return w.out != nil && w.out.over.Load() }

// rest is how much longer a frame that has begun may take if its transfer is given up now, or was.
func (w *frameWriter) rest() time.Duration {
	if !w.stops() || fault.On("tcp-stop-unbound") {
		return w.s.stop
	}
	return w.s.stop - time.Since(w.out.ended)
}

// put is one writev out of the transfer's blocks, without a wait. On D, land is its
// counterpart.
func (st *outStream) put(fd uintptr, vec []iovec) (uintptr, syscall.Errno) {
	return vectored(syscall.SYS_WRITEV, fd, vec)
}
