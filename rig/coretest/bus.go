package coretest

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/wire"
)

// Cluster is the control plane that the Buses of one test share.
type Cluster struct {
	mu      sync.Mutex
	agents  map[core.AgentID]*Bus
	entries []entry // oldest first
	fault   func(Message) Fault
}

type entry struct {
	bus   *Bus
	agent []byte // encoded, as a registry holds it
}

// Message is a request that is about to be delivered.
type Message struct {
	From, To core.AgentID
	Request  *wire.Request
}

// Fault is the fate of a Message; the zero value delivers it.
type Fault struct {
	Drop      bool            // it is lost: the sender waits until its context ends
	DropReply bool            // it arrives, its reply is lost
	Twice     bool            // it arrives twice; the first reply counts
	Err       error           // the sender gets this at once
	Wait      <-chan struct{} // it arrives when this is closed
}

// NewCluster makes an empty one.
func NewCluster() *Cluster { return &Cluster{agents: map[core.AgentID]*Bus{}} }

// SetFault makes f decide about every message from now on; nil delivers all.
// f is called from several goroutines.
func (c *Cluster) SetFault(f func(Message) Fault) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fault = f
}

// NewBus makes an agent's Bus. bootstrap is the address that this agent serves
// ("http://host:port"), under which its entries are found; "" if it serves none.
func (c *Cluster) NewBus(id core.AgentID, bootstrap string) *Bus {
	b := &Bus{cluster: c, id: id, bootstrap: bootstrap, done: make(chan struct{})}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.agents[id] = b
	return b
}

// Bus is a core.Bus in memory. Messages pass through their encoding, so a message that
// does not fit on the wire fails here too.
type Bus struct {
	cluster   *Cluster
	id        core.AgentID
	bootstrap string
	done      chan struct{} // closed by Close

	mu      sync.Mutex
	closed  bool
	handler core.Handler
	running sync.WaitGroup // deliveries of this bus's requests, and its handler's calls
}

var _ core.Bus = (*Bus)(nil)

var errBusClosed = errors.New("bus is closed")

// enter counts one more goroutine or call that Close waits for.
func (b *Bus) enter() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return false
	}
	b.running.Add(1)
	return true
}

// Serve implements core.Bus.
func (b *Bus) Serve(h core.Handler) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.handler = h
}

// Register implements core.Bus.
func (b *Bus) Register(ctx context.Context, a *wire.Agent) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	enc, err := a.MarshalMsg(nil)
	if err != nil {
		return err
	}
	if !b.enter() {
		return errBusClosed
	}
	defer b.running.Done()
	b.cluster.mu.Lock()
	defer b.cluster.mu.Unlock()
	b.cluster.entries = append(b.cluster.entries, entry{b, enc})
	return nil
}

// Lookup implements core.Bus.
func (b *Bus) Lookup(ctx context.Context, t core.Target) (*wire.Agent, core.Via, error) {
	if err := ctx.Err(); err != nil {
		return nil, "", err
	}
	b.cluster.mu.Lock()
	defer b.cluster.mu.Unlock()
	if t.Bootstrap != "" && !b.cluster.serves(t.Bootstrap) {
		return nil, "", fmt.Errorf("%w: %s", core.ErrUnreachable, t.Bootstrap)
	}
	var found *wire.Agent
	for i := len(b.cluster.entries) - 1; i >= 0; i-- {
		e := b.cluster.entries[i]
		if t.Bootstrap != "" && e.bus.bootstrap != t.Bootstrap {
			continue
		}
		a := &wire.Agent{}
		if _, err := a.UnmarshalMsg(e.agent); err != nil {
			return nil, "", err
		}
		if t.DPRank >= 0 && a.DPRank != t.DPRank || a.TPRank != t.TPRank || a.PPRank != t.PPRank {
			continue
		}
		switch {
		case t.EngineID == a.EngineID:
			return a, core.Via(t.Bootstrap), nil
		case t.EngineID != "":
		case found == nil:
			found = a
		case found.EngineID != a.EngineID:
			return nil, "", fmt.Errorf("%w: engines %q and %q are at %s, name one", core.ErrNotRegistered, found.EngineID, a.EngineID, t.Bootstrap)
		}
	}
	if found == nil {
		return nil, "", fmt.Errorf("%w: engine %q dp %d tp %d pp %d at %q", core.ErrNotRegistered, t.EngineID, t.DPRank, t.TPRank, t.PPRank, t.Bootstrap)
	}
	return found, core.Via(t.Bootstrap), nil
}

// serves says whether an open agent has that bootstrap address; c.mu is held.
func (c *Cluster) serves(address string) bool {
	for _, b := range c.agents {
		if b.bootstrap == address {
			return true
		}
	}
	return false
}

// Request implements core.Bus.
func (b *Bus) Request(ctx context.Context, via core.Via, to core.AgentID, req *wire.Request) (*wire.Reply, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	enc, err := req.MarshalMsg(nil)
	if err != nil {
		return nil, err
	}
	in := &wire.Request{}
	if err := wire.Decode(enc, in); err != nil {
		return nil, fmt.Errorf("request to %s: %w", to, err)
	}
	in.From = string(b.id)
	b.cluster.mu.Lock()
	peer, hook := b.cluster.agents[to], b.cluster.fault
	b.cluster.mu.Unlock()
	var f Fault
	if hook != nil {
		f = hook(Message{From: b.id, To: to, Request: in})
	}
	if f.Err != nil {
		return nil, f.Err
	}
	if peer == nil {
		return nil, fmt.Errorf("%w: %s", core.ErrAbsent, to)
	}
	type result struct {
		rep *wire.Reply
		err error
	}
	results := make(chan result, 1)
	if !b.enter() {
		return nil, errBusClosed
	}
	go func() {
		defer b.running.Done()
		if f.Wait != nil {
			select {
			case <-f.Wait:
			case <-ctx.Done():
				return
			case <-b.done:
				return
			}
		}
		if f.Drop {
			return
		}
		rep, err := peer.deliver(via, in)
		if f.Twice && err == nil {
			again := &wire.Request{}
			if wire.Decode(enc, again) == nil {
				_, _ = peer.deliver(via, again)
			}
		}
		if !f.DropReply {
			results <- result{rep, err}
		}
	}()
	select {
	case r := <-results:
		return r.rep, r.err
	case <-ctx.Done():
		return nil, fmt.Errorf("request to %s: %w", to, ctx.Err())
	case <-b.done:
		return nil, errBusClosed
	}
}

// deliver runs the handler of this bus and returns its reply as it comes over
// the wire.
func (b *Bus) deliver(via core.Via, req *wire.Request) (*wire.Reply, error) {
	if !b.enter() {
		return nil, fmt.Errorf("%w: %s", core.ErrAbsent, b.id)
	}
	defer b.running.Done()
	b.mu.Lock()
	h := b.handler
	b.mu.Unlock()
	if h == nil {
		return nil, fmt.Errorf("%w: %s serves nothing yet", core.ErrAbsent, b.id)
	}
	enc, err := h(via, req).MarshalMsg(nil)
	if err != nil {
		return nil, err
	}
	rep := &wire.Reply{}
	return rep, wire.Decode(enc, rep)
}

// Kill makes the agent absent at once, as when its process ends: its entries
// stay in the registry until Expire.
func (b *Bus) Kill() {
	b.mu.Lock()
	if !b.closed {
		b.closed = true
		close(b.done)
	}
	b.mu.Unlock()
	b.cluster.mu.Lock()
	if b.cluster.agents[b.id] == b {
		delete(b.cluster.agents, b.id)
	}
	b.cluster.mu.Unlock()
}

// Expire ends the entries of a killed agent.
func (b *Bus) Expire() {
	b.cluster.mu.Lock()
	defer b.cluster.mu.Unlock()
	kept := b.cluster.entries[:0:0]
	for _, e := range b.cluster.entries {
		if e.bus != b {
			kept = append(kept, e)
		}
	}
	b.cluster.entries = kept
}

// Close implements core.Bus.
func (b *Bus) Close(ctx context.Context) error {
	b.Kill()
	b.Expire()
	idle := make(chan struct{})
	go func() {
		b.running.Wait()
		close(idle)
	}()
	select {
	case <-idle:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
