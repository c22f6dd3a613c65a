//go:build invariants

package node

import (
	"fmt"
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/core/machine"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/coretest"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// recorded has the agent's machine recorded from now on. Nothing may be under way.
func (s *side) recorded() *coretest.Record {
	r := &coretest.Record{Limit: 1 << 14}
	opt := s.cfg.machineOptions()
	opt.OnStep = r.Add
	s.machine.mu.Lock()
	defer s.machine.mu.Unlock()
	s.machine.inner = machine.New(s.machine.inner.Layout(), opt)
	return r
}

// TestReplay: what the machines of two real agents were told, and when, makes new machines want the same, to the last
// word. Transfers are announced, claimed, offered in parts, withdrawn, cancelled and left to the agents' Close.
func TestReplay(t *testing.T) {
	leaktest.Check(t)
	p, d := open(t, testConfig(RolePrefill)), open(t, testConfig(RoleDecode))
	layout := p.machine.inner.Layout()
	ofP, ofD := p.recorded(), d.recorded()
	id := func(i int) core.TransferID { return core.TransferID(fmt.Sprint("t-", i)) }
	const n = 60
	for i := range n {
		block := kv.BlockID(i % numBlocks)
		if i%3 == 0 {
			announce(t, p, id(i))
		}
		if i%2 == 0 {
			d.claim(p.BootstrapAddress(), id(i))
		}
		if i%6 == 3 {
			part := core.PartialOffer{ID: id(i), Blocks: [][]kv.BlockID{{block}}, Ready: []uint32{1}}
			if _, err := p.OfferPartial([]core.PartialOffer{part}); err != nil {
				t.Fatal(err)
			}
		}
		if i%12 == 3 {
			if err := p.Withdraw([]core.TransferID{id(i)}, bound); err != nil {
				t.Fatal(err)
			}
		}
		d.load(id(i), p.BootstrapAddress(), block)
		if i%5 == 0 {
			if _, err := d.Cancel([]core.TransferID{id(i)}, "not needed"); err != nil {
				t.Fatal(err)
			}
		}
	}
	for i := range n {
		if _, err := p.Offer([]core.OfferRequest{{ID: id(i), Selection: kv.Selection{Blocks: [][]kv.BlockID{{kv.BlockID(i % numBlocks)}}}}}); err != nil {
			t.Fatal(err)
		}
		if _, err := p.Offer([]core.OfferRequest{{ID: id(i), Selection: kv.Selection{Blocks: [][]kv.BlockID{{99}}}}}); err == nil {
			t.Fatal("a block that is not there is taken")
		}
	}
	for i := range n {
		if r := d.report(id(i)); i%5 != 0 && r.Code != core.OK {
			t.Errorf("%q ended with %v: %s", r.ID, r.Code, r.Reason)
		}
		p.report(id(i))
	}
	for i := range 8 { // one step ends them all, in an order that must not be a map's
		d.load(core.TransferID(fmt.Sprint("left-", i)), p.BootstrapAddress(), 1)
	}
	for _, s := range []*side{d, p} {
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		of      *side
		record  *coretest.Record
		kinds   []string // of events that must be there
		refused int
	}{
		{p, ofP, []string{"Announce", "PartialOffer", "Withdraw", "OfferRequest", "LoadMessage", "FinishMessage", "Written", "Close"}, n},
		{d, ofD, []string{"ClaimRequest", "LoadRequest", "Resolved", "Expecting", "LoadAnswered", "Received", "Cancel", "Close"}, 0},
	} {
		if c.record.Missed > 0 {
			t.Fatalf("the record has no room for %d steps", c.record.Missed)
		}
		kinds := c.record.Replay(t, layout, c.of.cfg.machineOptions()) // both have the same caches
		for _, kind := range c.kinds {
			if kinds[kind] == 0 {
				t.Errorf("the machine of the %s agent was told no %s", c.of.cfg.Role, kind)
			}
		}
		refused := 0
		for _, s := range c.record.Steps {
			if answer, _ := core.Split(s.Actions); answer != nil {
				if _, ok := answer.(core.Refuse); ok {
					refused++
				}
			}
		}
		if refused != c.refused {
			t.Errorf("the machine of the %s agent has refused %d events, want %d", c.of.cfg.Role, refused, c.refused)
		}
		t.Logf("%s: %d steps: %v", c.of.cfg.Role, len(c.record.Steps), kinds)
	}
}
