package node

import (
	"strings"
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/leaktest"
)

// sameIn compares blocks of some layers.
func sameIn(t testing.TB, layers []uint32, p *side, src []core.BlockID, d *side, dst []core.BlockID) {
	t.Helper()
	for _, l := range layers {
		for i := range src {
			if string(p.block(int(l), src[i])) != string(d.block(int(l), dst[i])) {
				t.Fatalf("layer %d: block %d of decode differs from block %d of prefill", l, dst[i], src[i])
			}
		}
	}
}

func clean(t testing.TB, layer int, d *side, ids ...core.BlockID) {
	t.Helper()
	for _, id := range ids {
		for _, b := range d.block(layer, id) {
			if b != 0 {
				t.Fatalf("layer %d: block %d was written", layer, id)
			}
		}
	}
}

func (s *side) loadParts(id core.TransferID, parts ...core.LoadPart) {
	s.t.Helper()
	if _, err := s.StartLoad([]core.LoadRequest{{ID: id, Parts: parts}}); err != nil {
		s.t.Fatal(err)
	}
}

// TestSharesOfOnePrefillRank: two decode ranks have their layers of one offer.
func TestSharesOfOnePrefillRank(t *testing.T) {
	leaktest.Check(t)
	id := core.TransferID(strings.Repeat("x", core.MaxTransferID)) // and each share's is longer
	p := open(t, testConfig(RolePrefill))
	from := core.Target{Bootstrap: p.BootstrapAddress()}
	ds := []*side{open(t, testConfig(RoleDecode)), open(t, testConfig(RoleDecode))}
	others := []*side{open(t, testConfig(RoleDecode)), open(t, testConfig(RoleDecode))}
	of := [][]uint32{{0, 1}, {2}}
	share := func(k int) core.Share { return core.Share{K: k, Of: 2} }
	p.fill(1, 4, 5)
	if _, err := ds[1].Claim([]core.ClaimRequest{{ID: id, Parts: []core.ClaimPart{{From: from, Share: share(1)}}}}); err != nil {
		t.Fatal(err)
	}
	p.knows(2) // both shares, of which one is claimed
	p.offer(id, 4, 5)
	ds[0].loadParts(id, core.LoadPart{From: from, Share: share(0), Blocks: [][]core.BlockID{{7, 9}}, Regions: of[0]})
	ds[0].want(id, core.OK)
	if r := p.GetFinished(); len(r) != 0 {
		t.Fatalf("the offer has ended with its first share: %+v", r)
	}
	others[0].load(id, p.BootstrapAddress(), 1)
	others[0].want(id, core.Refused, "2 shares")
	others[1].loadParts(id, core.LoadPart{From: from, Share: share(1), Blocks: [][]core.BlockID{{7, 9}}})
	others[1].want(id, core.Refused, string(ds[1].ID()))
	ds[1].loadParts(id, core.LoadPart{From: from, Share: share(1), Blocks: [][]core.BlockID{{3, 2}}, Regions: of[1]})
	ds[1].want(id, core.OK)
	if r := p.want(id, core.OK); r.Blocks != 2 || r.Stats.Bytes != 2*layers*blockBytes {
		t.Errorf("the offer's report: %+v", r)
	}
	sameIn(t, of[0], p, []core.BlockID{4, 5}, ds[0], []core.BlockID{7, 9})
	sameIn(t, of[1], p, []core.BlockID{4, 5}, ds[1], []core.BlockID{3, 2})
	clean(t, 2, ds[0], 7, 9)
	clean(t, 0, ds[1], 3, 2)
	clean(t, 1, ds[1], 3, 2)
}

// TestSourcesOfOneDecodeRank: two prefill ranks have a request's layers.
func TestSourcesOfOneDecodeRank(t *testing.T) {
	leaktest.Check(t)
	d := open(t, testConfig(RoleDecode))
	ps := []*side{open(t, testConfig(RolePrefill)), open(t, testConfig(RolePrefill))}
	of := [][]uint32{{0}, {1, 2}}
	var parts []core.LoadPart
	for i, p := range ps {
		p.fill(byte(i), 4, 5)
		parts = append(parts, core.LoadPart{From: core.Target{Bootstrap: p.BootstrapAddress()}, Share: core.Share{Of: 1, Source: i},
			Blocks: [][]core.BlockID{{7, 9}}, Regions: of[i]})
	}
	d.loadParts("t", parts...)
	ps[0].offer("t", 4, 5)
	ps[0].want("t", core.OK)
	if r := d.GetFinished(); len(r) != 0 {
		t.Fatalf("the load has ended with its first source: %+v", r)
	}
	ps[1].offer("t", 4, 5)
	ps[1].want("t", core.OK)
	if r := d.want("t", core.OK); r.Blocks != 2 || r.Stats.Bytes != 2*layers*blockBytes {
		t.Errorf("the load's report: %+v", r)
	}
	for i, p := range ps {
		sameIn(t, of[i], p, []core.BlockID{4, 5}, d, []core.BlockID{7, 9})
	}

	// One that fails ends the other, which learns it.
	d.loadParts("u", parts...)
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
