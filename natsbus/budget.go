package natsbus

import (
	"sync"

	"github.com/kvconn/kvconn/internal/fault"
)

// budget bounds what all connections together make this process hold. When they go over
// it, the connection that holds the most is ended, whichever asked for more.
type budget struct {
	limit int64

	mu     sync.Mutex
	total  int64
	shares map[*share]struct{} // of connections that hold something
}

// share is what one connection holds.
type share struct {
	of  *budget
	end func() // ends the connection; it does not wait

	bytes int64 // guarded by budget.mu, as ended is
	ended bool
}

func newBudget(limit int64) *budget { return &budget{limit: limit, shares: map[*share]struct{}{}} }

// add changes what a connection holds.
func (s *share) add(n int64) {
	if fault.On("bus-bytes-uncounted") {
		return
	}
	var most *share
	b := s.of
	b.mu.Lock()
	s.bytes += n
	b.total += n
	if s.bytes != 0 {
		b.shares[s] = struct{}{}
	} else {
		delete(b.shares, s)
	}
	if n > 0 && b.total > b.limit {
		for other := range b.shares {
			if !other.ended && (most == nil || other.bytes > most.bytes) {
				most = other
			}
		}
		if most != nil {
			most.ended = true
		}
	}
	b.mu.Unlock()
	if most != nil {
		most.end()
	}
}

// release gives back all that a connection holds.
func (s *share) release() {
	b := s.of
	b.mu.Lock()
	defer b.mu.Unlock()
	b.total -= s.bytes
	s.bytes = 0
	delete(b.shares, s)
}
