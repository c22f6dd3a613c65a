package node

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/rig/nettest"
	"github.com/kvconn/kvconn/wire"
)

// lossy is a bus that loses requests.
type lossy struct {
	core.Bus
	lose func(to core.AgentID, req *wire.Request) bool
}

func (b *lossy) Request(ctx context.Context, via core.Via, to core.AgentID, req *wire.Request) (*wire.Reply, error) {
	if !b.lose(to, req) {
		return b.Bus.Request(ctx, via, to, req)
	}
	<-ctx.Done()
	return nil, fmt.Errorf("no reply: %w", ctx.Err())
}

// countingBus is a bus that counts requests of a kind.
type countingBus struct {
	core.Bus
	kind           wire.Kind
	said, answered atomic.Int32
}

func (b *countingBus) Request(ctx context.Context, via core.Via, to core.AgentID, req *wire.Request) (*wire.Reply, error) {
	if req.Kind != b.kind {
		return b.Bus.Request(ctx, via, to, req)
	}
	b.said.Add(1)
	rep, err := b.Bus.Request(ctx, via, to, req)
	if err == nil {
		b.answered.Add(1)
	}
	return rep, err
}

// A hello that is lost, with the server that P was at, is said again within the
// bound, and none that was answered is.
func TestLostHelloIsSaidAgain(t *testing.T) {
	leaktest.Check(t)
	cfg := testConfig(RoleDecode)
	cfg.ConnectTimeout = Seconds(18 * time.Second) // a third of it without an answer, and it is said again
	p, d := open(t, testConfig(RolePrefill)), open(t, cfg)
	hellos := &countingBus{kind: wire.KindHello}
	hellos.Bus = &lossy{Bus: d.bus, lose: func(_ core.AgentID, req *wire.Request) bool {
		return req.Kind == wire.KindHello && hellos.said.Load() == 1
	}}
	setBus(d.Agent, hellos)
	transfer(t, p, d, "t", p.BootstrapAddress())
	if said, answered := hellos.said.Load(), hellos.answered.Load(); said < 2 || answered != 1 {
		t.Fatalf("hello was said %d times, and answered %d times", said, answered)
	}
}

// An agent that does not answer a load, though its connections stand, may have
// been replaced: the next load looks it up.
func TestSilentPrefillIsLookedUpAgain(t *testing.T) {
	leaktest.Check(t)
	urls := nettest.NewNATS(t).URL()
	cfg := func(role string) Config {
		cfg := testConfig(role)
		cfg.NATSURL, cfg.AdvertiseHost = urls, "127.0.0.1"
		soon(&cfg)
		return cfg
	}
	old, d := open(t, cfg(RolePrefill)), open(t, cfg(RoleDecode))
	var silent atomic.Bool
	setBus(d.Agent, &lossy{Bus: d.bus, lose: func(to core.AgentID, _ *wire.Request) bool { return silent.Load() && to == old.ID() }})
	transfer(t, old, d, "first", old.BootstrapAddress())
	silent.Store(true)
	p := open(t, cfg(RolePrefill))
	d.load("for the old one", old.BootstrapAddress(), 1)
	d.want("for the old one", core.PeerLost, "does not answer", string(old.ID()))
	transfer(t, p, d, "next", old.BootstrapAddress())
}

func says(reason string, words ...string) bool {
	for _, w := range words {
		if strings.Contains(reason, w) {
			return true
		}
	}
	return false
}

func theOnlyPeer(t *testing.T, s *side) core.AgentID {
	t.Helper()
	s.peers.mu.Lock()
	defer s.peers.mu.Unlock()
	if len(s.peers.byID) != 1 {
		t.Fatalf("%d peers, want 1", len(s.peers.byID))
	}
	for id := range s.peers.byID {
		return id
	}
	return ""
}
