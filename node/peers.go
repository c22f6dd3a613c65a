package node

import (
	"container/list"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/wire"
)

// maxPeers is how many peers are remembered. The peer that was unused for longest is
// forgotten first. If it comes back, it says hello again. A peer in use is never forgotten
// for another.
const maxPeers = 4096

// peer is this agent's record of another.
type peer struct {
	id     core.AgentID
	via    core.Via
	rank   string        // the peer's engine and rank; "" on P
	joined bool          // the peer uses the server of another process
	in     *core.Match   // the peer's caches with this agent's, for loads from it; nil: it was not looked up
	out    *core.Match   // this agent's caches with the peer's, for its loads; nil: it has not said hello
	opened time.Time     // the peer was not open before; zero: unknown
	gone   bool          // the peer was found gone; guarded by the table
	heard  time.Time     // when the peer answered a load last
	mute   time.Time     // until then loads are not tried, since the peer has not answered others
	used   time.Time     // when it was used last; guarded by the table
	place  *list.Element // in the table's order
}

// lookup names an engine that is looked up, or a rank of it.
type lookup struct {
	target core.Target
	part   bool
}

// peerTable holds the peers by id, and the targets that were looked up.
type peerTable struct {
	mu      sync.Mutex
	byID    map[core.AgentID]*peer
	order   *list.List                   // of *peer, by their last use
	known   map[lookup][]core.FoundPart  // the agents of a target that was looked up
	looking map[lookup][]core.Resolve    // the loads and claims that wait for a look-up under way
	held    map[core.Target][]core.Shape // the regions that a rank had when this agent's were dealt out to its engine

	// meeting is held while a peer is added and another is dismissed for it, so that
	// the transports admit exactly the peers of the table.
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
		p.used = time.Now()
		t.order.MoveToBack(p.place)
	}
	return p
}

// with calls f if a peer is known. That does not count as a use of the peer.
func (t *peerTable) with(id core.AgentID, f func(p *peer)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if p := t.byID[id]; p != nil {
		f(p)
	}
}

// rankOf names a prefill agent's engine and rank; "" if it was not met.
func (t *peerTable) rankOf(id core.AgentID) (rank string) {
	t.with(id, func(p *peer) { rank = p.rank })
	return rank
}

// dismisser is the part of the transports that a peerTable needs.
type dismisser interface {
	Dismiss(peer core.AgentID)
}

// keptFor is how long a peer is remembered after its last use, however many others come. A
// peer with transfers under way is used once a second.
const keptFor = 10 * time.Second

// errManyPeers: all peers in the table were used a moment ago.
var errManyPeers = fmt.Errorf("%d agents were met and are in use, the most that are remembered", maxPeers)

// add remembers a peer, and dismisses the peer that makes room for it; t.meeting is held.
func (t *peerTable) add(p *peer, transports dismisser) error {
	var oldest core.AgentID
	t.mu.Lock()
	p.used = time.Now()
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
		if p.used.Sub(first.used) < keptFor {
			t.mu.Unlock()
			return errManyPeers
		}
		oldest = first.id
		t.drop(first)
	}
	p.place = t.order.PushBack(p)
	t.byID[p.id] = p // met anew, so it is not gone
	t.mu.Unlock()
	if oldest != "" {
		transports.Dismiss(oldest) // it may call the sink
	}
	return nil
}

// admit lets a peer that has said hello connect, and remembers it. The transports' admit
// makes its tickets.
func (t *peerTable) admit(p *peer, transports dismisser, admit func() ([]wire.Ticket, error)) (tickets []wire.Ticket, err error) {
	t.meeting.Lock()
	defer t.meeting.Unlock()
	if tickets, err = admit(); err == nil {
		if err = t.add(p, transports); err != nil {
			transports.Dismiss(p.id) // nothing of this peer is kept
		}
	}
	return tickets, err
}

// connect remembers a peer that has answered a hello, and then makes the ways to
// it usable: a transport's signals are taken only from peers that are remembered.
func (t *peerTable) connect(p *peer, transports dismisser, connect func() error) error {
	t.meeting.Lock()
	defer t.meeting.Unlock()
	if err := t.add(p, transports); err != nil {
		return err
	}
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
	lost := true
	t.with(id, func(p *peer) { lost = p.gone })
	return lost
}

// answered notes that a peer lives.
func (t *peerTable) answered(id core.AgentID) {
	t.with(id, func(p *peer) { p.heard, p.mute = time.Now(), time.Time{} })
}

// silent notes that a peer gave no answer to a load that began then. For the pause the
// loads that wait behind that load fail at once, not one after the other.
func (t *peerTable) silent(id core.AgentID, began time.Time, pause time.Duration) {
	t.with(id, func(p *peer) {
		if p.heard.Before(began) {
			p.mute = time.Now().Add(pause)
		}
	})
}

func (t *peerTable) deaf(id core.AgentID, now time.Time) (deaf bool) {
	t.with(id, func(p *peer) { deaf = now.Before(p.mute) })
	return deaf
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

// find returns the known agents of a target. If there are none, r waits for the
// look-up; if first is true, the caller must do that, and call found.
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

// found takes the end of a look-up, with parts nil if it failed, and returns the
// loads and claims that wait for it.
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

// remember keeps the agents of a target, unless one of them is forgotten already;
// t.mu is held.
func (t *peerTable) remember(key lookup, found []core.FoundPart) {
	if len(t.known) >= 4*maxPeers { // many spellings; the targets in use are looked up again
		clear(t.known)
	}
	if !slices.ContainsFunc(found, func(f core.FoundPart) bool { return t.byID[f.Peer] == nil }) {
		t.known[key] = found
	}
}

// dealt remembers the ranks of an engine to which this agent's regions were dealt
// out, and the regions that each rank had.
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

// heldBy returns the regions that a rank had when this agent's were dealt out; nil
// if they were not.
func (t *peerTable) heldBy(target core.Target) []core.Shape {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.held[target]
}
