package natsbus

import (
	"container/heap"
	"container/list"
	"crypto/ed25519"
	"crypto/sha256"
	"time"
)

// A session's keys read what was said in it, so they are not kept for long after its last use. The requester is the first to
// forget an idle session, so that it sends no request over one that the responder has forgotten.
const (
	requesterIdle = 10 * time.Minute
	responderIdle = 2 * requesterIdle
)

// responderSession is a session that another agent has opened, at the agent that answers.
type responderSession struct {
	*sealSession
	key  [ed25519.PublicKeySize]byte // of the requester; zeros: of all that have no nkey
	open [sha256.Size]byte           // the digest of the requester's open

	last    time.Time // guarded by responderSessions.mu, as all that follows is: it was used, or opened
	replays replays
	proved  bool // a request has come that only the requester can make
	place   *list.Element
	// Of a proved one: with others of its key, in its place there, and which use its last one was.
	owner *keySessions
	among *list.Element
	used  uint64
}

// newResponderSession is for an open that self has accepted. The requesters of no nkey share a key where self has one, see ownerIn.
func newResponderSession(self *Identity, s *sealSession, open []byte) *responderSession {
	public, _, _ := keysOf(open)
	if self.ownerIn(s.peer) == freeIDs {
		public = make([]byte, ed25519.PublicKeySize)
	}
	return &responderSession{sealSession: s, key: [ed25519.PublicKeySize]byte(public), open: sha256.Sum256(open)}
}

// idle says that a session was not used for too long; mu is held.
func (v *responderSession) idle(now time.Time) bool { return now.Sub(v.last) >= responderIdle }

// keySessions is a key that has sessions in use at this agent.
type keySessions struct {
	key      [ed25519.PublicKeySize]byte
	sessions *list.List // of *responderSession, by their last use
	since    uint64     // at most the last use of the first of them: it may have been used again
	at       int        // in the heap
}

// keyHeap is all of them: a heap, in which the first has the most sessions, and of several the one whose session was
// not used for longest. A use of a session moves nothing in it, since a request must not wait for that: the first
// notices it when it is asked for. So it looks once more for each use, at most.
type keyHeap []*keySessions

// Len implements sort.Interface, as the next two do.
func (h keyHeap) Len() int { return len(h) }

func (h keyHeap) Less(i, j int) bool {
	if a, b := h[i].sessions.Len(), h[j].sessions.Len(); a != b {
		return a > b
	}
	return h[i].since < h[j].since
}

func (h keyHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].at, h[j].at = i, j
}

// Push implements heap.Interface, as Pop does.
func (h *keyHeap) Push(x any) {
	x.(*keySessions).at = len(*h)
	*h = append(*h, x.(*keySessions))
}

// Pop takes the last one away.
func (h *keyHeap) Pop() any {
	last := len(*h) - 1
	x := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	return x
}

// evictable is the session that makes room: of the key that has the most, its least recently used one.
func (h *keyHeap) evictable() *responderSession {
	for {
		most := (*h)[0]
		v := most.sessions.Front().Value.(*responderSession)
		if v.used == most.since {
			return v
		}
		most.since = v.used
		heap.Fix(h, 0)
	}
}
