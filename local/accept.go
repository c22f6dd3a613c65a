// P takes the socket of a D agent when both have proved themselves. Anybody else's has little time.

package local

import (
	"errors"
	"fmt"
	"net"
	"syscall"
	"time"
	"unsafe"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/internal/quota"
)

// pendingConns are the accepted sockets whose peers have not proved themselves. Any process of the
// network namespace may open one. So they are few, and have little time.
type pendingConns = quota.Places[owner, *net.UnixConn]

// owner is who counts with all sockets that it opens: a process, or all processes of another user, for whom processes cost nothing. The
// processes that this one does not see, in containers of their own, are one.
type owner struct{ user, process int }

func (t *Transport) ownerOf(conn *net.UnixConn) (o owner) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return o
	}
	_ = raw.Control(func(fd uintptr) { // after an error it is closed, and nobody's
		if cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
			o.user = int(cred.Uid)
			if o.user == t.here.uid {
				o.process = int(cred.Pid)
			}
		}
	})
	return fault.Pick("local-owners-alike", o, owner{})
}

// accept takes the sockets that D agents open.
func (s *sender) accept() {
	for {
		conn, err := s.t.ln.AcceptUnix()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return
			}
			// the process is out of descriptors, most likely: the next accept may have better luck
			s.warn("accept", err)
			if !s.t.pause(100 * time.Millisecond) {
				return
			}
			continue
		}
		s.enter(conn)
	}
}

// enter gives a socket its time for a meeting. If all places are taken, the oldest of whoever has the most
// loses its place: a decode agent proves itself at once.
func (s *sender) enter(conn *net.UnixConn) {
	var victim *net.UnixConn
	of := s.t.ownerOf(conn)
	s.mu.Lock()
	closed := s.closed
	if !closed {
		victim, _ = s.pending.Add(of, conn, s.t.cfg.MaxPending)
	}
	s.mu.Unlock()
	if closed {
		_ = conn.Close()
		return
	}
	if victim != nil {
		_ = victim.Close()
	}
	s.t.goRun("local accepted", func() {
		ol, err := s.handshake(conn)
		if err != nil {
			_ = conn.Close()
			if errors.Is(err, errAsBefore) {
				s.t.cfg.Logger.Debug("socket refused", zap.Error(err))
			} else {
				s.warn("socket refused", err)
			}
			return
		}
		s.serve(ol)
	})
}

// warn logs what unauthenticated peers cause, at a bounded rate.
func (s *sender) warn(what string, err error) {
	s.lines.Do(func(note string) { s.t.cfg.Logger.Warn(what+note, zap.Error(err)) })
}

// handshake meets a D agent, and makes the socket its link.
func (s *sender) handshake(conn *net.UnixConn) (ol *outLink, err error) {
	defer func() {
		s.mu.Lock()
		s.pending.Remove(conn)
		s.mu.Unlock()
		if err != nil && errors.Is(err, net.ErrClosed) {
			err = fmt.Errorf("its place was needed for a newer one, or the transport was closed (%d may be proving themselves): %w", s.t.cfg.MaxPending, err)
		}
	}()
	_ = conn.SetDeadline(time.Now().Add(s.t.cfg.ConnectTimeout))
	b, err := read(conn, helloSize)
	if err != nil {
		return nil, fmt.Errorf("no hello came within %v: %w", s.t.cfg.ConnectTimeout, err)
	}
	h, err := parseHello(b)
	if err != nil {
		return nil, err
	}
	l, err := s.t.newLink(conn)
	if err != nil {
		s.refuse(conn, err)
		return nil, err
	}
	ol = &outLink{link: l, credit: window}
	ol.more = func(b []byte) []byte { return s.speak(ol, b) }
	ol.broke = func(err error) { s.part(ol, ol.lost(err)) }
	err = s.meet(ol, h)
	if dead := ol.lives(); dead != nil {
		err = errors.Join(dead, err)
	}
	s.met(ol)
	if err == nil {
		_ = conn.SetDeadline(time.Time{})
		err = s.enlist(ol)
	}
	if err != nil {
		ol.end()
		return nil, s.noted(ol.taker, err)
	}
	return ol, nil
}

var errAsBefore = errors.New("as before")

// noted wraps errAsBefore around the error of a meeting if the peer's last meeting had the same error.
func (s *sender) noted(tk *taker, err error) error {
	if tk == nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if tk.refused == err.Error() {
		return fmt.Errorf("%w: %w", errAsBefore, err)
	}
	tk.refused = err.Error()
	return err
}

// refuse tells D why, if the reason has a code.
func (s *sender) refuse(conn *net.UnixConn, why error) {
	var r refusal
	if errors.As(why, &r) {
		_, _ = conn.Write((&challenge{refused: r}).bytes()) // if this fails, D sees only that the socket ends
	}
}

func (s *sender) full() error {
	return fmt.Errorf("%d peers are connected, the most that this process's limit of descriptors allows", s.t.cfg.MaxLinks)
}

// meet has both sides prove themselves, as hello.go tells.
func (s *sender) meet(ol *outLink, h hello) error {
	conn := ol.conn
	s.mu.Lock()
	tk := s.byName[h.name]
	full := s.links >= s.t.cfg.MaxLinks && (tk == nil || tk.link == nil)
	s.mu.Unlock()
	switch {
	case tk == nil:
		s.refuse(conn, refusedTicket)
		return fmt.Errorf("process %d says hello with a ticket that this agent does not know", ol.pid)
	case full:
		s.refuse(conn, refusedFull)
		return s.full()
	}
	ol.taker = tk
	if !fault.On("local-unwatched-decode") {
		ol.watch(func(err error) { s.died(ol, err) })
	}
	secret := new(random)
	*secret = newRandom()
	defer held(secret)() // D's process reads it
	w := challenge{salt: newRandom(), address: uint64(uintptr(unsafe.Pointer(secret)))}
	w.prove(tk.ticket, h)
	if _, err := conn.Write(w.bytes()); err != nil {
		return err
	}
	for {
		b, err := read(conn, responseSize)
		if err != nil {
			return fmt.Errorf("process %d has not proved itself: %w", ol.pid, err)
		}
		c := parseResponse(b)
		v, value, why := s.judge(ol, &c, h, &w, *secret)
		if _, err := conn.Write(v.bytes(value)); err != nil {
			return errors.Join(why, err)
		}
		if why != nil {
			return why
		}
		if v == verdictReady {
			if c.kind == responseRead && ol.unread == nil {
				ol.unread = alsoReads(s.t.kernel, ol.pid)
			}
			if err := s.admit(ol); err != nil {
				return err
			}
			return s.offerMemories(ol, c.kind == responseRead)
		}
	}
}

// admit takes the socket of a D agent that has proved itself out of the pending ones, so that no other takes its place while the
// agent opens memories. An agent keeps one such socket, the newest.
func (s *sender) admit(ol *outLink) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	tk := ol.taker
	if s.closed || s.peers[tk.id] != tk {
		return errDismissed
	}
	if tk.meeting != nil {
		_ = tk.meeting.Close()
	}
	tk.meeting = ol.conn
	if !fault.On("local-proved-pending") {
		s.pending.Remove(ol.conn)
	}
	return nil
}

// met notes that a D agent's meeting on this socket has ended.
func (s *sender) met(ol *outLink) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if tk := ol.taker; tk != nil && tk.meeting == ol.conn {
		tk.meeting = nil
	}
}

// judge answers a response. An error ends the meeting.
func (s *sender) judge(ol *outLink, c *response, h hello, w *challenge, secret random) (v verdict, value uint32, why error) {
	asked := ol.unread != nil
	switch {
	case !fault.On("local-unproved-decode") && !c.proof.equals(c.proofOf(ol.taker.ticket, h, w)):
		return verdictWrong, 0, fmt.Errorf("process %d names a ticket of this agent, and does not prove that it has the ticket", ol.pid)
	case c.kind == responseRead && (c.read.equals(secret) || fault.On("local-unread")):
		return verdictReady, 0, nil
	case c.kind != responseRead && s.t.all.lacks(s.t.layout, false) == nil:
		return verdictReady, 0, nil
	case c.kind == responseBarred && !asked && ol.pid > 0:
		other, errno, undo := letRead(s.t.kernel, ol.pid)
		switch {
		case other != 0:
			return verdictTaken, uint32(other), fmt.Errorf("process %d asks to read this process's memory, and process %d may do that already: the kernel lets only one (kernel.yama.ptrace_scope is 1; 0 lets both)", ol.pid, other)
		case errno != 0:
			return verdictBarred, uint32(errno), fmt.Errorf("decode agent %s cannot read this process's memory: %w", ol.taker.id, c.errno)
		}
		if err := ol.lives(); err != nil && !fault.On("local-let-the-dead") { // another process may have the number that was let read
			undo()
			return verdictBarred, uint32(syscall.ESRCH), err
		}
		ol.unread = undo
		return verdictAgain, 0, nil
	case c.kind == responseBarred || c.kind == responseGiveUp:
		return verdictBarred, uint32(syscall.EPERM), fmt.Errorf("decode agent %s cannot read this process's memory: %w", ol.taker.id, c.errno)
	}
	return verdictWrong, 0, fmt.Errorf("process %d has not read what this agent has put there", ol.pid)
}

// enlist makes a link its peer's. A previous one is over, whether this side saw its end or not.
func (s *sender) enlist(ol *outLink) error {
	tk := ol.taker
	s.mu.Lock()
	if s.closed || s.peers[tk.id] != tk {
		s.mu.Unlock()
		return errDismissed
	}
	old := tk.link
	if old == nil && s.links >= s.t.cfg.MaxLinks { // others met this agent meanwhile
		s.mu.Unlock()
		return s.full()
	}
	tk.link, tk.refused = ol, ""
	s.links++
	for _, out := range tk.byGrant {
		if out.link == nil {
			out.wait.stop()
			out.wait, out.link = nil, ol
			ol.enqueue(out)
		}
	}
	s.mu.Unlock()
	if old != nil {
		s.part(old, old.lost(errReplaced))
	}
	return nil
}

var (
	errDismissed = errors.New("the peer was dismissed, or the transport is closed")
	errReplaced  = errors.New("the decode agent has connected anew")
)
