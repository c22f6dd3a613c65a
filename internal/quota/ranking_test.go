package quota

import (
	"cmp"
	"math/rand/v2"
	"strings"
	"testing"
)

// gives holds a ranking to who gives way; "" is nobody.
func gives(t *testing.T, r *Ranking[string, string], owner, holder string, more int64, want string) {
	t.Helper()
	if got, ok := r.Gives(owner, holder, more); got != want || ok != (want != "") {
		t.Errorf("to %d more of %s's %s %q gives way (%v), want %q", more, owner, holder, got, ok, want)
	}
}

// TestManySmallHolders: an owner counts with all that its holders have. So one that holds much by many does not push out who holds more
// than each of them.
func TestManySmallHolders(t *testing.T) {
	r := NewRanking[string](strings.Compare)
	gives(t, r, "a", "a1", 1, "")
	r.Add("a", "a1", 3)
	r.Add("a", "a2", 4)
	r.Add("a", "a3", 3)
	r.Add("b", "b1", 9)
	gives(t, r, "b", "b1", 0, "a2")
	gives(t, r, "b", "b1", 1, "") // it would have as much as a
	gives(t, r, "c", "c1", 9, "a2")
	gives(t, r, "c", "c1", 10, "")
	gives(t, r, "a", "a1", 0, "a2") // a is the one that has the most
	gives(t, r, "a", "a1", 1, "")
	gives(t, r, "a", "a4", 1, "a2")
	r.Add("a", "a2", -1)
	gives(t, r, "c", "c1", 1, "a1") // as much as others of a, and a as much as b: the first
	r.Add("b", "b1", 1)
	gives(t, r, "c", "c1", 1, "b1")
	r.Add("b", "b1", -10)
	gives(t, r, "c", "c1", 0, "a1")
	r.Remove("a", "a1")
	gives(t, r, "b", "b1", 5, "a2")
	gives(t, r, "b", "b1", 6, "")
	r.Remove("a", "a2")
	r.Remove("a", "a3")
	r.Add("b", "b1", 0)
	gives(t, r, "c", "c1", 0, "") // who holds nothing has nothing to give
	r.Remove("b", "b1")
	if n := len(r.owners.by); n+r.Holders() != 0 {
		t.Errorf("%d owners are left, with %d holders", n, r.Holders())
	}
}

// TestEnding: who gives way already is not asked again, and what it holds counts for nobody.
func TestEnding(t *testing.T) {
	r := NewRanking[string](strings.Compare)
	r.Add("a", "a1", 6)
	r.Add("a", "a2", 2)
	r.Add("b", "b1", 5)
	r.End("a", "a1")
	if n := r.Holders(); n != 3 {
		t.Errorf("%d holders are known", n)
	}
	gives(t, r, "b", "b1", 1, "") // a has 2
	gives(t, r, "c", "c1", 4, "b1")
	gives(t, r, "c", "c1", 5, "")
	gives(t, r, "a", "a3", 2, "b1")
	r.Add("a", "a1", 1)
	r.End("a", "a1")
	gives(t, r, "a", "a3", 2, "b1")
	gives(t, r, "a", "a3", 3, "")
	r.End("a", "a2")
	gives(t, r, "c", "c1", 1, "b1") // nobody else can
	gives(t, r, "a", "a3", 4, "b1")
	gives(t, r, "a", "a3", 5, "")
	r.Add("a", "a1", -7)
	r.Add("a", "a1", 7)
	gives(t, r, "b", "b1", 1, "")
	r.Remove("a", "a1")
	r.Remove("a", "a2")
	gives(t, r, "a", "a1", 1, "b1")
	r.Remove("b", "b1")
	r.Remove("b", "b1")
	if n := len(r.owners.by); n+r.Holders() != 0 {
		t.Errorf("%d owners are left, with %d holders", n, r.Holders())
	}
}

// TestRankingOfMany: whatever is done, a ranking says what a look at all that is held says.
func TestRankingOfMany(t *testing.T) {
	type held struct {
		n      int64
		ending bool
	}
	rnd := rand.New(rand.NewPCG(1, 1))
	r := NewRanking[int](func(a, b int) int { return cmp.Compare(b, a) }) // the last
	model := map[int]map[int]*held{}
	for step := range 20000 {
		owner := rnd.IntN(4)
		holder := 10*owner + rnd.IntN(4)
		if model[owner] == nil {
			model[owner] = map[int]*held{}
		}
		h := model[owner][holder]
		if h == nil {
			h = &held{}
			model[owner][holder] = h
		}
		switch rnd.IntN(8) {
		case 0:
			r.End(owner, holder)
			h.ending = true
		case 1, 2:
			r.Remove(owner, holder)
			delete(model[owner], holder)
		case 3, 4:
			n := min(h.n, rnd.Int64N(4))
			r.Add(owner, holder, -n)
			h.n -= n
		default:
			n := rnd.Int64N(5)
			r.Add(owner, holder, n)
			h.n += n
		}
		sum := func(owner int) (n int64) {
			for _, h := range model[owner] {
				if !h.ending {
					n += h.n
				}
			}
			return n
		}
		largest := func(owner int) (holder int, most *held) {
			for k, h := range model[owner] {
				if !h.ending && (most == nil || h.n > most.n || h.n == most.n && k > holder) {
					holder, most = k, h
				}
			}
			return holder, most
		}
		asks, more := rnd.IntN(4), rnd.Int64N(8)
		who := 10*asks + rnd.IntN(4)
		want, wantOK, above := 0, false, sum(asks)+more
		for o := range 4 {
			if k, h := largest(o); h != nil && sum(o) > above {
				want, wantOK, above = k, true, sum(o)
			}
		}
		if !wantOK {
			var has int64
			if h := model[asks][who]; h != nil {
				has = h.n
			}
			if k, h := largest(asks); h != nil && h.n > has+more {
				want, wantOK = k, true
			}
		}
		mostOf, mostOK, of := 0, false, int64(-1)
		for o := range 4 {
			if k, h := largest(o); h != nil && sum(o) > of {
				mostOf, mostOK, of = k, true, sum(o)
			}
		}
		if got, ok := r.Most(); got != mostOf || ok != mostOK {
			t.Fatalf("step %d: %d, %v has the most; want %d, %v", step, got, ok, mostOf, mostOK)
		}
		var has int64
		if h := model[asks][who]; h != nil {
			has = h.n
		}
		if got := r.Of(asks, who); got != has {
			t.Fatalf("step %d: %d has %d, want %d", step, who, got, has)
		}
		all := func(owner int) (n int64) {
			for _, h := range model[owner] {
				n += h.n
			}
			return n
		}
		most := true
		for o := range 4 {
			most = most && all(o) <= all(asks)
		}
		if stay, ending := r.Held(asks); stay != sum(asks) || stay+ending != all(asks) || r.HoldsMost(asks) != most {
			t.Fatalf("step %d: %d has %d and %d, the most: %v; want %d of %d, %v", step, asks, stay, ending, r.HoldsMost(asks), sum(asks), all(asks), most)
		}
		var own int
		var ownOK bool
		if k, h := largest(asks); h != nil && h.n > has+more {
			own, ownOK = k, true
		}
		if got, ok := r.GivesOwn(asks, who, more); got != own || ok != ownOK {
			t.Fatalf("step %d: of its own %d, %v; want %d, %v", step, got, ok, own, ownOK)
		}
		if got, ok := r.Gives(asks, who, more); got != want || ok != wantOK {
			t.Fatalf("step %d: %d, %v; want %d, %v", step, got, ok, want, wantOK)
		}
	}
}

// TestAddNeedsNoMemory: a holder that is known may hold more and nothing in turn.
func TestAddNeedsNoMemory(t *testing.T) {
	r := NewRanking[string](strings.Compare)
	r.Add("a", "a1", 0)
	r.Add("a", "a2", 1)
	if n := testing.AllocsPerRun(100, func() {
		r.Add("a", "a1", 2)
		r.Add("a", "a1", -2)
		r.Gives("b", "b1", 0)
	}); n > 0 {
		t.Errorf("%v allocations", n)
	}
}
