package local

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
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

// yamaEnv tells a test binary to be an agent under the kernel's own Yama: p, or a decode agent by its id.
const yamaEnv = "KVCONN_TEST_YAMA"

// underYama is that process. p says its endpoint, the tickets of d and e, and where its memory lies. A decode agent is told
// what to do, and says how it went: "read PID ADDRESS", "connect TICKET ENDPOINT", "close".
func underYama() {
	id := os.Getenv(yamaEnv)
	if id == "" {
		return
	}
	mem, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		panic(err)
	}
	address := uint64(uintptr(unsafe.Pointer(&mem[0])))
	l, err := kv.NewLayout([]kv.Region{{Name: "k", Base: address, BlockStride: 4096, BlockBytes: 4096, NumBlocks: 1}})
	if err != nil {
		panic(err)
	}
	tr, err := New(Config{Listen: true}, l, deafSink{})
	if err != nil {
		panic(err)
	}
	if id == "p" {
		fmt.Println(tr.Endpoint())
		for _, d := range []core.AgentID{"d", "e"} {
			ticket, err := tr.Admit(d)
			if err != nil {
				panic(err)
			}
			fmt.Printf("%x\n", ticket)
		}
		fmt.Println(address)
	}
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		words := strings.Fields(in.Text())
		switch words[0] {
		case "read":
			var pid int
			var at uint64
			fmt.Sscan(words[1], &pid)
			fmt.Sscan(words[2], &at)
			_, errno := readRandom(linux{}, pid, at)
			fmt.Println(int(errno))
		case "connect":
			var ticket []byte
			fmt.Sscanf(words[1], "%x", &ticket)
			err := tr.Connect("p", strings.Join(words[2:], " "), ticket)
			if err == nil {
				ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
				err = tr.Usable(ctx, "p")
				cancel()
			}
			fmt.Println(err)
		case "close":
			fmt.Println(tr.Close())
		}
	}
	os.Exit(0)
}

// TestYamaOfTheKernel is TestYama on a kernel that has Yama, between processes of a user without privileges, of whom none
// is another's ancestor. Where the mode is 2 the reason names it.
func TestYamaOfTheKernel(t *testing.T) {
	mode := linux{}.yama()
	if (mode != "1" && mode != "2") || os.Geteuid() != 0 {
		t.Skipf("NOT RUN: it needs root, to start processes of another user, and kernel.yama.ptrace_scope 1 or 2, which is %q (`make rdma-test STAGES=yama` has both)", mode)
	}
	leaktest.Check(t)
	const nobody = 65534
	asNobody := func(c *exec.Cmd) { c.SysProcAttr.Credential = &syscall.Credential{Uid: nobody, Gid: nobody} }
	p := startChild(t, yamaEnv+"=p", asNobody)
	d, e := startChild(t, yamaEnv+"=d", asNobody), startChild(t, yamaEnv+"=e", asNobody)
	endpoint, ofD, ofE, address := p.line(), p.line(), p.line(), p.line()
	ask := func(c *child, words ...any) string {
		t.Helper()
		c.told(strings.TrimSpace(fmt.Sprintln(words...)))
		return c.line()
	}
	reads := func(c *child, want syscall.Errno) {
		t.Helper()
		if got := ask(c, "read", p.pid, address); got != fmt.Sprint(int(want)) {
			t.Errorf("process %d reads the prefill process with errno %s, want %d", c.pid, got, want)
		}
	}
	connects := func(c *child, ticket, says string) {
		t.Helper()
		if got := ask(c, "connect", ticket, endpoint); !strings.Contains(got, says) {
			t.Errorf("process %d connects with %q, want %q", c.pid, got, says)
		}
	}
	reads(d, syscall.EPERM)
	if mode == "2" {
		connects(d, ofD, "set kernel.yama.ptrace_scope to 1 or less")
		reads(d, syscall.EPERM)
		return
	}
	connects(d, ofD, "<nil>")
	reads(d, 0)
	reads(e, syscall.EPERM)
	connects(e, ofE, fmt.Sprintf("process %d read its memory already", d.pid))
	reads(e, syscall.EPERM)
	reads(d, 0)
	if got := ask(d, "close"); got != "<nil>" {
		t.Error(got)
	}
	// P takes the leave back when it has heard of the link's end.
	for end := time.Now().Add(30 * time.Second); ask(d, "read", p.pid, address) == "0"; {
		if time.Now().After(end) {
			t.Fatal("the process whose link has ended may still read")
		}
	}
	reads(d, syscall.EPERM)
	connects(e, ofE, "<nil>")
	reads(e, 0)
	reads(d, syscall.EPERM)
}
