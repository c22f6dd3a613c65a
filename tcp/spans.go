package tcp

import "slices"

// span is the positions from one to before another.
type span struct{ from, to uint64 }

// spans are sorted, and none touches the next.
type spans []span

// add changes nothing and returns false if some of the positions are there already.
func (s *spans) add(from, to uint64) bool {
	if from >= to {
		return from == to
	}
	list := *s
	i, _ := slices.BinarySearchFunc(list, from, func(s span, p uint64) int {
		if s.to <= p {
			return -1
		}
		return 1
	})
	if i < len(list) && list[i].from < to {
		return false
	}
	left := i > 0 && list[i-1].to == from
	right := i < len(list) && list[i].from == to
	switch {
	case left && right:
		list[i-1].to = list[i].to
		*s = slices.Delete(list, i, i+1)
	case left:
		list[i-1].to = to
	case right:
		list[i].from = from
	default:
		*s = slices.Insert(list, i, span{from, to})
	}
	return true
}

// remove takes positions out, which lie in one span.
func (s *spans) remove(from, to uint64) {
	for i, at := range *s {
		if at.from > from || at.to < to {
			continue
		}
		var rest []span
		if at.from < from {
			rest = append(rest, span{at.from, from})
		}
		if to < at.to {
			rest = append(rest, span{to, at.to})
		}
		*s = slices.Replace(*s, i, i+1, rest...)
		return
	}
}

// drop takes n bytes from the front, all of which the first span has.
func (s *spans) drop(n uint64) {
	list := *s
	if list[0].from += n; list[0].from == list[0].to {
		*s = list[1:]
	}
}
