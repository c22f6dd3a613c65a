package machine

import (
	"fmt"

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

// fanState: doc.go has the tables of transitions.
type fanState uint8

const (
	fanNone      fanState = iota // before its begin and after its end
	fanGoing                     // a fan-in of which no part has failed
	fanFailing                   // a fan-in of a load of which a part has failed: the others end
	fanUnoffered                 // a fan-out that P's engine has not offered
	fanOffered                   // a fan-out that P's engine has offered
)

func (s fanState) String() string {
	return [...]string{"-", "going", "failing", "unoffered", "offered"}[s]
}

// fanGuard names the case that the code takes, as half.Guard does. If the engine loads from another engine than it claimed from, the guard
// is half.WhenOther.
type fanGuard uint8

const (
	whenLast      fanGuard = iota // no part is left
	whenFailed                    // the part that tells it has failed, as the first
	whenTold                      // the engine wants to hear of lost claims
	whenSame                      // the load is from the claim's engine
	whenUnoffered                 // P's engine has not offered
	whenOffered                   // P's engine has offered
)

func (g fanGuard) String() string {
	return [...]string{"last", "failed", "told", "same", "unoffered", "offered"}[g]
}

// The kinds of fans, as Transition.Half has them.
const (
	claimFan = "claim-fan-in"
	loadFan  = "load-fan-in"
	offerFan = "fan-out"
)

// fan is what all kinds have in common.
type fan struct {
	kind  string
	id    core.TransferID // as the engine knows it
	state fanState
}

// fanTo performs one row of the table, that of the fan's state, of the event and of the guard: it sets the fan's next state, and wants
// the row's actions. The event is what a part has told, or "" for the step's own. It is the only way out of the maps of fans.
func (m *Machine) fanTo(f *fan, event string, guard fmt.Stringer, next fanState, does ...core.Action) {
	m.halves.Row(f.kind, half.ID(f.id), event, guard, f.state, next, does...)
	f.state = next
	switch {
	case next != fanNone:
	case f.kind == claimFan:
		delete(m.fans.claims, f.id)
	case f.kind == loadFan:
		delete(m.fans.loads, f.id)
	default:
		delete(m.fans.offers, f.id)
	}
}

// partTells is the event of a fan whose part has ended (over), or is to end.
func partTells(over bool) string {
	if over {
		return "Ended"
	}
	return "Lost"
}

// above is the machine as the halves know it.
type above struct{ *Machine }

func (m above) Name(id half.ID) core.TransferID     { return nameOf(id) }
func (m above) Shares(id half.ID) []core.TransferID { return m.shares(nameOf(id)) }
func (m above) Demanded(id half.ID) bool            { return m.demands[nameOf(id)] }
func (m above) Loaded(id half.ID)                   { m.demanded(nameOf(id)) }

func (m above) Forgotten(id half.ID) {
	if f := m.fans.offers[nameOf(id)]; f != nil {
		m.fanTo(&f.fan, "Forgotten", half.Always, fanNone)
	}
}

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
		invariants.Must(f.state == fanGoing, "claim %q is in state %v", id, f.state)
		invariants.Must(m.fans.loads[id] == nil, "transfer %q is claimed and loaded", id)
	}
	for id, f := range m.fans.loads {
		check(id, &f.parts)
		invariants.Must(f.state == fanGoing && f.sum.Code == core.OK || f.state == fanFailing && f.sum.Code != core.OK, "load %q ends as %v in state %v", id, f.sum.Code, f.state)
	}
}

// checkFanOuts checks the shares of P's halves likewise.
func (m *Machine) checkFanOuts() {
	for id, f := range m.fans.offers {
		live := m.halfOf(id)
		invariants.Must((f.state == fanOffered) != f.offered.IsZero() && (f.state == fanOffered || f.state == fanUnoffered), "offer %q, offered at %v, is in state %v", id, f.offered, f.state)
		invariants.Must(f.ID == id && f.id == id && len(live) == f.left && f.left > 0 && len(f.Parts) == f.of, "offer %q has %d of %d parts, counted %d", id, len(live), f.of, f.left)
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
