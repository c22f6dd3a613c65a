// The remote side of a transport in a process of its own: it obeys the suite's orders.

package coretest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
)

// remoteEnv tells a test binary that it is a remote, and of which kind.
const remoteEnv = "KVCONN_TEST_REMOTE"

// remoteMemory is the descriptor of the memory that a remote shares with the
// suite.
const remoteMemory = 3

// RemoteKind is a transport that ServeRemote opens, and where the memory lies.
type RemoteKind struct {
	Open   RemoteOpener
	Device *Device // nil: all regions lie in host memory
}

// RemoteOpener opens a transport in a process that the suite has started.
type RemoteOpener func(id core.AgentID, l *kv.Layout, sink core.Sink, signal core.Signal) (core.Transport, error)

// ServeRemote must be the first call of the TestMain of a package that has ProcessSuite
// start processes. In such a process it opens the transport that Fixture.Remote names,
// runs the suite's commands, and does not return.
func ServeRemote(kinds map[string]RemoteKind) {
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

// command is a call of a method of core.Transport, or "open".
type command struct {
	N        int
	Method   string
	Agent    core.AgentID `json:",omitempty"`
	Regions  []kv.Region  `json:",omitempty"` // their bases count from the start of the memory
	Size     int          `json:",omitempty"`
	ID       core.TransferID
	Peer     core.AgentID  `json:",omitempty"`
	Endpoint string        `json:",omitempty"`
	Ticket   []byte        `json:",omitempty"`
	Segments []kv.Segment  `json:",omitempty"`
	Op       *core.WriteOp `json:",omitempty"`
	Msg      []byte        `json:",omitempty"` // of Signalled
	Answer   *answer       `json:",omitempty"` // of "Answered": to the remote's signal of that number
}

// answer is the result of command N; N 0: the sink was told something.
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

func serveRemote(kind RemoteKind, in io.Reader, out io.Writer) error {
	if kind.Open == nil {
		return errors.New("ServeRemote was not given this kind")
	}
	commands := json.NewDecoder(in)
	s := &speaker{to: json.NewEncoder(out), asked: map[int]chan answer{}}
	var first command
	if err := commands.Decode(&first); err != nil {
		return err
	}
	mem, err := unix.Mmap(remoteMemory, 0, first.Size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return err
	}
	if _, err := kind.Device.place(first.Regions, mem, os.NewFile(remoteMemory, "memory")); err != nil {
		return err
	}
	l, err := kv.NewLayout(first.Regions)
	if err != nil {
		return err
	}
	t, err := kind.Open(first.Agent, l, s, s.signal)
	if err != nil {
		return err
	}
	s.say(answer{N: first.N, Text: t.Endpoint()})
	for {
		var o command
		if err := commands.Decode(&o); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		if o.Method == "Answered" {
			s.answered(o.N, *o.Answer)
			continue
		}
		go func() { // a command that waits holds up no other
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
				err = t.Revoke(o.ID)
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
