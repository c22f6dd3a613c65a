// The driver starts an engine's process, kills it and starts it again, and asks it by commands.

package chaos

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/kvconn/kvconn/internal/safe"
)

// Bounds of the driver's waits. They end a hang: in an emulated machine beside other work a process needs 20 s to open.
const (
	openTimeout = 120 * time.Second
	askTimeout  = 60 * time.Second
	// commandQueue bounds the commands for a process that does not read, because it
	// is stopped.
	commandQueue = 1 << 14
	// stderrKept is how much of a process's standard error is kept to be shown.
	stderrKept = 8 << 10
)

// errDown: there is no process to send a command to.
var errDown = errors.New("the process is not up")

// errCrashed: a process ended that the driver had not killed.
var errCrashed = errors.New("the process ended by itself")

// child is an engine that is started, killed and started again. Its methods may
// be called from any goroutine.
type child struct {
	name  string
	index int
	self  []string
	env   []string
	open  opening
	// on is told of each event, and with an event of op "" of the end.
	on func(c *child, life int, ev event)

	mu    sync.Mutex
	life  int // counts the processes
	p     *process
	ready bool
}

// process is one life of a child.
type process struct {
	cmd   *exec.Cmd
	in    chan []byte
	ended chan struct{}
	err   *tail

	mu     sync.Mutex
	killed bool
	seq    uint64
	asked  map[uint64]chan event
}

// start starts the process and opens its agent. If that fails, the error says why, and the
// process has ended.
func (c *child) start(ctx context.Context) error {
	c.mu.Lock()
	if c.p != nil {
		c.mu.Unlock()
		return fmt.Errorf("%s runs already", c.name)
	}
	p, out, err := spawn(c.self, c.env)
	if err != nil {
		c.mu.Unlock()
		return fmt.Errorf("%s: %w", c.name, err)
	}
	c.life++
	life := c.life
	c.p = p
	c.mu.Unlock()
	safe.Go("chaos child", func() { c.listen(p, life, out) })
	open := c.open
	answer, err := p.ask(ctx, command{Op: opOpen, Open: &open}, openTimeout)
	if err == nil && answer.Error != "" {
		err = errors.New(answer.Error)
	}
	if err != nil {
		c.kill()
		return fmt.Errorf("%s: open: %w", c.name, err)
	}
	c.on(c, life, answer)
	c.mu.Lock()
	c.ready = c.p == p
	c.mu.Unlock()
	return nil
}

func spawn(self, env []string) (*process, io.Reader, error) {
	p := &process{in: make(chan []byte, commandQueue), ended: make(chan struct{}), err: &tail{}, asked: map[uint64]chan event{}}
	p.cmd = exec.Command(self[0], self[1:]...)
	p.cmd.Env = append(os.Environ(), env...)
	p.cmd.Stderr = p.err
	// A group of its own: an interrupt of the terminal is the driver's to handle.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	in, err := p.cmd.StdinPipe()
	if err != nil {
		return nil, nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, nil, err
	}
	safe.Go("chaos commands", func() {
		defer in.Close()
		for {
			select {
			case <-p.ended:
				return
			case line := <-p.in:
				if line == nil {
					return
				}
				if _, err := in.Write(line); err != nil {
					return // it has ended
				}
			}
		}
	})
	return p, out, nil
}

// listen hands on a process's events, until it ends.
func (c *child) listen(p *process, life int, out io.Reader) {
	dec := json.NewDecoder(out)
	for {
		var ev event
		if dec.Decode(&ev) != nil {
			break // the end, maybe in the middle of a line
		}
		if ev.Seq != 0 {
			p.mu.Lock()
			answer := p.asked[ev.Seq]
			delete(p.asked, ev.Seq)
			p.mu.Unlock()
			if answer != nil {
				answer <- ev
			}
			continue
		}
		c.on(c, life, ev)
	}
	_ = p.cmd.Wait()
	c.mu.Lock()
	if c.p == p {
		c.p, c.ready = nil, false
	}
	c.mu.Unlock()
	end := event{At: now()}
	p.mu.Lock()
	if !p.killed {
		end.Error = fmt.Sprintf("%v: %v: %s", errCrashed, p.cmd.ProcessState, p.err)
	}
	p.mu.Unlock()
	c.on(c, life, end)
	close(p.ended)
}

func (p *process) send(o command) error {
	line, err := json.Marshal(o)
	if err != nil {
		return err
	}
	select {
	case <-p.ended:
		return fmt.Errorf("%w: %s", errDown, p.err)
	case p.in <- append(line, '\n'):
		return nil
	default:
		return fmt.Errorf("%d commands wait already", commandQueue)
	}
}

func (p *process) ask(ctx context.Context, o command, bound time.Duration) (event, error) {
	answer := make(chan event, 1)
	p.mu.Lock()
	p.seq++
	o.Seq = p.seq
	p.asked[o.Seq] = answer
	p.mu.Unlock()
	if err := p.send(o); err != nil {
		return event{}, err
	}
	t := time.NewTimer(bound)
	defer t.Stop()
	select {
	case ev := <-answer:
		return ev, nil
	case <-p.ended:
		return event{}, fmt.Errorf("%w: %s", errDown, p.err)
	case <-ctx.Done():
		return event{}, ctx.Err()
	case <-t.C:
		return event{}, fmt.Errorf("no answer to %q for %v", o.Op, bound)
	}
}

// up returns the process that commands go to, and which life it is.
func (c *child) up() (*process, int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.ready {
		return nil, c.life
	}
	return c.p, c.life
}

// ask sends a command and waits for its answer.
func (c *child) ask(ctx context.Context, o command) (event, error) {
	p, _ := c.up()
	if p == nil {
		return event{}, fmt.Errorf("%s: %w", c.name, errDown)
	}
	ev, err := p.ask(ctx, o, askTimeout)
	if err != nil {
		return ev, fmt.Errorf("%s: %w", c.name, err)
	}
	return ev, nil
}

// pid is the process's, or 0.
func (c *child) pid() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.p == nil {
		return 0
	}
	return c.p.cmd.Process.Pid
}

// signal sends a signal that does not end the process.
func (c *child) signal(s syscall.Signal) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.p != nil {
		_ = c.p.cmd.Process.Signal(s) // it has ended, at the worst
	}
}

// kill ends the process by force, if there is one, and waits until it is gone.
func (c *child) kill() {
	c.mu.Lock()
	p := c.p
	c.mu.Unlock()
	if p == nil {
		return
	}
	p.mu.Lock()
	p.killed = true
	p.mu.Unlock()
	_ = p.cmd.Process.Kill()
	<-p.ended
}

// stop ends the process in order: its agent is closed. If that takes too long, the process
// is killed, which is an error.
func (c *child) stop() error {
	c.mu.Lock()
	p := c.p
	c.mu.Unlock()
	if p == nil {
		return nil
	}
	p.mu.Lock()
	p.killed = true // the end is no surprise
	p.mu.Unlock()
	select {
	case p.in <- nil: // ends its input
	default:
	}
	t := time.NewTimer(askTimeout)
	defer t.Stop()
	select {
	case <-p.ended:
	case <-t.C:
		_ = p.cmd.Process.Kill()
		<-p.ended
		return fmt.Errorf("%s: its agent does not close within %v", c.name, askTimeout)
	}
	if !p.cmd.ProcessState.Success() {
		return fmt.Errorf("%s: %v: %s", c.name, p.cmd.ProcessState, p.err)
	}
	return nil
}

// tail keeps the end of the bytes that are written to it.
type tail struct {
	mu sync.Mutex
	b  []byte
}

func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.b = append(t.b, b...)
	if over := len(t.b) - stderrKept; over > 0 {
		t.b = append([]byte(nil), t.b[over:]...)
	}
	return len(b), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.TrimSpace(string(t.b))
}
