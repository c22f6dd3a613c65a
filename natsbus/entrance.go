package natsbus

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"

	"github.com/nats-io/nats.go"

	"github.com/kvconn/kvconn/core"
)

// entrance is how a link gets in at a server: it proves its identity and what it knows.
type entrance struct {
	self    *Identity
	secrets secrets
	right   right
	temp    string                            // the folder of local secrets
	heard   atomic.Pointer[nats.Subscription] // what the server's agents ask this one

	mu sync.Mutex
	as *Identity    // shown at this server and at its successors, once it is chosen
	at core.AgentID // the server of the last connection
}

// server is the server of the last connection.
func (e *entrance) server() core.AgentID {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.at
}

// id is the id under which the server knows this agent; "" before the first connection.
func (e *entrance) id() core.AgentID {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.as == nil {
		return ""
	}
	return e.as.id
}

// show chooses an identity. A rank that joins shows its own, which its registration
// names. A decode agent shows another one to each server. A link keeps the first one,
// also when the server is restarted: other ranks behind the server know the agent by
// it.
func (e *entrance) show(server core.AgentID) *Identity {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.at = server
	switch {
	case e.as != nil:
	case e.right == rightJoin:
		e.as = e.self
	default:
		e.as = e.self.At(server)
	}
	return e.as
}

// enter makes an upgraded connection one between two agents that have proved themselves.
func (e *entrance) enter(ctx context.Context, conn net.Conn) (net.Conn, error) {
	asked := false
	t := tls.Client(conn, clientTLS(func(server core.AgentID) *Identity {
		asked = true
		return e.show(server)
	}))
	if err := t.HandshakeContext(ctx); err != nil {
		return nil, fmt.Errorf("the agents' handshake: %w", err)
	}
	if !asked { // else the link would count as one to the server before
		return nil, errors.New("the agents' handshake: it does not ask for this agent's identity, as each kvconn agent does")
	}
	if err := e.secrets.greet(t, t.ConnectionState(), e.right, func(server core.AgentID) string { return localSecret(e.temp, server) }); err != nil {
		return nil, err
	}
	return newGuarded(newPaced(t), &e.heard), nil
}
