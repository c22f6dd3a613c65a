// Package callfilter has a test's process live under a filter of system calls, as containers do.
package callfilter

import (
	"fmt"
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// What the kernel does about a call.
const (
	Refuse     uint32 = unix.SECCOMP_RET_ERRNO | uint32(syscall.EPERM)
	Trap       uint32 = unix.SECCOMP_RET_TRAP // SIGSYS, for which Go's runtime ends the process
	KillThread uint32 = unix.SECCOMP_RET_KILL_THREAD
	Kill       uint32 = unix.SECCOMP_RET_KILL_PROCESS
)

// Actions are these by name.
var Actions = map[string]uint32{"refuse": Refuse, "trap": Trap, "kill thread": KillThread, "kill": Kill}

// Install has the kernel do so about calls of this process, for as long as it lives and whichever thread calls.
func Install(action uint32, calls ...uint32) error {
	filter := []unix.SockFilter{load(callNumber)}
	for i, call := range calls {
		filter = append(filter, unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: call, Jt: uint8(len(calls) - i)})
	}
	return install(append(filter, answer(unix.SECCOMP_RET_ALLOW), answer(action)))
}

// NoPeerPidfd has this process live as under a kernel before 6.5, whose sockets have no pidfd of their peer.
func NoPeerPidfd() error {
	return install([]unix.SockFilter{
		load(callNumber),
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_GETSOCKOPT, Jf: 3},
		load(thirdArgument),
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SO_PEERPIDFD, Jf: 1},
		answer(unix.SECCOMP_RET_ERRNO | uint32(syscall.ENOPROTOOPT)),
		answer(unix.SECCOMP_RET_ALLOW),
	})
}

// Where struct seccomp_data has them.
const (
	callNumber    = 0
	thirdArgument = 32
)

func load(at uint32) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: at}
}

func answer(action uint32) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: action}
}

func install(filter []unix.SockFilter) error {
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	runtime.LockOSThread() // for both calls
	defer runtime.UnlockOSThread()
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("PR_SET_NO_NEW_PRIVS: %w", err)
	}
	if _, _, errno := syscall.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&program))); errno != 0 {
		return fmt.Errorf("a filter of system calls: %w", errno)
	}
	return nil
}
