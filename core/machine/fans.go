package machine

import (
	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/core/half"
	"github.com/kvconn/kvconn/internal/invariants"
)

// fans are the transfers that go in parts. Only fans.go, fanin.go, fanout.go and share.go of this package know that an engine
// may have several ranks. Each half knows one peer. The engine's calls reach the parts of a transfer by halfOf, dropClaim and
// endLoad.
type fans struct {
	claims map[core.TransferID]*parts
	loads  map[core.TransferID]*loadFanIn
	offers map[core.TransferID]*fanOut
}

// above is the machine as the halves know it.
type above struct{ *Machine }

func (m above) Name(id half.ID) core.TransferID     { return nameOf(id) }
func (m above) Shares(id half.ID) []core.TransferID { return m.shares(nameOf(id)) }
func (m above) Demanded(id half.ID) bool            { return m.demands[nameOf(id)] }
func (m above) Loaded(id half.ID)                   { m.demanded(nameOf(id)) }
func (m above) Forgotten(id half.ID)                { delete(m.fans.offers, nameOf(id)) }

// checkFanIns checks the parts of D's halves, and their counts; only in builds with the tag "invariants".
func (m *Machine) checkFanIns() {
	left := map[core.TransferID]int{}
	for id := range m.halves.IDs(core.SideClaim) {
		if isPart(id) {
			left[nameOf(id)]++
			invariants.Must(m.fans.claims[nameOf(id)] != nil, "claim %q is a part of none", id)
		}
	}
	for id := range m.halves.IDs(core.SideLoad) {
		if isPart(id) {
			left[nameOf(id)]++
			invariants.Must(m.fans.loads[nameOf(id)] != nil, "load %q is a part of none", id)
		}
	}
	check := func(id core.TransferID, p *parts) {
		invariants.Must(p.id == id && p.left == left[id] && p.left > 0, "load %q has %d of %d parts, counted %d", id, left[id], len(p.ids), p.left)
		claim, load, _ := m.halves.Decodes(half.ID(id))
		invariants.Must(!claim && !load, "load %q is whole and in parts", id)
	}
	for id, f := range m.fans.claims {
		check(id, f)
		invariants.Must(m.fans.loads[id] == nil, "transfer %q is claimed and loaded", id)
	}
	for id, f := range m.fans.loads {
		check(id, &f.parts)
	}
}

// checkFanOuts checks the shares of P's halves likewise.
func (m *Machine) checkFanOuts() {
	for id, f := range m.fans.offers {
		live := m.halfOf(id)
		invariants.Must(f.ID == id && len(live) == f.left && f.left > 0 && len(f.Parts) == f.of, "offer %q has %d of %d parts, counted %d", id, len(live), f.of, f.left)
		invariants.Must(m.halves.Offer(half.ID(id)) == nil, "offer %q is whole and in parts", id)
		for _, of := range live {
			invariants.Must(of.Offered().Equal(f.offered), "a part of offer %q is in state %v", id, of.State())
		}
	}
	for id := range m.halves.IDs(core.SideOffer) {
		invariants.Must(!isPart(id) || m.fans.offers[nameOf(id)] != nil, "offer %q is a part of none", id)
	}
}

// checkLost checks the reported claims; only in builds with the tag "invariants".
func (m *Machine) checkLost() {
	m.lost.Check("lost claims")
	for id := range m.halves.IDs(core.SideClaim) {
		invariants.Must(!m.wasLost(nameOf(id)), "claim %q was reported as lost and is under way", id)
	}
}
