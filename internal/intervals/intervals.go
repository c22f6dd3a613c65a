// Package intervals keeps sets of positions in a transfer's linear order.
package intervals

import "slices"

// Interval is the positions from one to before another.
type Interval struct{ From, To uint64 }

// Set is sorted, and no interval touches the next.
type Set []Interval

// Add changes nothing and returns false if some of the positions are there already.
func (s *Set) Add(from, to uint64) bool {
	if from >= to {
		return from == to
	}
	list := *s
	i, _ := slices.BinarySearchFunc(list, from, func(s Interval, p uint64) int {
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
		*s = slices.Insert(list, i, Interval{from, to})
	}
	return true
}

// Remove takes positions out, which lie in one interval.
func (s *Set) Remove(from, to uint64) {
	for i, at := range *s {
		if at.From > from || at.To < to {
			continue
		}
		var rest []Interval
		if at.From < from {
			rest = append(rest, Interval{at.From, from})
		}
		if to < at.To {
			rest = append(rest, Interval{to, at.To})
		}
		*s = slices.Replace(*s, i, i+1, rest...)
		return
	}
}

// Drop takes n bytes from the front, all of which the first interval has.
func (s *Set) Drop(n uint64) {
	list := *s
	if list[0].From += n; list[0].From == list[0].To {
		*s = list[1:]
	}
}
