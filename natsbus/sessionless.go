package natsbus

import (
	"slices"
	"sync"

	"github.com/nats-io/nats.go"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
)

// A message over a cluster that is of no session may be anybody's, and its answer takes signatures: an open, or a request
// of a session that is not known here. So these have places and a responder of their own: they take none of the
// requests', however many come.
const (
	// maxSessionless is how many wait: what one processor answers before their requesters send another (openAgain).
	maxSessionless = 4096
	// maxSessionlessOf is how many of one owner wait: of a key's agents together, since a key's user names them as it likes.
	// An honest agent sends an open a second, and what it has under way when a session is forgotten. Where a user of the
	// cluster can publish in the names of its key only, no other key's are kept out by it.
	maxSessionlessOf = 256
	// maxResponders is how many are answered at one time: the other processors stay free.
	maxResponders = 1
)

// sessionless are the messages that wait.
type sessionless struct {
	queue      chan *inboundRequest
	responders chan struct{} // one for each message that is being answered

	owner func(core.AgentID) string

	mu sync.Mutex
	of map[string]int // how many wait, of each owner
}

func newSessionless(owner func(core.AgentID) string) *sessionless {
	return &sessionless{owner: owner, queue: make(chan *inboundRequest, maxSessionless), responders: make(chan struct{}, maxResponders), of: map[string]int{}}
}

// put has a message wait; false if too many do.
func (s *sessionless) put(v *inboundRequest) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	owner := s.owner(v.from)
	if s.of[owner] >= maxSessionlessOf && !fault.On("seal-quota-uncounted") {
		return false
	}
	// What lies in the queue is as long as it says: NATS keeps a message's headers and its data in one piece.
	m := &nats.Msg{Subject: v.m.Subject, Reply: v.m.Reply, Sub: v.m.Sub, Data: slices.Clone(v.m.Data[:min(len(v.m.Data), openBytes)])}
	select {
	case s.queue <- &inboundRequest{link: v.link, from: v.from, m: m, mark: v.mark}:
		s.of[owner]++
		return true
	default:
		return false
	}
}

// answered says that a message waits no more.
func (s *sessionless) answered(v *inboundRequest) {
	s.mu.Lock()
	defer s.mu.Unlock()
	owner := s.owner(v.from)
	if s.of[owner]--; s.of[owner] == 0 {
		delete(s.of, owner)
	}
}

// close lets go of what waits.
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
