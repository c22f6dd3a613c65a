// If a claim or load ends while P is being looked up, a farewell keeps the end until P is found and told.

package half

import "github.com/kvconn/kvconn/core"

// farewellState: doc.go has the table of transitions.
type farewellState uint8

const (
	farewellNone farewellState = iota // before its begin and after its end
	farewellKept                      // P is being looked up, to be told
)

func (s farewellState) String() string { return [...]string{"-", "kept"}[s] }

// farewell keeps an end that P must still be told: the claim or load, half says which, has ended while D was looking P's agent up. It
// is kept until P is found. A new claim or load of the id voids it, since P then hears of the id by the new one.
func (h *Set) farewell(half string, a asked, end Ending) {
	h.taken.word(half, a.id, "Farewell")
	a.end = end
	h.farewells.put(a.id, &a)
	h.taken.row("farewell", a.id, Always, farewellNone, farewellKept, nil)
}

// endFarewell performs one row of the table that ends a farewell.
func (h *Set) endFarewell(f *asked, guard Guard, does ...core.Action) {
	h.farewells.drop(f.id)
	h.taken.row("farewell", f.id, guard, farewellKept, farewellNone, does)
	h.actions = append(h.actions, does...)
}

// voidFarewell ends the farewell of a half that begins anew.
func (h *Set) voidFarewell(id ID) {
	if f := h.farewells.byID[id]; f != nil {
		h.endFarewell(f, Always)
	}
}

// voidFarewells ends all: P hears no more of what was being looked up.
func (h *Set) voidFarewells() {
	for _, id := range sortedKeys(h.farewells.byID) {
		h.voidFarewell(id)
	}
}

func (f *asked) finish(peer core.AgentID, id core.TransferID) core.Action {
	return core.SendFinish{Peer: peer, ID: id, Code: f.end.Code, Reason: f.end.Reason}
}
