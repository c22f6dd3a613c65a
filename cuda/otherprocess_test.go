package cuda

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvconn/kvconn/rig/testdouble/engine"
)

// P is another process in these tests: this program again, which does what it is asked over a socket.

// order is what P is asked, and told what it says.
type order struct {
	Do      string
	Device  int
	Addr    uintptr
	Bytes   int
	Pattern uint64
	Count   string
}

type told struct {
	Err         string
	Addr        uintptr
	N           uint64
	Process     Process
	Allocations []Allocation
}

const peerSocket = 3 // of P

// other is P, as D sees it.
type other struct {
	t    *testing.T
	c    *exec.Cmd
	conn *net.UnixConn
	says bytes.Buffer
	turn sync.Mutex // of who asks

	killed bool
}

// start starts P, which has an engine on a device, until the test ends.
func start(t *testing.T, device int, env ...string) *other {
	t.Helper()
	engine.Library(t)
	ends, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_SEQPACKET|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	theirs := os.NewFile(uintptr(ends[1]), "P's end")
	o := &other{t: t, c: exec.Command(os.Args[0], "-test.run", "^TestOtherProcess$", "-test.timeout", "120s"), conn: unixConn(t, ends[0])}
	o.c.Env = append(append(os.Environ(), inside+"=P", "GORACE=atexit_sleep_ms=0"), env...) // the race detector ends a process a second late
	o.c.ExtraFiles = []*os.File{theirs}
	o.c.Stdout, o.c.Stderr = &o.says, &o.says
	if err := o.c.Start(); err != nil {
		t.Fatal(err)
	}
	theirs.Close()
	t.Cleanup(func() {
		o.conn.Close() // P ends
		if o.killed {
			return
		}
		if err := o.c.Wait(); err != nil || t.Failed() {
			t.Errorf("P: %v\n%s", err, o.says.Bytes())
		}
	})
	o.ask(order{Do: "open", Device: device})
	return o
}

func unixConn(t *testing.T, fd int) *net.UnixConn {
	t.Helper()
	file := os.NewFile(uintptr(fd), "socket")
	defer file.Close()
	conn, err := net.FileConn(file)
	if err != nil {
		t.Fatal(err)
	}
	return conn.(*net.UnixConn)
}

// try asks P, and gives its answer and what files came with it.
func (o *other) try(of order) (told, []*os.File) {
	o.t.Helper()
	text, err := json.Marshal(of)
	if err != nil {
		o.t.Fatal(err)
	}
	o.turn.Lock()
	defer o.turn.Unlock()
	o.conn.SetDeadline(time.Now().Add(patience))
	if _, err := o.conn.Write(text); err != nil {
		o.t.Fatal(err)
	}
	answer, files := make([]byte, 1<<16), make([]byte, 4096)
	n, m, _, _, err := o.conn.ReadMsgUnix(answer, files)
	if err != nil {
		o.t.Fatalf("P's answer to %q: %v", of.Do, err)
	}
	var a told
	if err := json.Unmarshal(answer[:n], &a); err != nil {
		o.t.Fatalf("P's answer to %q: %v\n%s", of.Do, err, answer[:n])
	}
	return a, received(o.t, files[:m])
}

func received(t *testing.T, control []byte) (files []*os.File) {
	t.Helper()
	messages, err := syscall.ParseSocketControlMessage(control)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range messages {
		fds, err := syscall.ParseUnixRights(&m)
		if err != nil {
			t.Fatal(err)
		}
		for _, fd := range fds {
			f := os.NewFile(uintptr(fd), "P's memory")
			t.Cleanup(func() { f.Close() })
			files = append(files, f)
		}
	}
	return files
}

// ask is try, and P must have no error.
func (o *other) ask(of order) told {
	o.t.Helper()
	a, _ := o.try(of)
	if a.Err != "" {
		o.t.Fatalf("P, asked to %s: %s", of.Do, a.Err)
	}
	return a
}

// signal stops P, or lets it go on.
func (o *other) signal(s syscall.Signal) {
	o.t.Helper()
	if err := o.c.Process.Signal(s); err != nil {
		o.t.Fatal(err)
	}
}

// kill ends P as nothing else does.
func (o *other) kill() {
	o.t.Helper()
	o.signal(syscall.SIGKILL)
	o.c.Wait()
	o.killed = true
}

// memory is P's device memory, registered there, with a pattern in it.
func (o *other) memory(kind string, bytes int, pattern uint64) uintptr {
	o.t.Helper()
	at := o.ask(order{Do: kind, Bytes: bytes}).Addr
	o.ask(order{Do: "fill", Addr: at, Bytes: bytes, Pattern: pattern})
	return at
}

// openAll opens on d all that P shares, until the test ends.
func (o *other) openAll(d *Device) *Peer {
	o.t.Helper()
	a, files := o.try(order{Do: "share"})
	if a.Err != "" {
		o.t.Fatal(a.Err)
	}
	p := d.Peer("prefill 1", a.Process)
	if err := openEach(p, a, files); err != nil {
		o.t.Fatal(err)
	}
	o.t.Cleanup(func() {
		if err := p.Close(); err != nil && d.Err() == nil {
			o.t.Error(err)
		}
	})
	return p
}

func openEach(p *Peer, a told, files []*os.File) error {
	for _, of := range a.Allocations {
		var file *os.File
		if of.Handle == nil {
			file, files = files[0], files[1:]
		}
		if err := p.Open(of, file); err != nil {
			return err
		}
	}
	return nil
}

// checks says what P's Check says.
func (o *other) checks() string {
	o.t.Helper()
	a, _ := o.try(order{Do: "check"})
	return a.Err
}

// TestOtherProcess is P.
func TestOtherProcess(t *testing.T) {
	if os.Getenv(inside) != "P" {
		return
	}
	conn := unixConn(t, peerSocket)
	p := &inP{t: t}
	text := make([]byte, 1<<16)
	for {
		n, err := conn.Read(text)
		if n == 0 || err != nil {
			break // D has ended, or has what it wants
		}
		var of order
		if err := json.Unmarshal(text[:n], &of); err != nil {
			t.Fatal(err)
		}
		a, files := p.do(of)
		answer, err := json.Marshal(a)
		if err != nil {
			t.Fatal(err)
		}
		var fds []int
		for _, f := range files {
			fds = append(fds, int(f.Fd()))
		}
		if _, _, err := conn.WriteMsgUnix(answer, syscall.UnixRights(fds...), nil); err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			f.Close()
		}
	}
}

// inP is P from within.
type inP struct {
	t       *testing.T
	e       *engine.Engine
	d       *Device
	mapping *engine.Mapping
	region  *Region
	shared  *Shared
	pattern uint64
}

func (p *inP) do(of order) (a told, files []*os.File) {
	var err error
	switch of.Do {
	case "open":
		p.e = engine.New(p.t, of.Device)
		p.d, err = Open(of.Device, Options{})
		p.t.Cleanup(func() { p.d.Close() })
	case "allocate":
		a.Addr = p.e.Out("cuMemAlloc_v2", uintptr(of.Bytes))
		p.region, err = p.d.Register("cache", a.Addr, uint64(of.Bytes))
	case "expose": // a CPU engine's memory, as device memory
		var f *os.File
		if f, err = os.CreateTemp(p.t.TempDir(), ""); err != nil {
			break
		}
		if err = f.Truncate(int64(of.Bytes)); err != nil {
			break
		}
		a.Addr = p.e.Expose(f, of.Bytes)
		p.t.Cleanup(func() { p.e.Hide(a.Addr) })
		p.region, err = p.d.Register("exposed", a.Addr, uint64(of.Bytes))
	case "map":
		p.mapping = p.e.Map(of.Bytes)
		a.Addr = p.mapping.At
		p.region, err = p.d.Register("mapped", a.Addr, uint64(of.Bytes))
	case "free":
		p.region.Close()
		p.e.Must("cuMemFree_v2", of.Addr)
	case "anew": // at the same address, with a pattern
		p.region.Close()
		p.e.Bare("kvgpu_reuse_addresses", 1)
		p.e.Must("cuMemFree_v2", of.Addr)
		if a.Addr = p.e.Out("cuMemAlloc_v2", uintptr(of.Bytes)); a.Addr != of.Addr {
			err = fmt.Errorf("%#x was allocated anew as %#x", of.Addr, a.Addr)
			break
		}
		p.e.Fill(a.Addr, of.Bytes, of.Pattern)
		p.pattern = of.Pattern
		p.region, err = p.d.Register("cache", a.Addr, uint64(of.Bytes))
	case "sleep":
		p.mapping.Sleep()
	case "wake":
		p.mapping.Wake()
		err = renew(p.d)
	case "fill":
		p.e.Fill(of.Addr, of.Bytes, of.Pattern)
		p.pattern = of.Pattern
	case "pattern": // that was written last
		a.N = p.pattern
	case "kernel": // and P's moment, which P waits for
		stream := p.e.Stream()
		p.e.Kernel(stream, of.Addr, of.Bytes, of.Pattern)
		var m uint64
		if m, err = p.d.Moment(stream); err == nil {
			passed := make(chan error, 1)
			p.d.Await(m, func(err error) { passed <- err })
			err = <-passed
		}
	case "share":
		a.Process = ThisProcess()
		if p.shared, err = p.d.Share(); err != nil {
			break
		}
		a.Allocations = p.shared.Allocations
		for i := range a.Allocations {
			if a.Allocations[i].Handle == nil && err == nil {
				var f *os.File
				if f, err = p.shared.File(i); err == nil {
					files = append(files, f)
				}
			}
		}
	case "check":
		err = p.shared.Check()
	case "wrong":
		a.N = p.e.Wrong(of.Addr, of.Bytes, of.Pattern)
	case "count":
		a.N = p.e.Count(of.Count)
	default:
		err = fmt.Errorf("what is %q?", of.Do)
	}
	if err != nil {
		a.Err = strings.TrimSpace(err.Error())
	}
	return a, files
}
