package node

import (
	"container/list"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/wire"
)

// maxPeers bounds what is remembered of peers; the one that was not used for
// longest is forgotten first, and says hello again if it comes back.
const maxPeers = 4096

// peer is what one agent remembers of another.
type peer struct {
	id     core.AgentID
	via    core.Via
	rank   string        // of which engine it is; "" on P
	joined bool          // it and the server that it is reached by are not one process
	in     *core.Match   // of its caches with ours, for loads from it; nil: we have not looked it up
	out    *core.Match   // of ours with its, for loads of ours; nil: it has not said hello
	opened time.Time     // it was not open before this; zero: unknown
	gone   bool          // nobody listens there, or nobody answers; guarded by the table
	heard  time.Time     // when it answered a load last
	mute   time.Time     // until then its loads are not tried: it has left others without an answer
	place  *list.Element // in the table's order
}

// lookup is what is looked up: an engine, or a rank of it.
type lookup struct {
	target core.Target
	part   bool
}

// peerTable holds the peers by id, and which of them a target was found to be.
type peerTable struct {
	mu      sync.Mutex
	byID    map[core.AgentID]*peer
	order   *list.List                   // of *peer, the one used last at the end
	known   map[lookup][]core.FoundPart  // what a target was found to be
	looking map[lookup][]core.Resolve    // they wait for a look-up that is under way
	held    map[core.Target][]core.Shape // what a rank held when its engine's regions were dealt out

	// meeting is held while a peer is added and who makes room for it is
	// dismissed, so that a peer of the table is one that the transport admits.
	meeting sync.Mutex
}

func newPeerTable() *peerTable {
	return &peerTable{byID: map[core.AgentID]*peer{}, order: list.New(), known: map[lookup][]core.FoundPart{}, looking: map[lookup][]core.Resolve{}, held: map[core.Target][]core.Shape{}}
}

func (t *peerTable) get(id core.AgentID) *peer {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.byID[id]
	if p != nil {
		t.order.MoveToBack(p.place)
	}
	return p
}

// rankOf names a prefill agent's engine and rank; "" if it was not met.
func (t *peerTable) rankOf(id core.AgentID) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	if p := t.byID[id]; p != nil {
		return p.rank
	}
	return ""
}

// dismisser is the part of the transports that a peerTable needs.
type dismisser interface {
	Dismiss(peer core.AgentID)
}

// add remembers a peer, and dismisses the one that makes room for it; t.meeting
// is held.
func (t *peerTable) add(p *peer, transports dismisser) {
	var oldest core.AgentID
	t.mu.Lock()
	if old := t.byID[p.id]; old != nil {
		if p.in == nil { // an agent's caches do not change
			p.in = old.in
		}
		if p.out == nil {
			p.out = old.out
		}
		if p.rank == "" {
			p.rank, p.joined = old.rank, old.joined
		}
		t.order.Remove(old.place)
	} else if t.order.Len() >= maxPeers {
		first := t.order.Front().Value.(*peer)
		oldest = first.id
		t.drop(first)
	}
	p.place = t.order.PushBack(p)
	t.byID[p.id] = p // met anew: not gone, whatever was
	t.mu.Unlock()
	if oldest != "" {
		transports.Dismiss(oldest) // it may call the sink
	}
}

// admit lets a peer that has said hello connect, and remembers it. Its tickets are
// what the transports' admit returns.
func (t *peerTable) admit(p *peer, transports dismisser, admit func() ([]wire.Ticket, error)) (tickets []wire.Ticket, err error) {
	t.meeting.Lock()
	defer t.meeting.Unlock()
	if tickets, err = admit(); err == nil {
		t.add(p, transports)
	}
	return tickets, err
}

// connect remembers a peer that has answered a hello, and then makes the ways to
// it usable: a transport's signals are taken only from peers that are remembered.
func (t *peerTable) connect(p *peer, transports dismisser, connect func() error) error {
	t.meeting.Lock()
	defer t.meeting.Unlock()
	t.add(p, transports)
	return connect()
}

// drop removes a peer; t.mu is held.
func (t *peerTable) drop(p *peer) {
	delete(t.byID, p.id)
	t.order.Remove(p.place)
	t.unmap(p.id)
}

// lose marks a peer that was found gone, and makes the next load look the target
// up again. It stays known: transfers that are under way with it, if it lives
// after all, must still be renewed and ended.
func (t *peerTable) lose(id core.AgentID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if p := t.byID[id]; p != nil {
		p.gone = true
	}
	t.unmap(id)
}

func (t *peerTable) lost(id core.AgentID) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.byID[id]
	return p == nil || p.gone
}

// answered notes that a peer lives.
func (t *peerTable) answered(id core.AgentID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if p := t.byID[id]; p != nil {
		p.heard, p.mute = time.Now(), time.Time{}
	}
}

// silent notes that a peer has left a load without an answer that began then: the
// loads that stand behind it shall not find out one after the other.
func (t *peerTable) silent(id core.AgentID, began time.Time, pause time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if p := t.byID[id]; p != nil && p.heard.Before(began) {
		p.mute = time.Now().Add(pause)
	}
}

func (t *peerTable) deaf(id core.AgentID, now time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.byID[id]
	return p != nil && now.Before(p.mute)
}

// suspect makes the next load look the target up again: its agent may have been
// replaced.
func (t *peerTable) suspect(id core.AgentID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.unmap(id)
}

// unmap drops the targets that were found to be a peer; t.mu is held.
func (t *peerTable) unmap(id core.AgentID) {
	maps.DeleteFunc(t.known, func(_ lookup, found []core.FoundPart) bool {
		return slices.ContainsFunc(found, func(f core.FoundPart) bool { return f.Peer == id })
	})
}

// find returns what a target is known to be. If it is not, first says that the
// caller must look it up and call found; else the answer of whoever looks goes to r too.
func (t *peerTable) find(key lookup, r core.Resolve) (known []core.FoundPart, first bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if known = t.known[key]; known != nil && !r.Fresh {
		return known, false
	}
	first = t.looking[key] == nil
	t.looking[key] = append(t.looking[key], r)
	return nil, first
}

// found takes the end of a look-up, parts nil if it failed, and returns those that
// wait for it.
func (t *peerTable) found(key lookup, parts []core.FoundPart) []core.Resolve {
	t.mu.Lock()
	defer t.mu.Unlock()
	if parts != nil {
		t.remember(key, parts)
	}
	waiting := t.looking[key]
	delete(t.looking, key)
	return waiting
}

// remember keeps what was found, unless it is out of date already; t.mu is held.
func (t *peerTable) remember(key lookup, found []core.FoundPart) {
	if len(t.known) >= 4*maxPeers { // many spellings; what is in use is found again
		clear(t.known)
	}
	if !slices.ContainsFunc(found, func(f core.FoundPart) bool { return t.byID[f.Peer] == nil }) {
		t.known[key] = found
	}
}

// dealt remembers the ranks of an engine whose regions were dealt out, and what
// each of them held then.
func (t *peerTable) dealt(found []core.FoundPart, sources []core.Source) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.held) >= 4*maxPeers {
		clear(t.held)
	}
	for i := range found {
		t.held[found[i].From] = sources[i].Shapes
		t.remember(lookup{found[i].From, true}, found[i:i+1])
	}
}

// heldBy is what a rank held when its engine's regions were dealt out; nil: they
// were not.
func (t *peerTable) heldBy(target core.Target) []core.Shape {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.held[target]
}
