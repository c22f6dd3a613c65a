package quota

import (
	"math/rand/v2"
	"slices"
	"testing"
)

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
		t.Error("wrong counts")
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
	if p.Len() != 0 || len(p.by) != 0 || len(p.most) != 0 {
		t.Errorf("%v is left", p.by)
	}
}

// TestNoPlaces: where there are no places nobody gets one.
func TestNoPlaces(t *testing.T) {
	var none Places[string, int] // and no limit
	if gives, ok := none.Add("a", 1, 0); !ok || gives != 1 || none.Len() != 0 {
		t.Errorf("of no places: %d, %v", gives, ok)
	}
}

// TestPlacesOfMany: whatever is done, the places say what a look at all holders says.
func TestPlacesOfMany(t *testing.T) {
	type held struct {
		owner, holder int
		weight        int64
	}
	rnd := rand.New(rand.NewPCG(1, 2))
	var p Places[int, int]
	var model []held // the oldest first
	for step := range 20000 {
		holder := rnd.IntN(12)
		owner := rnd.IntN(4)
		at := slices.IndexFunc(model, func(h held) bool { return h.holder == holder })
		more := rnd.Int64N(3)
		switch rnd.IntN(6) {
		case 0, 1:
			if at >= 0 {
				model = slices.Delete(model, at, at+1)
			}
			model = append(model, held{owner, holder, 1 + more})
			p.Put(owner, holder, 1+more)
		case 2:
			if at >= 0 {
				model[at].weight += more
			}
			p.Weigh(holder, more)
		case 3:
			if at >= 0 {
				h := model[at]
				model = append(slices.Delete(model, at, at+1), h)
			}
			p.Renew(holder)
		case 4:
			if at >= 0 {
				model = slices.Delete(model, at, at+1)
			}
			p.Remove(holder)
		default:
			if h, ok := p.Oldest(); ok && rnd.IntN(2) == 0 {
				p.Remove(h)
				model = slices.DeleteFunc(model, func(m held) bool { return m.holder == h })
			}
		}
		has := map[int]int64{}
		for _, h := range model {
			has[h.owner] += h.weight
		}
		var want, newest held
		for _, h := range model {
			if has[h.owner] > has[want.owner] || want.weight == 0 {
				want = h
			}
		}
		for _, h := range model {
			if h.owner == want.owner {
				newest = h
			}
		}
		var most int64
		if want.weight > 0 {
			most = has[want.owner]
		}
		oldest, ok := p.Oldest()
		last, _ := p.Newest()
		if oldest != want.holder || ok != (most > 0) || last != newest.holder || p.Most() != most || p.Len() != len(model) || len(p.by) != len(has) || p.Of(owner) != has[owner] {
			t.Fatalf("step %d: %d and %d of %d in %d, want %d and %d of %d in %d", step, oldest, last, p.Most(), p.Len(), want.holder, newest.holder, most, len(model))
		}
		var own held
		if i := slices.IndexFunc(model, func(h held) bool { return h.owner == owner }); i >= 0 {
			own = model[i]
		}
		if h, ok := p.OldestOf(owner); h != own.holder || ok != (own.weight > 0) {
			t.Fatalf("step %d: the oldest of %d is %d, %v; want %d", step, owner, h, ok, own.holder)
		}
		if h, ok := p.First(); ok != (len(model) > 0) || ok && h != model[0].holder {
			t.Fatalf("step %d: the oldest is %d, %v", step, h, ok)
		}
		i := 0
		for h, o := range p.All() {
			if m := model[i]; m.holder != h || m.owner != o || !p.Has(h) {
				t.Fatalf("step %d: place %d is %d's, want %v", step, i, h, m)
			}
			i++
		}
		if i != len(model) {
			t.Fatalf("step %d: %d of %d", step, i, len(model))
		}
	}
}
