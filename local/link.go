package local

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/internal/safe"
)

// link is a socket between two agents that have met. Frames are queued on it and written by
// whoever comes first, mostly at once; if the socket is full, by a goroutine.
type link struct {
	t    *Transport
	conn *net.UnixConn
	raw  syscall.RawConn
	pid  int      // of the peer, as the kernel says; 0: it is in a process namespace that this one does not see
	life *os.File // becomes readable when the peer's process ends; nil: the kernel has no such thing, or does not let this process have it
	in   *bufio.Reader
	// more, if set, appends frames that are made only when they are written.
	more func(b []byte) []byte
	// broke is called with the error of a write, on a goroutine.
	broke func(err error)

	mu      sync.Mutex
	queue   []byte
	writing bool
	again   bool  // there may be more to write since the writer looked
	err     error // why this side ends the link
}

const (
	mostQueued  = 1 << 20 // bytes for a peer that reads nothing
	writeAtOnce = 64 << 10
	inlineTurns = 4 // so long an engine's thread writes for others
	readBuffer  = 4 << 10
	step        = 250 * time.Millisecond // if this process was stopped, that counts as one step
)

var (
	errFlood = errors.New("the peer reads none of its answers")
	errDead  = core.Lost.Mark(errors.New("the peer's process has ended"))
)

// newLink makes a link of a fresh socket. Its peer is not proven yet. With an error the socket stays
// the caller's.
func (t *Transport) newLink(conn *net.UnixConn) (*link, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, err
	}
	l := &link{t: t, conn: conn, raw: raw, in: bufio.NewReaderSize(conn, readBuffer)}
	var cred *unix.Ucred
	var pidfd int
	var ungiven syscall.Errno
	if e := raw.Control(func(fd uintptr) {
		cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
		pidfd, ungiven = t.kernel.peer(int(fd))
	}); e != nil {
		return nil, e
	}
	if err != nil {
		return nil, fmt.Errorf("the kernel does not say whose the socket is: %w", err)
	}
	l.pid = int(cred.Pid)
	switch {
	case ungiven == 0:
	case (ungiven == unix.ESRCH || ungiven == unix.EINVAL) && givesPeers(t.kernel) && !fault.On("local-number-alone"):
		return nil, l.dead() // and another process may have its number
	case l.pid > 0:
		var e error
		if pidfd, e = openPidfd(t.kernel, l.pid); e == unix.ESRCH {
			return nil, l.dead()
		}
	}
	if pidfd >= 0 && t.kernel.ended(uintptr(pidfd)) { // a child of its may hold the socket
		_ = unix.Close(pidfd)
		return nil, l.dead()
	}
	if pidfd >= 0 {
		_ = unix.SetNonblock(pidfd, true)
		l.life = os.NewFile(uintptr(pidfd), "the peer's process")
	}
	if int(cred.Uid) != t.here.uid && !fault.On("local-any-user") {
		if l.life != nil {
			_ = l.life.Close()
		}
		return nil, core.NotPermitted.Mark(fmt.Errorf("%w: it has user id %d, this process %d", refusedUser, cred.Uid, t.here.uid))
	}
	return l, nil
}

// close also ends a socket that a child of this process holds, which was forked and did not exec.
func (l *link) close() {
	_ = l.conn.CloseRead()
	_ = l.conn.CloseWrite()
	_ = l.conn.Close()
	if l.life != nil {
		_ = l.life.Close()
	}
}

// fail notes why this side ends the link; the first cause counts. Nothing is written any more.
func (l *link) fail(err error) (first bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return false
	}
	l.err, l.queue = err, nil
	return true
}

// ends is the cause for which the link ends: fail's, or else this one.
func (l *link) ends(err error) error {
	l.fail(err)
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}

// closed says whether an error means that the peer has closed its end, or that its process has
// ended.
func closed(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}

// clearer says what an error of a socket means here.
func clearer(err error) error {
	if closed(err) {
		return errors.New("the peer has closed the socket")
	}
	return err
}

// say queues frames. flush must follow, when no lock is held that more needs.
func (l *link) say(frames ...[]byte) {
	l.mu.Lock()
	var flood bool
	for _, f := range frames {
		if l.err == nil {
			l.queue = append(l.queue, f...)
		}
	}
	if flood = len(l.queue) > mostQueued; flood {
		l.queue = nil
	}
	l.mu.Unlock()
	if flood {
		l.spawn("local flood", func() { l.broke(errFlood) })
	}
}

// spawn starts a goroutine unless the link ends. Until then its reader runs, which Close waits for.
func (l *link) spawn(name string, f func()) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return false
	}
	l.t.goRun(name, f)
	return true
}

// flush writes what is queued, unless somebody does that already.
func (l *link) flush() {
	l.mu.Lock()
	l.again = true
	busy := l.writing || l.err != nil
	l.writing = l.writing || !busy
	l.mu.Unlock()
	if busy {
		return
	}
	for range inlineTurns {
		b, ended := l.next()
		if ended {
			return
		}
		n, err := l.try(b)
		if err != nil || n < len(b) {
			l.behind(b[n:])
			return
		}
	}
	l.behind(nil)
}

// behind has a goroutine go on.
func (l *link) behind(rest []byte) {
	l.spawn("local write", func() {
		for {
			if err := l.write(rest); err != nil {
				l.broke(err)
				return
			}
			var ended bool
			if rest, ended = l.next(); ended {
				return
			}
		}
	})
}

// next is what is to be written next. If there is nothing, or the link ends, the writer has ended.
func (l *link) next() (b []byte, ended bool) {
	for {
		l.mu.Lock()
		if l.err != nil {
			l.writing = false
			l.mu.Unlock()
			return nil, true
		}
		b, l.queue, l.again = l.queue, nil, false
		l.mu.Unlock()
		if l.more != nil && len(b) < writeAtOnce {
			b = l.more(b)
		}
		if len(b) > 0 {
			return b, false
		}
		l.mu.Lock()
		if !l.again {
			l.writing = false
			l.mu.Unlock()
			return nil, true
		}
		l.mu.Unlock()
	}
}

// try writes what the socket takes at once.
func (l *link) try(b []byte) (n int, err error) {
	if e := l.raw.Write(func(fd uintptr) bool {
		n, err = send(fd, b)
		return true
	}); e != nil {
		err = e
	}
	return max(n, 0), err
}

func send(fd uintptr, b []byte) (int, error) {
	for {
		n, err := unix.SendmsgN(int(fd), b, nil, nil, unix.MSG_NOSIGNAL|unix.MSG_DONTWAIT)
		if err != unix.EINTR {
			return n, err
		}
	}
}

// write writes all, and waits for a peer that reads slowly.
func (l *link) write(b []byte) error {
	still := time.Duration(0)
	defer l.conn.SetWriteDeadline(time.Time{}) // try must not find a deadline that is over
	for len(b) > 0 {
		l.conn.SetWriteDeadline(time.Now().Add(step))
		var n int
		var err error
		e := l.raw.Write(func(fd uintptr) bool {
			n, err = send(fd, b)
			return err != unix.EAGAIN
		})
		switch {
		case errors.Is(e, os.ErrDeadlineExceeded):
			if still += step; still >= l.t.cfg.StallTimeout {
				return fmt.Errorf("the peer has read nothing for %v", still)
			}
			continue
		case e != nil:
			return e
		case err != nil:
			return err
		}
		b, still = b[n:], 0
	}
	return nil
}

// serve hands on each frame until the link ends, or handle refuses one.
func (l *link) serve(handle func(h header, body []byte) error) error {
	var head [headerSize]byte
	var body []byte
	for {
		if _, err := io.ReadFull(l.in, head[:]); err != nil {
			return err
		}
		h := parseHeader(head[:])
		if err := h.check(); err != nil {
			return err
		}
		if int(h.length) > cap(body) {
			body = make([]byte, h.length)
		}
		body = body[:h.length]
		if _, err := io.ReadFull(l.in, body); err != nil {
			return err
		}
		if err := handle(h, body); err != nil {
			return err
		}
	}
}

// delayed is something that happens after a time, unless it is stopped before.
type delayed struct {
	mu    sync.Mutex
	timer *time.Timer
	left  time.Duration
	over  bool
	done  func()
}

// after calls f in so long, in steps. It is called under a lock under which the transport is
// not closed, so that Close waits for it.
func (t *Transport) after(d time.Duration, name string, f func()) *delayed {
	t.wg.Add(1)
	w := &delayed{left: d, done: t.wg.Done}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.timer = time.AfterFunc(min(step, d), func() {
		defer safe.Recover(name)
		w.mu.Lock()
		if w.over {
			w.mu.Unlock()
			return
		}
		if w.left -= step; w.left > 0 {
			w.timer.Reset(min(step, w.left))
			w.mu.Unlock()
			return
		}
		w.over = true
		w.mu.Unlock()
		defer w.done()
		f()
	})
	return w
}

// stop ends the wait. It may be called on a nil *delayed, and again.
func (w *delayed) stop() {
	if w == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.over {
		w.over = true
		w.timer.Stop()
		w.done()
	}
}
