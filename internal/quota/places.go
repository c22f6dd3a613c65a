package quota

import (
	"container/heap"
	"iter"
)

// Places are held by holders, each of which is one of an owner's. If one must give way it is one of the owner that has the most, and of two
// owners with as much the one with the oldest holder. So whoever has taken the most makes room for himself and for others. Who gives way is
// known at once, however many hold a place. The zero Places are all free. They have no lock.
type Places[O, H comparable] struct {
	at   map[H]*place[O, H]
	by   map[O]*share[O, H]
	all  queue[O, H]
	most shares[O, H]
	came uint64
}

// place is a holder's. It is in the queue of all, and in the queue of its owner's.
type place[O, H comparable] struct {
	holder       H
	of           *share[O, H]
	weight       int64
	came         uint64
	older, newer [2]*place[O, H]
}

const inAll, inOwn = 0, 1

// share is what an owner has.
type share[O, H comparable] struct {
	owner  O
	own    queue[O, H]
	weight int64
	at     int // in the heap
}

// Add gives a holder a place. If so many are taken, another gives way for it: it has its place no more, and is returned. Of its owner's it is the
// oldest: who holds one of such places only needs it for a moment. If there are no places at all, the holder gets none, and is returned itself.
func (p *Places[O, H]) Add(owner O, holder H, limit int) (gives H, ok bool) {
	if p.Len() >= limit {
		if gives, ok = p.Oldest(); !ok {
			return holder, true
		}
		p.Remove(gives)
	}
	p.Put(owner, holder, 1)
	return gives, ok
}

// Put gives a holder a place that counts so much, without a limit, as the newest. A place that it has it loses.
func (p *Places[O, H]) Put(owner O, holder H, weight int64) {
	p.Remove(holder)
	if p.at == nil {
		p.at, p.by = map[H]*place[O, H]{}, map[O]*share[O, H]{}
	}
	of := p.by[owner]
	p.came++
	e := &place[O, H]{holder: holder, weight: weight, came: p.came}
	if of == nil {
		of = &share[O, H]{owner: owner}
		p.by[owner] = of
	}
	e.of = of
	p.at[holder] = e
	p.all.push(e, inAll)
	of.own.push(e, inOwn)
	if of.weight += weight; of.own.first == e {
		heap.Push(&p.most, of)
	} else {
		heap.Fix(&p.most, of.at)
	}
}

// Weigh counts so much more for a holder's place, if it has one.
func (p *Places[O, H]) Weigh(holder H, more int64) {
	if e := p.at[holder]; e != nil {
		e.weight += more
		e.of.weight += more
		heap.Fix(&p.most, e.of.at)
	}
}

// Renew makes a holder the newest, if it has a place.
func (p *Places[O, H]) Renew(holder H) {
	if e := p.at[holder]; e != nil {
		p.came++
		e.came = p.came
		p.all.remove(e, inAll)
		p.all.push(e, inAll)
		e.of.own.remove(e, inOwn)
		e.of.own.push(e, inOwn)
		heap.Fix(&p.most, e.of.at)
	}
}

// Remove takes a holder's place, if it has one.
func (p *Places[O, H]) Remove(holder H) {
	e := p.at[holder]
	if e == nil {
		return
	}
	delete(p.at, holder)
	p.all.remove(e, inAll)
	of := e.of
	of.own.remove(e, inOwn)
	if of.weight -= e.weight; of.own.first == nil {
		heap.Remove(&p.most, of.at)
		delete(p.by, of.owner)
	} else {
		heap.Fix(&p.most, of.at)
	}
}

// First is the oldest holder of all; false if nobody holds a place.
func (p *Places[O, H]) First() (holder H, ok bool) {
	if p.all.first == nil {
		return holder, false
	}
	return p.all.first.holder, true
}

// Oldest is the oldest holder of the owner that has the most; false if nobody holds a place.
func (p *Places[O, H]) Oldest() (holder H, ok bool) {
	if len(p.most) == 0 {
		return holder, false
	}
	return p.most[0].own.first.holder, true
}

// OldestOf is the oldest holder of an owner; false if it has none.
func (p *Places[O, H]) OldestOf(owner O) (holder H, ok bool) {
	of := p.by[owner]
	if of == nil {
		return holder, false
	}
	return of.own.first.holder, true
}

// Newest is the newest holder of the owner that has the most; false if nobody holds a place.
func (p *Places[O, H]) Newest() (holder H, ok bool) {
	if len(p.most) == 0 {
		return holder, false
	}
	return p.most[0].own.last.holder, true
}

// Most is how much the owner has that has the most.
func (p *Places[O, H]) Most() int64 {
	if len(p.most) == 0 {
		return 0
	}
	return p.most[0].weight
}

// Of is how much an owner has.
func (p *Places[O, H]) Of(owner O) int64 {
	if of := p.by[owner]; of != nil {
		return of.weight
	}
	return 0
}

// Has says whether a holder has a place.
func (p *Places[O, H]) Has(holder H) bool { return p.at[holder] != nil }

// All are the holders with their owners, the oldest first.
func (p *Places[O, H]) All() iter.Seq2[H, O] {
	return func(yield func(H, O) bool) {
		for e := p.all.first; e != nil; {
			next := e.newer[inAll]
			if !yield(e.holder, e.of.owner) {
				return
			}
			e = next
		}
	}
}

// Len is how many hold a place.
func (p *Places[O, H]) Len() int { return len(p.at) }

// queue has places from the oldest to the newest. It is the queue of all or of an owner's, and in says which.
type queue[O, H comparable] struct {
	first, last *place[O, H]
}

func (q *queue[O, H]) push(e *place[O, H], in int) {
	e.older[in], e.newer[in] = q.last, nil
	if q.last != nil {
		q.last.newer[in] = e
	} else {
		q.first = e
	}
	q.last = e
}

func (q *queue[O, H]) remove(e *place[O, H], in int) {
	older, newer := e.older[in], e.newer[in]
	if older != nil {
		older.newer[in] = newer
	} else {
		q.first = newer
	}
	if newer != nil {
		newer.older[in] = older
	} else {
		q.last = older
	}
}

// shares is a heap. On top is whose holder gives way.
type shares[O, H comparable] []*share[O, H]

func (s shares[O, H]) Len() int { return len(s) }

func (s shares[O, H]) Less(i, j int) bool {
	a, b := s[i], s[j]
	if a.weight != b.weight {
		return a.weight > b.weight
	}
	return a.own.first.came < b.own.first.came
}

func (s shares[O, H]) Swap(i, j int) {
	s[i], s[j] = s[j], s[i]
	s[i].at, s[j].at = i, j
}

// Push is heap.Interface's.
func (s *shares[O, H]) Push(x any) {
	e := x.(*share[O, H])
	e.at = len(*s)
	*s = append(*s, e)
}

// Pop is heap.Interface's.
func (s *shares[O, H]) Pop() any {
	last := len(*s) - 1
	e := (*s)[last]
	(*s)[last] = nil
	*s = (*s)[:last]
	return e
}
