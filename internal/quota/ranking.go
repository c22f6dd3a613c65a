package quota

import (
	"cmp"
	"container/heap"
)

// Ranking is who holds how much of something that has a limit for all together, and who gives way so that somebody may have more.
// An owner is what costs something to be: a proven key, or an address. Its holders cost it nothing: they are its connections, or its
// agents. So an owner counts with all that its holders have: many that hold little are one that holds much. What a holder has that gives way
// already is on its way back, and counts for nobody; Held and HoldsMost say how much that is.
//
// The owner that holds the most gives way, and of its holders the one that holds the most. None gives way to one that would then hold as
// much or more. A Ranking has no lock and no limit: these are its user's.
type Ranking[O cmp.Ordered, H comparable] struct {
	owners level[O, *level[H, struct{}]]
	order  func(a, b H) int
}

// NewRanking makes a ranking in which nobody holds anything. Of an owner's holders that hold as much, the first by order gives way; of owners,
// the first by name: so a run can be repeated.
func NewRanking[O cmp.Ordered, H comparable](order func(a, b H) int) *Ranking[O, H] {
	return &Ranking[O, H]{level[O, *level[H, struct{}]]{order: cmp.Compare[O], by: map[O]*entry[O, *level[H, struct{}]]{}}, order}
}

// Add counts n more of an owner's holder, or fewer. A holder is known from the first time to Remove, also if it holds nothing: then
// Add needs no memory.
func (r *Ranking[O, H]) Add(owner O, holder H, n int64) {
	o := r.owner(owner)
	h := o.in.get(holder)
	h.weight += n
	*o.sum(h.ending) += n
	o.in.fix(h)
	r.fix(o)
}

// End says that a holder gives way already, and is not asked again. What it holds does not count any more.
func (r *Ranking[O, H]) End(owner O, holder H) {
	o := r.owner(owner)
	h := o.in.get(holder)
	*o.sum(h.ending) -= h.weight
	h.ending = true
	*o.sum(h.ending) += h.weight
	o.in.fix(h)
	r.fix(o)
}

// Remove forgets a holder, and all that it holds. It may be forgotten already.
func (r *Ranking[O, H]) Remove(owner O, holder H) {
	o := r.owners.by[owner]
	if o == nil {
		return
	}
	h := o.in.by[holder]
	if h == nil {
		return
	}
	*o.sum(h.ending) -= h.weight
	if o.in.remove(h); len(o.in.list) == 0 {
		r.owners.remove(o)
		return
	}
	r.fix(o)
}

// Gives is who gives way so that an owner's holder may have so much more. If no other owner has more than this one would have, it is a holder
// of this owner that has more than this holder would have. False: nobody but the holder itself.
func (r *Ranking[O, H]) Gives(owner O, holder H, more int64) (victim H, ok bool) {
	own := r.owners.by[owner]
	var has int64
	if own != nil {
		has = own.weight
	}
	if most := r.owners.first(); most != nil && most.weight > has+more {
		return r.Most()
	}
	return r.GivesOwn(owner, holder, more)
}

// GivesOwn is who gives way of an owner's holders so that this one may have so much more: one that has more than it would have. False: nobody but
// the holder itself.
func (r *Ranking[O, H]) GivesOwn(owner O, holder H, more int64) (victim H, ok bool) {
	own := r.owners.by[owner]
	if own == nil {
		return victim, false
	}
	if most := own.in.first(); most != nil && most.weight > r.Of(owner, holder)+more {
		return most.key, true
	}
	return victim, false
}

// Most is who gives way if nobody is to have more. False: nobody is left.
func (r *Ranking[O, H]) Most() (holder H, ok bool) {
	most := r.owners.first()
	if most == nil {
		return holder, false
	}
	return most.in.first().key, true
}

// Of is how much an owner's holder has.
func (r *Ranking[O, H]) Of(owner O, holder H) int64 {
	if o := r.owners.by[owner]; o != nil && o.in.by[holder] != nil {
		return o.in.by[holder].weight
	}
	return 0
}

// Held is how much an owner's holders have: those that stay, and those that give way already.
func (r *Ranking[O, H]) Held(owner O) (stay, ending int64) {
	if o := r.owners.by[owner]; o != nil {
		return o.weight, o.leaving
	}
	return 0, 0
}

// HoldsMost says whether no other owner's holders have more, those that give way already included. It looks at every owner.
func (r *Ranking[O, H]) HoldsMost(owner O) bool {
	stay, ending := r.Held(owner)
	for _, o := range r.owners.list {
		if o.weight+o.leaving > stay+ending {
			return false
		}
	}
	return true
}

// Holders is how many are known.
func (r *Ranking[O, H]) Holders() (n int) {
	for _, o := range r.owners.list {
		n += o.in.Len()
	}
	return n
}

func (r *Ranking[O, H]) owner(name O) *entry[O, *level[H, struct{}]] {
	o := r.owners.get(name)
	if o.in == nil {
		o.in = &level[H, struct{}]{order: r.order, by: map[H]*entry[H, struct{}]{}}
	}
	return o
}

// fix brings an owner to its place after one of its holders has changed.
func (r *Ranking[O, H]) fix(o *entry[O, *level[H, struct{}]]) {
	o.ending = o.in.first() == nil
	r.owners.fix(o)
}

// level is a heap. On top is who gives way first.
type level[K comparable, V any] struct {
	order func(a, b K) int
	by    map[K]*entry[K, V]
	list  []*entry[K, V]
}

type entry[K comparable, V any] struct {
	key     K
	weight  int64 // an owner's: of the holders that stay
	leaving int64 // an owner's: of those that give way already
	ending  bool  // it gives way already, or all of it does
	at      int   // in the list
	in      V     // an owner's holders
}

// sum is what an owner's holders have that give way already, or of those that stay.
func (e *entry[K, V]) sum(ending bool) *int64 {
	if ending {
		return &e.leaving
	}
	return &e.weight
}

// get is a key's entry, which it makes if there is none.
func (l *level[K, V]) get(key K) *entry[K, V] {
	e := l.by[key]
	if e == nil {
		e = &entry[K, V]{key: key}
		l.by[key] = e
		heap.Push(l, e)
	}
	return e
}

func (l *level[K, V]) fix(e *entry[K, V]) { heap.Fix(l, e.at) }

func (l *level[K, V]) remove(e *entry[K, V]) {
	delete(l.by, e.key)
	heap.Remove(l, e.at)
}

// first is who gives way first; nil if nobody can.
func (l *level[K, V]) first() *entry[K, V] {
	if len(l.list) == 0 || l.list[0].ending {
		return nil
	}
	return l.list[0]
}

func (l *level[K, V]) Len() int { return len(l.list) }

func (l *level[K, V]) Less(i, j int) bool {
	a, b := l.list[i], l.list[j]
	switch {
	case a.ending != b.ending:
		return b.ending
	case a.weight != b.weight:
		return a.weight > b.weight
	}
	return l.order(a.key, b.key) < 0
}

func (l *level[K, V]) Swap(i, j int) {
	l.list[i], l.list[j] = l.list[j], l.list[i]
	l.list[i].at, l.list[j].at = i, j
}

func (l *level[K, V]) Push(x any) {
	e := x.(*entry[K, V])
	e.at = len(l.list)
	l.list = append(l.list, e)
}

func (l *level[K, V]) Pop() any {
	last := len(l.list) - 1
	e := l.list[last]
	l.list[last] = nil
	l.list = l.list[:last]
	return e
}
