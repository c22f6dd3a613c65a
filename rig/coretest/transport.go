// Package coretest holds fakes of what package core is given (Transport, Bus,
// Clock), the conformance suite that every Transport passes, and the runner of
// transcripts.
package coretest

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
)

// chunk is how much the fake copies at a time: the longest that Revoke waits.
const chunk = 64 << 10

// Network joins the fakes of one test.
type Network struct {
	mu      sync.Mutex
	open    map[core.AgentID]*transport
	links   map[link]bool
	onChunk func(id core.TransferID, chunk int)

	// Of Signallers.
	fakes    map[core.AgentID]*Signaller
	broken   map[link]error // by both orders of two agents
	hold     <-chan struct{}
	revoking func(id core.TransferID)
}

// link: the receiver has connected to the sender, with its ticket.
type link struct{ sender, receiver core.AgentID }

// NewNetwork makes one without agents.
func NewNetwork() *Network {
	return &Network{open: map[core.AgentID]*transport{}, links: map[link]bool{}, fakes: map[core.AgentID]*Signaller{}, broken: map[link]error{}}
}

// OnChunk has f called before each chunk of each write (from 0), on the writer's
// goroutine and without a lock: f may wait, and call Close or Revoke.
func (n *Network) OnChunk(f func(id core.TransferID, chunk int)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.onChunk = f
}

// NewTransport opens a core.Transport that copies within this process from the
// addresses of the sender's layout to those of the receiver's, as RDMA does:
// the receiver's agent takes no part in a write but by its fence.
func (n *Network) NewTransport(id core.AgentID, layout *kv.Layout, sink core.Sink) core.Transport {
	t := n.newTransport(id, layout, sink)
	n.mu.Lock()
	defer n.mu.Unlock()
	n.open[id] = t
	return t
}

func (n *Network) newTransport(id core.AgentID, layout *kv.Layout, sink core.Sink) *transport {
	return &transport{net: n, id: id, layout: layout, sink: sink, done: make(chan struct{}),
		admitted: map[core.AgentID][]byte{}, expected: map[core.TransferID]*expect{}, writes: map[core.TransferID]*write{}}
}

type transport struct {
	net    *Network
	id     core.AgentID
	layout *kv.Layout
	sink   core.Sink
	done   chan struct{} // closed by Close
	// prepare, of a Signaller, makes the link before a write.
	prepare func(ctx context.Context, peer core.AgentID) error

	mu       sync.Mutex
	closed   bool
	admitted map[core.AgentID][]byte // the tickets
	expected map[core.TransferID]*expect
	writes   map[core.TransferID]*write
	running  sync.WaitGroup // goroutines that this transport owns
}

// expect is an armed receiver. Its lock is the fence: held while a chunk is
// copied and while Received is called, so that Revoke is exact for both.
type expect struct {
	id       core.TransferID
	peer     core.AgentID
	grant    []byte
	segments int
	total    uint64
	fence    sync.Mutex
	over     bool        // revoked, or its outcome was told
	told     atomic.Bool // Received is being called: the id is free again
	taken    bool        // a write has begun
}

type write struct {
	peer core.AgentID
	stop context.Context
	end  context.CancelCauseFunc
	more []core.WriteOp // of Extend; guarded by transport.mu
	wake chan struct{}  // has room for one word that there is more
}

var (
	errFakeClosed = errors.New("mem: transport is closed")
	errStopped    = errors.New("mem: write was stopped")
)

func (t *transport) Name() string     { return "mem" }
func (t *transport) Endpoint() string { return "mem:" + string(t.id) }

// enter counts what Close waits for.
func (t *transport) enter() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return false
	}
	t.running.Add(1)
	return true
}

// spawn starts a goroutine that Close waits for.
func (t *transport) spawn(f func()) bool {
	if !t.enter() {
		return false
	}
	go func() {
		defer t.running.Done()
		f()
	}()
	return true
}

func (t *transport) Admit(peer core.AgentID) ([]byte, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return nil, errFakeClosed
	}
	if t.admitted[peer] == nil {
		ticket := make([]byte, 16)
		rand.Read(ticket)
		t.admitted[peer] = ticket
	}
	return bytes.Clone(t.admitted[peer]), nil
}

func (t *transport) Dismiss(peer core.AgentID) {
	t.mu.Lock()
	delete(t.admitted, peer)
	for _, w := range t.writes {
		if w.peer == peer {
			w.end(fmt.Errorf("mem: agent %s was dismissed", peer))
		}
	}
	t.mu.Unlock()
	t.net.mu.Lock()
	other := t.net.open[peer]
	linked := t.net.links[link{t.id, peer}]
	delete(t.net.links, link{t.id, peer})
	t.net.mu.Unlock()
	if linked && other != nil {
		other.spawn(func() { other.sink.PeerDown(t.id, fmt.Errorf("mem: agent %s has dismissed this one", t.id)) })
	}
}

// admits says whether a ticket is the one of a peer that is admitted.
func (t *transport) admits(peer core.AgentID, ticket []byte) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.admitted[peer] != nil && bytes.Equal(t.admitted[peer], ticket)
}

func (t *transport) Connect(peer core.AgentID, endpoint string, ticket []byte) error {
	if !strings.HasPrefix(endpoint, "mem:") {
		return fmt.Errorf("mem: agent %s has the endpoint %q", peer, endpoint)
	}
	t.net.mu.Lock()
	var err error
	switch other := t.net.open[peer]; {
	case t.net.links[link{peer, t.id}]: // the ticket is for the next connection
	case other == nil || endpoint != "mem:"+string(peer):
		err = fmt.Errorf("mem: nobody is at %s", endpoint)
	case !other.admits(t.id, ticket):
		err = fmt.Errorf("mem: agent %s does not know the ticket", peer)
	default:
		t.net.links[link{peer, t.id}] = true
	}
	t.net.mu.Unlock()
	if err != nil && !t.spawn(func() { t.sink.PeerDown(peer, err) }) {
		return errFakeClosed
	}
	return nil
}

func (t *transport) Expect(id core.TransferID, peer core.AgentID, dst []kv.Segment) ([]byte, error) {
	e := &expect{id: id, peer: peer, grant: make([]byte, 16), segments: len(dst)}
	rand.Read(e.grant)
	for _, s := range dst {
		e.total += s.Length
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.closed:
		return nil, errFakeClosed
	case t.expected[id] != nil && !t.expected[id].told.Load():
		return nil, fmt.Errorf("mem: transfer %q is expected already", id.Name())
	}
	t.expected[id] = e
	return bytes.Clone(e.grant), nil
}

func (t *transport) Revoke(id core.TransferID) error {
	t.mu.Lock()
	e := t.expected[id]
	t.mu.Unlock()
	if e != nil {
		e.fence.Lock()
		e.over = true
		e.fence.Unlock()
		t.forget(e)
	}
	return nil
}

func (t *transport) forget(e *expect) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.expected[e.id] == e {
		delete(t.expected, e.id)
	}
}

// end tells the outcome, unless another end came first.
func (t *transport) end(e *expect, s core.TransferStats, err error) bool {
	if !t.enter() {
		return false
	}
	defer t.running.Done()
	e.fence.Lock()
	defer e.fence.Unlock()
	if e.over {
		return false
	}
	e.over = true
	e.told.Store(true)
	t.sink.Received(e.id, s, err)
	t.forget(e)
	return true
}

func (t *transport) Close() error {
	t.mu.Lock()
	if t.closed {
		t.mu.Unlock()
		t.running.Wait()
		return nil
	}
	t.closed = true
	expected := t.expected
	t.expected = map[core.TransferID]*expect{}
	t.mu.Unlock()
	close(t.done)
	for _, e := range expected {
		e.fence.Lock()
		e.over = true
		e.fence.Unlock()
	}
	t.net.mu.Lock()
	delete(t.net.open, t.id)
	var others []*transport
	for l := range t.net.links {
		switch t.id {
		case l.sender:
			others = append(others, t.net.open[l.receiver])
		case l.receiver:
			others = append(others, t.net.open[l.sender])
		default:
			continue
		}
		delete(t.net.links, l)
	}
	t.net.mu.Unlock()
	for _, o := range others {
		if o != nil {
			o.spawn(func() { o.sink.PeerDown(t.id, fmt.Errorf("mem: agent %s was closed", t.id)) })
		}
	}
	t.running.Wait()
	return nil
}

// inside checks a range against its region.
func inside(l *kv.Layout, region uint32, off, n uint64) error {
	if int(region) >= len(l.Regions) {
		return fmt.Errorf("region %d of %d", region, len(l.Regions))
	}
	r := &l.Regions[region]
	if end := off + n; end < off || end > r.Extent() {
		return fmt.Errorf("bytes %d to %d are outside of %v", off, end, r)
	}
	return nil
}

// memory is the n bytes at an address of this process, which is not Go memory.
func memory(addr, n uint64) []byte {
	a := uintptr(addr)
	return unsafe.Slice(*(**byte)(unsafe.Pointer(&a)), n)
}
