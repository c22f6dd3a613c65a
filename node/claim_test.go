package node

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/leaktest"
)

func (s *side) claim(from string, ids ...core.TransferID) {
	s.t.Helper()
	var list []core.ClaimRequest
	for _, id := range ids {
		list = append(list, core.ClaimRequest{ID: id, From: core.Target{Bootstrap: from}})
	}
	if _, err := s.Claim(list); err != nil {
		s.t.Fatal(err)
	}
}

// TestClaimsOutliveTheLease: an offer that nobody claims expires. An offer that is claimed,
// before it is made or after, does not.
func TestClaimsOutliveTheLease(t *testing.T) {
	leaktest.Check(t)
	pc := testConfig(RolePrefill)
	pc.Lease = Seconds(3 * time.Second) // six times as long as until the next renewal
	dc := testConfig(RoleDecode)
	soon(&dc)
	p, d := open(t, pc), open(t, dc)
	d.claim(p.BootstrapAddress(), "early", "late", "dropped")
	p.knows(3)
	p.fill(1, 1)
	p.fill(2, 2)
	p.offer("early", 1)
	announce(t, p, "late")
	for round := range 2 {
		id := core.TransferID(fmt.Sprint("unclaimed", round))
		p.offer(id, 3)
		p.want(id, core.Expired, "claimed or loaded")
	}
	p.offer("late", 2)
	d.load("early", p.BootstrapAddress(), 7)
	d.load("late", p.BootstrapAddress(), 8)
	for _, id := range []core.TransferID{"early", "late"} {
		d.want(id, core.OK)
		p.want(id, core.OK)
	}
	same(t, p, []kv.BlockID{1, 2}, d, []kv.BlockID{7, 8})
	if _, err := d.Cancel([]core.TransferID{"dropped"}, "client went away"); err != nil {
		t.Fatal(err)
	}
	p.offer("dropped", 4)
	p.want("dropped", core.PeerCancelled, "client went away")
}

// TestClaimOfAKilledPrefill: the load that follows fails at once, and finds no
// new instance by mistake.
func TestClaimOfAKilledPrefill(t *testing.T) {
	leaktest.Check(t)
	address, to := prefillProcess(t, freePort(t), "")
	d := open(t, testConfig(RoleDecode))
	d.claim(address, "announced")
	until(t, "prefill has answered the claim", func() bool { return d.sizes().Kept == 1 })
	to.kill()
	until(t, "the claim is lost", func() bool { return d.sizes().Kept == 0 })
	_, _ = prefillProcess(t, portOf(t, address), "")
	d.load("announced", address, 1)
	d.want("announced", core.PeerLost, "claimed")
}

func (s *side) sizes() core.Sizes {
	s.machine.mu.Lock()
	defer s.machine.mu.Unlock()
	return s.machine.inner.Sizes()
}

// TestDecodeKilled: P's blocks come back at once, not with the lease.
func TestDecodeKilled(t *testing.T) {
	leaktest.Check(t)
	pc := testConfig(RolePrefill)
	soon(&pc)
	p := open(t, pc)
	to := decodeProcess(t, p.BootstrapAddress())
	p.knows(2) // claimed and loaded
	p.offer("claimed", 1)
	announce(t, p, "loaded")
	to.kill()
	p.want("claimed", core.PeerLost, "gone")
	p.offer("loaded", 2)
	p.want("loaded", core.PeerLost, "gone")
}

// TestAbortStorm: a thousand transfers are aborted at once while others go on.
func TestAbortStorm(t *testing.T) {
	leaktest.Check(t)
	const storm = 1000
	p, d := open(t, testConfig(RolePrefill)), open(t, testConfig(RoleDecode))
	var loads []core.LoadRequest
	var ids []core.TransferID
	for i := range storm {
		id := core.TransferID(fmt.Sprint("storm-", i))
		ids = append(ids, id)
		loads = append(loads, core.LoadRequest{ID: id, From: core.Target{Bootstrap: p.BootstrapAddress()}, Selection: kv.Selection{Blocks: [][]kv.BlockID{{kv.BlockID(i % numBlocks)}}}})
	}
	announce(t, p, ids...)
	if _, err := d.StartLoad(loads); err != nil {
		t.Fatal(err)
	}
	until(t, "prefill has the loads", func() bool { return d.Stats().LoadsWaiting == storm })
	if _, err := d.Cancel(ids, "storm"); err != nil {
		t.Fatal(err)
	}
	for i := range 20 { // in the middle of it
		id := core.TransferID(fmt.Sprint("other-", i))
		p.offer(id, 1)
		d.load(id, p.BootstrapAddress(), 2)
		d.want(id, core.OK)
	}
	for _, id := range ids {
		d.want(id, core.Cancelled)
		p.offer(id, 3)
		p.want(id, core.PeerCancelled, "storm")
	}
	until(t, "nothing is left", func() bool {
		return p.Stats().OffersUnderWay == 0 && d.Stats().LoadsUnderWay == 0
	})
}

// TestLostClaimsAreReported: with report_claims the engine hears of a claim whose
// prefill process was killed, without a load, and a load that follows hears the same.
func TestLostClaimsAreReported(t *testing.T) {
	leaktest.Check(t)
	address, to := prefillProcess(t, 0, "")
	c := testConfig(RoleDecode)
	c.ReportClaims = true
	c.MaxTransfers = 2 // the ring has room for eight reports
	d := open(t, c)
	for round := range 5 { // claims that are cancelled leave none behind
		id := core.TransferID(fmt.Sprint("cancelled", round))
		d.claim(address, id, id+"'")
		if _, err := d.Cancel([]core.TransferID{id, id + "'"}, ""); err != nil {
			t.Fatal(err)
		}
	}
	d.claim(address, "announced")
	until(t, "prefill has answered the claim", func() bool { return d.sizes().Kept == 1 })
	to.kill()
	lost := d.want("announced", core.PeerLost, "gone", "claim of engine", address)
	if lost.Side != core.SideClaim || d.sizes().Claims != 0 {
		t.Fatalf("reported %+v, left is %+v", lost, d.sizes())
	}
	d.load("announced", address, 1)
	until(t, "the load's report", func() bool {
		return slices.ContainsFunc(d.GetFinished(), func(r core.Report) bool {
			return r.ID == "announced" && r.Side == core.SideLoad && r.Code == core.PeerLost && strings.Contains(r.Reason, "gone")
		})
	})
	if s := d.Stats(); s.Outstanding != 0 || s.ClaimsLost != 1 || s.LoadsBy["peer-lost"] != 1 {
		t.Fatalf("decode is left with %+v", s)
	}
}
