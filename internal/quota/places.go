package quota

import (
	"container/list"
	"iter"
)

// Gives is who gives its place to one more of an owner, of those that hold one each: all are they, with their owners, and counts how many
// places each owner has. It is the first of all whose owner has the most. An owner gives nothing to one that has more than itself. So
// whoever has taken the most makes room for himself and for others, and if all have as many it is whoever comes first.
func Gives[O, H comparable](counts CountsOf[O], to O, all iter.Seq2[H, O]) (victim H, ok bool) {
	most, _ := counts.Over(to)
	has := 0
	for h, o := range all {
		if n := counts[o]; n > has && n >= counts[to] {
			if victim, ok, has = h, true, n; n == most {
				break
			}
		}
	}
	return victim, ok
}

// Places are a limited number of places, each held by one of an owner's. Those who came first give way first: who holds one only needs it
// for a moment. The zero Places are all free. They have no lock.
type Places[O, H comparable] struct {
	order list.List // of place[O, H], the oldest first
	at    map[H]*list.Element
	has   CountsOf[O]
}

type place[O, H comparable] struct {
	owner  O
	holder H
}

// Add gives a holder a place. If so many are taken, another gives way for it: it has its place no more, and is returned. If nobody may,
// the holder gets none, and is returned itself.
func (p *Places[O, H]) Add(owner O, holder H, limit int) (gives H, ok bool) {
	if p.at == nil {
		p.at, p.has = map[H]*list.Element{}, CountsOf[O]{}
	}
	if p.Len() >= limit {
		if gives, ok = Gives(p.has, owner, p.All()); !ok {
			return holder, true
		}
		p.Remove(gives)
	}
	p.at[holder] = p.order.PushBack(place[O, H]{owner, holder})
	p.has.Add(owner, 1)
	return gives, ok
}

// Remove takes a holder's place, if it has one.
func (p *Places[O, H]) Remove(holder H) {
	if e := p.at[holder]; e != nil {
		p.order.Remove(e)
		delete(p.at, holder)
		p.has.Add(e.Value.(place[O, H]).owner, -1)
	}
}

// All are the holders with their owners, the oldest first.
func (p *Places[O, H]) All() iter.Seq2[H, O] {
	return func(yield func(H, O) bool) {
		for e := p.order.Front(); e != nil; e = e.Next() {
			if at := e.Value.(place[O, H]); !yield(at.holder, at.owner) {
				return
			}
		}
	}
}

// Len is how many are taken.
func (p *Places[O, H]) Len() int { return p.order.Len() }

// Of is how many an owner has.
func (p *Places[O, H]) Of(owner O) int { return p.has[owner] }
