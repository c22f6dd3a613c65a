// The first process starts the second one, asks it, and stops it.

package synthetic

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/internal/callprobe"
)

// PrefillCommand is the hidden argument that makes a program the second process.
const PrefillCommand = "__prefill"

// Process is the prefill side, in a process of its own.
type Process struct {
	cmd   *exec.Cmd
	in    io.WriteCloser
	lines chan []byte
	ended chan error
}

// answerTimeout bounds each answer of the second process.
const answerTimeout = 60 * time.Second

// Start starts the second process: self is the command of this program, which
// calls Serve where PrefillCommand is its argument.
func Start(ctx context.Context, self []string) (*Process, error) {
	if err := mayStart(); err != nil {
		return nil, fmt.Errorf("second process: %w", err)
	}
	p := &Process{lines: make(chan []byte, 1), ended: make(chan error, 1)}
	p.cmd = exec.CommandContext(ctx, self[0], append(slices.Clone(self[1:]), PrefillCommand)...)
	p.cmd.Stderr = os.Stderr
	p.cmd.Env = os.Environ()
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	p.cmd.Cancel = func() error { return p.cmd.Process.Kill() }
	var err error
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("second process: %w", err)
	}
	go func() {
		sc := bufio.NewScanner(out)
		for sc.Scan() {
			p.lines <- append([]byte(nil), sc.Bytes()...)
		}
		close(p.lines)
		p.ended <- p.cmd.Wait()
	}()
	return p, nil
}

// mayStart says why this process would not survive to start another. Go makes these calls before the first process that it starts.
func mayStart() error {
	for _, call := range []struct {
		name   string
		number uintptr
	}{{"pidfd_open", unix.SYS_PIDFD_OPEN}, {"pidfd_send_signal", unix.SYS_PIDFD_SEND_SIGNAL}} {
		if err := callprobe.Check(call.number); errors.Is(err, callprobe.ErrEnds) {
			return fmt.Errorf("a filter of system calls (seccomp) forbids to start one: %s: %w: "+
				"allow the call in the container's seccomp profile, or in systemd's SystemCallFilter", call.name, err)
		}
	}
	return nil
}

// PID is the process's id.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Ask sends one command and waits for its answer.
func (p *Process) Ask(command Command) (Answer, error) {
	var a Answer
	b, err := json.Marshal(command)
	if err != nil {
		return a, err
	}
	if _, err := p.in.Write(append(b, '\n')); err != nil {
		return a, fmt.Errorf("second process: %w", err)
	}
	t := time.NewTimer(answerTimeout)
	defer t.Stop()
	select {
	case line, ok := <-p.lines:
		if !ok {
			return a, errors.New("the second process ended")
		}
		if err := json.Unmarshal(line, &a); err != nil {
			return a, fmt.Errorf("second process said %q: %w", line, err)
		}
		if a.Error != "" {
			return a, fmt.Errorf("second process: %s", a.Error)
		}
		return a, nil
	case <-t.C:
		return a, fmt.Errorf("the second process has not answered %q for %v", command.Op, answerTimeout)
	}
}

// Sent waits until the prefill side has its transfers' reports too.
func (p *Process) Sent(id string, parts int) error {
	a, err := p.Ask(Command{Op: "wait", ID: id, Parts: parts})
	if err == nil && a.Code != 0 {
		err = fmt.Errorf("prefill side: code %d: %s", a.Code, a.Reason)
	}
	return err
}

// Stop ends the process: by the end of its input, else by force.
func (p *Process) Stop() {
	p.in.Close()
	select {
	case <-p.ended:
		return
	case <-p.lines:
	case <-time.After(10 * time.Second):
		_ = p.cmd.Process.Kill()
	}
	<-p.ended
}
