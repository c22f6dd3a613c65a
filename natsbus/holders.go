package natsbus

import (
	"container/heap"
	"container/list"
	"crypto/ed25519"
)

// holder is a key that has sessions in use at this agent.
type holder struct {
	key      [ed25519.PublicKeySize]byte
	sessions *list.List // of *sealSession, by their last use
	since    uint64     // at most the last use of the first of them: it may have been used again
	at       int        // in the heap
}

// holders are all of them: a heap, in which the first has the most sessions, and of several the one whose session was
// not used for longest. A use of a session moves nothing in it, since a request must not wait for that: the first
// notices it when it is asked for. So it looks once more for each use, at most.
type holders []*holder

// Len implements sort.Interface, as the next two do.
func (h holders) Len() int { return len(h) }

func (h holders) Less(i, j int) bool {
	if a, b := h[i].sessions.Len(), h[j].sessions.Len(); a != b {
		return a > b
	}
	return h[i].since < h[j].since
}

func (h holders) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].at, h[j].at = i, j
}

// Push implements heap.Interface, as Pop does.
func (h *holders) Push(x any) {
	x.(*holder).at = len(*h)
	*h = append(*h, x.(*holder))
}

// Pop takes the last one away.
func (h *holders) Pop() any {
	last := len(*h) - 1
	x := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	return x
}

// first is the session that makes room: of the key that has the most, its least recently used one.
func (h *holders) first() *sealSession {
	for {
		most := (*h)[0]
		v := most.sessions.Front().Value.(*sealSession)
		if v.in.used == most.since {
			return v
		}
		most.since = v.in.used
		heap.Fix(h, 0)
	}
}

// hold puts a session, used just now, with those of its key; mu is held, as in the next two.
func (s *served) hold(v *sealSession) {
	s.uses++
	v.in.used, v.in.place = s.uses, s.used.PushBack(v)
	h := s.each[v.in.key]
	if h == nil {
		h = &holder{key: v.in.key, sessions: list.New(), since: v.in.used}
		s.each[v.in.key] = h
		v.in.holder, v.in.among = h, h.sessions.PushBack(v)
		heap.Push(&s.holders, h)
		return
	}
	v.in.holder, v.in.among = h, h.sessions.PushBack(v)
	heap.Fix(&s.holders, h.at)
}

// touch notes a use.
func (s *served) touch(v *sealSession) {
	s.uses++
	v.in.used = s.uses
	s.used.MoveToBack(v.in.place)
	v.in.holder.sessions.MoveToBack(v.in.among)
}

// release takes a session away from those of its key.
func (s *served) release(v *sealSession) {
	s.used.Remove(v.in.place)
	h := v.in.holder
	h.sessions.Remove(v.in.among)
	if h.sessions.Len() == 0 {
		delete(s.each, h.key)
		heap.Remove(&s.holders, h.at)
		return
	}
	heap.Fix(&s.holders, h.at)
}
