// What this package asks of the kernel about other processes and their memory, and whether it may ask at all.

package local

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/callprobe"
	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/kv"
)

// iovec is the kernel's struct iovec. The memory belongs to the host process or to a peer, not
// to Go's heap, so its address is kept as a number.
type iovec struct {
	base uintptr
	len  uintptr
}

// kernel is what this package asks of the operating system about other processes' memory.
type kernel interface {
	// readv copies from the memory of a process into this one's, in the order of the vectors. It
	// says how many bytes came.
	readv(pid int, into, from []iovec) (uint64, syscall.Errno)
	// letRead lets a process read this one's memory where Yama demands that; 0: nobody.
	letRead(pid int) syscall.Errno
	// yama is the mode of /proc/sys/kernel/yama/ptrace_scope, "" if there is none.
	yama() string
	// user is whose this process is.
	user() int
	// peer is a pidfd of the process at the other end of a unix socket; -1 and an error: the kernel gives none. ENOPROTOOPT: it is older
	// than 6.5; ESRCH or EINVAL: the process has ended.
	peer(fd int) (pidfd int, errno syscall.Errno)
	// ended says whether the process of a pidfd has.
	ended(pidfd uintptr) bool
	// survives says whether a filter of system calls lets this process live if it makes a call. nil: it does. Else the error says why it
	// does not, or why nobody knows.
	survives(call uintptr) error
}

type linux struct{}

func (linux) readv(pid int, into, from []iovec) (uint64, syscall.Errno) {
	for {
		n, _, errno := syscall.Syscall6(unix.SYS_PROCESS_VM_READV, uintptr(pid), uintptr(unsafe.Pointer(&into[0])), uintptr(len(into)),
			uintptr(unsafe.Pointer(&from[0])), uintptr(len(from)), 0)
		if errno != syscall.EINTR {
			return uint64(n), errno
		}
	}
}

func (linux) letRead(pid int) syscall.Errno {
	_, _, errno := syscall.Syscall6(unix.SYS_PRCTL, unix.PR_SET_PTRACER, uintptr(pid), 0, 0, 0, 0)
	return errno
}

func (linux) yama() string {
	b, err := os.ReadFile("/proc/sys/kernel/yama/ptrace_scope")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

func (linux) user() int { return os.Geteuid() }

func (linux) peer(fd int) (int, syscall.Errno) {
	pidfd, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PEERPIDFD)
	if err != nil {
		errno, _ := err.(syscall.Errno)
		return -1, errno
	}
	return pidfd, 0
}

func (linux) ended(pidfd uintptr) bool {
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, 0)
	return n > 0 && err == nil
}

func (linux) survives(call uintptr) error { return callprobe.Check(call) }

// unreading is the kernel of a process that must not call process_vm_readv: it refuses in the kernel's place.
type unreading struct{ kernel }

func (unreading) readv(int, []iovec, []iovec) (uint64, syscall.Errno) { return 0, syscall.EPERM }

// held keeps memory at its address until release is called. This process gives the kernel that address as a number, and memory
// that is not held may lie on a goroutine's stack, which moves.
func held(p any) (release func()) {
	pin := new(runtime.Pinner)
	pin.Pin(p)
	return pin.Unpin
}

// readRandom reads a random value out of a process.
func readRandom(k kernel, pid int, address uint64) (t random, errno syscall.Errno) {
	p := new(random)
	defer held(p)()
	n, errno := k.readv(pid, []iovec{{uintptr(unsafe.Pointer(p)), uintptr(len(p))}}, []iovec{{uintptr(address), uintptr(len(p))}})
	if errno == 0 && n != uint64(len(p)) {
		errno = syscall.EFAULT
	}
	return *p, errno
}

// reading says whether this process may call process_vm_readv at all, and gives the kernel that it is to ask. The call is tried only
// where it does not end the process.
func reading(k kernel) (kernel, error) {
	err := k.survives(unix.SYS_PROCESS_VM_READV)
	switch {
	case err == nil || fault.On("local-unprobed"):
	case errors.Is(err, callprobe.ErrEnds):
		return unreading{k}, blinded(err)
	default:
		return unreading{k}, core.NotPermitted.Mark(fmt.Errorf("local: this process is under a filter of system calls, and does not call process_vm_readv: %w", err))
	}
	if errno := mayRead(k); errno != 0 {
		return k, blinded(errno)
	}
	return k, nil
}

// mayRead reads this process: on itself it always may, unless a filter of system calls is in its way.
func mayRead(k kernel) syscall.Errno {
	own := newRandom()
	at := new(random)
	*at = own
	defer held(at)()
	got, errno := readRandom(k, os.Getpid(), uint64(uintptr(unsafe.Pointer(at))))
	if errno == 0 && got != own {
		errno = syscall.EFAULT
	}
	return errno
}

// readable returns an error that names a region which no other process could read, so that each transfer would fail. The kernel
// does not copy memory that consists of a driver's pages, as some drivers' pinned memory does, though this process itself can read it.
func (t *Transport) readable() error {
	if t.blind != nil {
		return nil // the reason is told where it counts
	}
	for i := range t.layout.Regions {
		r := &t.layout.Regions[i]
		if r.Memory != kv.HostMemory {
			continue
		}
		for _, at := range []uint64{r.Base, r.Base + r.Extent() - 1} {
			if space, _ := t.all.at(at); space != processMemory {
				continue
			}
			if errno := readByte(t.kernel, at); errno != 0 {
				return fmt.Errorf("region %q cannot be read out of this process (process_vm_readv at %#x: %w): its memory is a driver's, or is not mapped; take tcp, or memory that kvconn has allocated", r.Name, at, errno)
			}
		}
	}
	return nil
}

// readByte reads a byte of this process by process_vm_readv, as another process would.
func readByte(k kernel, address uint64) syscall.Errno {
	into := new([1]byte)
	defer held(into)()
	_, errno := k.readv(os.Getpid(), []iovec{{uintptr(unsafe.Pointer(into)), 1}}, []iovec{{uintptr(address), 1}})
	return errno
}
