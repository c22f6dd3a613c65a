// Package spans keeps sets of positions in a transfer's linear order.
package spans

import "slices"

// Span is the positions from one to before another.
type Span struct{ From, To uint64 }

// List is sorted, and no span touches the next.
type List []Span

// Add changes nothing and returns false if some of the positions are there already.
func (s *List) Add(from, to uint64) bool {
	if from >= to {
		return from == to
	}
	list := *s
	i, _ := slices.BinarySearchFunc(list, from, func(s Span, p uint64) int {
		if s.To <= p {
			return -1
		}
		return 1
	})
	if i < len(list) && list[i].From < to {
		return false
	}
	left := i > 0 && list[i-1].To == from
	right := i < len(list) && list[i].From == to
	switch {
	case left && right:
		list[i-1].To = list[i].To
		*s = slices.Delete(list, i, i+1)
	case left:
		list[i-1].To = to
	case right:
		list[i].From = from
	default:
		*s = slices.Insert(list, i, Span{from, to})
	}
	return true
}

// Remove takes positions out, which lie in one span.
func (s *List) Remove(from, to uint64) {
	for i, at := range *s {
		if at.From > from || at.To < to {
			continue
		}
		var rest []Span
		if at.From < from {
			rest = append(rest, Span{at.From, from})
		}
		if to < at.To {
			rest = append(rest, Span{to, at.To})
		}
		*s = slices.Replace(*s, i, i+1, rest...)
		return
	}
}

// Drop takes n bytes from the front, all of which the first span has.
func (s *List) Drop(n uint64) {
	list := *s
	if list[0].From += n; list[0].From == list[0].To {
		*s = list[1:]
	}
}
