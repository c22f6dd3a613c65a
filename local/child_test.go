package local

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
)

// child is this program once more, as a process that is told lines and says lines.
type child struct {
	t   testing.TB
	pid int
	in  io.WriteCloser
	out *bufio.Scanner
	// quit closes what the child hears and waits for its end; kill does not leave the end to the child.
	quit, kill func()
}

// startChild starts it with one more variable in its environment. The test's end kills it.
func startChild(t testing.TB, variable string, changes ...func(*exec.Cmd)) *child {
	t.Helper()
	c := exec.Command("/proc/self/exe") // whose folder another user may not enter
	c.Env, c.Stderr = append(os.Environ(), variable), os.Stderr
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	for _, change := range changes {
		change(c)
	}
	in, err := c.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	wait := sync.OnceFunc(func() { _ = c.Wait() })
	p := &child{t: t, pid: c.Process.Pid, in: in, out: bufio.NewScanner(out)}
	p.quit = func() { in.Close(); wait() }
	p.kill = func() { _ = c.Process.Kill(); wait() }
	t.Cleanup(p.kill)
	return p
}

// line is what the child says next.
func (p *child) line() string {
	p.t.Helper()
	if !p.out.Scan() {
		p.t.Fatal("the child has ended")
	}
	return p.out.Text()
}

// told says lines to the child.
func (p *child) told(lines ...string) { fmt.Fprintln(p.in, strings.Join(lines, "\n")) }

// met is the endpoint and the ticket that a prefill agent's process says, a line each.
func (p *child) met() (endpoint string, ticket []byte) {
	p.t.Helper()
	endpoint = p.line()
	fmt.Sscanf(p.line(), "%x", &ticket)
	return endpoint, ticket
}
