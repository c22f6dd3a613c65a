package core

import "time"

// fans are the transfers that go in parts. The files fans.go, fanin.go, fanout.go and
// share.go know that an engine has several ranks. Each half knows one peer. The calls of
// the engine reach the parts of a transfer by halfOf, cancelParts and the like.
type fans struct {
	claims map[TransferID]*claimFanIn
	loads  map[TransferID]*loadFanIn
	offers map[TransferID]*fanOut
}

func newFans() fans {
	return fans{claims: map[TransferID]*claimFanIn{}, loads: map[TransferID]*loadFanIn{}, offers: map[TransferID]*fanOut{}}
}

// in is the number of fan-ins.
func (f *fans) in() int { return len(f.claims) + len(f.loads) }

// halves are all halves of one kind, by their ids; parts of a fan-in count apart.
type halves[T any] struct {
	byID  map[TransferID]T
	parts int
}

func newHalves[T any]() halves[T] { return halves[T]{byID: map[TransferID]T{}} }

func (h *halves[T]) get(id TransferID) T { return h.byID[id] }

func (h *halves[T]) put(id TransferID, v T) {
	if _, there := h.byID[id]; !there && isPart(id) {
		h.parts++
	}
	h.byID[id] = v
}

func (h *halves[T]) drop(id TransferID) {
	if _, there := h.byID[id]; there && isPart(id) {
		h.parts--
	}
	delete(h.byID, id)
}

// named is how many of them the engine has named itself.
func (h *halves[T]) named() int { return len(h.byID) - h.parts }

// claimed and loading say whether the engine has claimed a transfer, or loads it.
func (m *Machine) claimed(id TransferID) bool {
	return m.claims.get(id) != nil || m.fans.claims[id] != nil
}

func (m *Machine) loading(id TransferID) bool {
	return m.loads.get(id) != nil || m.fans.loads[id] != nil
}

func (m *Machine) namedClaims() int { return m.claims.named() + len(m.fans.claims) }

// namedLoads is how many loads the engine has named, besides one of this id. A cancelled
// load of which P must still hear counts too.
func (m *Machine) namedLoads(id TransferID) int {
	n := m.loads.named() + len(m.fans.loads) + m.farewells.named()
	if m.farewells.get(id) != nil {
		n--
	}
	return n
}

// cancelParts ends the parts of D's half of a transfer, and says whether it goes in parts.
func (m *Machine) cancelParts(now time.Time, id TransferID, end ending) bool {
	f := m.fans.claims[id]
	if f != nil {
		m.dropClaimFanIn(f, end)
	}
	return m.endLoadParts(now, id, end) || f != nil
}

// endLoadParts ends the parts of a load, and says whether it goes in parts.
func (m *Machine) endLoadParts(now time.Time, id TransferID, end ending) bool {
	f := m.fans.loads[id]
	if f != nil {
		m.endLoadFanIn(now, f, end)
	}
	return f != nil
}

// busyLoads is how many fan-ins load blocks.
func (f *fans) busyLoads() (n int) {
	for _, l := range f.loads {
		if l.blocks > 0 {
			n++
		}
	}
	return n
}

// checkFans checks the parts, and their counts; only in builds with the tag "invariants".
func (m *Machine) checkFans() {
	m.checkFanIns()
	m.checkFanOuts()
}

func (m *Machine) checkFanIns() {
	left := map[TransferID]int{}
	for id := range m.claims.byID {
		if isPart(id) {
			left[nameOf(id)]++
			must(m.fans.claims[nameOf(id)] != nil, "claim %q is a part of none", id)
		}
	}
	for id := range m.loads.byID {
		if isPart(id) {
			left[nameOf(id)]++
			must(m.fans.loads[nameOf(id)] != nil, "load %q is a part of none", id)
		}
	}
	check := func(id TransferID, p *parts) {
		must(p.id == id && p.left == left[id] && p.left > 0, "load %q has %d of %d parts, counted %d", id, left[id], len(p.ids), p.left)
		must(m.claims.get(id) == nil && m.loads.get(id) == nil, "load %q is whole and in parts", id)
	}
	for id, f := range m.fans.claims {
		check(id, &f.parts)
		must(m.fans.loads[id] == nil, "transfer %q is claimed and loaded", id)
	}
	for id, f := range m.fans.loads {
		check(id, &f.parts)
	}
}

func (m *Machine) checkFanOuts() {
	for id, f := range m.fans.offers {
		live := m.halfOf(id)
		must(f.id == id && len(live) == f.left && f.left > 0 && len(f.parts) == f.of, "offer %q has %d of %d parts, counted %d", id, len(live), f.of, f.left)
		must(m.offers[id] == nil, "offer %q is whole and in parts", id)
		for _, of := range live {
			must(of.offered.Equal(f.offered), "part %q of offer %q in state %v", of.id, id, of.state)
		}
	}
	for id := range m.offers {
		must(!isPart(id) || m.fans.offers[nameOf(id)] != nil, "offer %q is a part of none", id)
	}
}
