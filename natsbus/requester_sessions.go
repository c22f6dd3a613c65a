package natsbus

import (
	"container/list"
	"sync"
	"time"

	"github.com/kvconn/kvconn/core"
)

// requesterSessions are the sessions that this agent has opened to ask others, one for each.
type requesterSessions struct {
	mu     sync.Mutex
	by     map[core.AgentID]*requesterSession
	closed bool
	order  *list.List // of *requesterSession, by their last use
}

// requesterSession is the session with one agent.
type requesterSession struct {
	peer     core.AgentID
	session  *sealSession // nil: none is open
	previous *sealSession // the session before that one, as long as that one was not used
	attempt  *attempt     // the attempt to open a session; nil if none is under way
	used     time.Time    // when a request last asked for the session, or when it was opened
	place    *list.Element
}

func newRequesterSessions() *requesterSessions {
	return &requesterSessions{by: map[core.AgentID]*requesterSession{}, order: list.New()}
}

// get returns the session with an agent. stale is a session that the agent does not know any more. If there is no session, or it needs
// a rekey, get returns the attempt to open one. If first is true, the caller must make this attempt, and call ended.
func (o *requesterSessions) get(peer core.AgentID, stale *sealSession, now time.Time) (s *sealSession, a *attempt, first bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	with := o.by[peer]
	if with == nil {
		with = o.add(peer)
	}
	o.order.MoveToBack(with.place)
	if with.idle(now) { // an idle session is dropped even if no other can be opened
		with.session, with.previous = nil, nil
	}
	with.used = now
	if stale != nil || with.session != nil && with.session.used() { // an agent that has forgotten a session has forgotten earlier ones
		with.previous = nil
	}
	s = nil
	for _, one := range []*sealSession{with.session, with.previous} { // the newer one may have waited for too long to be used
		if s == nil && one != nil && one != stale && !one.expired(now) {
			s = one
		}
	}
	if s != nil && !s.needsRekey(now) {
		return s, nil, false
	}
	if first = with.attempt == nil; first {
		with.attempt = &attempt{done: make(chan struct{})}
	}
	if stale != nil {
		with.attempt.stale = stale
	}
	return s, with.attempt, first
}

// ended notes how an attempt has ended, and tells those who wait for it.
func (o *requesterSessions) ended(peer core.AgentID, a *attempt, s *sealSession, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	a.session, a.err = s, err
	close(a.done)
	with := o.by[peer] // it is there: add drops no agent with an attempt
	switch with.attempt = nil; {
	case o.closed:
		o.drop(with)
	case s != nil:
		if with.previous = with.session; with.previous == a.stale {
			with.previous = nil
		}
		with.session, with.used = s, time.Now()
	case with.session == nil:
		o.drop(with)
	}
}

// close forgets all sessions, for good. Sessions that are opened later are not kept.
func (o *requesterSessions) close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.closed = true
	for _, a := range o.by {
		if a.session, a.previous = nil, nil; a.attempt == nil {
			o.drop(a)
		}
	}
}

// add makes a place for an agent; mu is held. If all places are taken, the agent that was not asked for longest makes room.
func (o *requesterSessions) add(peer core.AgentID) *requesterSession {
	for e := o.order.Front(); e != nil && len(o.by) >= maxSessions; {
		a := e.Value.(*requesterSession)
		if e = e.Next(); a.attempt == nil {
			o.drop(a)
		}
	}
	a := &requesterSession{peer: peer}
	a.place = o.order.PushBack(a)
	o.by[peer] = a
	return a
}

// forget forgets a session with an agent, if it is still the one.
func (o *requesterSessions) forget(peer core.AgentID, s *sealSession) {
	o.mu.Lock()
	defer o.mu.Unlock()
	with := o.by[peer]
	if with == nil || with.session != s {
		return
	}
	if with.session, with.previous = nil, nil; with.attempt == nil {
		o.drop(with)
	}
}

func (o *requesterSessions) drop(a *requesterSession) {
	delete(o.by, a.peer)
	o.order.Remove(a.place)
}

// sweep forgets idle sessions, and says how many agents are left.
func (o *requesterSessions) sweep(now time.Time) (left int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for e := o.order.Front(); e != nil && e.Value.(*requesterSession).idle(now); {
		a := e.Value.(*requesterSession)
		if e = e.Next(); a.attempt == nil {
			o.drop(a)
		}
	}
	return len(o.by)
}

// idle says that the session with an agent was not used for too long; mu is held.
func (a *requesterSession) idle(now time.Time) bool { return now.Sub(a.used) >= requesterIdle }
