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
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
)

// remoteEnv tells a test binary that it is a remote, and of which kind.
const remoteEnv = "KVCONN_TEST_REMOTE"

// remoteMemory is the descriptor of the memory that a remote shares with the
// suite.
const remoteMemory = 3

// RemoteOpener opens a transport in a process that the suite has started.
type RemoteOpener func(id core.AgentID, l *core.Layout, sink core.Sink, signal core.Signal) (core.Transport, error)

// ServeRemote must be the first call of the TestMain of a package that has ProcessSuite
// start processes. In such a process it opens the transport that Fixture.Remote names,
// obeys the suite's orders, and does not return.
func ServeRemote(kinds map[string]RemoteOpener) {
	kind, asked := os.LookupEnv(remoteEnv)
	if !asked {
		return
	}
	if err := serveRemote(kinds[kind], os.Stdin, os.Stdout); err != nil {
		fmt.Fprintf(os.Stderr, "remote %q: %v\n", kind, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// order is a call of a method of core.Transport, or "open".
type order struct {
	N        int
	Method   string
	Agent    core.AgentID  `json:",omitempty"`
	Regions  []core.Region `json:",omitempty"` // their bases count from the start of the memory
	Size     int           `json:",omitempty"`
	ID       core.TransferID
	Peer     core.AgentID   `json:",omitempty"`
	Endpoint string         `json:",omitempty"`
	Ticket   []byte         `json:",omitempty"`
	Segments []core.Segment `json:",omitempty"`
	Op       *core.WriteOp  `json:",omitempty"`
	Msg      []byte         `json:",omitempty"` // of Signalled
	Answer   *answer        `json:",omitempty"` // of "Answered": to the remote's signal of that number
}

// answer is the result of order N; N 0: the sink was told something.
type answer struct {
	N       int
	Data    []byte       `json:",omitempty"`
	Text    string       `json:",omitempty"`
	Err     *remoteError `json:",omitempty"`
	Outcome *Outcome     `json:",omitempty"` // without its Err
	Signal  *signalOut   `json:",omitempty"`
}

// signalOut is a signal that a remote's transport sends.
type signalOut struct {
	N   int
	To  core.AgentID
	Msg []byte
}

// remoteError is an error of another process.
type remoteError struct {
	Text                      string
	Lost, NotExpected, Absent bool
}

func (e *remoteError) Error() string { return e.Text }

func (e *remoteError) Is(target error) bool {
	return target == core.ErrConnectionLost && e.Lost || target == core.ErrNotExpected && e.NotExpected || target == core.ErrAbsent && e.Absent
}

func toRemote(err error) *remoteError {
	if err == nil {
		return nil
	}
	return &remoteError{err.Error(), errors.Is(err, core.ErrConnectionLost), errors.Is(err, core.ErrNotExpected), errors.Is(err, core.ErrAbsent)}
}

// speaker says answers, one at a time. It is the remote's sink.
type speaker struct {
	mu sync.Mutex
	to *json.Encoder

	signals int
	asked   map[int]chan answer
}

// signal is the core.Signal of a remote's transport.
func (s *speaker) signal(ctx context.Context, to core.AgentID, msg []byte) ([]byte, error) {
	c := make(chan answer, 1)
	s.mu.Lock()
	s.signals++
	n := s.signals
	s.asked[n] = c
	s.mu.Unlock()
	s.say(answer{Signal: &signalOut{n, to, msg}})
	select {
	case a := <-c:
		if a.Err != nil {
			return nil, a.Err
		}
		return a.Data, nil
	case <-ctx.Done():
		s.mu.Lock()
		delete(s.asked, n)
		s.mu.Unlock()
		return nil, ctx.Err()
	}
}

func (s *speaker) answered(n int, a answer) {
	s.mu.Lock()
	c := s.asked[n]
	delete(s.asked, n)
	s.mu.Unlock()
	if c != nil {
		c <- a
	}
}

func (s *speaker) say(a answer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = s.to.Encode(a) // without a suite the remote ends by itself
}

func (s *speaker) Received(id core.TransferID, st core.TransferStats, err error) {
	s.say(answer{Outcome: &Outcome{Kind: "received", ID: id, Stats: st}, Err: toRemote(err)})
}

func (s *speaker) Written(id core.TransferID, st core.TransferStats, err error) {
	s.say(answer{Outcome: &Outcome{Kind: "written", ID: id, Stats: st}, Err: toRemote(err)})
}

func (s *speaker) PeerDown(peer core.AgentID, err error) {
	s.say(answer{Outcome: &Outcome{Kind: "down", Peer: peer}, Err: toRemote(err)})
}

func serveRemote(open RemoteOpener, in io.Reader, out io.Writer) error {
	if open == nil {
		return errors.New("ServeRemote was not given this kind")
	}
	orders := json.NewDecoder(in)
	s := &speaker{to: json.NewEncoder(out), asked: map[int]chan answer{}}
	var first order
	if err := orders.Decode(&first); err != nil {
		return err
	}
	mem, err := unix.Mmap(remoteMemory, 0, first.Size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return err
	}
	for i := range first.Regions {
		first.Regions[i].Base += uint64(uintptr(unsafe.Pointer(&mem[0])))
	}
	l, err := core.NewLayout(first.Regions)
	if err != nil {
		return err
	}
	t, err := open(first.Agent, l, s, s.signal)
	if err != nil {
		return err
	}
	s.say(answer{N: first.N, Text: t.Endpoint()})
	for {
		var o order
		if err := orders.Decode(&o); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		if o.Method == "Answered" {
			s.answered(o.N, *o.Answer)
			continue
		}
		go func() { // an order that waits holds up no other
			a := answer{N: o.N}
			var err error
			switch o.Method {
			case "Admit":
				a.Data, err = t.Admit(o.Peer)
			case "Dismiss":
				t.Dismiss(o.Peer)
			case "Connect":
				err = t.Connect(o.Peer, o.Endpoint, o.Ticket)
			case "Expect":
				a.Data, err = t.Expect(o.ID, o.Peer, o.Segments)
			case "Revoke":
				t.Revoke(o.ID)
			case "Write":
				t.Write(*o.Op)
			case "Extend":
				t.Extend(*o.Op)
			case "Stop":
				t.Stop(o.ID)
			case "Signalled":
				a.Data, err = t.(core.Signaller).Signalled(o.Peer, o.Msg)
			case "Close":
				err = t.Close()
			}
			a.Err = toRemote(err)
			s.say(a)
		}()
	}
}

// remote is a core.Transport in a process of its own.
type remote struct {
	t        *testing.T
	cmd      *exec.Cmd
	sink     *Recorder
	signal   core.Signal // of the board
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
	fd, err := unix.MemfdCreate("kvconn-test", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	file := os.NewFile(uintptr(fd), "memory")
	defer file.Close()
	return openOn(t, f, id, newArena(t, specs, file), func(a *arena, sink *Recorder) core.Transport {
		r := &remote{t: t, cmd: exec.Command(os.Args[0]), sink: sink, signal: f.board.from(id), ended: make(chan struct{}), waiting: map[int]chan answer{}}
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
		first := order{Method: "open", Agent: id, Size: len(a.mem), Regions: append([]core.Region{}, a.layout.Regions...)}
		for i := range first.Regions {
			first.Regions[i].Base -= uint64(uintptr(unsafe.Pointer(&a.mem[0])))
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

// carry hands a remote's signal to the board. It ends when the asked transport answers, or
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
		_ = json.NewEncoder(r.in).Encode(order{N: s.N, Method: "Answered", Answer: &answer{Data: data, Err: toRemote(err)}})
	}
}

func (r *remote) signalled(ctx context.Context, from core.AgentID, msg []byte) ([]byte, error) {
	a, err := r.askUntil(ctx, order{Method: "Signalled", Peer: from, Msg: msg})
	return a.Data, err
}

// ask gives an order and waits for its answer.
func (r *remote) ask(o order) (answer, error) {
	ctx, cancel := context.WithTimeoutCause(context.Background(), patience, fmt.Errorf("the remote's %s has not returned within %v", o.Method, patience))
	defer cancel()
	return r.askUntil(ctx, o)
}

func (r *remote) askUntil(ctx context.Context, o order) (answer, error) {
	c := make(chan answer, 1)
	r.mu.Lock()
	r.n++
	o.N = r.n
	r.waiting[o.N] = c
	err := json.NewEncoder(r.in).Encode(o)
	r.mu.Unlock()
	if err != nil {
		return answer{}, fmt.Errorf("the remote takes no orders: %w", errors.Join(core.ErrAbsent, err))
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

// order is ask where only the remote's own failure is an error.
func (r *remote) order(o order) {
	if _, err := r.ask(o); err != nil {
		r.t.Errorf("%s: %v", o.Method, err)
	}
}

func (r *remote) Name() string     { return "remote" }
func (r *remote) Endpoint() string { return r.endpoint }

func (r *remote) Admit(peer core.AgentID) ([]byte, error) {
	a, err := r.ask(order{Method: "Admit", Peer: peer})
	return a.Data, err
}

func (r *remote) Dismiss(peer core.AgentID) { r.order(order{Method: "Dismiss", Peer: peer}) }

func (r *remote) Connect(peer core.AgentID, endpoint string, ticket []byte) error {
	_, err := r.ask(order{Method: "Connect", Peer: peer, Endpoint: endpoint, Ticket: ticket})
	return err
}

func (r *remote) Expect(id core.TransferID, peer core.AgentID, dst []core.Segment) ([]byte, error) {
	a, err := r.ask(order{Method: "Expect", ID: id, Peer: peer, Segments: dst})
	return a.Data, err
}

func (r *remote) Revoke(id core.TransferID) { r.order(order{Method: "Revoke", ID: id}) }
func (r *remote) Write(op core.WriteOp)     { r.order(order{Method: "Write", Op: &op}) }
func (r *remote) Extend(op core.WriteOp)    { r.order(order{Method: "Extend", Op: &op}) }
func (r *remote) Stop(id core.TransferID)   { r.order(order{Method: "Stop", ID: id}) }

// Close closes the transport and ends the process, which must not complain: the race
// detector's word is its exit status.
func (r *remote) Close() error {
	_, err := r.ask(order{Method: "Close"})
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
