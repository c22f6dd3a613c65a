package coretest

import (
	"context"
	"errors"
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/leaktest"
)

func TestSignaller(t *testing.T) {
	var n *Network
	var owner string
	TransportSuite(t, Fixture{
		Open: func(t *testing.T, id core.AgentID, l *kv.Layout, sink core.Sink, _ core.Signal) core.Transport {
			if owner != t.Name() {
				n, owner = NewNetwork(), t.Name()
			}
			return n.NewSignaller("sig", id, l, sink, n.Signals(id))
		},
	})
}

func TestSignallerCutAndMended(t *testing.T) {
	leaktest.Check(t)
	n := NewNetwork()
	f := Fixture{Open: func(_ *testing.T, id core.AgentID, l *kv.Layout, sink core.Sink, _ core.Signal) core.Transport {
		return n.NewSignaller("sig", id, l, sink, n.Signals(id))
	}}
	hold := make(chan struct{})
	n.Hold(hold)
	p, d := pair(t, f, dense(4096, 4), dense(4096, 4))
	blocks := [][]kv.BlockID{sequence(0, 4)}
	p.paint(1, blocks)
	over, cancel := context.WithCancel(context.Background())
	cancel()
	s := d.tr.(core.Signaller)
	if err := s.Usable(over, p.id); !errors.Is(err, context.Canceled) {
		t.Errorf("usable in the middle of the handshake: %v", err)
	}
	close(hold)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := s.Usable(ctx, p.id); err != nil {
		t.Fatal(err)
	}
	moves(t, p, d, "t", blocks)
	why := errors.New("both paths are down")
	n.Cut(p.id, d.id, why)
	p.down(d.id, 1)
	d.down(p.id, 1)
	if err := s.Usable(over, p.id); !errors.Is(err, why) {
		t.Errorf("usable while it is cut: %v", err)
	}
	p.write("u", d, d.expect("u", p, blocks), blocks, blocks)
	if o := p.sink.Wait("written", "u", 1); !errors.Is(o.Err, core.ErrConnectionLost) {
		t.Errorf("a write over a way that is cut: %v", o.Err)
	}
	d.revoke("u")
	n.Mend(p.id, d.id)
	if err := s.Usable(ctx, p.id); err != nil {
		t.Fatal(err)
	}
	moves(t, p, d, "v", blocks)
}
