package node

import (
	"fmt"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/leaktest"
	"github.com/kvconn/kvconn/internal/nettest"
)

// The server that leads the registry is killed: transfers under way finish, and
// new ones between agents that have met start at once; a new agent gets in.
func TestTransfersOutliveTheClustersLeader(t *testing.T) {
	leaktest.Check(t)
	c := nettest.NewNATSTrio(t)
	configure := func(role string) Config {
		cfg := testConfig(role)
		cfg.NATSURL, cfg.ConnectTimeout, cfg.CloseTimeout = c.URLs(), Seconds(nettest.ElectionBound), Seconds(10*time.Second)
		cfg.PeerTimeout = Seconds(10 * time.Second) // of a machine that also runs other tests
		cfg.EarlyLoad = Seconds(nettest.ElectionBound)
		if role == RolePrefill {
			cfg.AdvertiseHost = "127.0.0.1"
		}
		return cfg
	}
	p, d := open(t, configure(RolePrefill)), open(t, configure(RoleDecode))
	transfer(t, p, d, "before", p.BootstrapAddress())

	const under = 8
	for i := range under {
		d.load(core.TransferID(fmt.Sprint("under way ", i)), p.BootstrapAddress(), core.BlockID(8+i))
	}
	p.knows(under)
	leader, _ := c.StreamLeader("KV_kvconn_ranks")
	leader.Kill()
	transfer(t, p, d, "at once", p.BootstrapAddress())
	for i := range under {
		id := core.TransferID(fmt.Sprint("under way ", i))
		p.fill(byte(40+i), core.BlockID(20))
		p.offer(id, 20)
		d.want(id, core.OK)
		p.want(id, core.OK)
		same(t, p, []core.BlockID{20}, d, []core.BlockID{core.BlockID(8 + i)})
	}
	fresh := open(t, configure(RoleDecode))
	transfer(t, p, fresh, "by a new agent", p.BootstrapAddress())
	another := configure(RolePrefill)
	another.EngineID = "another"
	p2 := open(t, another) // its registration waits for the election
	p2.fill(99, 3)
	p2.offer("from a new agent", 3)
	if _, err := d.StartLoad([]core.LoadRequest{{ID: "from a new agent", Blocks: [][]core.BlockID{{4}},
		From: core.Target{Bootstrap: p2.BootstrapAddress(), EngineID: "another"}}}); err != nil {
		t.Fatal(err)
	}
	d.want("from a new agent", core.OK)
	same(t, p2, []core.BlockID{3}, d, []core.BlockID{4})
}
