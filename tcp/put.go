package tcp

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"
)

// stopGrace is how long a frame of a transfer that was given up may stay without progress.
// Its source is read until it is written whole, or its stream ends, and an engine may wait
// for that. So stopBound bounds the whole for a D that takes a few bytes now and then.
const (
	stopGrace = 500 * time.Millisecond
	stopBound = 2 * time.Second
)

var errStuck = errors.New("a transfer was given up, and the decode agent does not take the rest of its frame")

// write sends a frame whole. With an error it says how many bytes were written.
func (s *sender) write(st *outStream, out *outbound, length uint64) (sent uint64, err error) {
	w := frameWriter{s: s, st: st, out: out, idle: stall{bound: s.t.cfg.StallTimeout}}
	if s.t.devices.mover == nil || out == nil {
		return w.write(st.vec, length)
	}
	st.source.begins(s.t, func() bool { return out.over.Load() }, st.vec)
	defer func() {
		if !st.source.end() {
			err = fmt.Errorf("%w: %w", ErrMayCopy, err)
		}
	}()
	for {
		p, err := st.source.next()
		if p == nil || err != nil {
			return sent, err
		}
		n, err := w.write(p.vec, p.bytes)
		sent += n
		if err != nil {
			return sent, err
		}
		st.source.written()
	}
}

// frameWriter writes parts of a frame to its stream.
type frameWriter struct {
	s    *sender
	st   *outStream
	out  *outbound
	idle stall
	over time.Time // when the transfer was given up
}

// write writes a part; each step must make progress within the bound. Each step looks
// whether the transfer was given up meanwhile.
func (w *frameWriter) write(vec []iovec, length uint64) (sent uint64, _ error) {
	s, st, out, left := w.s, w.st, w.out, length
	for left > 0 {
		st.conn.SetWriteDeadline(w.idle.deadline())
		var n uintptr
		var errno syscall.Errno
		err := st.raw.Write(func(fd uintptr) bool {
			n, errno = st.put(fd, vec)
			return errno != syscall.EAGAIN
		})
		switch {
		case err != nil && w.idle.goesOn(err):
		case err != nil:
			return length - left, err
		case errno == syscall.EFAULT:
			return length - left, s.t.fault(vec, false)
		case errno != 0:
			return length - left, fmt.Errorf("writev: %w", errno)
		default:
			w.idle.since = 0
			vec = drop(vec, n)
			left -= uint64(n)
		}
		if left > 0 && out != nil && out.over.Load() {
			if w.over.IsZero() {
				w.over = time.Now()
			}
			if w.idle.since >= stopGrace || time.Since(w.over) >= stopBound {
				return length - left, fmt.Errorf("%w: %w", errStuck, os.ErrDeadlineExceeded)
			}
		}
	}
	return length, nil
}

// put is one writev out of the transfer's blocks, without a wait. On D, land is its
// counterpart.
func (st *outStream) put(fd uintptr, vec []iovec) (uintptr, syscall.Errno) {
	return vectored(syscall.SYS_WRITEV, fd, vec)
}
