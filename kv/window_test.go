package kv

import "testing"

// checkWindows compares a load's Plans with its lists: whatever room a caller has, and
// wherever it begins, it gets the list's bytes.
func checkWindows(t testing.TB, m *Match, src, dst Selection, pairs []Pair, segments []Segment) {
	t.Helper()
	landed := make([]Pair, len(segments))
	for i, s := range segments {
		landed[i] = Pair{DstRegion: s.Region, DstOffset: s.Offset, Length: s.Length}
	}
	plan, err := m.Plan(src, dst, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	landing, err := m.Landing(dst)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name  string
		plan  Plan
		list  []Pair
		lands bool
	}{{"P", plan, pairs, false}, {"D", landing, landed, true}} {
		if c.plan.Pieces() < len(c.list) {
			t.Fatalf("%s: a list of %d pieces, said are at most %d", c.name, len(c.list), c.plan.Pieces())
		}
		var total uint64
		for _, p := range c.list {
			total += p.Length
		}
		extents := c.plan.Extents()
		if total > 0 && (len(extents) != 1 || extents[0] != Extent{Bytes: total}) || total == 0 && extents != nil {
			t.Fatalf("%s: extents %v of %d bytes", c.name, extents, total)
		}
		for room, step := range map[int]uint64{1: 0, 2: 8, 5: 0, 64: 20} {
			if step > 0 && total > 1<<12 {
				continue // a block of a petabyte has many windows
			}
			limit := ^uint64(0)
			if room == 5 {
				limit = 1
			}
			next, into, before := 0, uint64(0), uint64(0) // of the list, and of the window's step
			for position := uint64(0); position < total; {
				got := c.plan.Pairs(make([]Pair, 0, room), position, limit)
				if len(got) == 0 {
					t.Fatalf("%s: nothing at %d of %d", c.name, position, total)
				}
				if step > 0 { // the next window begins within this one's bytes
					got = firstBytes(got, before%step+4)
					before++
				}
				for _, p := range got {
					if c.lands {
						p.SrcRegion = 0
					}
					position += p.Length
					for p.Length > 0 {
						want := c.list[next]
						want.SrcOffset, want.DstOffset, want.Length = want.SrcOffset+into, want.DstOffset+into, min(want.Length-into, p.Length)
						if c.lands {
							want.SrcOffset = 0
						}
						have := p
						have.Length = want.Length
						if c.lands {
							have.SrcOffset = 0
						}
						if have != want {
							t.Fatalf("%s: with room for %d there is %+v, the list has %+v", c.name, room, have, want)
						}
						p.SrcOffset, p.DstOffset, p.Length = p.SrcOffset+want.Length, p.DstOffset+want.Length, p.Length-want.Length
						if into += want.Length; into == c.list[next].Length {
							next, into = next+1, 0
						}
					}
				}
			}
			if next != len(c.list) {
				t.Fatalf("%s: %d of %d pieces", c.name, next, len(c.list))
			}
		}
	}
}

// firstBytes cuts a list off after so many bytes.
func firstBytes(list []Pair, n uint64) []Pair {
	for i := range list {
		if list[i].Length >= n {
			list[i].Length = n
			return list[:i+1]
		}
		n -= list[i].Length
	}
	return list
}
