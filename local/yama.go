// If the kernel's Yama lets one process only read this one, P names D's.

package local

import (
	"fmt"
	"sync"
	"syscall"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
)

// If Yama runs in mode 1, only a process's ancestors may read it, and one process that it has
// named to the kernel. When D has proved itself and asks, P names D's process. A process has one such
// name at a time, so all agents of this process share it.
var tracer struct {
	mu    sync.Mutex
	pid   int
	links int // how many links need that pid to be named
}

// letRead has the kernel let a peer's process read this one, for one link. If another process may read it already,
// letRead returns that one. The caller calls undo when the link has ended. letRead names the process even if it was named
// before: another part of this process may have named another one meanwhile.
func letRead(k kernel, pid int) (other int, errno syscall.Errno, undo func()) {
	tracer.mu.Lock()
	defer tracer.mu.Unlock()
	if tracer.links > 0 && tracer.pid != pid {
		return tracer.pid, syscall.EBUSY, nil
	}
	if errno := k.letRead(pid); errno != 0 {
		return 0, errno, nil
	}
	return 0, 0, counted(k, pid)
}

// alsoReads counts a further link to the process that may read this one. If no link has asked for that process, alsoReads
// does nothing and returns nil.
func alsoReads(k kernel, pid int) (undo func()) {
	tracer.mu.Lock()
	defer tracer.mu.Unlock()
	if tracer.links == 0 || tracer.pid != pid || fault.On("local-uncounted") {
		return nil
	}
	return counted(k, pid)
}

// counted adds a link; tracer.mu is held.
func counted(k kernel, pid int) (undo func()) {
	tracer.pid = pid
	tracer.links++
	return sync.OnceFunc(func() {
		tracer.mu.Lock()
		defer tracer.mu.Unlock()
		if tracer.links--; tracer.links == 0 {
			tracer.pid = 0
			_ = k.letRead(0)
		}
	})
}

// refusedRead explains why the kernel does not let D read P's memory, and what helps.
func refusedRead(k kernel, pid int, errno syscall.Errno, p place, own place) error {
	if pid == 0 {
		return core.Elsewhere.Mark(fmt.Errorf("the prefill agent's process is in a process namespace that this one does not see (%s, this process's is %s): run both containers in one, as with --pid host or shareProcessNamespace", p.pids, own.pids))
	}
	switch mode := k.yama(); {
	case errno == syscall.ESRCH:
		return core.Lost.Mark(fmt.Errorf("there is no process %d here, which the prefill agent's socket names: %w", pid, errno))
	case errno == syscall.ENOSYS:
		return core.NotPermitted.Mark(fmt.Errorf("the kernel has no process_vm_readv: %w", errno))
	case errno != syscall.EPERM && errno != syscall.EACCES:
		return fmt.Errorf("process %d has not got what the prefill agent has put there: %w", pid, errno)
	case mode == "3":
		return core.NotPermitted.Mark(fmt.Errorf("this host's kernel forbids it to all (%w): set kernel.yama.ptrace_scope to 1 or less and start the host anew", errno))
	case mode == "2":
		return core.NotPermitted.Mark(fmt.Errorf("this host's kernel lets only administrators read process %d (%w): set kernel.yama.ptrace_scope to 1 or less, or give this process CAP_SYS_PTRACE", pid, errno))
	}
	return core.NotPermitted.Mark(fmt.Errorf("the kernel does not let this process read process %d (%w): both need the same user, user namespace and capabilities (or this one CAP_SYS_PTRACE), and process %d must be dumpable, which a program with file capabilities is not", pid, errno, pid))
}

// barred adds P's verdict to the reason why D cannot read P's memory.
func barred(v verdict, value uint32, pid int, cause error) error {
	switch v {
	case verdictTaken:
		return fmt.Errorf("kernel.yama.ptrace_scope is 1, and the prefill agent's process %d lets process %d read its memory already; the kernel lets it name only one: set kernel.yama.ptrace_scope to 0: %w", pid, value, cause)
	case verdictBarred:
		return fmt.Errorf("%w (the prefill agent asked the kernel to allow it, in vain: %w)", cause, syscall.Errno(value))
	}
	return cause
}
