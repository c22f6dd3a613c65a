package node

import (
	"slices"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
)

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
