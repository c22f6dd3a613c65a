package natsbus

import (
	"errors"
	"fmt"
	"net"
	"sync"
)

// maxHandshakes bounds the connections that have not proved themselves yet.
const maxHandshakes = 256

var errServerClosed = errors.New("the embedded nats server is closed")

// upgraded is one HTTP connection that has become a NATS connection.
type upgraded struct {
	peer, server net.Conn // guarded by clients.mu until both are there
	in           bool     // the client has proved itself; guarded by clients.mu
}

func (u *upgraded) close() {
	// Errors of closing do not matter here.
	_ = hangUp(u.peer)
	_ = u.server.Close()
}

// clients are the upgraded connections of a server.
type clients struct {
	max int // clients at one time

	mu     sync.Mutex
	closed bool
	conns  map[*upgraded]struct{}
	in     int            // connections of conns that were let in
	wg     sync.WaitGroup // of conns
}

// admit reserves a place for a connection.
func (c *clients) admit(u *upgraded) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return errServerClosed
	}
	waiting := len(c.conns) - c.in
	if c.in >= c.max {
		return fmt.Errorf("%d control connections are open, the most that this agent takes", c.in)
	}
	if waiting >= maxHandshakes {
		return fmt.Errorf("%d control connections have not proved themselves yet, the most at a time", waiting)
	}
	u.peer, u.server = noConn, noConn
	c.conns[u] = struct{}{}
	c.wg.Add(1)
	return nil
}

// connected makes the connection one that close closes.
func (c *clients) connected(u *upgraded, peer, inside net.Conn) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	u.peer, u.server = peer, inside
	return !c.closed
}

// letIn counts a connection that has proved itself. Connections that have not done so
// cannot take the places of clients.
func (c *clients) letIn(u *upgraded) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	u.in = true
	c.in++
	return c.in <= c.max // several may have been in the handshake for the last place
}

func (c *clients) dismiss(u *upgraded) {
	c.mu.Lock()
	delete(c.conns, u)
	if u.in {
		c.in--
	}
	c.mu.Unlock()
	c.wg.Done()
}

// close ends all connections, and lets no more in.
func (c *clients) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	for u := range c.conns {
		u.close()
	}
}

func (c *clients) isClosed() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.closed
}

// noConn stands in until there is a connection; only its Close is called.
var noConn net.Conn = closeOnly{}

type closeOnly struct{ net.Conn }

func (closeOnly) Close() error { return nil }
