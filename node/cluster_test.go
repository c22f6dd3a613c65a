package node

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/rig/nettest"
	"github.com/kvconn/kvconn/tcp"
	"github.com/kvconn/kvconn/wire"
)

const registry = "KV_kvconn_ranks"

// trioConfig is for agents of a cluster. No election is so long that a peer counts as gone: what is no answer for that time is none of
// the peer's silence. That a peer is gone, its port or the cluster says.
func trioConfig(role, urls string) Config {
	cfg := testConfig(role)
	cfg.NATSURL, cfg.ConnectTimeout, cfg.CloseTimeout = urls, Seconds(nettest.ElectionBound), Seconds(10*time.Second)
	cfg.PeerTimeout, cfg.StallTimeout = Seconds(nettest.ElectionBound), Seconds(2*nettest.ElectionBound)
	cfg.EarlyLoad = Seconds(nettest.ElectionBound)
	if role == RolePrefill {
		cfg.AdvertiseHost = "127.0.0.1"
	}
	return cfg
}

// registryLeader makes the registry by an agent that comes and goes, and returns
// the server that leads it and the two others.
func registryLeader(t *testing.T, c *nettest.NATSTrio) (leader *nettest.NATSServer, others [2]*nettest.NATSServer) {
	t.Helper()
	cfg := trioConfig(RolePrefill, c.URLs())
	cfg.EngineID = "first"
	if err := open(t, cfg).Close(); err != nil {
		t.Fatal(err)
	}
	return c.StreamLeader(registry)
}

// atServer opens an agent that knows one server. The agent finds the other servers by
// itself.
func atServer(t *testing.T, c *nettest.NATSTrio, cfg Config, s *nettest.NATSServer) *side {
	t.Helper()
	cfg.NATSURL = s.URL()
	a := open(t, cfg)
	if at := c.At(string(a.ID())); at != s {
		t.Fatalf("agent of role %s is connected to %s, want %s", cfg.Role, at.URL(), s.URL())
	}
	return a
}

// span is a run of n block ids.
func span(first, n int) []kv.BlockID {
	ids := make([]kv.BlockID, n)
	for i := range ids {
		ids[i] = kv.BlockID(first + i)
	}
	return ids
}

// failed counts what ended badly at an agent.
func (s *side) failed() uint64 {
	st := s.Stats()
	return st.LoadsFailed + st.OffersFailed
}

// The server that leads the registry is killed, once with nobody at it, once
// with P, once with a D: a transfer in the middle, loads that wait and claims go
// on, and new ones between agents that have met need no election.
func TestTransfersOutliveTheClustersLeader(t *testing.T) {
	for name, at := range map[string][3]int{ // servers of P and the two D's; 0 is killed
		"without agents":   {1, 2, 1},
		"with prefill":     {0, 1, 2},
		"with one decode":  {1, 0, 2},
		"with both decode": {1, 0, 0},
		"with all":         {0, 0, 0},
	} {
		t.Run(name, func(t *testing.T) { outliveLeader(t, at) })
	}
}

func outliveLeader(t *testing.T, at [3]int) {
	leaktest.Check(t)
	c := nettest.NewNATSTrio(t)
	leader, others := registryLeader(t, c)
	servers := []*nettest.NATSServer{leader, others[0], others[1]}
	pc := trioConfig(RolePrefill, "")
	pc.AdvertiseHost, pc.Transport = "127.0.0.2", viaTCP // the data path leads over a way that can be held
	p := atServer(t, c, pc, servers[at[0]])
	_, port, err := net.SplitHostPort(p.caches.Load().transports.named(viaTCP).Endpoint())
	if err != nil {
		t.Fatal(err)
	}
	way := nettest.ForwardFrom(t, "127.0.0.2:"+port, "127.0.0.1:"+port)
	held := atServer(t, c, trioConfig(RoleDecode, ""), servers[at[1]])
	free := atServer(t, c, trioConfig(RoleDecode, ""), servers[at[2]])
	from := p.BootstrapAddress()

	// A transfer stops in the middle; only the streams of its D are held.
	transfer(t, p, held, "held meets prefill", from)
	until(t, "all its streams are there", func() bool { return way.Open() == tcp.FirstStreams })
	way.Hold(24 * layers * blockBytes / 2)
	transfer(t, p, free, "free meets prefill", from)
	large := span(0, 24)
	p.fill(77, large...)
	p.offer("large", large...)
	held.load("large", from, large...)
	until(t, "half of the bytes are here", way.Holds)
	// Loads of announced requests and claims wait.
	ds, renewals := map[string]*side{"held": held, "free": free}, map[string]*countingBus{}
	for name, d := range ds {
		renewals[name] = &countingBus{Bus: d.bus, kind: wire.KindRenew}
		setBus(d.Agent, renewals[name])
		d.claim(from, core.TransferID("claim of "+name))
		announce(t, p, core.TransferID("load of "+name))
		d.load(core.TransferID("load of "+name), from, 25)
		waiting := 1
		if d == held {
			waiting++
		}
		until(t, "prefill has it all", func() bool { return d.Stats().LoadsWaiting == waiting && d.sizes().Kept == 1 })
	}

	leader.Kill()

	for name, d := range ds { // all that waits is renewed with it, at once
		d.claim(from, core.TransferID("claimed at once by "+name))
	}
	p.fill(3, 28)
	p.offer("at once", 28)
	free.load("at once", from, 28)
	free.want("at once", core.OK)
	p.want("at once", core.OK)
	same(t, p, []kv.BlockID{28}, free, []kv.BlockID{28})
	p.fill(4, 29)
	p.offer("behind the large one", 29)
	held.load("behind the large one", from, 29)
	for _, r := range held.GetFinished() {
		t.Fatalf("while the streams are held: %+v", r)
	}
	way.Release()
	for _, id := range []core.TransferID{"large", "behind the large one"} {
		held.want(id, core.OK)
		p.want(id, core.OK)
	}
	same(t, p, append(large, 29), held, append(large, 29))

	// Transfers that wait are renewed during the election and after it.
	leader.Start()
	c.StreamLeader(registry)
	for name, d := range ds {
		if at == [3]int{} { // a renewal is due each 10 s
			so := renewals[name].answered.Load()
			until(t, "it renews after the election", func() bool { return renewals[name].answered.Load() > so })
		}
		p.fill(byte(len(name)), 26, 27)
		p.offer(core.TransferID("load of "+name), 26)
		d.want(core.TransferID("load of "+name), core.OK)
		p.want(core.TransferID("load of "+name), core.OK)
		p.offer(core.TransferID("claim of "+name), 27)
		d.load(core.TransferID("claim of "+name), from, 24)
		d.want(core.TransferID("claim of "+name), core.OK)
		p.want(core.TransferID("claim of "+name), core.OK)
		same(t, p, []kv.BlockID{26, 27}, d, []kv.BlockID{25, 24})
		p.offer(core.TransferID("claimed at once by "+name), 27)
		d.load(core.TransferID("claimed at once by "+name), from, 26)
		d.want(core.TransferID("claimed at once by "+name), core.OK)
		p.want(core.TransferID("claimed at once by "+name), core.OK)
		same(t, p, []kv.BlockID{27}, d, []kv.BlockID{26})
		transfer(t, p, d, core.TransferID("after the election, to "+name), from)
	}
	for name, a := range map[string]*side{"prefill": p, "held": held, "free": free} {
		if a.failed() != 0 {
			t.Errorf("%s: %+v", name, a.Stats())
		}
	}
}

// Agents that have not met wait for the election, with a bound. Their only error is that
// the registry is not reached.
func TestAgentsConnectDuringAnElection(t *testing.T) {
	leaktest.Check(t)
	c := nettest.NewNATSTrio(t)
	leader, others := registryLeader(t, c)
	p := atServer(t, c, trioConfig(RolePrefill, ""), leader)
	from := p.BootstrapAddress()
	patient := atServer(t, c, trioConfig(RoleDecode, ""), leader)
	hasty := map[string]*side{}
	for name, s := range map[string]*nettest.NATSServer{"there": leader, "elsewhere": others[0]} {
		cfg := trioConfig(RoleDecode, "")
		cfg.ConnectTimeout = Seconds(5 * time.Second)
		hasty[name] = atServer(t, c, cfg, s)
	}

	leader.Kill()

	p.offer("patient", 1)
	patient.load("patient", from, 1)
	for name, d := range hasty {
		for n := 0; ; n++ {
			id := core.TransferID(fmt.Sprint(name, n))
			p.offer(id, 2)
			if _, err := d.StartLoad([]core.LoadRequest{{ID: id, Selection: kv.Selection{Blocks: [][]kv.BlockID{{2}}}, From: core.Target{Bootstrap: from, EngineID: p.cfg.EngineID}}}); err != nil {
				t.Fatal(err)
			}
			r := d.report(id)
			if r.Code == core.OK {
				break
			}
			if r.Code != core.Unreachable || n > 20 {
				t.Fatalf("%s, load %d: %v, %s", name, n, r.Code, r.Reason)
			}
			t.Logf("%s, load %d: %s", name, n, r.Reason)
		}
	}
	patient.want("patient", core.OK)

	fresh := open(t, trioConfig(RoleDecode, c.URLs()))
	transfer(t, p, fresh, "by a new decode agent", from)
	cfg := trioConfig(RolePrefill, c.URLs())
	cfg.EngineID = "another"
	another := open(t, cfg) // its registration waits for the election
	another.fill(99, 3)
	another.offer("from a new prefill agent", 3)
	if _, err := patient.StartLoad([]core.LoadRequest{{ID: "from a new prefill agent", Selection: kv.Selection{Blocks: [][]kv.BlockID{{4}}}, From: core.Target{Bootstrap: another.BootstrapAddress(), EngineID: "another"}}}); err != nil {
		t.Fatal(err)
	}
	patient.want("from a new prefill agent", core.OK)
	same(t, another, []kv.BlockID{3}, patient, []kv.BlockID{4})
}

// P is killed and comes back under its engine_id at its ports, while D lives on:
// the transfers of the old instance fail and say so, none of their bytes come from the
// new one, and the next load finds the new one.
func TestPrefillReplacedByANewInstance(t *testing.T) {
	t.Run("on its own server", func(t *testing.T) { replaced(t, "", viaTCP) })
	t.Run("on its own server and host", func(t *testing.T) { replaced(t, "", viaAuto) })
	t.Run("on a cluster", func(t *testing.T) { replaced(t, nettest.NewNATSTrio(t).URLs(), viaTCP) })
}

func replaced(t *testing.T, urls, transport string) {
	leaktest.Check(t)
	t.Setenv("KVCONN_TEST_TRANSPORT", transport)
	cfg := func(role string) Config {
		cfg := forced(role, transport)
		cfg.ConnectTimeout, cfg.PeerTimeout, cfg.CloseTimeout = Seconds(bound), Seconds(10*time.Second), Seconds(10*time.Second) // a claim of a cluster looks for the new one after PeerTimeout
		cfg.NATSURL = urls
		return cfg
	}
	data := freePort(t)
	t.Setenv("KVCONN_TEST_TCP_PORT", fmt.Sprint(data))
	address, to := prefillProcess(t, freePort(t), urls)
	d := open(t, cfg(RoleDecode))
	d.load("offered", address, 0, 1)
	d.want("offered", core.OK)
	old := theOnlyPeer(t, d)
	d.fill(200, span(0, numBlocks)...)
	before := bytes.Clone(d.cache)
	loads := []core.TransferID{"announced", "early 1", "early 2"}
	claims := []core.TransferID{"claimed 1", "claimed 2"}
	for i, id := range loads {
		d.load(id, address, span(2*i, 2)...)
	}
	d.claim(address, claims...)
	until(t, "prefill has it all", func() bool { return d.Stats().LoadsWaiting == len(loads) && d.sizes().Kept == len(claims) })

	to.kill()
	pc := cfg(RolePrefill)
	pc.BootstrapPort, pc.TCPPort, pc.AdvertiseHost = portOf(t, address), data, "127.0.0.1"
	pc.Lease = Seconds(time.Hour)
	pc.EarlyLoad = Seconds(minBound) // a request that came by mistake would expire early and be counted
	p := open(t, pc)
	if p.BootstrapAddress() != address || p.ID() == old {
		t.Fatalf("agent %s at %s took the place of %s at %s", p.ID(), p.BootstrapAddress(), old, address)
	}
	// It has the same requests again: none of its bytes may go to the old loads.
	p.fill(9, 1, 2)
	for _, id := range loads {
		p.offer(id, 1, 2)
	}
	for _, id := range claims {
		p.offer(id, 1, 2)
	}
	for i, id := range loads {
		r := d.want(id, core.PeerLost, string(old))
		if !says(r.Reason, "gone", "connection lost") {
			t.Errorf("load %d: %s", i, r.Reason)
		}
	}
	until(t, "the claims are lost", func() bool { return d.sizes().Kept == 0 })
	for i, id := range claims {
		d.load(id, address, span(10+2*i, 2)...)
		if r := d.want(id, core.PeerLost, string(old)); !says(r.Reason, "gone", "replaced") {
			t.Errorf("claim %d: %s", i, r.Reason)
		}
	}
	p.fill(9, 5)
	p.offer("next", 5)
	d.load("next", address, 31)
	d.want("next", core.OK)
	p.want("next", core.OK)
	same(t, p, []kv.BlockID{5}, d, []kv.BlockID{31})
	for l := range layers {
		at := l * numBlocks * blockBytes
		if !bytes.Equal(d.cache[at:at+31*blockBytes], before[at:at+31*blockBytes]) {
			t.Errorf("layer %d: bytes of the new instance came into blocks of old loads", l)
		}
	}
	st := p.Stats()
	if offered := len(loads) + len(claims); st.OffersUnderWay != offered || st.OffersEarly != 0 || st.ExpiredEarly != 0 || st.Offers != 1 || st.OffersFailed != 0 {
		t.Errorf("the new instance was told of the old one's transfers: %+v", st)
	}
}

// A cluster's server that refuses connections says nothing of P: it comes back,
// and everything that waited goes on.
func TestRefusedConnectionToAClusterIsNoProof(t *testing.T) {
	leaktest.Check(t)
	c := nettest.NewNATS(t)
	cfg := func(role string) Config {
		cfg := trioConfig(role, c.URL())
		cfg.PeerTimeout = Seconds(bound)
		return cfg
	}
	p, d := open(t, cfg(RolePrefill)), open(t, cfg(RoleDecode))
	from := p.BootstrapAddress()
	announce(t, p, "waits")
	d.claim(from, "claimed")
	d.load("waits", from, 1)
	until(t, "prefill has both", func() bool { return d.Stats().LoadsWaiting == 1 && d.sizes().Kept == 1 })

	c.Kill()
	until(t, "the connection is refused", func() bool {
		_, err := d.client.requestWithin(time.Second, p.ID(), &wire.Request{Kind: wire.KindRenew, Renew: &wire.Renew{}})
		if gone(err) {
			t.Fatalf("taken for the proof that P is gone: %v", err)
		}
		return errors.Is(err, syscall.ECONNREFUSED)
	})
	d.claim(from, "claimed meanwhile") // it is asked for at once
	d.load("meanwhile", from, 2)
	until(t, "it is asked again", func() bool { return d.Stats().Retries > 0 })
	c.Start()

	p.fill(5, 1, 2, 3, 4)
	p.offer("waits", 1)
	p.offer("meanwhile", 2)
	p.offer("claimed", 3)
	p.offer("claimed meanwhile", 4)
	d.load("claimed", from, 3)
	d.load("claimed meanwhile", from, 4)
	for _, id := range []core.TransferID{"waits", "meanwhile", "claimed", "claimed meanwhile"} {
		d.want(id, core.OK)
		p.want(id, core.OK)
	}
	same(t, p, span(1, 4), d, span(1, 4))
}
