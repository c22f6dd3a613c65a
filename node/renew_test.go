package node

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/coretest"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// TestTransportIsNotThere: decode has chosen rdma, and when prefill offers, prefill's cards do not have its memory. The transfer
// goes by tcp, also if some of it was offered before. Where rdma is forced, it fails by name.
func TestTransportIsNotThere(t *testing.T) {
	for _, c := range []struct {
		transport string
		partial   bool
	}{{"auto", false}, {"auto", true}, {viaRDMA, false}} {
		t.Run(fmt.Sprint(c.transport, " ", c.partial), func(t *testing.T) {
			leaktest.Check(t)
			n := coretest.NewNetwork()
			p, d := openFakeAgent(t, n, forced(RolePrefill, c.transport), nil), openFakeAgent(t, n, forced(RoleDecode, c.transport), nil)
			goesBy(t, p, d, "first", viaRDMA)
			why := errors.New("region k is not registered with the cards")
			refuse := func(peer core.AgentID) error {
				n.Cut(p.ID(), peer, why) // decode's rdma has heard of it
				return fmt.Errorf("%w: %w", core.ErrOtherWay, why)
			}
			p.fake.refuse.Store(&refuse)
			p.fill(7, 5, 6)
			d.load("t", p.BootstrapAddress(), 1, 2)
			for end := time.Now().Add(bound); d.Stats().LoadsWaiting == 0; time.Sleep(time.Millisecond) {
				if time.Now().After(end) {
					t.Fatal("prefill does not have the load")
				}
			}
			if c.partial {
				if _, err := p.OfferPartial([]core.PartialOffer{{ID: "t", Blocks: [][]kv.BlockID{{5, 6}}, Ready: []uint32{1}}}); err != nil {
					t.Fatal(err)
				}
			}
			p.offer("t", 5, 6)
			if c.transport == viaRDMA {
				d.want("t", core.Unreachable, why.Error())
				return
			}
			for _, r := range []core.Report{d.want("t", core.OK), p.want("t", core.OK)} {
				if r.Transport != viaTCP {
					t.Errorf("%s went by %q", r.Side, r.Transport)
				}
			}
			same(t, p.side, []kv.BlockID{5, 6}, d.side, []kv.BlockID{1, 2})
			if s := d.Stats(); s.Transports[viaRDMA].Fallbacks[why.Error()] != 1 {
				t.Errorf("decode counts %+v", s.Transports[viaRDMA])
			}
		})
	}
}
