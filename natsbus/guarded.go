// A link's connection goes through the guard. While too much waits for this agent, it is not read.

package natsbus

import (
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
)

// Of what a prefill engine's host has asked and no handler has taken, so much is kept. A host that
// asks for more is not read meanwhile. An honest one asks for a tenth of it.
const (
	maxWaiting      = 256 << 10
	maxWaitingCount = 1024
	waitingPause    = 10 * time.Millisecond
)

// guardedConn's guard sees all bytes before the caller does.
type guardedConn struct {
	net.Conn
	guard        guard
	refused      error
	subscription *atomic.Pointer[nats.Subscription] // nil until this agent listens
	closed       chan struct{}
	once         sync.Once
}

func newGuarded(conn net.Conn, heard *atomic.Pointer[nats.Subscription]) *guardedConn {
	return &guardedConn{Conn: conn, subscription: heard, closed: make(chan struct{})}
}

// Close ends the connection at once.
func (c *guardedConn) Close() error {
	c.once.Do(func() { close(c.closed) })
	return hangUp(c.Conn)
}

func (c *guardedConn) Read(b []byte) (int, error) {
	for c.full() {
		select {
		case <-c.closed:
			return 0, net.ErrClosed
		case <-time.After(waitingPause):
		}
	}
	if c.refused != nil {
		return 0, c.refused
	}
	n, err := c.Conn.Read(b)
	if c.refused = c.guard.check(b[:n]); c.refused != nil {
		return 0, c.refused
	}
	return n, err
}

// full says whether too many messages, or too many bytes, wait for this agent to take them.
func (c *guardedConn) full() bool {
	sub := c.subscription.Load()
	if sub == nil {
		return false
	}
	count, bytes, err := sub.Pending()
	return err == nil && (count > maxWaitingCount || bytes > maxWaiting)
}
