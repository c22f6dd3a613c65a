package local

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// orphanEnv tells a test binary to be a prefill agent whose child keeps its sockets open.
const orphanEnv = "KVCONN_TEST_ORPHAN"

type deafSink struct{}

func (deafSink) Received(core.TransferID, core.TransferStats, error) {}
func (deafSink) Written(core.TransferID, core.TransferStats, error)  {}
func (deafSink) PeerDown(core.AgentID, error)                        {}

// withOrphan is that process. It says its endpoint and ticket, and when it is told to, has a child
// that holds all its sockets, whose process id it says.
func withOrphan() {
	if os.Getenv(orphanEnv) == "" {
		return
	}
	mem, err := unix.Mmap(-1, 0, 1<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		panic(err)
	}
	l, err := kv.NewLayout([]kv.Region{{Name: "k", Base: uint64(uintptr(unsafe.Pointer(&mem[0]))), BlockStride: 4096, BlockBytes: 4096, NumBlocks: 256}})
	if err != nil {
		panic(err)
	}
	tr, err := New(Config{Listen: true}, l, deafSink{})
	if err != nil {
		panic(err)
	}
	ticket, err := tr.Admit("d")
	if err != nil {
		panic(err)
	}
	fmt.Printf("%s\n%x\n", tr.Endpoint(), ticket)
	_, _ = bufio.NewReader(os.Stdin).ReadString('\n')
	fmt.Println(heir())
	select {}
}

// heir starts a child that holds all sockets of this process open, and says its process id and how many they are.
func heir() (pid, sockets int) {
	child := exec.Command("sleep", "60")
	names, _ := filepath.Glob("/proc/self/fd/*")
	for _, name := range names {
		if to, _ := os.Readlink(name); strings.HasPrefix(to, "socket:") {
			fd, _ := strconv.Atoi(filepath.Base(name))
			if copied, err := unix.Dup(fd); err == nil {
				child.ExtraFiles = append(child.ExtraFiles, os.NewFile(uintptr(copied), name))
			}
		}
	}
	child.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := child.Start(); err != nil {
		panic(err)
	}
	return child.Process.Pid, len(child.ExtraFiles)
}

// TestOrphan: when P's process ends D hears of it, though a child of P's holds the socket open.
func TestOrphan(t *testing.T) {
	leaktest.Check(t)
	d := start(t, "d", Config{}, nil)
	p := startChild(t, orphanEnv+"=1")
	endpoint, ticket := p.met()
	if err := d.tr.Connect("p", endpoint, ticket); err != nil {
		t.Fatal(err)
	}
	if err := d.tr.Usable(t.Context(), "p"); err != nil {
		t.Fatal(err)
	}
	p.told("now")
	var child, sockets int
	fmt.Sscan(p.line(), &child, &sockets)
	if child == 0 || sockets < 2 { // the listener and the link
		t.Fatalf("child %d holds %d sockets", child, sockets)
	}
	defer func() { _ = syscall.Kill(child, syscall.SIGKILL) }()
	grant := d.expect("t", "p")
	if len(grant) == 0 {
		t.Fatal("no grant")
	}
	p.kill()
	wants(t, d.sink.Wait("received", "t", 1).Err, "the peer's process has ended")
	d.down("the peer's process has ended")
	e := start(t, "e", Config{ConnectTimeout: time.Hour}, nil) // the socket still takes connections, which nobody accepts
	if err := e.tr.Connect("p", endpoint, ticket); err != nil {
		t.Fatal(err)
	}
	e.down("the peer's process has ended")
}

// TestChildHoldsLink: P hears that D has closed their link, though a child of D's holds the socket open.
func TestChildHoldsLink(t *testing.T) {
	p, d := two(t, nil)
	moves(t, "t", p, d)
	r := &d.tr.receiver
	r.mu.Lock()
	held, err := r.sources["p"].link.conn.File()
	r.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	d.tr.Dismiss("p")
	p.down("closed the socket")
}
