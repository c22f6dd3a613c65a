package local

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/rig/leaktest"
)

// halfwayEnv tells a test binary to be the process of one side of a meeting: "listen", or the name that it dials. It gives a copy of the
// socket to the test, which says its words and so is a child that holds the socket.
const halfwayEnv = "KVCONN_TEST_HALFWAY"

func halfway() {
	name := os.Getenv(halfwayEnv)
	if name == "" {
		return
	}
	fail := func(err error) {
		if err != nil {
			panic(err)
		}
	}
	var c *net.UnixConn
	var err error
	if name == "listen" {
		own, e := here(linux{})
		fail(e)
		own.name = newName()
		ln, e := net.ListenUnix("unix", &net.UnixAddr{Name: "@" + own.name, Net: "unix"})
		fail(e)
		fmt.Println(own.String())
		c, err = ln.AcceptUnix()
	} else {
		c, err = net.DialUnix("unix", nil, &net.UnixAddr{Name: "@" + name, Net: "unix"})
	}
	fail(err)
	f, err := c.File()
	fail(err)
	fail(unix.Sendmsg(3, []byte{0}, unix.UnixRights(int(f.Fd())), nil, 0))
	_, _ = bufio.NewReader(os.Stdin).ReadString('\n')
	os.Exit(0)
}

// half is that process.
type half struct {
	*child
	hears *os.File
}

func startHalf(t *testing.T, name string) *half {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	given := os.NewFile(uintptr(pair[1]), "given")
	h := &half{hears: os.NewFile(uintptr(pair[0]), "hears")}
	t.Cleanup(func() { h.hears.Close() })
	h.child = startChild(t, halfwayEnv+"="+name, func(c *exec.Cmd) { c.ExtraFiles = []*os.File{given} })
	given.Close()
	return h
}

// socket is the copy.
func (h *half) socket() *net.UnixConn {
	h.t.Helper()
	control := make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := unix.Recvmsg(int(h.hears.Fd()), make([]byte, 1), control, unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		h.t.Fatal(err)
	}
	fds := descriptors(control[:n])
	if len(fds) != 1 {
		h.t.Fatalf("%d descriptors came", len(fds))
	}
	f := os.NewFile(uintptr(fds[0]), "socket")
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	return c.(*net.UnixConn)
}

// between is a kernel on which the memory of one process is this one's, and that is in the test's hands at some calls.
type between struct {
	linux
	pid  int
	read func()             // before a read of that process
	lets func(pid int)      // instead of letRead
	gone func(errno *error) // may change what peer says of that process

	deaf  atomic.Bool // ended says no, for whoever waits for it
	looks atomic.Int32
	reads atomic.Int32
}

func (k *between) readv(pid int, into, from []iovec) (uint64, syscall.Errno) {
	if pid == k.pid {
		k.reads.Add(1)
		if k.read != nil {
			k.read()
		} else {
			pid = os.Getpid()
		}
	}
	return k.linux.readv(pid, into, from)
}

func (k *between) letRead(pid int) syscall.Errno {
	if k.lets != nil {
		k.lets(pid)
	}
	return 0
}

func (k *between) ended(pidfd uintptr) bool {
	if k.deaf.Load() {
		k.looks.Add(1)
		return false
	}
	return k.linux.ended(pidfd)
}

// kills ends the process unseen by those who wait for it: they have looked, and are not told again.
func (k *between) kills(t *testing.T) {
	k.deaf.Store(true)
	before := k.looks.Load()
	if err := syscall.Kill(k.pid, syscall.SIGKILL); err != nil { // nobody waits for it yet, so its end is told once
		t.Error(err)
	}
	for end := time.Now().Add(20 * time.Second); k.looks.Load() == before; time.Sleep(100 * time.Microsecond) {
		if time.Now().After(end) {
			t.Error("nobody waits for the process's end")
			break
		}
	}
	k.deaf.Store(false)
}

// meets has a decode agent dial a process that listens, on a kernel of the test's.
func meets(t *testing.T, k *between) (p *half, d *agent, c *net.UnixConn, ticket random) {
	t.Helper()
	leaktest.Check(t)
	p, ticket = startHalf(t, "listen"), newRandom()
	k.pid = p.pid
	d = start(t, "d", Config{ConnectTimeout: time.Hour}, k)
	if err := d.tr.Connect("p", p.line(), ticket[:]); err != nil {
		t.Fatal(err)
	}
	return p, d, p.socket(), ticket
}

var ready = string(verdictReady.bytes(0))

// TestPrefillEndsInMeeting: P's process ends between two words of the meeting, and another process holds the socket.
func TestPrefillEndsInMeeting(t *testing.T) {
	for name, says := range map[string]string{"before the challenge": "", "before the verdict": "+", "before the list": "+" + ready, "before the end": "+" + ready + "\x00\x00\x00\x00"} {
		t.Run(name, func(t *testing.T) {
			p, d, c, ticket := meets(t, new(between))
			if says == "" {
				_, _ = read(c, helloSize)
			} else if _, err := answers(c, ticket, func(*challenge) {}); err != nil {
				t.Fatal(err)
			}
			_, _ = c.Write([]byte(strings.TrimPrefix(says, "+")))
			p.kill()
			d.down("the peer's process has ended")
			if why := d.await("down", "").Err.Error(); strings.Contains(why, "in time") {
				t.Errorf("a dead process is said to be late: %s", why)
			}
		})
	}
}

// TestEndBehindTheProof: P's process ends when it has proved itself, and D, who waits for that, is not told. It looks before it takes the
// link.
func TestEndBehindTheProof(t *testing.T) {
	k := new(between)
	_, d, c, ticket := meets(t, k)
	if _, err := answers(c, ticket, func(*challenge) {}); err != nil {
		t.Fatal(err)
	}
	k.kills(t)
	_, _ = c.Write([]byte(ready + "\x00\x00\x00\x00" + ready))
	d.down("the peer's process has ended")
}

// TestNumberReusedInMeeting: another process has P's number when D reads what P has put there.
func TestNumberReusedInMeeting(t *testing.T) {
	k, reached, goes := new(between), make(chan struct{}), make(chan struct{})
	k.read = sync.OnceFunc(func() { close(reached); <-goes })
	p, d, c, ticket := meets(t, k)
	goOn := sync.OnceFunc(func() { close(goes) })
	t.Cleanup(goOn)
	go func() { _, _ = answers(c, ticket, func(w *challenge) { w.address = reusedMemory }) }()
	<-reached
	p.kill()
	hear, say, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer hear.Close()
	err = startAs(int32(k.pid), say, reusedEnv+"=x")
	say.Close()
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EINVAL) {
		t.Skipf("NOT RUN: this machine lets nobody choose the number of a process (root can, by clone3): %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = syscall.Kill(k.pid, syscall.SIGKILL)
		_, _ = syscall.Wait4(k.pid, nil, 0, nil)
	})
	if said, err := bufio.NewReader(hear).ReadString('\n'); err != nil || said != "ready\n" {
		t.Fatalf("the process with the number says %q, %v", said, err)
	}
	goOn()
	d.down("the peer's process has ended")
	if n := k.reads.Load(); n != 1 {
		t.Errorf("a process was read %d times that only has the number", n)
	}
}

func (k *between) peer(fd int) (pidfd int, errno syscall.Errno) {
	pidfd, errno = k.linux.peer(fd)
	if k.gone == nil || errno != 0 {
		return pidfd, errno
	}
	if cred, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil && int(cred.Pid) == k.pid {
		var says error
		k.gone(&says)
		_ = unix.Close(pidfd)
		return -1, says.(syscall.Errno)
	}
	return pidfd, errno
}

// TestNumberOfTheDead: the kernel says that the socket's process has ended. Whoever has its number now hears nothing.
func TestNumberOfTheDead(t *testing.T) {
	for _, says := range []syscall.Errno{unix.ESRCH, unix.EINVAL} {
		t.Run(says.Error(), func(t *testing.T) {
			_, d, c, _ := meets(t, &between{gone: func(errno *error) { *errno = says }})
			if b, err := read(c, 1); err == nil {
				t.Errorf("it hears %x", b)
			}
			c.Close()
			d.down("the peer's process has ended")
		})
	}
}

// met is a prefill agent to which a process has opened a socket, whose copy the test has.
func met(t *testing.T, k *between) (p *agent, d *half, c *net.UnixConn, says *observer.ObservedLogs) {
	t.Helper()
	leaktest.Check(t)
	core, says := observer.New(zap.WarnLevel)
	p = start(t, "p", Config{ConnectTimeout: time.Hour, Logger: zap.New(core)}, k)
	d = startHalf(t, p.tr.here.name)
	return p, d, d.socket(), says
}

// refusedDead waits until no meeting is under way.
func (a *agent) refusedDead(says *observer.ObservedLogs) {
	a.t.Helper()
	s := &a.tr.sender
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(100 * time.Microsecond) {
		s.mu.Lock()
		over := s.pending.Len() == 0 && s.links == 0
		for _, tk := range s.peers {
			over = over && tk.meeting == nil
		}
		s.mu.Unlock()
		if lines := says.FilterMessage("socket refused").All(); over && len(lines) > 0 {
			if why := fmt.Sprint(lines[0].ContextMap()["error"]); !strings.Contains(why, "the peer's process has ended") {
				a.t.Errorf("the reason is %q", why)
			}
			return
		}
		if time.Now().After(end) {
			a.t.Fatal("the meeting with a dead process does not end")
		}
	}
}

// TestDecodeEndsInMeeting: D's process ends between two words of the meeting, and another process holds the socket. What P has let it do
// is taken back.
func TestDecodeEndsInMeeting(t *testing.T) {
	for _, step := range []string{"before the response", "before the answer", "when it may read"} {
		t.Run(step, func(t *testing.T) {
			var mu sync.Mutex
			var let []int
			p, d, c, says := met(t, &between{lets: func(pid int) {
				mu.Lock()
				defer mu.Unlock()
				let = append(let, pid)
			}})
			ticket := random(p.ticket("d"))
			p.shares(0, whole, seals, 1)
			h := hello{ticket.name(), newRandom()}
			cl, want := response{kind: responseRead}, verdictReady
			if step == "when it may read" {
				p.tr.memories, p.tr.all = nil, nil // else there is no need
				cl, want = response{kind: responseBarred, errno: syscall.EPERM}, verdictAgain
			}
			if w := p.hail(c, h); step != "before the response" {
				if cl.kind == responseRead {
					cl.read, _ = readRandom(linux{}, os.Getpid(), w.address)
				}
				cl.prove(ticket, h, &w)
				if v := p.responds(c, &cl); v != want {
					t.Fatalf("verdict %d", v)
				}
			}
			d.kill()
			p.refusedDead(says)
			mu.Lock()
			defer mu.Unlock()
			if want == verdictAgain && fmt.Sprint(let) != fmt.Sprintf("[%d 0]", d.pid) {
				t.Errorf("the kernel was told of %v, want %d and then nobody", let, d.pid)
			}
		})
	}
}

// TestDeadIsNotLet: D's process ends while P asks the kernel to let it read. Then who has its number could read, so P takes that back at once
// and says so, also before it is told of the end.
func TestDeadIsNotLet(t *testing.T) {
	k := new(between)
	k.lets = func(pid int) {
		if pid != 0 {
			k.kills(t)
		}
	}
	p, d, c, says := met(t, k)
	k.pid = d.pid
	ticket := random(p.ticket("d"))
	h := hello{ticket.name(), newRandom()}
	w := p.hail(c, h)
	cl := response{kind: responseBarred, errno: syscall.EPERM}
	cl.prove(ticket, h, &w)
	if v := p.responds(c, &cl); v != verdictBarred {
		t.Errorf("verdict %d to a dead process", v)
		c.Close()
	}
	p.refusedDead(says)
}
