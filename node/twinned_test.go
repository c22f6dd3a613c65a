package node

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/core/coretest"
	"github.com/kvconn/kvconn/rdma"
	"github.com/kvconn/kvconn/wire"
)

// spy is a Signaller twin that counts and replaces calls.
type spy struct {
	*coretest.Signaller
	waits    atomic.Int32 // calls of Usable that might have waited
	signals  atomic.Int32
	answerer atomic.Pointer[func(from core.AgentID, msg []byte) ([]byte, error)]
	signal   core.Signal
}

func (s *spy) Usable(ctx context.Context, peer core.AgentID) error {
	if ctx.Err() == nil {
		s.waits.Add(1)
	}
	return s.Signaller.Usable(ctx, peer)
}

func (s *spy) Signalled(from core.AgentID, msg []byte) ([]byte, error) {
	s.signals.Add(1)
	if f := s.answerer.Load(); f != nil {
		return (*f)(from, msg)
	}
	return s.Signaller.Signalled(from, msg)
}

// twinned is an agent with a twin in the place of rdma.
type twinned struct {
	*side
	twin *spy
	logs *observer.ObservedLogs
}

// openTwinned opens an agent; lack says why it has no rdma.
func openTwinned(t *testing.T, n *coretest.Network, cfg Config, lack error) *twinned {
	t.Helper()
	r, err := tryTwinned(t, n, cfg, lack)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func tryTwinned(t *testing.T, n *coretest.Network, cfg Config, lack error) (*twinned, error) {
	t.Helper()
	seen, logs := observer.New(zap.InfoLevel)
	r := &twinned{logs: logs}
	opt := Options{Logger: zap.New(seen), rdma: func(_ rdma.Config, id core.AgentID, l *core.Layout, s core.Sink, signal core.Signal) (core.Signaller, error) {
		if lack != nil {
			return nil, lack
		}
		r.twin = &spy{Signaller: n.NewSignaller(viaRDMA, id, l, s, signal), signal: signal}
		return r.twin, nil
	}}
	a, err := Open(cfg, opt)
	if err != nil {
		t.Fatal(err)
	}
	r.side = &side{Agent: a, t: t, cache: make([]byte, layers*numBlocks*blockBytes), seen: map[core.TransferID]core.Report{}}
	t.Cleanup(func() { _ = a.Close() })
	return r, a.RegisterKVCaches(regions(r.cache))
}

// said counts the log lines that begin so.
func (r *twinned) said(begin string) int {
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
func goesBy(t *testing.T, p, d *twinned, id core.TransferID, transport string) {
	t.Helper()
	p.fill(byte(len(id)), 5, 6)
	p.offer(id, 5, 6)
	d.load(id, p.BootstrapAddress(), 1, 2)
	for _, r := range []core.Report{d.want(id, core.OK), p.want(id, core.OK)} {
		if r.Transport != transport {
			t.Fatalf("%s of %q went by %q, want %q; decode said %v", r.Side, id, r.Transport, transport, d.logs.All())
		}
	}
	same(t, p.side, []core.BlockID{5, 6}, d.side, []core.BlockID{1, 2})
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
