package natsbus

import (
	"container/list"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
)

// Bounds of the sessions that an agent keeps, some 2 KiB each.
const (
	maxSessions = 8192 // twice node's peers
	maxUnused   = 4096 // opened by others, and not used yet
	unusedLife  = 10 * time.Second
	servedLife  = 2 * sessionLife // the asker opens another before
)

// served are the sessions that others have opened to ask this agent.
//
// A session that its asker has not used stands apart: an open can be sent again by whoever has
// heard it, and takes no place from those in use. If there are too many in use, the key that has
// the most gives its least recently used one up. Its agent is told so when it asks again, and
// opens another.
type served struct {
	mu     sync.Mutex
	by     map[uint64]*sealSession
	opens  map[[sha256.Size]byte]bool // of the sessions that there are
	unused *list.List                 // of *sealSession, the oldest first
	used   *list.List                 // by their last use

	uses    uint64 // counts them
	each    map[[ed25519.PublicKeySize]byte]*holder
	holders holders
}

func newServed() *served {
	return &served{by: map[uint64]*sealSession{}, opens: map[[sha256.Size]byte]bool{}, unused: list.New(), used: list.New(), each: map[[ed25519.PublicKeySize]byte]*holder{}}
}

// repeated says that there is a session for an open already.
func (s *served) repeated(open []byte) bool {
	name := sha256.Sum256(open)
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.opens[name]
}

// number is one for the next session.
func (s *served) number() uint64 {
	var b [8]byte
	rand.Read(b[:])
	return binary.BigEndian.Uint64(b[:])
}

// add keeps a session that was opened just now. It does not if its open or its number is there already.
func (s *served) add(v *sealSession) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.by[v.id] != nil || s.opens[v.in.open] {
		return false
	}
	for e := s.unused.Front(); e != nil; e = s.unused.Front() {
		if old := e.Value.(*sealSession); s.unused.Len() < maxUnused && v.began.Sub(old.began) < unusedLife {
			break
		}
		s.drop(e.Value.(*sealSession))
	}
	for e := s.used.Front(); e != nil && v.began.Sub(e.Value.(*sealSession).began) >= servedLife; e = s.used.Front() {
		s.drop(e.Value.(*sealSession))
	}
	s.by[v.id], s.opens[v.in.open], v.in.last = v, true, v.began
	v.in.place = s.unused.PushBack(v)
	return true
}

// drop forgets a session; mu is held.
func (s *served) drop(v *sealSession) {
	delete(s.by, v.id)
	delete(s.opens, v.in.open)
	if !v.in.proved {
		s.unused.Remove(v.in.place)
		return
	}
	s.release(v)
}

// find is the session of a request, and what its number says. It is nil if there is none.
func (s *served) find(id, number uint64, now time.Time) (*sealSession, arrival) {
	s.mu.Lock()
	defer s.mu.Unlock()
	v := s.by[id]
	if v == nil || now.Sub(v.began) >= servedLife || v.idle(now) {
		return nil, arrivalNew
	}
	if fault.On("seal-replayed") {
		return v, arrivalNew
	}
	return v, v.in.replays.look(number)
}

// use notes a request that the asker has made: its tag was right. It is taken once.
func (s *served) use(v *sealSession, number uint64) arrival {
	s.mu.Lock()
	defer s.mu.Unlock()
	if a := v.in.replays.take(number); a != arrivalNew && !fault.On("seal-replayed") {
		return a
	}
	if s.by[v.id] != v { // it has given way meanwhile
		return arrivalNew
	}
	v.in.last = time.Now()
	if v.in.proved {
		s.touch(v)
		return arrivalNew
	}
	if s.used.Len() >= maxSessions {
		s.drop(s.holders.first())
	}
	s.unused.Remove(v.in.place)
	v.in.proved = true
	s.hold(v)
	return arrivalNew
}

// openSessions are the sessions that this agent has opened to ask others, one for each.
type openSessions struct {
	mu    sync.Mutex
	by    map[core.AgentID]*asking
	order *list.List // of *asking, by their last use
}

// asking is the session with one agent.
type asking struct {
	peer    core.AgentID
	session *sealSession // nil: none is open
	attempt *attempt     // to open one; nil if none is under way
	used    time.Time    // when it was asked for, or opened
	place   *list.Element
}

// attempt opens a session. All requests that have none wait for it. It is bounded by a time of its own: a request's may
// be short, and the next would begin from the beginning.
type attempt struct {
	awaited
	word    atomic.Pointer[nats.Msg] // that nobody listens; nil if it has not come
	done    chan struct{}            // closed when session or err is set
	session *sealSession
	err     error
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
		with.session = nil
	}
	with.used = now
	if s = with.session; s == stale || s != nil && s.spent(now) {
		s = nil
	}
	if s != nil && !s.worn(now) {
		return s, nil, false
	}
	if first = with.attempt == nil; first {
		with.attempt = &attempt{done: make(chan struct{})}
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
	if with.attempt = nil; s != nil {
		with.session, with.used = s, time.Now()
	} else if with.session == nil {
		o.drop(with)
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
	if with.session = nil; with.attempt == nil {
		o.drop(with)
	}
}

func (o *openSessions) drop(a *asking) {
	delete(o.by, a.peer)
	o.order.Remove(a.place)
}
