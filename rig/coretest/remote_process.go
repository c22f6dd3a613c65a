// The suite's side of a transport in a process of its own.

package coretest

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
)

// remote is a core.Transport in a process of its own.
type remote struct {
	t        *testing.T
	cmd      *exec.Cmd
	sink     *Recorder
	signal   core.Signal // of the hub
	endpoint string
	ended    chan struct{} // the process says nothing any more

	mu      sync.Mutex
	in      io.WriteCloser
	n       int
	waiting map[int]chan answer
	killed  bool
}

var _ core.Transport = (*remote)(nil)

// openRemote is open, with the transport in a process of its own. The memory is
// shared, so that the suite sees and changes it while the process is stopped.
func openRemote(t *testing.T, f Fixture, id core.AgentID, specs []regionSpec) *endpoint {
	t.Helper()
	file := newMemory(t)
	return openOn(t, f, id, newArena(t, specs, file, nil), func(a *arena, sink *Recorder) core.Transport {
		r := &remote{t: t, cmd: exec.Command(os.Args[0]), sink: sink, signal: f.hub.from(id), ended: make(chan struct{}), waiting: map[int]chan answer{}}
		// At the exit the race detector would wait a second for late reports.
		r.cmd.Env = append(os.Environ(), remoteEnv+"="+f.Remote, "GORACE="+os.Getenv("GORACE")+" atexit_sleep_ms=0")
		r.cmd.ExtraFiles = []*os.File{file}
		r.cmd.Stderr = os.Stderr
		r.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} // a stopped process would stay for ever
		var err error
		if r.in, err = r.cmd.StdinPipe(); err != nil {
			t.Fatal(err)
		}
		out, err := r.cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := r.cmd.Start(); err != nil {
			t.Fatal(err)
		}
		go r.read(bufio.NewReader(out))
		t.Cleanup(r.kill)
		first := command{Method: "open", Agent: id, Size: len(a.mem), Regions: append([]kv.Region{}, a.layout.Regions...)}
		for i := range first.Regions {
			first.Regions[i].Base = a.starts[i]
		}
		opened, err := r.ask(first)
		if err != nil {
			t.Fatal(err)
		}
		r.endpoint = opened.Text
		return r
	})
}

func (r *remote) read(out io.Reader) {
	defer close(r.ended)
	for words := json.NewDecoder(out); ; {
		var a answer
		if words.Decode(&a) != nil {
			return
		}
		if s := a.Signal; s != nil {
			go r.carry(s)
			continue
		}
		if o := a.Outcome; o != nil {
			if a.Err != nil { // else the remote's error would be an interface that holds a nil
				o.Err = a.Err
			}
			r.sink.add(*o)
			continue
		}
		r.mu.Lock()
		c := r.waiting[a.N]
		delete(r.waiting, a.N)
		r.mu.Unlock()
		if c != nil {
			c <- a
		}
	}
}

// carry hands a remote's signal to the hub. It ends when the asked transport answers, or
// with the remote.
func (r *remote) carry(s *signalOut) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	go func() {
		select {
		case <-r.ended:
			cancel()
		case <-ctx.Done():
		}
	}()
	data, err := r.signal(ctx, s.To, s.Msg)
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.killed {
		_ = json.NewEncoder(r.in).Encode(command{N: s.N, Method: "Answered", Answer: &answer{Data: data, Err: toRemote(err)}})
	}
}

func (r *remote) signalled(ctx context.Context, from core.AgentID, msg []byte) ([]byte, error) {
	a, err := r.askUntil(ctx, command{Method: "Signalled", Peer: from, Msg: msg})
	return a.Data, err
}

// ask gives a command and waits for its answer.
func (r *remote) ask(o command) (answer, error) {
	ctx, cancel := context.WithTimeoutCause(context.Background(), patience, fmt.Errorf("the remote's %s has not returned within %v", o.Method, patience))
	defer cancel()
	return r.askUntil(ctx, o)
}

func (r *remote) askUntil(ctx context.Context, o command) (answer, error) {
	c := make(chan answer, 1)
	r.mu.Lock()
	r.n++
	o.N = r.n
	r.waiting[o.N] = c
	err := json.NewEncoder(r.in).Encode(o)
	r.mu.Unlock()
	if err != nil {
		return answer{}, fmt.Errorf("the remote takes no commands: %w", errors.Join(core.ErrAbsent, err))
	}
	select {
	case a := <-c:
		if a.Err != nil {
			return a, a.Err
		}
		return a, nil
	case <-r.ended:
		return answer{}, fmt.Errorf("the remote has ended: %w", core.ErrAbsent)
	case <-ctx.Done():
		return answer{}, context.Cause(ctx)
	}
}

// command is ask where only the remote's own failure is an error.
func (r *remote) command(o command) {
	if _, err := r.ask(o); err != nil {
		r.t.Errorf("%s: %v", o.Method, err)
	}
}

func (r *remote) Name() string     { return "remote" }
func (r *remote) Endpoint() string { return r.endpoint }

func (r *remote) Admit(peer core.AgentID) ([]byte, error) {
	a, err := r.ask(command{Method: "Admit", Peer: peer})
	return a.Data, err
}

func (r *remote) Dismiss(peer core.AgentID) { r.command(command{Method: "Dismiss", Peer: peer}) }

func (r *remote) Connect(peer core.AgentID, endpoint string, ticket []byte) error {
	_, err := r.ask(command{Method: "Connect", Peer: peer, Endpoint: endpoint, Ticket: ticket})
	return err
}

func (r *remote) Expect(id core.TransferID, peer core.AgentID, dst []kv.Segment) ([]byte, error) {
	a, err := r.ask(command{Method: "Expect", ID: id, Peer: peer, Segments: dst})
	return a.Data, err
}

func (r *remote) Revoke(id core.TransferID) error {
	_, err := r.ask(command{Method: "Revoke", ID: id})
	return err
}

func (r *remote) Write(op core.WriteOp)   { r.command(command{Method: "Write", Op: &op}) }
func (r *remote) Extend(op core.WriteOp)  { r.command(command{Method: "Extend", Op: &op}) }
func (r *remote) Stop(id core.TransferID) { r.command(command{Method: "Stop", ID: id}) }

// Close closes the transport and ends the process, which must not complain: the race
// detector's word is its exit status.
func (r *remote) Close() error {
	_, err := r.ask(command{Method: "Close"})
	r.in.Close()
	select {
	case <-r.ended:
	case <-time.After(patience):
		return errors.Join(err, fmt.Errorf("the remote has not ended within %v", patience))
	}
	r.mu.Lock()
	killed := r.killed
	r.killed = true
	r.mu.Unlock()
	if killed {
		return err
	}
	return errors.Join(err, r.cmd.Wait())
}

func (r *remote) kill() {
	r.mu.Lock()
	killed := r.killed
	r.killed = true
	r.mu.Unlock()
	if killed {
		return
	}
	_ = r.cmd.Process.Kill()
	<-r.ended
	_ = r.cmd.Wait() // says that it was killed
	r.in.Close()
}

// freeze stops the process and returns when none of its threads runs.
func (r *remote) freeze() {
	r.t.Helper()
	if err := r.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		r.t.Fatal(err)
	}
	for deadline := time.Now().Add(patience); !allStopped(r.cmd.Process.Pid); time.Sleep(100 * time.Microsecond) {
		if time.Now().After(deadline) {
			r.t.Fatalf("process %d is not stopped within %v", r.cmd.Process.Pid, patience)
		}
	}
}

// thaw lets a stopped process run on.
func (r *remote) thaw() {
	r.t.Helper()
	if err := r.cmd.Process.Signal(syscall.SIGCONT); err != nil {
		r.t.Fatal(err)
	}
}

func allStopped(pid int) bool {
	stats, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	for _, name := range stats {
		b, err := os.ReadFile(name)
		if err != nil {
			return false
		}
		// The state follows the name, which is in parentheses.
		if i := strings.LastIndexByte(string(b), ')'); i < 0 || !strings.HasPrefix(string(b[i+1:]), " T") {
			return false
		}
	}
	return len(stats) > 0
}
