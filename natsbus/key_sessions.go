// If sessions are too many, the key that has the most sessions in use loses the one that was not used for longest.

package natsbus

import (
	"container/heap"
	"container/list"
	"crypto/ed25519"
	"crypto/sha256"
	"time"
)

// Whoever has a session's keys can read its messages, so an agent does not keep them for long after the session's last use. The
// requester forgets an idle session before the responder does, so it sends no request over one that the responder has forgotten.
const (
	requesterIdle = 10 * time.Minute
	responderIdle = 2 * requesterIdle
)

// responderSession is a session that another agent has opened, at the agent that answers.
type responderSession struct {
	*sealSession
	key  [ed25519.PublicKeySize]byte // of the requester; zeros stand for all requesters without an nkey
	open [sha256.Size]byte           // the digest of the requester's open

	last    time.Time // when it was last used, or opened; responderSessions.mu guards this field and all that follow
	replays replays
	proved  bool // a request has come that only the requester can make
	place   *list.Element
	// If it is proved: the sessions of its key, its place among them, and the number of its last use.
	owner *keySessions
	among *list.Element
	used  uint64
}

// newResponderSession makes the session of an open that self has accepted. If self has an nkey, the requesters without an nkey share one
// key: see ownerIn.
func newResponderSession(self *Identity, s *sealSession, open []byte) *responderSession {
	public, _, _ := keysOf(open)
	if self.ownerIn(s.peer) == freeIDs {
		public = make([]byte, ed25519.PublicKeySize)
	}
	return &responderSession{sealSession: s, key: [ed25519.PublicKeySize]byte(public), open: sha256.Sum256(open)}
}

// idle says whether a session was not used for too long; mu is held.
func (v *responderSession) idle(now time.Time) bool { return now.Sub(v.last) >= responderIdle }

// keySessions is a key that has sessions in use at this agent.
type keySessions struct {
	key      [ed25519.PublicKeySize]byte
	sessions *list.List // of *responderSession, by their last use
	since    uint64     // no later than the last use of the first of the sessions
	at       int        // the index in the heap
}

// keyHeap is a heap of all keys that have sessions in use. Its first key has the most sessions. If several keys have as many, it is
// the one with the session that was not used for longest. A use of a session moves no key in the heap, since a request must not wait
// for that. Only evictable puts the first key right. For each use it does so once at most.
type keyHeap []*keySessions

// Len implements sort.Interface, with Less and Swap.
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

// Push implements heap.Interface, with Pop.
func (h *keyHeap) Push(x any) {
	x.(*keySessions).at = len(*h)
	*h = append(*h, x.(*keySessions))
}

// Pop takes the last key out of the heap.
func (h *keyHeap) Pop() any {
	last := len(*h) - 1
	x := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	return x
}

// evictable is the session that must make room for another: the least recently used one of the key that has the most.
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
