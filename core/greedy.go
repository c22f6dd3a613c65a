package core

import (
	"container/heap"
	"slices"
)

// greedy counts what each peer holds of something that has a limit for all together, and
// knows the peer that holds the most: that one gives way.
type greedy struct {
	byPeer map[AgentID]*holding
	order  holdings
}

// holding is what one peer holds.
type holding struct {
	peer   AgentID
	ids    []TransferID // in the order of their coming
	weight int
	at     int // in the order
}

func newGreedy() greedy { return greedy{byPeer: map[AgentID]*holding{}} }

// of is a peer's weight.
func (g *greedy) of(peer AgentID) int {
	if h := g.byPeer[peer]; h != nil {
		return h.weight
	}
	return 0
}

// most is the peer with the greatest weight; nil if none has any.
func (g *greedy) most() *holding {
	if len(g.order) == 0 {
		return nil
	}
	return g.order[0]
}

// add counts an id that weighs so much. Its weight is positive.
func (g *greedy) add(peer AgentID, id TransferID, weight int) {
	h := g.byPeer[peer]
	if h == nil {
		h = &holding{peer: peer}
		g.byPeer[peer] = h
		heap.Push(&g.order, h)
	}
	h.ids = append(h.ids, id)
	h.weight += weight
	heap.Fix(&g.order, h.at)
}

// drop takes an id away, with the weight that it was added with.
func (g *greedy) drop(peer AgentID, id TransferID, weight int) {
	h := g.byPeer[peer]
	i := len(h.ids) - 1
	if h.ids[i] != id { // the newest gives way most often
		i = slices.Index(h.ids, id)
	}
	switch {
	case i == 0:
		h.ids = h.ids[1:]
	case i > 0:
		h.ids = slices.Delete(h.ids, i, i+1)
	}
	if len(h.ids) == 0 {
		delete(g.byPeer, peer)
		heap.Remove(&g.order, h.at)
		return
	}
	h.weight -= weight
	heap.Fix(&g.order, h.at)
}

// holdings are a heap with the greatest weight on top. Of equal ones the least id is on top,
// so that a run can be repeated.
type holdings []*holding

func (o holdings) Len() int { return len(o) }
func (o holdings) Less(i, j int) bool {
	return o[i].weight > o[j].weight || o[i].weight == o[j].weight && o[i].peer < o[j].peer
}
func (o holdings) Swap(i, j int) {
	o[i], o[j] = o[j], o[i]
	o[i].at, o[j].at = i, j
}
func (o *holdings) Push(x any) {
	h := x.(*holding)
	h.at = len(*o)
	*o = append(*o, h)
}
func (o *holdings) Pop() any {
	last := (*o)[len(*o)-1]
	(*o)[len(*o)-1] = nil
	*o = (*o)[:len(*o)-1]
	return last
}
