// A guard is a server's parent: however its starter ends, nothing of the server stays alive.

package launch

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// GuardCommand is the hidden command that runs Guard.
const GuardCommand = "__guard"

// StopGrace is how long a server may take to end after SIGTERM. reapLimit is how long its
// remains may take to vanish after SIGKILL.
const (
	StopGrace = 15 * time.Second
	reapLimit = 10 * time.Second
)

// guardLeft is a guard's exit status when something of its command is still alive.
const guardLeft = 119

// ErrLeft is Guard's error if something of its command is still alive.
var ErrLeft = errors.New("processes are left")

// Guard runs a command and ends when nothing of it is alive any more. It adopts the
// processes that the command leaves behind. The end of its input, a signal, or its
// starter's death by any means stops the command: Guard sends SIGTERM to its process
// group, and after grace SIGKILL to all that is left. It returns the command's exit
// status; if a signal ended the command, that is 128 and the signal's number. With ErrLeft
// the status is one of Guard's own.
func Guard(in io.Reader, command []string, grace time.Duration) (int, error) {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return 0, fmt.Errorf("launch: guard: %w", err)
	}
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGCHLD)
	defer signal.Stop(signals)
	stop := make(chan struct{})
	go func() { // ends with the input, at the latest with this process
		_, _ = io.Copy(io.Discard, in)
		close(stop)
	}()
	// A death signal is sent at the end of the thread that started the process.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	// Not exec.Cmd: its Wait and the wait for adopted processes would take each
	// other's children.
	p, err := os.StartProcess(command[0], command, &os.ProcAttr{
		Files: []*os.File{nil, os.Stdout, os.Stderr},
		Sys:   &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGTERM},
	})
	if err != nil {
		return 0, fmt.Errorf("launch: %s: %w", command[0], err)
	}
	code, ended := 0, false
	reap := func() (left bool) {
		for {
			var status syscall.WaitStatus
			pid, err := syscall.Wait4(-1, &status, syscall.WNOHANG, nil)
			switch {
			case errors.Is(err, syscall.EINTR):
			case err != nil || pid <= 0:
				return err == nil
			case pid == p.Pid:
				ended = true
				if code = status.ExitStatus(); status.Signaled() {
					code = 128 + int(status.Signal())
				}
			}
		}
	}
	var late <-chan time.Time
	terminate := func() {
		if late == nil {
			_ = syscall.Kill(-p.Pid, syscall.SIGTERM)
			late = time.After(grace)
		}
	}
	for expired := false; !ended && !expired; {
		select {
		case <-stop:
			stop = nil
			terminate()
		case s := <-signals:
			if s != syscall.SIGCHLD {
				terminate()
			}
		case <-late:
			expired = true
		}
		reap()
	}
	// A process that the server did not end itself gets no second chance. A process that was
	// just killed needs a moment, and may have forked before.
	for limit := time.Now().Add(reapLimit); time.Now().Before(limit); time.Sleep(10 * time.Millisecond) {
		for _, pid := range descendants(os.Getpid()) {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		if !reap() {
			return code, nil
		}
	}
	return guardLeft, fmt.Errorf("launch: %w: %s has the processes %v, which still run %v after SIGKILL", ErrLeft, command[0], descendants(os.Getpid()), reapLimit)
}

// descendants are the processes below one, as /proc has them now.
func descendants(pid int) []int {
	children := map[int][]int{}
	stats, _ := filepath.Glob("/proc/[0-9]*/stat") // the pattern is good
	for _, name := range stats {
		text, err := os.ReadFile(name)
		if err != nil {
			continue // it has ended
		}
		// The name is in parentheses and may hold anything: the parent is the
		// second field after the last one.
		_, rest, _ := cutLast(string(text), ")")
		f := strings.Fields(rest)
		child, err := strconv.Atoi(filepath.Base(filepath.Dir(name)))
		if err != nil || len(f) < 2 {
			continue
		}
		if parent, err := strconv.Atoi(f[1]); err == nil {
			children[parent] = append(children[parent], child)
		}
	}
	var all []int
	for next := []int{pid}; len(next) > 0; {
		found := children[next[0]]
		all, next = append(all, found...), append(next[1:], found...)
	}
	return all
}

func cutLast(s, sep string) (before, after string, found bool) {
	if at := strings.LastIndex(s, sep); at >= 0 {
		return s[:at], s[at+len(sep):], true
	}
	return s, "", false
}
