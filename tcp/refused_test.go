package tcp

import (
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// limit is a socket that poll(2) calls writable and that takes no bytes, as the system calls of a stream
// see it: a netlink socket that is connected to one whose queue is full. What is waited for is the
// stream's own socket.
type limit struct {
	syscall.RawConn
	fd    int
	calls atomic.Int64
}

func newLimit(t *testing.T, of syscall.RawConn) *limit {
	t.Helper()
	var fds [2]int
	var at [2]unix.Sockaddr
	for i := range fds {
		fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.NETLINK_USERSOCK)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(fd) })
		if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
			t.Fatal(err)
		}
		if at[i], err = unix.Getsockname(fd); err != nil {
			t.Fatal(err)
		}
		fds[i] = fd
	}
	if err := unix.Connect(fds[0], at[1]); err != nil {
		t.Fatal(err)
	}
	for {
		_, err := unix.Write(fds[0], make([]byte, 4096))
		if err == unix.EAGAIN {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if !polled(uintptr(fds[0]), unix.POLLOUT) {
		t.Fatal("the kernel calls it full")
	}
	return &limit{RawConn: of, fd: fds[0]}
}

func (b *limit) Write(f func(uintptr) bool) error {
	return b.RawConn.Write(func(uintptr) bool {
		b.calls.Add(1)
		return f(uintptr(b.fd))
	})
}

// TestSocketThatRefuses: a socket that has room and takes no bytes costs some system calls a second, and
// no more. The time counts as one without progress, so the stream ends.
func TestSocketThatRefuses(t *testing.T) {
	leaktest.Check(t)
	const stalled = 2 * time.Second
	slots := newFewSlots(4, 64<<10)
	p := newAgent(t, Config{StallTimeout: stalled, Mover: slots})
	c := dial(t, p)
	c.say(p.hello(t, "d", 0, 1, 0))
	st := p.stream(t, "d")
	b := newLimit(t, st.raw)
	p.sender.mu.Lock()
	st.raw = b // the stream looks at its field when it has a frame
	p.sender.mu.Unlock()
	grant := newRandom()
	p.Write(core.WriteOp{ID: "t", Peer: "d", Grant: grant[:], Pairs: p.pairs(t, allBlocks(1))})
	until(t, "the stream has ended", func() bool {
		p.sender.mu.Lock()
		defer p.sender.mu.Unlock()
		return p.sender.streams == 0
	})
	steps := int64(stalled / tenure)
	if n := b.calls.Load(); n < steps || n > 4*steps {
		t.Errorf("%d calls in %d steps", n, steps)
	}
	if taken := slots.taken.Load(); taken > 2*steps {
		t.Errorf("%d slots were taken in %d steps", taken, steps)
	}
}
