package node

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/sleep"
	"github.com/kvconn/kvconn/wire"
)

// rpcClient sends requests to peers that were resolved or have said hello.
type rpcClient struct {
	ctx         context.Context // ends with the agent
	bus         requester
	peers       *peerTable
	peerTimeout time.Duration
	retried     func() // is told of each request that is sent again
}

// requester is the half of core.Bus that an rpcClient needs.
type requester interface {
	Request(ctx context.Context, via core.Via, to core.AgentID, req *wire.Request) (*wire.Reply, error)
}

// requestWithin asks once, and waits for the answer as long as bound.
func (s *rpcClient) requestWithin(bound time.Duration, to core.AgentID, req *wire.Request) (*wire.Reply, error) {
	ctx, cancel := context.WithTimeout(s.ctx, bound)
	defer cancel()
	return s.request(ctx, to, req)
}

func (s *rpcClient) request(ctx context.Context, to core.AgentID, req *wire.Request) (*wire.Reply, error) {
	p := s.peers.get(to)
	if p == nil {
		return nil, fmt.Errorf("agent %s is not known any more", to)
	}
	rep, err := s.bus.Request(ctx, p.via, to, req)
	if p.joined && errors.Is(err, core.ErrAbsent) && !errors.Is(err, core.ErrAway) {
		err = fmt.Errorf("%w: %w", core.ErrAway, err) // the peer's link to that server may come back, or the server itself
	}
	return rep, err
}

// gone says whether an error proves that the agent is not there any more.
// Other errors may mean that a connection broke or a message was lost.
func gone(err error) bool { return errors.Is(err, core.ErrAbsent) && !errors.Is(err, core.ErrAway) }

// requestWithRetries asks until there is an answer, for a little less than peer_timeout_s:
// messages get lost, and links come back. A request may arrive twice.
func (s *rpcClient) requestWithRetries(to core.AgentID, req *wire.Request) (rep *wire.Reply, err error) {
	p := s.peers.get(to)
	here := p != nil && p.via == "" // the peer's link leads to this agent's server, and may come back
	end := time.Now().Add(s.peerTimeout - 2*core.TickInterval)
	for {
		asked, most := time.Now(), min(s.peerTimeout/3, time.Until(end))
		rep, err = s.requestWithin(most, to, req)
		if late := time.Since(asked) - most; late > core.TickInterval*10 {
			end = end.Add(late) // this process did not run
		}
		if err == nil || gone(err) && !here || errors.Is(err, core.ErrTooLarge) || s.ctx.Err() != nil || time.Until(end) < core.TickInterval {
			return rep, err
		}
		s.retried()
		_ = sleep.For(s.ctx, core.TickInterval/2) // a link that is down says so at once
	}
}
