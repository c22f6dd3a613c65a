package node

import (
	"context"
	"sync/atomic"
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/wire"
)

// panicky is a bus whose first look-ups have a defect.
type panicky struct {
	core.Bus
	left atomic.Int32
}

func (b *panicky) Lookup(ctx context.Context, t core.Target) (*wire.Agent, core.Via, error) {
	if b.left.Add(-1) >= 0 {
		panic("a defect of the look-up")
	}
	return b.Bus.Lookup(ctx, t)
}

// TestLookupThatPanics: a look-up that panics ends the loads that wait for it, with that reason, and the next load of the same target
// has a look-up of its own.
func TestLookupThatPanics(t *testing.T) {
	leaktest.Check(t)
	p, d := open(t, testConfig(RolePrefill)), open(t, testConfig(RoleDecode))
	b := &panicky{Bus: d.bus}
	b.left.Store(1)
	setBus(d.Agent, b)
	d.load("first", p.BootstrapAddress(), 1)
	d.want("first", core.Unreachable, "a defect of the look-up")
	p.fill(1, 2)
	p.offer("second", 2)
	d.load("second", p.BootstrapAddress(), 1)
	d.want("second", core.OK)
	p.want("second", core.OK)
	same(t, p, []kv.BlockID{2}, d, []kv.BlockID{1})
}
