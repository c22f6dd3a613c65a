// Which peers this agent has met, which of them do not answer, and which one is forgotten to make room.

package node

import (
	"container/list"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/internal/quota"
	"github.com/kvconn/kvconn/wire"
)

// maxPeers is how many peers are remembered. If there are as many, yields says which is forgotten for the next. If it comes back, it says
// hello again.
const maxPeers = 4096

// peer is this agent's record of another.
type peer struct {
	id                core.AgentID
	account           core.Account // whom it counts under, if it has said hello
	via               core.Via
	rank              string        // the peer's engine and rank; "" on P
	joined            bool          // the peer uses the server of another process
	in                *matched      // the peer's caches with this agent's, for loads from it; nil: it was not looked up
	out               *matched      // this agent's caches with the peer's, for its loads; nil: it has not said hello
	opened            time.Time     // the peer was not open before; zero: unknown
	gone              bool          // the peer was found gone; guarded by the table
	answeredAt        time.Time     // when the peer answered a load last
	unresponsiveUntil time.Time     // until then loads are not tried, since the peer has not answered others
	used              time.Time     // when it was used last; guarded by the table
	works             atomic.Bool   // the peer has or had a transfer with this agent; if not, the table may forget it for another at once
	place             *list.Element // in the table's order
}

// lookup names an engine that is looked up, or a rank of it.
type lookup struct {
	target core.Target
	part   bool
}

// peerTable holds the peers by id, and the targets that were looked up.
type peerTable struct {
	mu             sync.Mutex
	byID           map[core.AgentID]*peer
	order          *list.List                        // of *peer, by their last use
	idle           quota.Places[core.Account, *peer] // those that do not work, the longest unused first
	working        quota.Places[core.Account, *peer] // those that work, but not those from which this agent loads
	known          map[lookup][]core.FoundPart       // the agents of a target that was looked up
	pendingLookups map[lookup][]core.Resolve         // the loads and claims that wait for a look-up under way
	dealtRegions   map[core.Target][sha256.Size]byte // sumOf the regions that a rank had when this agent's were dealt out to its engine
	matches        matchStore
	long           chan struct{} // holds a value while a peer with many regions is looked at
	now            func() time.Time

	// admitting is held while a peer is added and another is dismissed for it, so that
	// the transports admit exactly the peers of the table.
	admitting sync.Mutex
}

func newPeerTable() *peerTable {
	return &peerTable{byID: map[core.AgentID]*peer{}, order: list.New(), known: map[lookup][]core.FoundPart{}, pendingLookups: map[lookup][]core.Resolve{}, dealtRegions: map[core.Target][sha256.Size]byte{},
		matches: matchStore{by: map[cachesKey]*matched{}}, long: make(chan struct{}, 1), now: time.Now}
}

func (t *peerTable) get(id core.AgentID) *peer {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.byID[id]
	if p != nil {
		p.used = t.now()
		t.order.MoveToBack(p.place)
		t.idle.Renew(p)
	}
	return p
}

// with calls f if a peer is known. A call of with does not count as a use of the peer.
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

// errBusy refuses a peer's request that the peer is to repeat.
var errBusy = errors.New("there is too much to do at this moment")

// errManyPeers refuses a peer because all peers in the table were used a moment ago.
var errManyPeers = fmt.Errorf("%w: this agent works with %d peers, its limit, and has used each within the last %v", errBusy, maxPeers, keptFor)

// add remembers a peer, and dismisses the peers that make room for it; t.admitting is held.
func (t *peerTable) add(p *peer, transports dismisser) error {
	t.mu.Lock()
	gone, err := t.put(p)
	t.mu.Unlock()
	for _, id := range gone {
		transports.Dismiss(id) // it may call the sink
	}
	return err
}

// put remembers a peer, and returns the peers that it has forgotten for this one; t.mu is held.
func (t *peerTable) put(p *peer) (gone []core.AgentID, err error) {
	p.used = t.now()
	old := t.byID[p.id]
	if old != nil {
		old.used = p.used // it makes no room for itself
		t.order.MoveToBack(old.place)
		if p.in == nil { // an agent's caches do not change
			p.in = old.in
		}
		if p.out == nil {
			p.out = old.out
		}
		if p.rank == "" {
			p.rank, p.joined = old.rank, old.joined
		}
		if p.account == "" { // this agent has looked it up
			p.account = old.account
		}
		if old.works.Load() {
			p.works.Store(true)
		}
	} else if t.order.Len() >= maxPeers {
		first, ok := t.yields(p.account, p.used)
		if !ok {
			return nil, errManyPeers
		}
		gone = append(gone, first.id)
		t.drop(first)
	}
	more, err := t.makeRoom(t.matches.adds(p.in, p.out), old)
	if gone = append(gone, more...); err != nil {
		if old != nil { // the peer's new record found no room, and its old record does not hold any more
			gone = append(gone, p.id)
			t.drop(old)
		}
		return gone, err
	}
	p.in, p.out = t.matches.hold(p.in), t.matches.hold(p.out)
	if old != nil {
		t.remove(old)
	}
	p.place = t.order.PushBack(p)
	t.count(p)
	t.byID[p.id] = p // met anew, so it is not gone
	return gone, nil
}

// errManyMatches refuses a peer because the matches take too much memory, and all peers were used a moment ago.
var errManyMatches = fmt.Errorf("%w: what this agent keeps of how its peers' KV caches fit its own would take more than %d bytes, and it has used each peer within the last %v; give all decode engines the same KV caches",
	errBusy, maxMatched, keptFor)

// makeRoom forgets peers that are not in use, until there is room for so many more bytes: first those that
// take the most. It keeps a peer if another peer has the same caches, since that frees nothing. It also keeps the
// peer but, which says hello again and which put deals with. t.mu is held.
func (t *peerTable) makeRoom(bytes int, but *peer) (gone []core.AgentID, err error) {
	if t.matches.bytes+bytes <= maxMatched {
		return nil, nil
	}
	var idle []*peer
	now := t.now()
	for e := t.order.Front(); e != nil; e = e.Next() {
		p := e.Value.(*peer)
		if p != but && !p.busy(now) && alone(p.in, p.out) > 0 {
			idle = append(idle, p)
		}
	}
	slices.SortStableFunc(idle, func(a, b *peer) int { return alone(b.in, b.out) - alone(a.in, a.out) })
	for _, p := range idle {
		if t.matches.bytes+bytes <= maxMatched {
			break
		}
		gone = append(gone, p.id)
		t.drop(p)
	}
	if t.matches.bytes+bytes > maxMatched {
		return gone, errManyMatches
	}
	return gone, nil
}

// admit lets a peer that has said hello connect, and remembers it. The transports' admit
// makes its tickets.
func (t *peerTable) admit(p *peer, transports dismisser, admit func() ([]wire.Ticket, error)) (tickets []wire.Ticket, err error) {
	t.admitting.Lock()
	defer t.admitting.Unlock()
	if tickets, err = admit(); err == nil {
		if err = t.add(p, transports); err != nil {
			transports.Dismiss(p.id) // nothing of this peer is kept
		}
	}
	return tickets, err
}

// connect remembers a peer that has answered a hello, and then makes the transports to
// it usable: a transport's signals are taken only from peers that are remembered.
func (t *peerTable) connect(p *peer, transports dismisser, connect func() error) error {
	t.admitting.Lock()
	defer t.admitting.Unlock()
	p.works.Store(true) // this agent has looked the peer up for a load or a claim
	if err := t.add(p, transports); err != nil {
		return err
	}
	return connect()
}

// drop forgets a peer; t.mu is held.
func (t *peerTable) drop(p *peer) {
	t.remove(p)
	t.unmap(p.id)
}

// remove takes a peer's record out; t.mu is held.
func (t *peerTable) remove(p *peer) {
	delete(t.byID, p.id)
	t.order.Remove(p.place)
	t.idle.Remove(p)
	t.working.Remove(p)
	t.matches.release(p.in)
	t.matches.release(p.out)
}

// markGone marks a peer that was found gone, and makes the next load look the target
// up again. It stays known: transfers that are under way with it, if it lives
// after all, must still be renewed and ended.
func (t *peerTable) markGone(id core.AgentID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if p := t.byID[id]; p != nil {
		p.gone = true
	}
	t.unmap(id)
}

func (t *peerTable) isGone(id core.AgentID) bool {
	lost := true
	t.with(id, func(p *peer) { lost = p.gone })
	return lost
}

// answered notes that a peer lives.
func (t *peerTable) answered(id core.AgentID) {
	t.with(id, func(p *peer) { p.answeredAt, p.unresponsiveUntil = time.Now(), time.Time{} })
}

// noteUnanswered notes that a peer gave no answer to a load that began then. For the length of the pause every load of
// that peer fails at once, so that those that wait behind this one do not fail one after the other. But if the peer has answered another load since then, and
// did so within the last pause, the peer still counts as responsive.
func (t *peerTable) noteUnanswered(id core.AgentID, began time.Time, pause time.Duration) {
	t.with(id, func(p *peer) {
		if p.answeredAt.Before(began) || time.Since(p.answeredAt) >= pause {
			p.unresponsiveUntil = time.Now().Add(pause)
		}
	})
}

func (t *peerTable) unresponsive(id core.AgentID, now time.Time) (unresponsive bool) {
	t.with(id, func(p *peer) { unresponsive = now.Before(p.unresponsiveUntil) })
	return unresponsive
}

// suspect makes the next load look the target up again: its agent may have been
// replaced.
func (t *peerTable) suspect(id core.AgentID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.unmap(id)
}

// unmap forgets which agents each target has, for the targets that have this peer; t.mu is held.
func (t *peerTable) unmap(id core.AgentID) {
	maps.DeleteFunc(t.known, func(_ lookup, found []core.FoundPart) bool {
		return slices.ContainsFunc(found, func(f core.FoundPart) bool { return f.Peer == id })
	})
}

// find returns the known agents of a target. If none is known, r waits for a
// look-up. If first is true, the caller must do this look-up, and then call found.
func (t *peerTable) find(key lookup, r core.Resolve) (known []core.FoundPart, first bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if known = t.known[key]; known != nil && !r.Fresh {
		return known, false
	}
	first = t.pendingLookups[key] == nil
	t.pendingLookups[key] = append(t.pendingLookups[key], r)
	return nil, first
}

// found ends a look-up and returns the loads and claims that wait for it. If the
// look-up failed, parts is nil.
func (t *peerTable) found(key lookup, parts []core.FoundPart) []core.Resolve {
	t.mu.Lock()
	defer t.mu.Unlock()
	if parts != nil {
		t.remember(key, parts)
	}
	waiting := t.pendingLookups[key]
	delete(t.pendingLookups, key)
	return waiting
}

// remember keeps the agents of a target, unless one of them is forgotten already;
// t.mu is held.
func (t *peerTable) remember(key lookup, found []core.FoundPart) {
	if len(t.known) >= 4*maxPeers { // requests have spelled targets in many ways; those in use are looked up again
		clear(t.known)
	}
	if !slices.ContainsFunc(found, func(f core.FoundPart) bool { return t.byID[f.Peer] == nil }) {
		t.known[key] = found
	}
}

// dealt remembers the ranks of an engine to which this agent's regions were dealt
// out, and the regions that each rank had.
func (t *peerTable) dealt(found []core.FoundPart, sums [][sha256.Size]byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.dealtRegions) >= 4*maxPeers {
		clear(t.dealtRegions)
	}
	for i := range found {
		t.dealtRegions[found[i].From] = sums[i]
		t.remember(lookup{found[i].From, true}, found[i:i+1])
	}
}

// dealtTo is the digest of the regions that a rank had when this agent's were dealt out; ok is
// false if they were not.
func (t *peerTable) dealtTo(target core.Target) (sum [sha256.Size]byte, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	sum, ok = t.dealtRegions[target]
	return sum, ok
}

// keptFor is how long the table remembers a peer after its last use, however many others come. An
// agent uses a peer with transfers under way once a second.
const keptFor = 10 * time.Second

// notes remembers that a peer works with this agent, if one of its transfers is one that this agent's engine knows. Claims and loads
// that the engine has not named do not count, since a peer may name what it likes.
func (t *peerTable) notes(p *peer, answers []core.Answer) []core.Answer {
	if !p.works.Load() && slices.ContainsFunc(answers, func(a core.Answer) bool {
		return a.Status == core.StatusPrefill || a.Status == core.StatusOffered || a.Status == core.StatusSending
	}) {
		t.noteWorks(p)
	}
	return answers
}

// noteWorks remembers that a peer works with this agent.
func (t *peerTable) noteWorks(p *peer) {
	p.works.Store(true)
	t.mu.Lock()
	defer t.mu.Unlock()
	if p = t.byID[p.id]; p != nil { // it may have said hello again meanwhile
		p.works.Store(true)
		t.count(p)
	}
}

// count says among whose peers one counts; t.mu is held.
func (t *peerTable) count(p *peer) {
	t.idle.Remove(p)
	t.working.Remove(p)
	switch {
	case !p.works.Load() || fault.On("node-works-uncounted"):
		t.idle.Put(p.account, p, 1)
	case p.in == nil:
		t.working.Put(p.account, p, 1)
	}
}

// busy says whether the table must remember a peer; t.mu is held.
func (p *peer) busy(now time.Time) bool {
	return now.Sub(p.used) < keptFor && (p.works.Load() || fault.On("node-hello-is-use"))
}

// yields is the peer that makes room for one of an account. It is the first that there is of these:
//   - the peer that was unused for longest, if for keptFor;
//   - of the account with the most peers that do not work, the one of them that was unused for longest;
//   - of the account with the most that work, the one that has worked for longest, if they are more than half of all and at least two more than
//     the newcomer's.
//
// t.mu is held.
func (t *peerTable) yields(to core.Account, now time.Time) (*peer, bool) {
	if e := t.order.Front(); e != nil && now.Sub(e.Value.(*peer).used) >= keptFor {
		return e.Value.(*peer), true
	}
	if p, ok := t.idle.Oldest(); ok && !fault.On("node-hello-is-use") {
		return p, true
	}
	if most := t.working.Most(); most > maxPeers/2 && most > t.working.Of(to)+1 && !fault.On("node-peers-first-come") {
		return t.working.Oldest()
	}
	return nil, false
}
