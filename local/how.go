package local

import (
	"slices"
	"strings"

	"github.com/kvconn/kvconn/core"
)

// way is how bytes of P's memory come into D's.
type way uint8

const (
	byProcess way = iota // D reads P's process
	byMapping            // D has mapped the memory
	byDevice             // D's device has the memory open
	ways
)

var wayNames = [ways]string{"process_vm_readv", "mapping", "device"}

func wayOf(r reach) way {
	switch r.(type) {
	case nil:
		return byProcess
	case *views:
		return byMapping
	}
	return byDevice
}

// used are the ways that are.
type used [ways]bool

func (u used) String() string {
	var names []string
	for w, name := range wayNames {
		if u[w] {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return strings.Join(names, ", ")
}

// Counters count the bytes that have come by each way and those that passed the caches on it, and say how much memory of peers this agent has mapped, and how
// much of its own they may map.
func (t *Transport) Counters() map[string]uint64 {
	all := map[string]uint64{}
	t.receiver.mu.Lock()
	for w, name := range wayNames {
		all["bytes_by_"+name] = t.receiver.came[w]
	}
	all["bytes_past_caches"] = t.receiver.past
	t.receiver.mu.Unlock()
	t.mapped.mu.Lock()
	all["peers_memory_mapped_bytes"] = t.mapped.bytes
	t.mapped.mu.Unlock()
	var shared uint64
	for i := range t.memories {
		shared += t.memories[i].size
	}
	all["own_memory_shared_bytes"] = shared
	return all
}

// How says by which ways bytes go with a peer, or went; "" if the two have not met. P knows before a byte has gone. D does
// not know P's regions: it begins with what it has open, and adds the process when bytes come from there.
func (t *Transport) How(peer core.AgentID) string {
	r, s := &t.receiver, &t.sender
	r.mu.Lock()
	src := r.sources[peer]
	if src != nil {
		defer r.mu.Unlock()
		return src.ways.String()
	}
	r.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	if tk := s.peers[peer]; tk != nil {
		return tk.ways.String()
	}
	return ""
}

// begin are the ways of a D that has met P.
func (r *reaches) begin() (u used) {
	for _, one := range r.spaces {
		u[wayOf(r.to(one.space))] = true
	}
	if u == (used{}) {
		u[byProcess] = true
	}
	return u
}

// waysTo are those that this agent's regions go by to a D which has opened these memories.
func (t *Transport) waysTo(all spaces) (u used) {
	for i := range t.layout.Regions {
		r := &t.layout.Regions[i]
		for at := r.Base; at < r.Base+r.Extent(); {
			space, end := all.at(at)
			switch {
			case space == processMemory:
				u[byProcess] = true
			case slices.ContainsFunc(t.memories, func(m memory) bool { return m.space == space }):
				u[byMapping] = true
			default:
				u[byDevice] = true
			}
			at = end
		}
	}
	return u
}
