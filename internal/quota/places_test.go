package quota

import "testing"

// TestPlaces: whoever has the most gives way, the oldest first, and to nobody who has more.
func TestPlaces(t *testing.T) {
	var p Places[string, int]
	const limit = 4
	add := func(owner string, holder, want int) {
		t.Helper()
		if got, _ := p.Add(owner, holder, limit); got != want {
			t.Errorf("for %s's %d %d gives way, want %d", owner, holder, got, want)
		}
		if p.Len() > limit {
			t.Errorf("%d places are taken", p.Len())
		}
	}
	add("a", 1, 0)
	add("b", 2, 0)
	add("b", 3, 0)
	add("b", 4, 0)
	add("c", 5, 2)
	add("b", 6, 3) // its own
	add("d", 7, 4)
	add("e", 8, 1) // all have one: the oldest of all
	add("c", 9, 5) // so does it for one that has one
	if p.Of("a") != 0 || p.Of("c") != 1 || p.Of("b") != 1 {
		t.Errorf("%v", p.has)
	}
	p.Remove(6)
	p.Remove(6)
	add("c", 10, 0)
	add("c", 11, 9)
	add("d", 12, 10) // c has two, and d one
	add("c", 13, 7)  // d has two, and c one
	for _, holder := range []int{8, 11, 12, 13} {
		p.Remove(holder)
	}
	if p.Len() != 0 || len(p.has) != 0 || len(p.at) != 0 {
		t.Errorf("%v is left", p.has)
	}
}

// TestPlacesOfMore: if only those have places that have fewer, nobody gives way.
func TestPlacesOfMore(t *testing.T) {
	counts := CountsOf[string]{"a": 3, "b": 1, "c": 2} // a's are in use
	may := func(yield func(int, string) bool) { _ = yield(1, "b") && yield(2, "c") && yield(3, "c") }
	for to, want := range map[string]int{"a": 0, "b": 2, "c": 2, "d": 2} {
		if got, ok := Gives(counts, to, may); got != want || ok != (want > 0) {
			t.Errorf("to %s gives way %d, %v, want %d", to, got, ok, want)
		}
	}
	var none Places[string, int]
	if gives, ok := none.Add("a", 1, 0); !ok || gives != 1 || none.Len() != 0 {
		t.Errorf("of no places: %d, %v", gives, ok)
	}
}
