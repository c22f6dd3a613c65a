package local

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// reusedEnv tells a test binary which of two processes to be: a prefill agent ("p"), or the process that gets the prefill agent's number
// after its end ("x").
const reusedEnv = "KVCONN_TEST_REUSED"

// Where both have their memory, and its validity page. Nothing else of a Go program lies there, with the race detector or without.
const (
	reusedMemory   = 0x4000_0000_0000
	reusedValidity = 0x4100_0000_0000
)

// reusing is each of the two. Its memory has its letter in each byte.
func reusing() {
	role := os.Getenv(reusedEnv)
	if role == "" {
		return
	}
	fixed := func(address uintptr, size int) []byte {
		at, err := unix.MmapPtr(-1, 0, *(*unsafe.Pointer)(unsafe.Pointer(&address)), uintptr(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_FIXED_NOREPLACE)
		if err != nil {
			panic(err)
		}
		mem := unsafe.Slice((*byte)(at), size)
		for i := range mem {
			mem[i] = role[0]
		}
		return mem
	}
	fixed(reusedMemory, whole)
	area := &pageArea{mem: fixed(reusedValidity, os.Getpagesize())}
	if role == "x" {
		fmt.Println("ready")
		select {}
	}
	l, err := twoRegions(reusedMemory)
	if err != nil {
		panic(err)
	}
	tr, err := New(Config{Listen: true}, l, deafSink{})
	if err != nil {
		panic(err)
	}
	tr.validity.areas, tr.validity.free = []*pageArea{area}, []*validityPage{{address: reusedValidity, area: area}}
	ticket, err := tr.Admit("d")
	if err != nil {
		panic(err)
	}
	fmt.Printf("%s\n%x\n", tr.Endpoint(), ticket)
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		if in.Text() == "child" {
			child, _ := heir()
			fmt.Println(child)
			continue
		}
		var grant []byte
		fmt.Sscanf(in.Text(), "%x", &grant)
		_, pairs := (&agent{}).all()
		tr.Write(core.WriteOp{ID: "t", Peer: "d", Grant: grant, Pairs: pairs})
	}
}

// startAs starts this test binary anew as the process with a number that nobody has. What it prints goes to out.
//
//go:norace
func startAs(pid int32, out *os.File, env ...string) error {
	path, err := syscall.BytePtrFromString("/proc/self/exe")
	if err != nil {
		return err
	}
	envp, err := syscall.SlicePtrFromStrings(append(os.Environ(), env...))
	if err != nil {
		return err
	}
	argv := []*byte{path, nil}
	number := &pid
	args := &[11]uint64{4: uint64(unix.SIGCHLD), 8: uint64(uintptr(unsafe.Pointer(number))), 9: 1} // struct clone_args: exit_signal, set_tid, set_tid_size
	defer held(number)()
	to := out.Fd()
	syscall.ForkLock.Lock()
	defer syscall.ForkLock.Unlock()
	got, _, errno := syscall.RawSyscall(unix.SYS_CLONE3, uintptr(unsafe.Pointer(args)), unsafe.Sizeof(*args), 0)
	if errno == 0 && got == 0 { // the child has this one thread, and calls nothing of Go's runtime
		syscall.RawSyscall(unix.SYS_PRCTL, unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0)
		syscall.RawSyscall(unix.SYS_DUP3, to, 1, 0)
		syscall.RawSyscall(unix.SYS_EXECVE, uintptr(unsafe.Pointer(path)), uintptr(unsafe.Pointer(&argv[0])), uintptr(unsafe.Pointer(&envp[0])))
		for {
			syscall.RawSyscall(unix.SYS_EXIT_GROUP, 1, 0, 0)
		}
	}
	runtime.KeepAlive(envp)
	if errno != 0 {
		return errno
	}
	return nil
}

// holdsBack is a kernel that counts the reads of a process, and holds the first one of its blocks back.
type holdsBack struct {
	linux
	pid     int
	reads   atomic.Int32
	reached chan struct{}
	goes    chan struct{}
}

func (k *holdsBack) readv(pid int, into, from []iovec) (uint64, syscall.Errno) {
	if pid != k.pid {
		return k.linux.readv(pid, into, from)
	}
	k.reads.Add(1)
	if blocks := from[min(1, len(from)-1)].base; blocks >= reusedMemory && blocks < reusedMemory+whole { // the page comes before them
		close(k.reached) // there is one such read
		<-k.goes
	}
	return k.linux.readv(pid, into, from)
}

// TestPidReused: P has ended, and another process has its number and memory at its addresses when D copies. What D has read there is
// never reported, and D reads no more of it, though it is asked to meet P again.
func TestPidReused(t *testing.T) {
	for name, c := range map[string]struct {
		child bool // of P's, which holds its sockets open
		deaf  bool // D's kernel does not tell it of the ends of processes
	}{
		"D hears of the socket's end, or of the process's": {},
		"D hears of the process's end alone":               {child: true},
		"D hears of neither":                               {child: true, deaf: true},
	} {
		t.Run(name, func(t *testing.T) { reuses(t, c.child, c.deaf) })
	}
}

func reuses(t *testing.T, child, deaf bool) {
	leaktest.Check(t)
	p := startChild(t, reusedEnv+"=p")
	endpoint, ticket := p.met()
	k := &holdsBack{pid: p.pid, reached: make(chan struct{}), goes: make(chan struct{})}
	d := start(t, "d", Config{BatchBytes: 2 * whole, Workers: 1, StallTimeout: time.Minute}, k)
	goes := sync.OnceFunc(func() { close(k.goes) })
	t.Cleanup(goes)
	d.tr.receiver.redial = 0
	if err := d.tr.Connect("p", endpoint, ticket); err != nil {
		t.Fatal(err)
	}
	if err := d.tr.Usable(t.Context(), "p"); err != nil {
		t.Fatal(err)
	}
	d.tr.receiver.mu.Lock()
	src := d.tr.receiver.sources["p"]
	d.tr.receiver.mu.Unlock()
	if child {
		var pid int
		p.told("child")
		fmt.Sscan(p.line(), &pid)
		defer func() { _ = syscall.Kill(pid, syscall.SIGKILL) }()
	}
	if deaf {
		if src.link.life == nil {
			t.Fatal("this kernel has no pidfds")
		}
		_ = src.link.life.Close() // the watch ends without a word
	}
	p.told(fmt.Sprintf("%x", d.expect("t", "p")))
	<-k.reached
	p.kill()
	x := int32(k.pid)
	hear, say, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer hear.Close()
	err = startAs(x, say, reusedEnv+"=x")
	say.Close()
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EINVAL) {
		t.Skipf("NOT RUN: this machine lets nobody choose the number of a process (root can, by clone3): %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = syscall.Kill(int(x), syscall.SIGKILL)
		_, _ = syscall.Wait4(int(x), nil, 0, nil)
	})
	if said, err := bufio.NewReader(hear).ReadString('\n'); err != nil || said != "ready\n" {
		t.Fatalf("the process with the number of the prefill process says %q, %v", said, err)
	}
	if !deaf {
		d.until(func() bool { src.link.mu.Lock(); defer src.link.mu.Unlock(); return src.link.err != nil })
	}
	goes()
	if deaf {
		d.copied("t", whole) // all has come, and the page is not P's
		d.tr.Revoke("t")
		if all := d.sink.All("received", ""); len(all) != 0 {
			t.Errorf("another process's memory was reported: %+v", all)
		}
		src.leave(errReplaced)
		d.down("connected anew")
	} else {
		if o := d.sink.Wait("received", "t", 1); !errors.Is(o.Err, core.ErrConnectionLost) {
			t.Errorf("received with %v", o.Err)
		}
		var says []string // which of two ends it hears of first is chance
		if child {
			says = []string{"the peer's process has ended"}
		}
		d.down(says...)
	}
	if !slices.Equal(d.mem, []byte(strings.Repeat("x", whole))) {
		t.Fatal("the process with the number was not read: the test shows nothing")
	}
	before := k.reads.Load()
	if err := d.tr.Usable(t.Context(), "p"); err == nil { // it tries again
		t.Error("a prefill agent that has ended is usable")
	}
	if d.refused() == src {
		t.Error("it has not tried again")
	}
	e := start(t, "e", Config{}, k) // by the same kernel
	if err := e.tr.Connect("p", endpoint, ticket); err != nil {
		t.Fatal(err)
	}
	e.down()
	if n := k.reads.Load(); n != before {
		t.Errorf("the process with the number was read %d times more", n-before)
	}
}
