// A peer's socket may outlive the peer's process, in a child, and another process may then have the process's number. So each link
// has a handle on the process itself (a pidfd), from before the two prove themselves to the link's end.

package local

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/internal/fault"
)

// givesPeers says whether the kernel gives pidfds of peers. It asks for that of this process.
func givesPeers(k kernel) bool {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer unix.Close(pair[0])
	defer unix.Close(pair[1])
	pidfd, errno := k.peer(pair[0])
	if errno == 0 {
		_ = unix.Close(pidfd)
	}
	return errno == 0
}

// openPidfd is for kernels before 6.5, whose sockets have none.
func openPidfd(k kernel, pid int) (int, error) {
	if err := k.survives(unix.SYS_PIDFD_OPEN); err != nil && !fault.On("local-unprobed-pidfd") {
		return -1, err
	}
	return unix.PidfdOpen(pid, 0)
}

func (l *link) dead() error { return fmt.Errorf("%w (process %d)", errDead, l.pid) }

// lives returns an error if the peer's process has ended: another process may have its number by now.
func (l *link) lives() (err error) {
	if l.life == nil || fault.On("local-unlooked-end") {
		return nil
	}
	raw, err := l.life.SyscallConn()
	if err == nil {
		e := raw.Control(func(pidfd uintptr) {
			if l.t.kernel.ended(pidfd) {
				err = l.dead()
			}
		})
		err = errors.Join(err, e)
	}
	return err
}

// watch waits for the end of the peer's process. The socket's end does not show this end: a child that
// the process has forked may hold the socket open for ever.
func (l *link) watch(ended func(error)) {
	if l.life == nil {
		return
	}
	l.t.goRun("local watch", func() {
		raw, err := l.life.SyscallConn()
		if err != nil {
			return
		}
		err = raw.Read(l.t.kernel.ended)
		if err == nil {
			ended(l.dead())
		}
	})
}
