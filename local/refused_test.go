package local

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/callfilter"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/shmem"
)

// stern is a kernel that, when it is shut, lets only him read whom Yama was told of. It is sterner
// than any: it refuses also a process that reads itself.
type stern struct {
	linux
	mode  string
	errno syscall.Errno // of a read that is refused
	deaf  syscall.Errno // of letRead

	mu    sync.Mutex
	shut  bool
	lets  int // the process that may read
	calls []int
}

func (k *stern) readv(pid int, into, from []iovec) (uint64, syscall.Errno) {
	k.mu.Lock()
	may := !k.shut || k.lets == os.Getpid()
	k.mu.Unlock()
	if !may {
		return 0, k.errno
	}
	return k.linux.readv(pid, into, from)
}

func (k *stern) letRead(pid int) syscall.Errno {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.calls = append(k.calls, pid)
	if k.deaf == 0 {
		k.lets = pid
	}
	return k.deaf
}

func (k *stern) yama() string { return k.mode }

func (k *stern) shuts() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.shut = true
}

// unmetAgents are agents that have not met, under a kernel that is shut.
func unmetAgents(t *testing.T, k *stern) (p, d *agent) {
	t.Helper()
	leaktest.Check(t)
	p, d = start(t, "p", Config{}, k), start(t, "d", Config{}, k)
	k.shuts()
	return p, d
}

// TestYama: P lets just the process read that has proved itself and asks, while their link lives.
func TestYama(t *testing.T) {
	k := &stern{mode: "1", errno: syscall.EPERM}
	p, d := unmetAgents(t, k)
	d.connect(p)
	moves(t, "t", p, d)
	e := start(t, "e", Config{}, &stern{mode: "1", errno: syscall.EPERM})
	e.tr.kernel = k
	e.connect(p) // of the same process, so the kernel need not be told again
	moves(t, "u", p, e)
	if err := d.tr.Close(); err != nil {
		t.Error(err)
	}
	p.down("closed the socket")
	moves(t, "v", p, e) // whose leave does not end with that link
	for _, a := range []*agent{e, p} {
		if err := a.tr.Close(); err != nil {
			t.Error(err)
		}
	}
	if want := []int{os.Getpid(), 0}; !slices.Equal(k.calls, want) {
		t.Errorf("the kernel was told of %v, want %v", k.calls, want)
	}
}

// TestYamaReset: another part of P's process has named somebody else to the kernel. D is let read again when it comes
// anew, though another link of its process's counts as let.
func TestYamaReset(t *testing.T) {
	k := &stern{mode: "1", errno: syscall.EPERM}
	p, d := unmetAgents(t, k)
	d.connect(p)
	moves(t, "t", p, d)
	e := start(t, "e", Config{}, &stern{})
	e.tr.kernel = k
	_ = k.letRead(1)
	e.connect(p)
	moves(t, "u", p, e)
}

// TestYamaOfTwo: the kernel has room for one process, and a second one hears so.
func TestYamaOfTwo(t *testing.T) {
	k := &stern{mode: "1", errno: syscall.EPERM}
	p, d := unmetAgents(t, k)
	other, errno, undo := letRead(k, 1)
	if other != 0 || errno != 0 {
		t.Fatal(other, errno)
	}
	k.lets = 0
	d.connect(p)
	d.down("process 1 read its memory already", "set kernel.yama.ptrace_scope to 0")
	if p.sink.All("down", "") != nil {
		t.Error("the prefill agent was told of a peer that it has not met")
	}
	undo()
	undo() // is one
	d.connect(p)
	moves(t, "t", p, d)
}

// TestRefusals: each refusal of the kernel has a reason with a remedy.
func TestRefusals(t *testing.T) {
	for name, c := range map[string]struct {
		k    *stern
		why  core.Why
		says []string
	}{
		"no yama":       {&stern{errno: syscall.EPERM}, core.NotPermitted, []string{"CAP_SYS_PTRACE", "user namespace", "dumpable"}},
		"yama 0":        {&stern{errno: syscall.EPERM, mode: "0"}, core.NotPermitted, []string{"CAP_SYS_PTRACE"}},
		"yama 2":        {&stern{errno: syscall.EPERM, mode: "2"}, core.NotPermitted, []string{"only administrators", "ptrace_scope to 1"}},
		"yama 3":        {&stern{errno: syscall.EPERM, mode: "3"}, core.NotPermitted, []string{"forbids it to all", "start the host anew"}},
		"yama in vain":  {&stern{errno: syscall.EPERM, mode: "1", deaf: syscall.EINVAL}, core.NotPermitted, []string{"in vain", "invalid argument"}},
		"no such call":  {&stern{errno: syscall.ENOSYS}, core.NotPermitted, []string{"has no process_vm_readv"}},
		"no such pid":   {&stern{errno: syscall.ESRCH}, core.Lost, []string{"there is no process"}},
		"another error": {&stern{errno: syscall.EFAULT}, core.Setup, []string{"has not got what"}},
	} {
		t.Run(name, func(t *testing.T) {
			p, d := unmetAgents(t, c.k)
			d.connect(p)
			d.down(c.says...)
			if err := d.tr.Usable(t.Context(), "p"); core.WhyOf(err) != c.why {
				t.Errorf("%v is %q, want %q", err, core.WhyOf(err), c.why)
			}
		})
	}
}

// TestOtherPidNamespace: a socket's process may be one that this namespace does not show.
func TestOtherPidNamespace(t *testing.T) {
	err := refusedRead(linux{}, 0, syscall.ESRCH, place{pids: "5"}, place{pids: "6"})
	wants(t, err, "does not see", "5", "6", "--pid host")
	if why := core.WhyOf(err); why != core.Elsewhere {
		t.Errorf("%v is %q", err, why)
	}
}

// TestRefusedLater: if the kernel refuses in the middle, both sides end what is under way.
func TestRefusedLater(t *testing.T) {
	for _, errno := range []syscall.Errno{syscall.EPERM, syscall.ESRCH} {
		t.Run(errno.Error(), func(t *testing.T) {
			k := &stern{errno: errno}
			p, d := two(t, k)
			moves(t, "before", p, d)
			k.shuts()
			p.write("t", "d", d.expect("t", "p"))
			if o := d.sink.Wait("received", "t", 1); !errors.Is(o.Err, core.ErrConnectionLost) {
				t.Errorf("received with %v", o.Err)
			}
			if o := p.sink.Wait("written", "t", 1); !errors.Is(o.Err, core.ErrConnectionLost) {
				t.Errorf("written with %v", o.Err)
			}
			d.down("process")
			p.down("closed the socket")
		})
	}
}

// filterEnv tells a test binary to live under a filter of system calls, and what that does.
const filterEnv = "KVCONN_TEST_FILTER"

// TestFilter: where a filter forbids process_vm_readv, D gets only what P's memories have, and says so. Also a filter that would
// end the process does not.
func TestFilter(t *testing.T) {
	for name := range callfilter.Actions {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second) // a process that has lost a thread may stand
			defer cancel()
			c := exec.CommandContext(ctx, "/proc/self/exe")
			c.Env = append(os.Environ(), filterEnv+"="+name)
			if out, err := c.CombinedOutput(); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}

// underFilter is TestFilter's process.
func underFilter() {
	action := os.Getenv(filterEnv)
	if action == "" {
		return
	}
	fail := func(args ...any) {
		fmt.Println(args...)
		os.Exit(1)
	}
	fd, err := unix.MemfdCreate("kvconn-test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		fail(err)
	}
	if err := unix.Ftruncate(fd, 4096); err != nil {
		fail(err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
		fail(err)
	}
	l, err := kv.NewLayout([]kv.Region{{Name: "k", Base: 4096, BlockStride: 4096, BlockBytes: 4096, NumBlocks: 1}})
	if err != nil {
		fail(err)
	}
	if err := callfilter.NoPeerPidfd(); err != nil {
		fail(err)
	}
	if err := callfilter.Install(callfilter.Actions[action], unix.SYS_PROCESS_VM_READV, unix.SYS_PIDFD_OPEN, unix.SYS_MEMFD_CREATE); err != nil {
		fail(err)
	}
	if r := Inspect(); r.Available || !strings.Contains(r.Problem, "a filter of system calls forbids it") {
		fail("inspected:", r)
	}
	if _, err := shmem.Alloc(4096); err == nil || !strings.Contains(err.Error(), "memfd_create") {
		fail("memory is allocated:", err)
	}
	d, err := New(Config{}, l, deafSink{})
	if err != nil {
		fail("an agent that only receives:", err)
	}
	shared := memory{space: 1, kind: memoryFile, base: 4096, size: 4096, handle: make([]byte, 8), open: func() (*os.File, error) {
		copied, err := unix.Dup(fd)
		return os.NewFile(uintptr(copied), "memory"), err
	}}
	for id, list := range map[core.AgentID][]memory{"its process": nil, "its memory": {shared}} {
		p, err := New(Config{Listen: true}, l, deafSink{})
		if err != nil {
			fail("an agent that sends:", err)
		}
		if p.memories = list; list != nil {
			p.all, _ = spacesOf(list)
		}
		ticket, err := p.Admit("d")
		if err == nil {
			err = d.Connect(id, p.Endpoint(), ticket)
		}
		if err != nil {
			fail("connect:", err)
		}
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		err = d.Usable(ctx, id)
		if list == nil && (err == nil || !contains(err, "a filter of system calls forbids it") || contains(err, "SIGSYS") == (action == "refuse")) || list != nil && err != nil {
			fail(id, "is read:", err)
		}
	}
	os.Exit(0)
}
