package coretest

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
)

// Signaller is a fake of a transport whose ends agree by signals before bytes
// move: D says hello, P asks D to join, D answers with its ticket, P says that it is up.
type Signaller struct {
	*transport
	name   string
	signal core.Signal
	ctx    context.Context // ends with Close
	cancel context.CancelFunc

	state       sync.Mutex
	connections map[core.AgentID]*fakeConnection // D: to the agents that it was told to connect
	joins       map[core.AgentID]*fakeJoin       // P: under way
}

var _ core.Signaller = (*Signaller)(nil)

type fakeConnection struct {
	ticket  []byte
	nonce   string        // P's word on it has the nonce, and no word on an earlier agent of this id has it
	settled chan struct{} // closed when it is up, or err is set
	err     error
}

type fakeJoin struct {
	done chan struct{}
	err  error
}

// handshakeTimeout bounds a handshake's messages.
const handshakeTimeout = 5 * time.Second

// NewSignaller opens a fake whose Name is name. As with NewTransport, the bytes
// are copied within this process.
func (n *Network) NewSignaller(name string, id core.AgentID, layout *kv.Layout, sink core.Sink, signal core.Signal) *Signaller {
	s := &Signaller{transport: n.newTransport(id, layout, sink), name: name, signal: signal,
		connections: map[core.AgentID]*fakeConnection{}, joins: map[core.AgentID]*fakeJoin{}}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.prepare = s.link
	n.mu.Lock()
	defer n.mu.Unlock()
	n.open[id], n.fakes[id] = s.transport, s
	return s
}

// Signals is a Signal that hands messages over within the test, for the fake id.
func (n *Network) Signals(id core.AgentID) core.Signal {
	return func(ctx context.Context, to core.AgentID, msg []byte) ([]byte, error) {
		n.mu.Lock()
		s := n.fakes[to]
		n.mu.Unlock()
		if s == nil || s.ctx.Err() != nil {
			return nil, fmt.Errorf("%w: %s", core.ErrAbsent, to)
		}
		return s.Signalled(id, bytes.Clone(msg))
	}
}

// Name implements core.Transport.
func (s *Signaller) Name() string { return s.name }

func (s *Signaller) linked(sender, receiver core.AgentID) bool {
	s.net.mu.Lock()
	defer s.net.mu.Unlock()
	return s.net.links[link{sender, receiver}]
}

func (s *Signaller) cutOff(peer core.AgentID) error {
	s.net.mu.Lock()
	defer s.net.mu.Unlock()
	return s.net.broken[link{s.id, peer}]
}

// Connect implements core.Transport.
func (s *Signaller) Connect(peer core.AgentID, endpoint string, ticket []byte) error {
	if endpoint != "mem:"+string(peer) {
		return fmt.Errorf("mem: agent %s has the endpoint %q", peer, endpoint)
	}
	w := &fakeConnection{ticket: bytes.Clone(ticket), nonce: rand.Text(), settled: make(chan struct{})}
	s.state.Lock()
	s.connections[peer] = w
	s.state.Unlock()
	if s.linked(peer, s.id) { // the ticket is for the next connection
		close(w.settled)
		return nil
	}
	if !s.spawn(func() { s.sayHello(peer, w) }) {
		return errFakeClosed
	}
	return nil
}

func (s *Signaller) sayHello(peer core.AgentID, w *fakeConnection) {
	ctx, cancel := context.WithTimeout(s.ctx, handshakeTimeout)
	defer cancel()
	if _, err := s.signal(ctx, peer, append([]byte("hello "+w.nonce+" "), w.ticket...)); err != nil {
		s.settle(peer, w.nonce, err)
	}
}

// settle ends the waiting for the connection with a nonce; an error is told.
func (s *Signaller) settle(peer core.AgentID, nonce string, err error) {
	s.state.Lock()
	w := s.connections[peer]
	if w == nil || w.nonce != nonce {
		s.state.Unlock()
		return
	}
	select {
	case <-w.settled:
		s.state.Unlock()
		return
	default:
	}
	w.err = err
	close(w.settled)
	s.state.Unlock()
	if err != nil {
		s.spawn(func() { s.sink.PeerDown(peer, err) })
	}
}

// Signalled implements core.Signaller.
func (s *Signaller) Signalled(from core.AgentID, msg []byte) ([]byte, error) {
	if s.ctx.Err() != nil {
		return nil, errFakeClosed
	}
	kind, rest, _ := bytes.Cut(msg, []byte(" "))
	switch string(kind) {
	case "hello":
		if err := s.cutOff(from); err != nil {
			return nil, err
		}
		nonce, ticket, _ := bytes.Cut(rest, []byte(" "))
		if !s.admits(from, ticket) {
			return nil, fmt.Errorf("mem: agent %s does not know the ticket", s.id)
		}
		if !s.spawn(func() { s.takeHello(from, string(nonce)) }) {
			return nil, errFakeClosed
		}
		return nil, nil
	case "join":
		s.state.Lock()
		defer s.state.Unlock()
		w := s.connections[from]
		if w == nil {
			return nil, fmt.Errorf("mem: agent %s has not connected", s.id)
		}
		return w.ticket, nil
	case "up":
		s.settle(from, string(rest), nil)
		return nil, nil
	case "no":
		nonce, why, _ := bytes.Cut(rest, []byte(" "))
		s.settle(from, string(nonce), errors.New(string(why)))
		return nil, nil
	}
	return nil, fmt.Errorf("mem: a signal of unknown kind %.20q", kind)
}

// takeHello makes the link that D has asked for, and tells D the outcome.
func (s *Signaller) takeHello(peer core.AgentID, nonce string) {
	ctx, cancel := context.WithTimeout(s.ctx, handshakeTimeout)
	defer cancel()
	word := "up " + nonce
	if err := s.link(ctx, peer); err != nil {
		word = "no " + nonce + " " + err.Error()
	}
	_, _ = s.signal(ctx, peer, []byte(word))
}

// join makes P's end of the link, once at a time; ours if this call has begun it.
func (s *Signaller) join(peer core.AgentID) (j *fakeJoin, ours bool) {
	s.state.Lock()
	defer s.state.Unlock()
	if j = s.joins[peer]; j != nil {
		return j, false
	}
	j = &fakeJoin{done: make(chan struct{})}
	end := func(err error) {
		s.state.Lock()
		j.err = err
		delete(s.joins, peer)
		s.state.Unlock()
		close(j.done)
	}
	s.joins[peer] = j
	if !s.spawn(func() { end(s.agree(peer)) }) {
		delete(s.joins, peer)
		j.err = errFakeClosed
		close(j.done)
	}
	return j, true
}

func (s *Signaller) agree(peer core.AgentID) error {
	s.net.mu.Lock()
	hold := s.net.hold
	s.net.mu.Unlock()
	if hold != nil {
		select {
		case <-hold:
		case <-s.ctx.Done():
			return errFakeClosed
		}
	}
	ctx, cancel := context.WithTimeout(s.ctx, handshakeTimeout)
	defer cancel()
	if err := s.cutOff(peer); err != nil {
		return err
	}
	ticket, err := s.signal(ctx, peer, []byte("join"))
	if err != nil {
		return err
	}
	if !s.admits(peer, ticket) {
		return fmt.Errorf("mem: agent %s shows a ticket that %s does not know", peer, s.id)
	}
	s.net.mu.Lock()
	defer s.net.mu.Unlock()
	if s.net.open[peer] == nil {
		return fmt.Errorf("mem: nobody is at %s", peer)
	}
	s.net.links[link{s.id, peer}] = true
	return nil
}

// link makes the link to a peer that was admitted, unless it is there.
func (s *Signaller) link(ctx context.Context, peer core.AgentID) error {
	for range 3 { // a link that was made, or was not, may be that of the last agent with this id
		s.mu.Lock()
		admitted := s.admitted[peer] != nil
		s.mu.Unlock()
		if s.linked(s.id, peer) || !admitted {
			return nil // run says what is missing
		}
		if err := s.cutOff(peer); err != nil {
			return fmt.Errorf("mem: %w: %w", core.ErrConnectionLost, err)
		}
		j, ours := s.join(peer)
		select {
		case <-j.done:
			if j.err != nil && ours {
				return j.err
			}
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// Usable implements core.Signaller.
func (s *Signaller) Usable(ctx context.Context, peer core.AgentID) error {
	for {
		if err := s.cutOff(peer); err != nil {
			return err
		}
		if s.linked(peer, s.id) || s.linked(s.id, peer) {
			return nil
		}
		s.state.Lock()
		w := s.connections[peer]
		s.state.Unlock()
		if w == nil {
			return fmt.Errorf("mem: agent %s was not connected", peer)
		}
		select {
		case <-w.settled:
			s.state.Lock()
			err, old := w.err, s.connections[peer] != w
			s.state.Unlock()
			if err == nil && !s.linked(peer, s.id) {
				err = fmt.Errorf("mem: agent %s is not connected any more", peer)
			}
			if !old {
				return err
			}
		case <-ctx.Done():
			return fmt.Errorf("mem: agent %s is being connected: %w", peer, ctx.Err())
		}
	}
}

// Dismiss implements core.Transport.
func (s *Signaller) Dismiss(peer core.AgentID) {
	s.state.Lock()
	delete(s.connections, peer)
	s.state.Unlock()
	s.transport.Dismiss(peer)
}

// Revoke implements core.Transport.
func (s *Signaller) Revoke(id core.TransferID) error {
	s.net.mu.Lock()
	f := s.net.revoking
	s.net.mu.Unlock()
	if f != nil {
		f(id)
	}
	return s.transport.Revoke(id)
}

// Close implements core.Transport.
func (s *Signaller) Close() error {
	s.cancel()
	s.net.mu.Lock()
	if s.net.fakes[s.id] == s {
		delete(s.net.fakes, s.id)
	}
	s.net.mu.Unlock()
	return s.transport.Close()
}
