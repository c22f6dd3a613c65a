package node

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/coretest"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// TestStormOfWaitingRevokes: revokes that wait for a peer's word wait side by side, and hold
// up nothing else.
func TestStormOfWaitingRevokes(t *testing.T) {
	leaktest.Check(t)
	const loads = maxRevokes + 100
	n := coretest.NewNetwork()
	pc, dc := testConfig(RolePrefill), testConfig(RoleDecode)
	pc.MaxTransfers, dc.MaxTransfers = 2*loads, 2*loads
	dc.PeerTimeout = Seconds(20 * time.Second) // a machine with much else to do is no death
	p, d := openFakeAgent(t, n, pc, nil), openFakeAgent(t, n, dc, nil)
	var entered atomic.Int32
	word := make(chan struct{})
	n.Revoking(func(core.TransferID) {
		entered.Add(1)
		<-word
	})
	release := sync.OnceFunc(func() { close(word) })
	t.Cleanup(release) // before the agents close
	id := func(i int) core.TransferID { return core.TransferID(fmt.Sprint("t", i)) }
	var ids []core.TransferID
	var list []core.LoadRequest
	for i := range loads {
		ids = append(ids, id(i))
		list = append(list, core.LoadRequest{ID: id(i), From: core.Target{Bootstrap: p.BootstrapAddress()}, Selection: kv.Selection{Blocks: [][]kv.BlockID{{kv.BlockID(i % numBlocks)}}}})
	}
	if _, err := d.StartLoad(list); err != nil {
		t.Fatal(err)
	}
	until(t, "all loads wait at prefill", func() bool { return d.Stats().LoadsWaiting == loads })
	if _, err := d.Cancel(ids, "storm"); err != nil {
		t.Fatal(err)
	}
	until(t, "as many wait for the word as may", func() bool { return entered.Load() == maxRevokes })
	goesBy(t, p, d, "beside the storm", viaRDMA)
	if s := d.Stats(); s.LoadsUnderWay != loads || entered.Load() != maxRevokes {
		t.Fatalf("%d loads are under way, %d revokes: a load was reported before its revoke returned", s.LoadsUnderWay, entered.Load())
	}
	release()
	for _, id := range ids {
		d.want(id, core.Cancelled)
	}
	if got := entered.Load(); got != loads {
		t.Errorf("%d revokes of %d loads", got, loads)
	}
	if going := d.caches.Load().transports.active; going == nil || len(going) != 0 {
		t.Errorf("%d transfers are left", len(going))
	}
}
