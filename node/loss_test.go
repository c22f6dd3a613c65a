package node

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/rig/nettest"
)

func TestPrefillRestartedOnItsPort(t *testing.T) {
	leaktest.Check(t)
	cfg := testConfig(RolePrefill)
	cfg.BootstrapPort = freePort(t)
	p, d := open(t, cfg), open(t, testConfig(RoleDecode))
	address := p.BootstrapAddress()
	for round := range 3 {
		id := core.TransferID(fmt.Sprint("round-", round))
		p.fill(byte(round), 1)
		p.offer(id, 1)
		d.load(id, address, 2)
		d.want(id, core.OK)
		same(t, p, []kv.BlockID{1}, d, []kv.BlockID{2})
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
		cfg.EngineID = fmt.Sprint("engine-", round%2) // the same one or another
		p = open(t, cfg)
	}
}

func TestPeerThatForgotUsIsMetAgain(t *testing.T) {
	leaktest.Check(t)
	p, d := open(t, testConfig(RolePrefill)), open(t, testConfig(RoleDecode))
	for i := range 2 {
		id := core.TransferID(fmt.Sprint("t", i))
		p.fill(byte(i), 4)
		p.offer(id, 4)
		d.load(id, p.BootstrapAddress(), 3)
		d.want(id, core.OK)
		same(t, p, []kv.BlockID{4}, d, []kv.BlockID{3})
		p.peers.mu.Lock()
		p.peers.drop(p.peers.byID[p.nameOf(d)])
		p.peers.mu.Unlock()
	}
}

func TestPrefillKilledDuringLoads(t *testing.T) {
	byEach(t, func(t *testing.T, transport, by string) {
		why := []string{"is gone"}
		if by == viaLocal {
			why = append(why, "connection lost") // whichever is seen first
		}
		prefillKilled(t, transport, by, why)
	})
}

func prefillKilled(t *testing.T, transport, by string, why []string) {
	t.Setenv("KVCONN_TEST_TRANSPORT", transport)
	address, to := prefillProcess(t, freePort(t), "")
	d := open(t, forced(RoleDecode, transport))
	d.load("announced", address, 1)
	d.load("offered", address, 2, 3)
	if r := d.want("offered", core.OK); r.Transport != by {
		t.Errorf("%+v went by another transport", r)
	}
	if b := d.block(0, 2); b[0] != 7 || b[blockBytes-1] != 7 {
		t.Fatal("the loaded block has wrong bytes")
	}
	until(t, "the load waits at prefill", func() bool { return d.Stats().LoadsWaiting == 1 })
	to.kill()
	if r := d.want("announced", core.PeerLost); !says(r.Reason, why...) {
		t.Errorf("the load that waited: %s", r.Reason)
	}

	// The engine comes back on its port: the next request works.
	again, _ := prefillProcess(t, portOf(t, address), "")
	if again != address {
		t.Fatalf("restarted at %s, was at %s", again, address)
	}
	d.seen = map[core.TransferID]core.Report{}
	d.load("offered", address, 4, 5)
	if r := d.want("offered", core.OK); r.Transport != by {
		t.Errorf("%+v went by another transport", r)
	}
	if b := d.block(0, 4); b[0] != 7 {
		t.Fatal("the block loaded after the restart has wrong bytes")
	}
}

// TestShortLossDuringNewLoads: while the control plane is away for a moment, a load
// that waits for a living P must not end because another one begins.
func TestShortLossDuringNewLoads(t *testing.T) {
	leaktest.Check(t)
	pc, dc := testConfig(RolePrefill), testConfig(RoleDecode)
	dc.PeerTimeout, dc.ConnectTimeout = Seconds(6*time.Second), Seconds(bound)
	p, d := open(t, pc), open(t, dc)
	way := nettest.Forward(t, strings.TrimPrefix(p.BootstrapAddress(), "http://"))
	address := "http://" + way.Addr()
	p.fill(3, 1, 2)
	d.load("waits", address, 1)
	until(t, "the load waits at prefill", func() bool { return d.Stats().LoadsWaiting == 1 })
	announce(t, p, "waits")
	way.Shut(true)
	way.Cut()
	d.load("new", address, 2)
	began := time.Now() // longer than the time between two renewals, shorter than the bound
	until(t, "a renewal was due", func() bool { return time.Since(began) > 5*time.Second/2 })
	way.Shut(false)
	p.offer("new", 2)
	d.want("new", core.OK)
	p.offer("waits", 1)
	d.want("waits", core.OK)
	same(t, p, []kv.BlockID{1, 2}, d, []kv.BlockID{1, 2})
}

// TestStoppedPrefillIsNoticedThroughManyLoads: P is silent. Neither the load that waits
// nor the many loads under way find out one after the other.
func TestStoppedPrefillIsNoticedThroughManyLoads(t *testing.T) {
	leaktest.Check(t)
	const loads = 200
	cfg := testConfig(RoleDecode)
	cfg.NATSURL = nettest.NewNATS(t).URL() // the bus lives on when P stops
	soon(&cfg)
	address, to := prefillProcess(t, 0, cfg.NATSURL)
	d := open(t, cfg)
	d.load("announced", address, 1)
	until(t, "the load waits at prefill", func() bool { return d.Stats().LoadsWaiting == 1 })
	to.stop()
	for i := range loads {
		d.load(core.TransferID(fmt.Sprint("more-", i)), address, 2)
	}
	d.want("announced", core.PeerLost, "gone")
	for i := range loads {
		if r := d.report(core.TransferID(fmt.Sprint("more-", i))); r.Code == core.OK {
			t.Fatalf("%+v", r)
		}
	}
}
