package natsbus

import (
	"container/list"
	"sync"
	"time"

	"github.com/kvconn/kvconn/core"
)

// openSessions are the sessions that this agent has opened to ask others, one for each.
type openSessions struct {
	mu     sync.Mutex
	by     map[core.AgentID]*asking
	closed bool
	order  *list.List // of *asking, by their last use
}

// asking is the session with one agent.
type asking struct {
	peer    core.AgentID
	session *sealSession // nil: none is open
	former  *sealSession // the one before it, for as long as session was not used
	attempt *attempt     // to open one; nil if none is under way
	used    time.Time    // when it was asked for, or opened
	place   *list.Element
}

func newOpened() *openSessions {
	return &openSessions{by: map[core.AgentID]*asking{}, order: list.New()}
}

// get returns the session with an agent; stale is one which the agent does not know. If there is none, or it is worn, get
// returns the attempt to open one. If first is true, the caller must make it, and call ended.
func (o *openSessions) get(peer core.AgentID, stale *sealSession, now time.Time) (s *sealSession, a *attempt, first bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	with := o.by[peer]
	if with == nil {
		with = o.add(peer)
	}
	o.order.MoveToBack(with.place)
	if with.idle(now) { // also if no other can be opened
		with.session, with.former = nil, nil
	}
	with.used = now
	if stale != nil || with.session != nil && with.session.used() { // an agent that has forgotten one has forgotten those before it
		with.former = nil
	}
	s = nil
	for _, one := range []*sealSession{with.session, with.former} { // the newer one may have waited for too long to be used
		if s == nil && one != nil && one != stale && !one.spent(now) {
			s = one
		}
	}
	if s != nil && !s.worn(now) {
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

// ended takes the end of an attempt.
func (o *openSessions) ended(peer core.AgentID, a *attempt, s *sealSession, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	a.session, a.err = s, err
	close(a.done)
	with := o.by[peer] // an agent with an attempt makes no room
	switch with.attempt = nil; {
	case o.closed:
		o.drop(with)
	case s != nil:
		if with.former = with.session; with.former == a.stale {
			with.former = nil
		}
		with.session, with.used = s, time.Now()
	case with.session == nil:
		o.drop(with)
	}
}

// close forgets all sessions, for good. Those that are asked for later are not kept.
func (o *openSessions) close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.closed = true
	for _, a := range o.by {
		if a.session, a.former = nil, nil; a.attempt == nil {
			o.drop(a)
		}
	}
}

// add makes a place for an agent; mu is held. Who was not asked for longest makes room.
func (o *openSessions) add(peer core.AgentID) *asking {
	for e := o.order.Front(); e != nil && len(o.by) >= maxSessions; {
		a := e.Value.(*asking)
		if e = e.Next(); a.attempt == nil {
			o.drop(a)
		}
	}
	a := &asking{peer: peer}
	a.place = o.order.PushBack(a)
	o.by[peer] = a
	return a
}

// forget forgets a session with an agent, if it is still the one.
func (o *openSessions) forget(peer core.AgentID, s *sealSession) {
	o.mu.Lock()
	defer o.mu.Unlock()
	with := o.by[peer]
	if with == nil || with.session != s {
		return
	}
	if with.session, with.former = nil, nil; with.attempt == nil {
		o.drop(with)
	}
}

func (o *openSessions) drop(a *asking) {
	delete(o.by, a.peer)
	o.order.Remove(a.place)
}

// sweep forgets idle sessions, and says how many agents are left.
func (o *openSessions) sweep(now time.Time) (left int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for e := o.order.Front(); e != nil && e.Value.(*asking).idle(now); {
		a := e.Value.(*asking)
		if e = e.Next(); a.attempt == nil {
			o.drop(a)
		}
	}
	return len(o.by)
}

// idle says that the session with an agent was not used for too long; mu is held.
func (a *asking) idle(now time.Time) bool { return now.Sub(a.used) >= askedIdle }
