// Messages that have no session are answered apart, so that they take nothing from the sessions.

package natsbus

import (
	"slices"
	"sync"

	"github.com/nats-io/nats.go"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/internal/quota"
)

// A message over a cluster that has no session is an open, or a request of a session that is not known here. It may be
// anybody's, and its answer takes signatures. So such messages have places and a responder of their own: however many
// come, they take no place from the requests of sessions.
const (
	// maxSessionless is the most that wait: as many as one processor answers before their requesters send them again (openAgain).
	maxSessionless = 4096
	// maxSessionlessOf is the most that wait of one owner. All agents of a key are one owner, since a key's user gives them ids as it
	// likes. An honest agent sends one open a second, and repeats its requests under way when a session is forgotten. If a user of
	// the cluster can publish only in the names of its own key, it keeps out no agent of another key.
	maxSessionlessOf = 256
	// maxResponders is how many are answered at one time: the other processors stay free.
	maxResponders = 1
)

// sessionless has the messages without a session that wait.
type sessionless struct {
	responders chan struct{} // one for each message that is being answered

	owner func(core.AgentID) string

	mu    sync.Mutex
	waits quota.Places[string, *inboundRequest] // by owner
}

func newSessionless(owner func(core.AgentID) string) *sessionless {
	return &sessionless{owner: owner, responders: make(chan struct{}, maxResponders)}
}

// put queues a message. It returns the message that gets no answer since too many wait: this one, if its owner has as many waiting as one
// may; else the oldest of the owner that has the most. nil: there was room. It takes no longer if many wait: it runs on NATS's goroutine.
func (s *sessionless) put(v *inboundRequest) (unanswered *inboundRequest) {
	s.mu.Lock()
	defer s.mu.Unlock()
	owner := s.owner(v.from)
	full := s.waits.Len() >= maxSessionless && fault.On("seal-first-come")
	if full || s.waits.Of(owner) >= maxSessionlessOf && !fault.On("seal-quota-uncounted") {
		return v
	}
	// The queue has a copy of the data only: NATS keeps a message's headers and its data in one piece of memory.
	m := &nats.Msg{Subject: v.m.Subject, Reply: v.m.Reply, Sub: v.m.Sub, Data: slices.Clone(v.m.Data[:min(len(v.m.Data), openBytes)])}
	unanswered, _ = s.waits.Add(owner, &inboundRequest{link: v.link, from: v.from, m: m, requestTag: v.requestTag}, maxSessionless)
	return unanswered
}

// take is the message that has waited for longest, which waits no more; nil if none waits.
func (s *sessionless) take() *inboundRequest {
	s.mu.Lock()
	defer s.mu.Unlock()
	for v := range s.waits.All() {
		s.waits.Remove(v)
		return v
	}
	return nil
}

func (s *sessionless) len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.waits.Len()
}

// close drops the messages that wait.
func (s *sessionless) close() {
	for s.take() != nil {
	}
}
