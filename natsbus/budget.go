package natsbus

import (
	"cmp"
	"fmt"
	"sync"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/internal/quota"
)

// budget bounds what all connections together make this process hold. When they go over it, one connection is ended, whichever asked for
// more: the largest of the account whose connections together hold the most. So many connections that hold little end none of an
// account that holds less than they do. What a connection that is being ended still holds is on its way back, so it does not count for its account,
// and no other connection is ended for it. But once all that is held, with it, is over twice the limit, an account of which connections are being
// ended, or that holds the most with what they hold, gets no more: it loses the largest of its own. No other account loses one then, so
// the other accounts may together hold as much as the limit.
type budget struct {
	limit int64

	mu     sync.Mutex
	total  int64 // of these, ending are of connections that are being ended
	ending int64
	n      uint64
	shares *quota.Ranking[core.Account, *share]
}

// share is what one connection holds.
type share struct {
	of      *budget
	account core.Account
	end     func() // ends the connection; it does not wait
	n       uint64 // in the order in which they came

	bytes    int64 // guarded by budget.mu, as those below are
	ended    bool
	released bool
}

func newBudget(limit int64) *budget {
	// Of connections that hold as much, the newest is ended.
	return &budget{limit: limit, shares: quota.NewRanking[core.Account](func(a, b *share) int { return cmp.Compare(b.n, a.n) })}
}

// newShare is a connection's that holds nothing yet. See client.account.
func (b *budget) newShare(account core.Account, end func()) *share {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.n++
	if fault.On("bus-bytes-by-connection") {
		account = core.Account(fmt.Sprint(account, " ", b.n))
	}
	s := &share{of: b, account: account, end: end, n: b.n}
	b.shares.Add(account, s, 0)
	return s
}

// add changes what a connection holds.
func (s *share) add(n int64) {
	if fault.On("bus-bytes-uncounted") {
		return
	}
	if gives := s.of.add(s, n); gives != nil {
		gives.end()
	}
}

// add changes what a connection holds, and returns the one that is to be ended for it; nil: there is room, or this connection is over.
func (b *budget) add(s *share, n int64) (gives *share) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if s.released {
		return nil
	}
	s.bytes += n
	b.total += n
	b.shares.Add(s.account, s, n)
	if s.ended {
		b.ending += n
		return nil
	}
	ending := b.ending
	if fault.On("bus-ending-counts") {
		ending = 0
	}
	ok := false
	switch {
	case n <= 0:
		return nil
	case b.total-ending > b.limit, b.total > 2*b.limit && fault.On("bus-ending-ends-others"):
		gives, ok = b.shares.Gives(s.account, s, 0)
	case b.total > 2*b.limit && b.caused(s.account) && !fault.On("bus-ending-unbounded"):
		gives, ok = b.shares.GivesOwn(s.account, s, 0)
	default:
		return nil
	}
	if !ok {
		gives = s
	}
	gives.ended = true
	b.ending += gives.bytes
	b.shares.End(gives.account, gives)
	return gives
}

// caused says whether an account has its part in what is held by connections that are being ended, or holds the most of all; mu is held.
func (b *budget) caused(account core.Account) bool {
	_, ending := b.shares.Held(account)
	return ending > 0 || b.shares.HoldsMost(account)
}

// release gives back all that a connection holds.
func (s *share) release() {
	b := s.of
	b.mu.Lock()
	defer b.mu.Unlock()
	b.total -= s.bytes
	if s.ended {
		b.ending -= s.bytes
	}
	s.bytes, s.released = 0, true
	b.shares.Remove(s.account, s)
}
