// The sessions that others have opened to ask this agent: which are known, and which request comes again.

package natsbus

import (
	"container/heap"
	"container/list"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"sync"
	"time"

	"github.com/kvconn/kvconn/internal/fault"
)

// Bounds of the sessions that an agent keeps, some 2 KiB each.
const (
	maxSessions   = 8192            // twice node's peers
	maxUnused     = 4096            // opened by others, and not used yet
	responderLife = 2 * sessionLife // the requester opens another before
)

// responderSessions are the sessions that others have opened to ask this agent.
//
// Sessions that their requesters have not used are kept apart: anybody who has heard an open can send it again, and
// must not take a place from the sessions in use. If there are too many sessions in use, the key that has
// the most gives up the one that was not used for longest. When the agent of that session asks again, it is told so,
// and opens another one.
type responderSessions struct {
	mu     sync.Mutex
	closed bool
	by     map[uint64]*responderSession
	opens  map[[sha256.Size]byte]bool // the digests of the sessions' opens
	unused *list.List                 // of *responderSession, the oldest first
	used   *list.List                 // of *responderSession, by their last use

	uses uint64 // counts the uses of all sessions
	each map[[ed25519.PublicKeySize]byte]*keySessions
	heap keyHeap
}

func newResponderSessions() *responderSessions {
	return &responderSessions{by: map[uint64]*responderSession{}, opens: map[[sha256.Size]byte]bool{}, unused: list.New(), used: list.New(), each: map[[ed25519.PublicKeySize]byte]*keySessions{}}
}

// repeated says whether there is a session for an open already.
func (s *responderSessions) repeated(open []byte) bool {
	name := sha256.Sum256(open)
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.opens[name]
}

// number makes a random number for the next session.
func (s *responderSessions) number() uint64 {
	var b [8]byte
	rand.Read(b[:])
	return binary.BigEndian.Uint64(b[:])
}

// add keeps a session that was opened just now. It keeps nothing, and returns false, if there is a session with the same open or
// number already, or after close.
func (s *responderSessions) add(v *responderSession) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || s.by[v.id] != nil || s.opens[v.open] {
		return false
	}
	for e := s.unused.Front(); e != nil; e = s.unused.Front() {
		if old := e.Value.(*responderSession); s.unused.Len() < maxUnused && v.began.Sub(old.began) < unusedLife {
			break
		}
		s.drop(e.Value.(*responderSession))
	}
	for e := s.used.Front(); e != nil && v.began.Sub(e.Value.(*responderSession).began) >= responderLife; e = s.used.Front() {
		s.drop(e.Value.(*responderSession))
	}
	s.by[v.id], s.opens[v.open], v.last = v, true, v.began
	v.place = s.unused.PushBack(v)
	return true
}

// drop forgets a session; mu is held.
func (s *responderSessions) drop(v *responderSession) {
	delete(s.by, v.id)
	delete(s.opens, v.open)
	if !v.proved {
		s.unused.Remove(v.place)
		return
	}
	s.release(v)
}

// find returns the session of a request, and what the request's number says. If there is no such session, it is nil.
func (s *responderSessions) find(id, number uint64, now time.Time) (*responderSession, arrival) {
	s.mu.Lock()
	defer s.mu.Unlock()
	v := s.by[id]
	if v == nil || now.Sub(v.began) >= responderLife || v.idle(now) {
		return nil, arrivalNew
	}
	if fault.On("seal-replayed") {
		return v, arrivalNew
	}
	return v, v.replays.look(number)
}

// use notes a request whose tag was right, so that only the requester can have made it. A request is accepted once.
func (s *responderSessions) use(v *responderSession, number uint64) arrival {
	s.mu.Lock()
	defer s.mu.Unlock()
	if a := v.replays.take(number); a != arrivalNew && !fault.On("seal-replayed") {
		return a
	}
	if s.by[v.id] != v { // it was evicted meanwhile
		return arrivalNew
	}
	v.last = time.Now()
	if v.proved {
		s.touch(v)
		return arrivalNew
	}
	if s.used.Len() >= maxSessions {
		s.drop(s.heap.evictable())
	}
	s.unused.Remove(v.place)
	v.proved = true
	s.hold(v)
	return arrivalNew
}

// hold adds a session that was used just now to the sessions of its key; mu is held, as in touch and release.
func (s *responderSessions) hold(v *responderSession) {
	s.uses++
	v.used, v.place = s.uses, s.used.PushBack(v)
	h := s.each[v.key]
	if h == nil {
		h = &keySessions{key: v.key, sessions: list.New(), since: v.used}
		s.each[v.key] = h
		v.owner, v.among = h, h.sessions.PushBack(v)
		heap.Push(&s.heap, h)
		return
	}
	v.owner, v.among = h, h.sessions.PushBack(v)
	heap.Fix(&s.heap, h.at)
}

// touch notes that a session was used.
func (s *responderSessions) touch(v *responderSession) {
	s.uses++
	v.used = s.uses
	s.used.MoveToBack(v.place)
	v.owner.sessions.MoveToBack(v.among)
}

// release removes a session from the sessions of its key.
func (s *responderSessions) release(v *responderSession) {
	s.used.Remove(v.place)
	h := v.owner
	h.sessions.Remove(v.among)
	if h.sessions.Len() == 0 {
		delete(s.each, h.key)
		heap.Remove(&s.heap, h.at)
		return
	}
	heap.Fix(&s.heap, h.at)
}

// sweep forgets idle sessions, and says how many are left.
func (s *responderSessions) sweep(now time.Time) (left int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for e := s.unused.Front(); e != nil && now.Sub(e.Value.(*responderSession).began) >= unusedLife; e = s.unused.Front() {
		s.drop(e.Value.(*responderSession))
	}
	for e := s.used.Front(); e != nil && e.Value.(*responderSession).idle(now); e = s.used.Front() {
		s.drop(e.Value.(*responderSession))
	}
	return len(s.by)
}

// close forgets all sessions, for good.
func (s *responderSessions) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for _, v := range s.by {
		s.drop(v)
	}
}
