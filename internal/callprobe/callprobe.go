// Package callprobe finds out whether a filter of system calls (seccomp) would end this process for a call.
//
// Filters of containers mostly answer with an error. Others end the process: those of systemd's SystemCallFilter do, and so do
// lists of what is allowed. Which it is the kernel tells nobody but an administrator. So a child makes the call, and may die of it.
package callprobe

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// ErrEnds is of a call that would end this process.
var ErrEnds = errors.New("the process would be ended for it by SIGSYS")

// known are the answers of children. A filter stays for as long as its process lives, but others may come.
var known struct {
	sync.Mutex
	answers map[question]error
}

type question struct {
	call    uintptr
	filters string
}

// Check says whether this process survives a system call, whatever the call answers: nil, ErrEnds, or why that is not known. The call is
// one that does nothing when all of its arguments are 0. No child is made where there is no filter.
func Check(call uintptr) error {
	runtime.LockOSThread() // filters are a thread's
	defer runtime.UnlockOSThread()
	now := filters()
	if now == "" {
		return nil
	}
	known.Lock() // also for the child's sake: see ask
	defer known.Unlock()
	q := question{call, now}
	if answer, found := known.answers[q]; found {
		return answer
	}
	answer := ask(call, sharesEnd())
	if answer == nil || errors.Is(answer, ErrEnds) {
		if known.answers == nil {
			known.answers = map[question]error{}
		}
		known.answers[q] = answer
	}
	return answer
}

// filters are the kernel's words on the filters that this thread has and the first one has; "" if neither has one. Threads may
// differ: a filter may be one thread's and of those that it has started since.
func filters() string {
	var all []string
	for _, who := range []string{"self", "thread-self"} {
		status, err := os.ReadFile("/proc/" + who + "/status")
		if err != nil {
			return "unknown" // a child can be asked where there is no /proc
		}
		for line := range bytes.Lines(status) {
			if bytes.HasPrefix(line, []byte("Seccomp")) {
				all = append(all, string(bytes.Join(bytes.Fields(line), []byte(" "))))
			}
		}
	}
	if text := strings.Join(all, ", "); strings.Contains(text, "Seccomp: 1") || strings.Contains(text, "Seccomp: 2") {
		return text
	}
	return ""
}

// sharesEnd says whether this kernel ends all processes that share memory if one of them dies as a filter has it die. Those before 5.16 do.
func sharesEnd() bool {
	var u unix.Utsname
	var major, minor int
	if unix.Uname(&u) != nil {
		return true
	}
	if n, _ := fmt.Sscanf(unix.ByteSliceToString(u.Release[:]), "%d.%d", &major, &minor); n < 2 {
		return true
	}
	return major < 5 || major == 5 && minor < 16
}
