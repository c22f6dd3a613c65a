package node

import (
	"strings"
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// TestSharesOfOnePrefillRank: two decode ranks have their heads of one offer, and
// nobody else has any.
func TestSharesOfOnePrefillRank(t *testing.T) {
	leaktest.Check(t)
	id := core.TransferID(strings.Repeat("x", core.MaxTransferID)) // and each share's is longer
	m, two := model{3, 4, false}, kv.Ranks{TP: 2, PP: 1}
	ps, address := m.engine(t, RolePrefill, kv.One, nil)
	p, at := ps[0], from(address, ps[0].cfg.EngineID)
	ds, _ := m.engine(t, RoleDecode, two, nil)
	whole, _ := m.engine(t, RoleDecode, kv.One, nil)
	others, _ := m.engine(t, RoleDecode, two, nil)
	p.paint(1, 4, 5)
	ds[1].claimFrom(id, at)
	p.knows(2) // both shares, of which one is claimed
	p.offer(id, 4, 5)
	ds[0].loadFrom(id, at, 7, 9)
	ds[0].want(id, core.OK)
	if r := p.GetFinished(); len(r) != 0 {
		t.Fatalf("the offer has ended with its first share: %+v", r)
	}
	whole[0].loadFrom(id, at, 1, 2)
	whole[0].want(id, core.Refused, "2 shares")
	others[1].loadFrom(id, at, 7, 9)
	others[1].want(id, core.Refused, "is being loaded by decode agent of another engine already")
	ds[1].loadFrom(id, at, 3, 2)
	ds[1].want(id, core.OK)
	if r := p.want(id, core.OK); r.Blocks != 2 || r.Stats.Bytes != 2*3*4*modelTokens*modelItem {
		t.Errorf("the offer's report: %+v", r)
	}
	ds[0].check(1, 7, 9)
	ds[1].check(1, 3, 2)
	for _, r := range []*rank{whole[0], others[0], others[1]} {
		for i, b := range r.cache {
			if b != 0 {
				t.Fatalf("byte %d was written at a rank that was refused", i)
			}
		}
	}
}

// TestSourcesOfOneDecodeRank: two prefill ranks have a request's heads.
func TestSourcesOfOneDecodeRank(t *testing.T) {
	leaktest.Check(t)
	m := model{3, 4, false}
	ps, address := m.engine(t, RolePrefill, kv.Ranks{TP: 2, PP: 1}, nil)
	ds, _ := m.engine(t, RoleDecode, kv.One, nil)
	d, at := ds[0], from(address, ps[0].cfg.EngineID)
	for _, p := range ps {
		p.paint(1, 4, 5)
	}
	d.loadFrom("t", at, 7, 9)
	ps[0].offer("t", 4, 5)
	ps[0].want("t", core.OK)
	if r := d.GetFinished(); len(r) != 0 {
		t.Fatalf("the load has ended with its first source: %+v", r)
	}
	ps[1].offer("t", 4, 5)
	ps[1].want("t", core.OK)
	if r := d.want("t", core.OK); r.Blocks != 2 || r.Stats.Bytes != 2*3*4*modelTokens*modelItem {
		t.Errorf("the load's report: %+v", r)
	}
	d.check(1, 7, 9)

	// One that fails ends the other, which learns it.
	d.loadFrom("u", at, 7, 9)
	for _, p := range ps {
		until(t, "the load is there", func() bool { return p.Stats().OffersEarly > 0 })
	}
	if _, err := ps[1].Cancel([]core.TransferID{"u"}, "aborted"); err != nil {
		t.Fatal(err)
	}
	d.want("u", core.PeerCancelled, "aborted")
	until(t, "the other has heard of it", func() bool { return ps[0].Stats().OffersEarly == 0 })
	ps[0].offer("u", 5)
	ps[0].want("u", core.PeerCancelled, "aborted")
}
