// Agents find each other and talk over a Bus; package natsbus implements it.

package core

import (
	"context"
	"errors"
	"time"

	"github.com/kvconn/kvconn/wire"
)

// Errors of a Bus, wrapped with the address and the cause.
var (
	// ErrAbsent: nobody listens under that agent id any more. The server says so at once,
	// without a time-out. If only the peer's link to this agent's own server broke, the peer
	// is back soon.
	ErrAbsent = errors.New("agent is gone")
	// ErrAway comes beside ErrAbsent: the peer may be moving from a server that died to another
	// one, or may be coming back to a server that is not its own. Only waiting shows whether the peer is
	// gone.
	ErrAway = errors.New("the agent may come back")
	// ErrTooLarge: the message is over the servers' limit.
	ErrTooLarge = errors.New("message is too large")
	// ErrUnreachable: the bootstrap address or cluster cannot be reached, or an agent there forgets whom it talks to.
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

	// Register makes this agent findable until Close. The bus renews the entry. When the
	// process ends, the entry ends by itself.
	Register(ctx context.Context, a *wire.Agent) error

	// Lookup finds the newest entry of a rank, and makes its agent reachable by Request
	// under the returned Via. If the Target has no EngineID, only one engine may be
	// registered with that rank there. A DPRank below 0 stands for any.
	Lookup(ctx context.Context, t Target) (*wire.Agent, Via, error)

	// Request asks an agent and waits for its reply. If nobody listens, the error is
	// ErrAbsent. If this does not prove that the agent is gone, the error is ErrAway too. If
	// no reply comes in time, the error is the context's.
	Request(ctx context.Context, via Via, to AgentID, req *wire.Request) (*wire.Reply, error)

	// Close withdraws the registration, ends all connections and waits, bounded
	// by ctx, until no handler runs.
	Close(ctx context.Context) error
}

// Clock is the time that an agent runs by; tests give a virtual one.
type Clock interface {
	Now() time.Time
	// NewTicker calls f on the clock's goroutine every d until stop is called. When stop has
	// returned, f does not run and will not again.
	NewTicker(d time.Duration, f func(now time.Time)) (stop func())
}
