package local

import (
	"bufio"
	"context"
	"errors"
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

// orphanEnv tells a test binary to be an agent, prefill's ("p") or decode's ("d"), whose child keeps its sockets open.
const orphanEnv = "KVCONN_TEST_ORPHAN"

type deafSink struct{}

func (deafSink) Received(core.TransferID, core.TransferStats, error) {}
func (deafSink) Written(core.TransferID, core.TransferStats, error)  {}
func (deafSink) PeerDown(core.AgentID, error)                        {}

// withOrphan is that process. Prefill's says its endpoint and ticket. Decode's is told these, and says the grant of a transfer
// that it expects. When it is told to, each has a child that holds all its sockets, whose process id it says.
func withOrphan() {
	role := os.Getenv(orphanEnv)
	if role == "" {
		return
	}
	mem, err := unix.Mmap(-1, 0, whole, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		panic(err)
	}
	l, err := twoRegions(uint64(uintptr(unsafe.Pointer(&mem[0]))))
	if err != nil {
		panic(err)
	}
	tr, err := New(Config{Listen: role == "p"}, l, deafSink{})
	if err != nil {
		panic(err)
	}
	in := bufio.NewScanner(os.Stdin)
	if role == "p" {
		ticket, err := tr.Admit("d")
		if err != nil {
			panic(err)
		}
		fmt.Printf("%s\n%x\n", tr.Endpoint(), ticket)
	} else {
		fmt.Printf("%x\n", expects(tr, in))
	}
	in.Scan()
	fmt.Println(heir())
	select {}
}

// expects has a decode agent meet the prefill agent that it is told of, and is the grant of a transfer from there.
func expects(tr *Transport, in *bufio.Scanner) []byte {
	var ticket []byte
	in.Scan()
	endpoint := in.Text()
	in.Scan()
	fmt.Sscanf(in.Text(), "%x", &ticket)
	err := tr.Connect("p", endpoint, ticket)
	if err == nil {
		err = tr.Usable(context.Background(), "p")
	}
	into, _ := (&agent{}).all()
	grant, err2 := tr.Expect("t", "p", into)
	if err = errors.Join(err, err2); err != nil {
		panic(err)
	}
	return grant
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
	p := startChild(t, orphanEnv+"=p")
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

// TestDecodeEndsInWrite: when D's process ends under a write P hears of it, and its engine may use the blocks, though a child of D's holds the
// socket open: so nothing but the end of the process tells.
func TestDecodeEndsInWrite(t *testing.T) {
	leaktest.Check(t)
	p := start(t, "p", Config{}, nil)
	d := startChild(t, orphanEnv+"=d")
	d.told(p.tr.Endpoint(), fmt.Sprintf("%x", p.ticket("d")))
	var grant []byte
	fmt.Sscanf(d.line(), "%x", &grant)
	d.told("now")
	var child, sockets int
	fmt.Sscan(d.line(), &child, &sockets)
	if child == 0 || sockets == 0 {
		t.Fatalf("child %d holds %d sockets", child, sockets)
	}
	defer func() { _ = syscall.Kill(child, syscall.SIGKILL) }()
	_, pairs := p.all()
	p.tr.Write(core.WriteOp{ID: "t", Peer: "d", Grant: grant, Pairs: pairs[:1], At: []kv.Extent{{Pairs: 1}}, Bytes: whole}) // more would come
	s := &p.tr.sender
	comes(t, "D is told of a block", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		out := s.byID["t"]
		return out != nil && out.said == blockBytes
	})
	d.kill()
	wants(t, p.sink.Wait("written", "t", 1).Err, "the peer's process has ended", core.ErrConnectionLost.Error())
	p.down("the peer's process has ended")
	g := &p.tr.validity
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.lost > 0 { // as where D may still copy
		t.Errorf("%d pages are kept for a process that has ended", g.lost)
	}
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
