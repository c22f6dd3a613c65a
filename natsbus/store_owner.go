package natsbus

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/internal/callprobe"
	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/internal/hostenv"
)

// silentFor is how long the owner of a store may say nothing before it counts as ended, where only its word tells. It says that it lives each
// hour at least (sweepAtMost), and hosts' clocks differ.
const silentFor = 24 * time.Hour

// storeOwner is the process that has made a store, as the lock's file names it.
type storeOwner struct {
	Boot       string `json:"boot"`       // its host's boot id; "" if that is not known
	Namespaces string `json:"namespaces"` // in which its number and its start time are so; "" if that is not known
	PID        int    `json:"pid"`
	Start      uint64 `json:"start"` // in clock ticks, as /proc has it
}

// thisOwner is this process.
func thisOwner() storeOwner {
	o := storeOwner{Boot: thisHost(), PID: os.Getpid()}
	st, err := readProcess(o.PID)
	// A /proc of another PID namespace has another process under this one's number.
	if self, e := os.Readlink("/proc/self"); errors.Join(err, e) == nil && self == strconv.Itoa(o.PID) {
		o.Namespaces, o.Start = namespaces(), st.start
	}
	return o
}

// thisHost is the boot id: each start of each host has another one.
func thisHost() string {
	boot, _ := hostenv.BootID()
	return boot
}

// namespaces are the numbers of this process's PID and time namespaces. While a process lives no others have the numbers of its own.
func namespaces() string {
	var pids, times unix.Stat_t
	if unix.Stat("/proc/self/ns/pid", &pids) != nil {
		return ""
	}
	_ = unix.Stat("/proc/self/ns/time", &times) // the kernel may be older than these
	return fmt.Sprint(pids.Ino, " ", times.Ino)
}

// readOwner reads a lock's file. It fails for what no kvconn of this version has written.
func readOwner(lock *os.File) (o storeOwner, err error) {
	text := make([]byte, 512)
	n, err := lock.ReadAt(text, 0) // it does not wait, whatever kind of file lies there
	if err != io.EOF {
		return o, fmt.Errorf("the lock's file is too long, or unreadable: %w", err)
	}
	return o, json.Unmarshal(text[:n], &o)
}

// ended says whether the process has ended for certain. held: a process of this host holds its lock.
//
// The kernel ends a process's lock when the process ends, unless the process has forked: then its child has the lock too, and may outlive
// it. So if the lock is held, the process itself is looked for. And if hosts, or sandboxes, do not share locks, a lock may be free here
// although a process of another host holds it. Such a process says at times that it lives (store.touch). One from before this host was
// started anew looks like one of another host, and says nothing any more.
func (o *storeOwner) ended(lock *os.File, held bool) bool {
	switch {
	case (o.Boot == "" || o.Boot != thisHost()) && !fault.On("bus-sweeps-other-hosts"):
		st, err := lock.Stat()
		return err == nil && !held && time.Since(st.ModTime()) > silentFor && !fault.On("bus-keeps-restarted")
	case !held:
		return true
	}
	return o.gone() || fault.On("bus-sweeps-living")
}

// gone says whether a process of this host is not there any more.
func (o *storeOwner) gone() bool {
	if here := thisOwner(); o.Namespaces == "" || o.Namespaces != here.Namespaces || o.PID <= 0 || fault.On("bus-believes-heirs") {
		return false
	}
	// /proc may hide a process that lives.
	if callprobe.Check(unix.SYS_KILL) == nil && errors.Is(unix.Kill(o.PID, 0), unix.ESRCH) {
		return true
	}
	p, err := readProcess(o.PID)
	return err == nil && (p.zombie && !fault.On("bus-zombies-live") || p.start != o.Start && !fault.On("bus-number-alone"))
}

// process is what /proc/PID/stat says of a process.
type process struct {
	zombie bool   // it has ended, and nobody has waited for it
	start  uint64 // in clock ticks after the host's
}

func readProcess(pid int) (p process, err error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return p, err
	}
	// The second field, the name in parentheses, may hold anything.
	fields := bytes.Fields(text[bytes.LastIndexByte(text, ')')+1:])
	if len(fields) < 20 {
		return p, fmt.Errorf("/proc/%d/stat holds %q", pid, text)
	}
	// A process whose first thread has ended before the others looks the same, but has several threads.
	p.zombie = string(fields[0]) == "Z" && (string(fields[17]) == "1" || fault.On("bus-first-thread-alone"))
	p.start, err = strconv.ParseUint(string(fields[19]), 10, 64)
	return p, err
}
