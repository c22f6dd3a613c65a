package proxy

import (
	"net/url"
	"sync"
)

// server is one prefill or decode server and what is known of it.
type server struct {
	role      string // "prefill" or "decode"
	url       string // as configured
	base      *url.URL
	bootstrap string // the bootstrap URL of a prefill server

	mu     sync.Mutex
	seen   bool // has been up once
	up     bool
	reason string // why it is not up
	ranks  []rank // of a prefill server, by dp rank; the last ones known
}

// rank is one data parallel rank of a prefill server.
type rank struct {
	dp       int
	engineID string
}

// prefillRank is a rank together with its server: what one request goes to.
type prefillRank struct {
	server *server
	rank
}

// path is the URL of a path on the server.
func (s *server) path(p string) string { return s.base.String() + p }

// state returns a snapshot.
func (s *server) state() (seen, up bool, reason string, ranks []rank) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.seen, s.up, s.reason, s.ranks
}

// setUp notes that the server is up with these ranks, and returns whether it
// was and the ranks it had.
func (s *server) setUp(ranks []rank) (wasUp bool, before []rank) {
	s.mu.Lock()
	defer s.mu.Unlock()
	wasUp, before = s.up, s.ranks
	s.seen, s.up, s.reason, s.ranks = true, true, "", ranks
	return wasUp, before
}

// setDown notes why the server is not up, and reports whether it was.
func (s *server) setDown(reason string) (wasUp bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	wasUp = s.up
	s.up, s.reason = false, reason
	return wasUp
}
