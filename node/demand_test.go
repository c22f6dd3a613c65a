package node

import (
	"slices"
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// TestWantIsReported: P's engine hears once of an announced transfer that decode
// has room for it, and once of its offer.
func TestWantIsReported(t *testing.T) {
	leaktest.Check(t)
	cfg := testConfig(RolePrefill)
	cfg.ReportDemands = true
	p, d := open(t, cfg), open(t, testConfig(RoleDecode))
	announce(t, p, "x")
	d.load("x", p.BootstrapAddress(), 1, 2)
	if r := p.want("x", core.OK); r.Side != core.SideDemand || r.Blocks != 0 {
		t.Fatalf("reported %+v first, want that it is wanted", r)
	}
	p.offer("x", 3, 4)
	d.want("x", core.OK)
	until(t, "the offer's report", func() bool {
		return slices.ContainsFunc(p.GetFinished(), func(r core.Report) bool { return r.ID == "x" && r.Side == core.SideOffer && r.Code == core.OK })
	})
	if s := p.Stats(); s.Outstanding != 0 {
		t.Fatalf("prefill is left with %+v", s)
	}
}
