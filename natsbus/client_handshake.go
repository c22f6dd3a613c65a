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

// clientHandshake is how a link connects to a server: it proves its identity and what it knows.
type clientHandshake struct {
	self         *Identity
	secrets      secrets
	right        right
	temp         string                            // the folder of local secrets
	subscription atomic.Pointer[nats.Subscription] // what the server's agents ask this one

	mu         sync.Mutex
	shown      *Identity    // shown at this server and at its successors, once it is chosen
	lastServer core.AgentID // the server of the last connection
}

// server is the server of the last connection.
func (e *clientHandshake) server() core.AgentID {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.lastServer
}

// id is the id under which the server knows this agent; "" before the first connection.
func (e *clientHandshake) id() core.AgentID {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.shown == nil {
		return ""
	}
	return e.shown.id
}

// chooseIdentity chooses an identity. A rank that joins shows its own, which its registration
// names. A decode agent shows another one to each server. A link keeps the first one,
// also when the server is restarted: other ranks behind the server know the agent by
// it.
func (e *clientHandshake) chooseIdentity(server core.AgentID) *Identity {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.lastServer = server
	switch {
	case e.shown != nil:
	case e.right == rightJoin:
		e.shown = e.self
	default:
		e.shown = e.self.At(server)
	}
	return e.shown
}

// run makes an upgraded connection one between two agents that have proved themselves.
func (e *clientHandshake) run(ctx context.Context, conn net.Conn) (net.Conn, error) {
	asked := false
	t := tls.Client(conn, clientTLS(func(server core.AgentID) *Identity {
		asked = true
		return e.chooseIdentity(server)
	}))
	if err := t.HandshakeContext(ctx); err != nil {
		return nil, fmt.Errorf("the agents' handshake: %w", err)
	}
	if !asked { // else the link would count as one to the server before
		return nil, errors.New("the agents' handshake: it does not ask for this agent's identity, as each kvconn agent does")
	}
	if err := e.secrets.prove(t, t.ConnectionState(), e.right, func(server core.AgentID) string { return localSecret(e.temp, server) }); err != nil {
		return nil, err
	}
	return newGuarded(newPaced(t), &e.subscription), nil
}
