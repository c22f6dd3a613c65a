package cli

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"time"
)

// peerCommand is the hidden command of the second process of demo and bench.
const peerCommand = "__peer"

// selfCommand is how this very command was started, without its own arguments:
// the kvconn program, or a Python interpreter with the wheel's script.
func selfCommand() ([]string, error) {
	b, err := os.ReadFile("/proc/self/cmdline")
	if err != nil {
		return nil, err
	}
	parts := bytes.Split(bytes.TrimSuffix(b, []byte{0}), []byte{0})
	for i := 1; i < len(parts); i++ { // behind the program; arguments may have such names too
		switch string(parts[i]) {
		case "demo", "bench", "bench-proxy", "chaos", "launch":
			out := make([]string, i)
			for k := range out {
				out[k] = string(parts[k])
			}
			return out, nil
		}
	}
	return nil, fmt.Errorf("the command line %q does not hold this command", b)
}

// peerProcess is the prefill side of demo and bench, in a process of its own.
type peerProcess struct {
	cmd   *exec.Cmd
	in    io.WriteCloser
	lines chan []byte
	ended chan error
}

// peerTimeout bounds each answer of the peer process.
const peerTimeout = 60 * time.Second

func startPeer(ctx context.Context) (*peerProcess, error) {
	self, err := selfCommand()
	if err != nil {
		return nil, err
	}
	p := &peerProcess{lines: make(chan []byte, 1), ended: make(chan error, 1)}
	p.cmd = exec.CommandContext(ctx, self[0], append(self[1:], peerCommand)...)
	p.cmd.Stderr = os.Stderr
	p.cmd.Env = os.Environ()
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	p.cmd.Cancel = func() error { return p.cmd.Process.Kill() }
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

// ask sends one order and waits for its answer.
func (p *peerProcess) ask(order peerOrder) (peerAnswer, error) {
	var a peerAnswer
	b, err := json.Marshal(order)
	if err != nil {
		return a, err
	}
	if _, err := p.in.Write(append(b, '\n')); err != nil {
		return a, fmt.Errorf("second process: %w", err)
	}
	t := time.NewTimer(peerTimeout)
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
		return a, fmt.Errorf("the second process has not answered %q for %v", order.Op, peerTimeout)
	}
}

// sent waits until the prefill side has its transfer's report too.
func (p *peerProcess) sent(id string) error {
	a, err := p.ask(peerOrder{Op: "wait", ID: id})
	if err == nil && a.Code != 0 {
		err = fmt.Errorf("prefill side: code %d: %s", a.Code, a.Reason)
	}
	return err
}

// stop ends the process: by the end of its input, else by force.
func (p *peerProcess) stop() {
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
