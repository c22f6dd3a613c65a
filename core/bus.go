package core

import (
	"context"
	"errors"
	"time"

	"github.com/kvconn/kvconn/wire"
)

// Errors of a Bus, wrapped with the address and the cause.
var (
	// ErrAbsent: nobody listens under that agent id any more. It is known at
	// once, without a time-out. At this agent's own server it may be that the
	// peer's link broke: it is back in a moment, if the peer lives.
	ErrAbsent = errors.New("agent is gone")
	// ErrAway, beside ErrAbsent: it may be on its way from a server that died to
	// another, or back to one that is not its own. Only time tells.
	ErrAway = errors.New("it may come back")
	// ErrTooLarge: the message is over what the servers carry.
	ErrTooLarge = errors.New("message is too large")
	// ErrUnreachable: the bootstrap address or cluster cannot be reached.
	ErrUnreachable = errors.New("bootstrap address cannot be reached")
	// ErrNotRegistered: the registry is reached and has no such engine or rank.
	ErrNotRegistered = errors.New("engine is not registered")
)

// Via names the way to an agent: the bootstrap address at which it was found,
// or "" for this agent's own server or cluster.
type Via string

// Handler answers a peer's request. It is called from the bus's goroutines,
// several at a time, and returns without waiting for the network.
type Handler func(via Via, req *wire.Request) *wire.Reply

// Bus is the control plane: a registry of prefill ranks, and requests between
// agents that are delivered at most once. Every method that waits is bounded by
// its context.
type Bus interface {
	// Serve sets the handler of requests for this agent; once, before Register
	// and Lookup.
	Serve(h Handler)

	// Register makes this agent findable until Close; the entry is renewed and
	// ends by itself when the process does.
	Register(ctx context.Context, a *wire.Agent) error

	// Lookup finds the newest entry of a rank, and makes its agent reachable by
	// Request under the returned Via. An empty EngineID in the Target means the
	// only engine registered with that rank there; a DPRank below 0 any.
	Lookup(ctx context.Context, t Target) (*wire.Agent, Via, error)

	// Request asks an agent and waits for its reply. ErrAbsent when nobody
	// listens, with ErrAway when that is no proof; the context's error when no
	// reply came in time.
	Request(ctx context.Context, via Via, to AgentID, req *wire.Request) (*wire.Reply, error)

	// Close withdraws the registration, ends all connections and waits, bounded
	// by ctx, until no handler runs.
	Close(ctx context.Context) error
}

// Clock is the time that an agent runs by; tests give a virtual one.
type Clock interface {
	Now() time.Time
	// NewTicker calls f on the clock's goroutine every d until stop is called;
	// stop returns when f does not run and will not again.
	NewTicker(d time.Duration, f func(now time.Time)) (stop func())
}
