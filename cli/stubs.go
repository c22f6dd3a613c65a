package cli

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"time"

	"github.com/kvconn/kvconn/bootstrap"
	"github.com/kvconn/kvconn/internal/stubengine"
)

// stubCommand is the hidden command of bench-proxy's engines.
const stubCommand = "__stubs"

// stubAddrs is the line that it prints: host:port of each, and the bootstrap port.
type stubAddrs struct {
	Prefill, Decode, Bootstrap string
}

// runStubs serves a prefill and a decode engine that compute nothing until its
// input ends.
func runStubs(ctx context.Context, args []string, in io.Reader, out io.Writer) error {
	if len(args) != 1 {
		return errUsage
	}
	chunks, err := strconv.Atoi(args[0])
	if err != nil {
		return fmt.Errorf("%w: %w", errUsage, err)
	}
	var table bootstrap.Table
	if err := table.Register(bootstrap.Registration{EngineID: "stub", Addr: "tcp://127.0.0.1:1"}); err != nil {
		return err
	}
	engine := stubengine.Options{Model: "stub", Chunks: chunks}
	boot := &http.Server{Handler: bootstrap.NewHandler(&table, nil, nil), ReadHeaderTimeout: childStop}
	var addrs []net.Addr
	for _, serve := range []func(net.Listener){
		func(l net.Listener) { stubengine.Lean(l, engine) },
		func(l net.Listener) { stubengine.Lean(l, engine) },
		func(l net.Listener) { _ = boot.Serve(l) }, // ends by Close
	} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return err
		}
		defer l.Close()
		go serve(l)
		addrs = append(addrs, l.Addr())
	}
	defer boot.Close()
	_, bootstrapPort, err := net.SplitHostPort(addrs[2].String())
	if err != nil {
		return err
	}
	if err := json.NewEncoder(out).Encode(stubAddrs{addrs[0].String(), addrs[1].String(), bootstrapPort}); err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, in)
	return err
}

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

// startChild starts a command, whose output goes to log; its first line is JSON
// for says, unless that is nil.
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
