package node

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/local"
	"github.com/kvconn/kvconn/rdma"
	"github.com/kvconn/kvconn/rig/coretest"
	"github.com/kvconn/kvconn/wire"
)

// spy is a fake Signaller that counts and replaces calls.
type spy struct {
	*coretest.Signaller
	waits      atomic.Int32 // calls of Usable that might have waited
	signals    atomic.Int32
	answerer   atomic.Pointer[func(from core.AgentID, msg []byte) ([]byte, error)]
	signal     core.Signal
	names      *fakeNames
	sink       core.Sink
	refuse     atomic.Pointer[func(peer core.AgentID) error] // of each write, by the peer's own id
	connectErr error                                         // of each Connect
	holds      atomic.Pointer[chan struct{}]                 // Revoke and Close wait until it is closed
	fails      atomic.Bool                                   // then both say that bytes may land
	closing    atomic.Bool                                   // Close has begun
}

// fakeNames are the ids by which an agent knows its peers, and the peers' own ids, by which
// fakes find each other.
type fakeNames struct {
	mu    sync.Mutex
	known map[core.AgentID]core.AgentID // by the peer's own id
}

var railedAgents struct {
	sync.Mutex
	list []*side
}

// own is the own id of a peer. A peer keeps the id that it had at this agent's predecessor.
func (n *fakeNames) own(id core.AgentID) core.AgentID {
	railedAgents.Lock()
	defer railedAgents.Unlock()
	for _, p := range railedAgents.list {
		for _, d := range railedAgents.list {
			if p.nameOf(d) == id {
				n.mu.Lock()
				n.known[d.ID()] = id
				n.mu.Unlock()
				return d.ID()
			}
		}
	}
	return id
}

// here is the id by which this agent knows a peer.
func (n *fakeNames) here(own core.AgentID) core.AgentID {
	n.mu.Lock()
	defer n.mu.Unlock()
	if id, ok := n.known[own]; ok {
		return id
	}
	return own
}

// renaming is a sink that hears of peers by the ids that its agent knows.
type renaming struct {
	core.Sink
	names *fakeNames
}

func (r renaming) PeerDown(peer core.AgentID, err error) { r.Sink.PeerDown(r.names.here(peer), err) }

func (s *spy) Connect(peer core.AgentID, endpoint string, ticket []byte) error {
	if s.connectErr != nil {
		return s.connectErr
	}
	return s.Signaller.Connect(peer, endpoint, ticket)
}

func (s *spy) Admit(peer core.AgentID) ([]byte, error) { return s.Signaller.Admit(s.names.own(peer)) }
func (s *spy) Dismiss(peer core.AgentID)               { s.Signaller.Dismiss(s.names.own(peer)) }

func (s *spy) hold() {
	if c := s.holds.Load(); c != nil {
		<-*c
	}
}

func (s *spy) Revoke(id core.TransferID) error {
	s.hold()
	if s.fails.Load() {
		return fmt.Errorf("a test: %w", core.ErrMayLand)
	}
	return s.Signaller.Revoke(id)
}

func (s *spy) Close() error {
	s.closing.Store(true)
	s.hold()
	err := s.Signaller.Close()
	if s.fails.Load() {
		err = fmt.Errorf("a test: %w", core.ErrMayLand)
	}
	return err
}

func (s *spy) Write(op core.WriteOp) {
	op.Peer = s.names.own(op.Peer)
	if f := s.refuse.Load(); f != nil {
		s.sink.Written(op.ID, core.TransferStats{}, (*f)(op.Peer))
		return
	}
	s.Signaller.Write(op)
}

func (s *spy) Extend(op core.WriteOp) {
	op.Peer = s.names.own(op.Peer)
	s.Signaller.Extend(op)
}

func (s *spy) Usable(ctx context.Context, peer core.AgentID) error {
	if ctx.Err() == nil {
		s.waits.Add(1)
	}
	return s.Signaller.Usable(ctx, s.names.own(peer))
}

func (s *spy) Signalled(from core.AgentID, msg []byte) ([]byte, error) {
	s.signals.Add(1)
	if f := s.answerer.Load(); f != nil {
		return (*f)(from, msg)
	}
	return s.Signaller.Signalled(s.names.own(from), msg)
}

// fakeAgent is an agent with a fake transport in the place of rdma, or of local where its configuration names that.
type fakeAgent struct {
	*side
	fake  *spy            // the last one
	fakes map[string]*spy // by the transport's name
	logs  *observer.ObservedLogs
}

// fakeAndTCP are what auto stands for here: local itself would be taken before the fake of rdma.
const fakeAndTCP = viaRDMA + "," + viaTCP

// openFakeAgent opens an agent; lack says why it has no fake transport.
func openFakeAgent(t *testing.T, n *coretest.Network, cfg Config, lack error) *fakeAgent {
	t.Helper()
	r, err := tryFakeAgent(t, n, cfg, lack)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func tryFakeAgent(t *testing.T, n *coretest.Network, cfg Config, lack error) (*fakeAgent, error) {
	t.Helper()
	cache := make([]byte, layers*numBlocks*blockBytes)
	r := fakeAgentOver(t, n, cfg, lack, cache)
	return r, r.RegisterKVCaches(regions(cache))
}

// fakeAgentOver has registered nothing yet.
func fakeAgentOver(t *testing.T, n *coretest.Network, cfg Config, lack error, cache []byte) *fakeAgent {
	t.Helper()
	if cfg.Transport == viaAuto {
		cfg.Transport = fakeAndTCP
	}
	return fakeAgentOn(t, map[string]*coretest.Network{viaLocal: n, viaRDMA: n}, cfg, lack, cache)
}

// fakeAgentOn is fakeAgentOver whose fakes may be on networks of their own.
func fakeAgentOn(t *testing.T, on map[string]*coretest.Network, cfg Config, lack error, cache []byte) *fakeAgent {
	t.Helper()
	seen, logs := observer.New(zap.InfoLevel)
	r := &fakeAgent{logs: logs, fakes: map[string]*spy{}}
	patience := firstWait
	if cfg.ConnectTimeout == testConfig(cfg.Role).ConnectTimeout { // nothing here is late, however slow the machine is
		cfg.ConnectTimeout, patience = Seconds(3*bound), bound
	}
	fake := func(name string, id core.AgentID, l *kv.Layout, s core.Sink, signal core.Signal) (core.Signaller, error) {
		if lack != nil {
			return nil, lack
		}
		names := &fakeNames{known: map[core.AgentID]core.AgentID{}}
		toPeer := func(ctx context.Context, to core.AgentID, msg []byte) ([]byte, error) {
			return signal(ctx, names.here(to), msg)
		}
		r.fake = &spy{Signaller: on[name].NewSignaller(name, id, l, renaming{s, names}, toPeer), signal: toPeer, names: names, sink: s}
		r.fakes[name] = r.fake
		return r.fake, nil
	}
	opt := Options{
		Logger: zap.New(seen), firstWait: patience,
		rdma: func(_ rdma.Config, id core.AgentID, l *kv.Layout, s core.Sink, signal core.Signal) (core.Signaller, error) {
			return fake(viaRDMA, id, l, s, signal)
		},
		near: func(_ local.Config, id core.AgentID, l *kv.Layout, s core.Sink, signal core.Signal) (core.Transport, error) {
			return fake(viaLocal, id, l, s, signal)
		},
	}
	a, err := Open(cfg, opt)
	if err != nil {
		t.Fatal(err)
	}
	r.side = &side{Agent: a, t: t, cache: cache, seen: map[core.TransferID]core.Report{}}
	t.Cleanup(func() { _ = a.Close() })
	railedAgents.Lock()
	railedAgents.list = append(railedAgents.list, r.side)
	railedAgents.Unlock()
	t.Cleanup(func() { // each look-up asks for the name of each agent to each other
		railedAgents.Lock()
		defer railedAgents.Unlock()
		railedAgents.list = slices.DeleteFunc(railedAgents.list, func(s *side) bool { return s == r.side })
	})
	return r
}

// said counts the log lines that begin so.
func (r *fakeAgent) said(begin string) int {
	n := 0
	for _, e := range r.logs.All() {
		if strings.HasPrefix(e.Message, begin) {
			n++
		}
	}
	return n
}

func forced(role, transport string) Config {
	cfg := testConfig(role)
	cfg.Transport = transport
	return cfg
}

// goesBy moves one transfer and checks by which transport.
func goesBy(t *testing.T, p, d *fakeAgent, id core.TransferID, transport string) {
	t.Helper()
	p.fill(byte(len(id)), 5, 6)
	p.offer(id, 5, 6)
	d.load(id, p.BootstrapAddress(), 1, 2)
	for _, r := range []core.Report{d.want(id, core.OK), p.want(id, core.OK)} {
		if r.Transport != transport {
			t.Fatalf("%s of %q went by %q, want %q; decode said %v", r.Side, id, r.Transport, transport, d.logs.All())
		}
	}
	same(t, p.side, []kv.BlockID{5, 6}, d.side, []kv.BlockID{1, 2})
}

// changed is a bus whose replies come changed.
type changed struct {
	core.Bus
	reply func(*wire.Reply)
}

func (b *changed) Request(ctx context.Context, via core.Via, to core.AgentID, req *wire.Request) (*wire.Reply, error) {
	rep, err := b.Bus.Request(ctx, via, to, req)
	if err == nil {
		b.reply(rep)
	}
	return rep, err
}
