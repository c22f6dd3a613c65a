package natsbus

import (
	"slices"
	"sync"

	"github.com/nats-io/nats.go"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
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
	queue      chan *inboundRequest
	responders chan struct{} // one for each message that is being answered

	owner func(core.AgentID) string

	mu sync.Mutex
	of map[string]int // how many wait, by owner
}

func newSessionless(owner func(core.AgentID) string) *sessionless {
	return &sessionless{owner: owner, queue: make(chan *inboundRequest, maxSessionless), responders: make(chan struct{}, maxResponders), of: map[string]int{}}
}

// put queues a message. It returns false if too many wait.
func (s *sessionless) put(v *inboundRequest) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	owner := s.owner(v.from)
	if s.of[owner] >= maxSessionlessOf && !fault.On("seal-quota-uncounted") {
		return false
	}
	// The queue has a copy of the data only: NATS keeps a message's headers and its data in one piece of memory.
	m := &nats.Msg{Subject: v.m.Subject, Reply: v.m.Reply, Sub: v.m.Sub, Data: slices.Clone(v.m.Data[:min(len(v.m.Data), openBytes)])}
	select {
	case s.queue <- &inboundRequest{link: v.link, from: v.from, m: m, mark: v.mark}:
		s.of[owner]++
		return true
	default:
		return false
	}
}

// answered notes that a message does not wait any more.
func (s *sessionless) answered(v *inboundRequest) {
	s.mu.Lock()
	defer s.mu.Unlock()
	owner := s.owner(v.from)
	if s.of[owner]--; s.of[owner] == 0 {
		delete(s.of, owner)
	}
}

// close drops the messages that wait.
func (s *sessionless) close() {
	for {
		select {
		case v := <-s.queue:
			s.answered(v)
		default:
			return
		}
	}
}
