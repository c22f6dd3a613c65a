package tcp

import (
	"errors"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/rig/leaktest"
)

// halfStream is a stream of D's at P that no goroutine serves, and D's end of it.
func (a *agent) halfStream(t *testing.T) (st *outStream, far *net.TCPConn) {
	t.Helper()
	return a.halfStreamOf(t, 0)
}

// halfStreamOf is a halfStream of a number.
func (a *agent) halfStreamOf(t *testing.T, number int) (st *outStream, far *net.TCPConn) {
	t.Helper()
	ln, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	if far, err = net.DialTCP("tcp", nil, ln.Addr().(*net.TCPAddr)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { far.Close() })
	conn, err := ln.AcceptTCP()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	raw, err := conn.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	a.admit(t, "d")
	s := &a.sender
	st = &outStream{conn: conn, raw: raw, peer: s.peers["d"], number: number, outFrame: newOutFrame(), next: &outFrame{}}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.addStream(st, 1)
	return st, far
}

// TestCauseOfAnEnd: the kernel tells one of a stream's two goroutines why it has given up the connection. The loss has that
// cause also if the other goroutine, which learns only of an end, is first.
func TestCauseOfAnEnd(t *testing.T) {
	for _, vague := range []error{io.EOF, syscall.EPIPE} {
		leaktest.Check(t)
		p := newAgent(t, Config{StallTimeout: time.Minute})
		p.sender.late = bound
		st, far := p.halfStream(t)
		far.SetLinger(0)
		far.Close() // at once, by a reset
		until(t, "the kernel has closed the connection", st.closed)
		var cause int
		told := func(fd uintptr) { cause, _ = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR) }
		if err := st.raw.Control(told); err != nil || cause == 0 {
			t.Fatalf("the kernel has told nobody the cause: %v", err)
		}
		first := make(chan struct{})
		go func() {
			defer close(first)
			p.sender.streamEnded(st, vague)
		}()
		time.Sleep(step / 10) // else it may come second, which proves nothing
		p.sender.streamEnded(st, syscall.ETIMEDOUT)
		<-first
		if all := p.sink.All("down", ""); len(all) != 1 || !strings.Contains(all[0].Err.Error(), "no progress for 1m0s") {
			t.Errorf("%v came first: %+v", vague, all)
		}
	}
}

// TestEndWithoutACause: what nobody will say is not waited for: D has closed the stream, or P has, and D then.
func TestEndWithoutACause(t *testing.T) {
	leaktest.Check(t)
	p := newAgent(t, Config{})
	st, far := p.halfStream(t)
	far.CloseWrite()
	if _, err := st.conn.Read(make([]byte, 1)); !errors.Is(err, io.EOF) || p.sender.causeAwaited(st, err) {
		t.Errorf("D has closed its end: %v", err)
	}
	st.shut = true
	st.conn.CloseWrite()
	until(t, "both have closed it", st.closed)
	if p.sender.causeAwaited(st, io.EOF) {
		t.Error("P has closed its end, and D has")
	}
	st.shut = false
	if !p.sender.causeAwaited(st, io.EOF) || p.sender.causeAwaited(st, syscall.ETIMEDOUT) {
		t.Error("P has closed nothing: an end has a cause, and a cause is one")
	}
	p.sender.streamEnded(st, syscall.ETIMEDOUT)
}
