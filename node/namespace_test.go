package node

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// network is a network namespace with a cable to this process's, as a container has.
type network struct {
	Near string // this side's address
	work chan func()
}

// newNetwork makes one, which is gone when the test is over or its process is.
func newNetwork(t *testing.T) *network {
	t.Helper()
	if _, err := exec.LookPath("ip"); err != nil {
		t.Skipf("NOT RUN: the program ip is not here: %v", err)
	}
	n := &network{work: make(chan func())}
	made, over := make(chan error), make(chan struct{})
	go n.live(made, over)
	if err := <-made; err != nil {
		t.Skipf("NOT RUN: this machine makes no network namespace: %v", err)
	}
	t.Cleanup(func() {
		close(n.work)
		<-over
	})
	near := fmt.Sprint("kvt", os.Getpid())
	cable := exec.Command("ip", "link", "add", "kvt", "type", "veth", "peer", "name", near, "netns", fmt.Sprint(os.Getpid()))
	var out []byte
	var err error
	n.do(func() { out, err = cable.CombinedOutput() })
	if err != nil {
		t.Skipf("NOT RUN: this machine makes no pair of virtual network cards: %v: %s", err, out)
	}
	t.Cleanup(func() { _ = exec.Command("ip", "link", "del", near).Run() }) // the kernel does so too, but later
	base := freeNet(t)
	n.Near = fmt.Sprintf("%s.1", base)
	for _, args := range [][]string{{"addr", "add", n.Near + "/30", "dev", near}, {"link", "set", near, "up"}} {
		ip(t, args...)
	}
	n.do(func() {
		for _, args := range [][]string{{"link", "set", "lo", "up"}, {"addr", "add", base + ".2/30", "dev", "kvt"}, {"link", "set", "kvt", "up"}} {
			ip(t, args...)
		}
	})
	return n
}

// live is the thread that keeps the namespace. It ends with its goroutine, which does not give it back.
func (n *network) live(made chan<- error, over chan<- struct{}) {
	runtime.LockOSThread()
	defer close(over)
	if unix.Gettid() == unix.Getpid() { // by the first thread's namespace others know this process
		next := make(chan struct{})
		go n.live(made, next)
		<-next
		runtime.UnlockOSThread()
		return
	}
	err := unix.Unshare(unix.CLONE_NEWNET)
	made <- err
	if err != nil {
		return
	}
	for f := range n.work {
		f()
	}
}

// do runs f in the namespace, and what it starts is there.
func (n *network) do(f func()) {
	done := make(chan struct{})
	n.work <- func() {
		defer close(done)
		f()
	}
	<-done
}

func ip(t *testing.T, args ...string) {
	t.Helper()
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		t.Errorf("ip %v: %v: %s", args, err, out)
	}
}

// freeNet finds addresses of those for benchmarks (RFC 2544) that this machine has not got.
func freeNet(t *testing.T) string {
	t.Helper()
	have, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for i := range 256 {
		base := fmt.Sprintf("198.18.%d", (os.Getpid()+i)%256)
		taken := false
		for _, a := range have {
			n, is := a.(*net.IPNet)
			taken = taken || is && n.Contains(net.ParseIP(base+".1"))
		}
		if !taken {
			return base
		}
	}
	t.Skip("NOT RUN: this machine has all of 198.18.0.0/16")
	return ""
}
