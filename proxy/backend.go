// One server as the router knows it: whether it is up, in which role, with which ranks and how much work.

package proxy

import (
	"cmp"
	"context"
	"errors"
	"net/url"
	"slices"
	"sync"
	"sync/atomic"
)

// Roles of servers.
const (
	prefillRole = "prefill"
	decodeRole  = "decode"
)

// server is one prefill or decode server and what the router knows of it.
type server struct {
	role          string
	url           string // as configured
	base          *url.URL
	bootstrap     string     // where a prefill server is asked for its ranks, if it can be asked
	bootstrapPort int        // as configured
	other         *server    // the same server, where it is given in the other role too
	roleProbe     *roleProbe // of its role, also where it is given in both roles; nil by contracts without such changes

	mu          sync.Mutex
	seen        bool // has been up once, in this role
	up          bool
	ups         uint64          // how many times it has come up
	roleChanged bool            // it has the other role by now
	reason      string          // why it is not up
	ranks       []rank          // the last ranks known; a server without a table of ranks has one rank
	port        int             // the bootstrap port that the server names itself, 0 if it names none
	term        context.Context // ends when the server has another role; nil by contracts without such changes
	endTerm     context.CancelCauseFunc

	againMu sync.Mutex
	again   *question // the last that requests have asked together
}

// bootstrapAt is the configured bootstrap port, else the one that was found; 0 if there is
// neither.
func (s *server) bootstrapAt() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return cmp.Or(s.bootstrapPort, s.port)
}

// found notes what a server says of its bootstrap port.
func (s *server) found(port int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.port = port
}

// rank is one data parallel rank of a server.
type rank struct {
	dp       int
	engineID string // empty where no table of ranks names it
	load     *load
	term     context.Context // the server's, when the rank was found
}

// load is the work under way at a rank, in units of roughly equal size.
type load struct{ n atomic.Int64 }

// unranked is the one rank of a server that tells of none.
const unranked = -1

// target is a rank together with its server: a request goes to it.
type target struct {
	server *server
	rank
}

// begin counts work at the rank until the returned function is called.
func (t target) begin(units int64) (end func()) {
	t.load.n.Add(units)
	return func() { t.load.n.Add(-units) }
}

// same reports whether two targets are one engine. A restarted engine is
// another one.
func (t target) same(o target) bool {
	return t.server == o.server && t.dp == o.dp && t.engineID == o.engineID
}

// path is the URL of a path on the server.
func (s *server) path(p string) string { return s.base.String() + p }

// state returns a snapshot.
func (s *server) state() (seen, up bool, reason string, ranks []rank) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.seen, s.up, s.reason, s.ranks
}

// setUp notes that the server is up with these ranks. It reports whether the server was up,
// and whether the ranks are others than before. A rank that stays keeps its load.
func (s *server) setUp(ranks []rank) (wasUp, changed bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	ranks = slices.Clone(ranks)
	for i := range ranks {
		ranks[i].load, ranks[i].term = new(load), s.term
		for _, old := range s.ranks {
			if old.dp == ranks[i].dp && old.engineID == ranks[i].engineID {
				ranks[i].load = old.load
			}
		}
	}
	wasUp, changed = s.up, !slices.Equal(s.ranks, ranks)
	if !wasUp {
		s.ups++
	}
	s.seen, s.up, s.roleChanged, s.reason, s.ranks = true, true, false, "", ranks
	return wasUp, changed
}

var errRoleChanged = errors.New("the server has another role by now")

// mayChangeRole is for servers whose roles may change.
func (b *balancer) mayChangeRole() {
	tell := map[string]*roleProbe{}
	for _, s := range b.servers() {
		s.beginTerm()
		for _, o := range b.servers() {
			if o.role != s.role && o.base.String() == s.base.String() {
				s.other = o
			}
		}
		url := s.base.String()
		if tell[url] == nil {
			tell[url] = new(roleProbe)
		}
		s.roleProbe = tell[url]
	}
}

func (s *server) beginTerm() {
	s.term, s.endTerm = context.WithCancelCause(context.Background())
}

// setRoleChanged notes that the server has another role. What was asked of it in this one has no answer: its engine had nothing under way
// when its role changed. It reports whether the server was up in this role.
func (s *server) setRoleChanged(reason string) (wasUp bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	wasUp = s.up
	if s.seen {
		s.endTerm(errRoleChanged)
		s.beginTerm()
	}
	s.seen, s.up, s.roleChanged, s.reason = false, false, true, reason
	return wasUp
}

// inOtherRole reports whether the server has its other role, or had it last, and counts there.
func (s *server) inOtherRole() bool {
	return s.other != nil && s.hasRoleChanged() && !s.other.hasRoleChanged()
}

func (s *server) hasRoleChanged() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.roleChanged
}

// untilRoleChange is a context that ends with another one, and when the target's server turns, unless stop was called by then.
func (t target) untilRoleChange(ctx context.Context) (_ context.Context, stop func()) {
	if t.term == nil {
		return ctx, func() {}
	}
	ctx, cancel := context.WithCancelCause(ctx)
	unhook := context.AfterFunc(t.term, func() { cancel(errRoleChanged) })
	return ctx, func() { unhook() }
}

// times is how many times the server has come up.
func (s *server) times() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ups
}

// setDown notes why the server is not up, unless it has come up since it had done so many times, and reports whether it was up.
func (s *server) setDown(since uint64, reason string) (wasUp bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ups != since {
		return false
	}
	wasUp = s.up
	s.up, s.reason = false, reason
	return wasUp
}

// inFlight sums the loads of the server's ranks.
func (s *server) inFlight() (units int64) {
	_, _, _, ranks := s.state()
	for _, r := range ranks {
		units += r.load.n.Load()
	}
	return units
}
