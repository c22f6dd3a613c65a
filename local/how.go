package local

import (
	"slices"
	"strings"

	"github.com/kvconn/kvconn/core"
)

// copyMethod is how bytes of P's memory come into D's.
type copyMethod uint8

const (
	byProcess   copyMethod = iota // D reads P's process
	byMapping                     // D has mapped the memory
	byDevice                      // D's device has the memory open
	copyMethods                   // how many there are
)

var methodNames = [copyMethods]string{"process_vm_readv", "mapping", "device"}

func methodOf(r memoryAccess) copyMethod {
	switch r.(type) {
	case nil:
		return byProcess
	case *views:
		return byMapping
	}
	return byDevice
}

// methodSet is which methods are used.
type methodSet [copyMethods]bool

func (u methodSet) String() string {
	var names []string
	for w, name := range methodNames {
		if u[w] {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return strings.Join(names, ", ")
}

// Counters count the bytes that have come by each method and those that passed the caches on it, and say how much memory of peers this agent has mapped, and how
// much of its own they may map.
func (t *Transport) Counters() map[string]uint64 {
	all := map[string]uint64{}
	t.receiver.mu.Lock()
	for w, name := range methodNames {
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

// How says by which methods bytes go with a peer, or went; "" if the two have not met. P knows before a byte has gone. D does
// not know P's regions: it begins with what it has open, and adds the process when bytes come from there.
func (t *Transport) How(peer core.AgentID) string {
	r, s := &t.receiver, &t.sender
	r.mu.Lock()
	src := r.sources[peer]
	if src != nil {
		defer r.mu.Unlock()
		return src.methods.String()
	}
	r.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	if tk := s.peers[peer]; tk != nil {
		return tk.methods.String()
	}
	return ""
}

// begin are the methods of a D that has met P.
func (r *peerAccess) begin() (u methodSet) {
	for _, one := range r.spaces {
		u[methodOf(r.to(one.space))] = true
	}
	if u == (methodSet{}) {
		u[byProcess] = true
	}
	return u
}

// methodsTo are those by which this agent's regions go to a D which has opened these memories.
func (t *Transport) methodsTo(all spaces) (u methodSet) {
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
