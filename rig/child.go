package rig

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// child is a process that ends with this one.
type child struct {
	cmd   *exec.Cmd
	in    io.WriteCloser
	ended chan struct{}
}

// Bounds of a child's first line and of its end.
const (
	childStart = 30 * time.Second
	childStop  = 10 * time.Second
)

// startChild starts a command, whose output goes to log. Its first line is JSON for says,
// unless says is nil.
func startChild(ctx context.Context, command []string, log *os.File, says any) (*child, error) {
	c := &child{cmd: exec.CommandContext(ctx, command[0], command[1:]...), ended: make(chan struct{})}
	c.cmd.Stderr = log
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	var err error
	if c.in, err = c.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	var stdout io.ReadCloser
	if says == nil {
		c.cmd.Stdout = log
	} else if stdout, err = c.cmd.StdoutPipe(); err != nil {
		return nil, err
	}
	if err := c.cmd.Start(); err != nil {
		return nil, err
	}
	if says != nil {
		late := time.AfterFunc(childStart, func() { _ = c.cmd.Process.Kill() })
		line, err := bufio.NewReader(stdout).ReadBytes('\n')
		late.Stop()
		if err == nil {
			err = json.Unmarshal(line, says)
		}
		if err != nil {
			go c.wait()
			c.stop()
			return nil, fmt.Errorf("it said %q: %w", line, err)
		}
	}
	go c.wait()
	return c, nil
}

func (c *child) wait() {
	_ = c.cmd.Wait() // how it ended is in its log
	close(c.ended)
}

// stop ends the child by the end of its input and SIGTERM, else by force.
func (c *child) stop() {
	_ = c.in.Close()
	_ = c.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-c.ended:
	case <-time.After(childStop):
		_ = syscall.Kill(-c.cmd.Process.Pid, syscall.SIGKILL)
		<-c.ended
	}
}

// residentKiB is the memory that a process has now.
func residentKiB(pid int) (int, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if v, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			return strconv.Atoi(strings.TrimSuffix(strings.TrimSpace(v), " kB"))
		}
	}
	return 0, fmt.Errorf("process %d has no VmRSS: it has ended", pid)
}

// cpuTime is what a process has used so far, in steps of 10 ms.
func cpuTime(pid int) (time.Duration, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	// The second field, the name in parentheses, may hold anything. User and system
	// time are the 12th and 13th field behind it, in USER_HZ.
	fields := bytes.Fields(text[bytes.LastIndexByte(text, ')')+1:])
	if len(fields) < 13 {
		return 0, fmt.Errorf("/proc/%d/stat holds %q", pid, text)
	}
	var sum time.Duration
	for _, f := range fields[11:13] {
		n, err := strconv.Atoi(string(f))
		if err != nil {
			return 0, fmt.Errorf("/proc/%d/stat: %w", pid, err)
		}
		sum += time.Duration(n) * 10 * time.Millisecond
	}
	return sum, nil
}
