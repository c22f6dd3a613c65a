// Connections have places: those that have proved themselves, and those that have not. A connection of the address with
// the most gives way.

package natsbus

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/internal/quota"
)

// maxHandshakes bounds the connections that have not proved themselves yet. An agent does so within some milliseconds: after
// handshakeGrace any gives its place to another.
const (
	maxHandshakes  = 256
	handshakeGrace = 500 * time.Millisecond
)

var (
	errServerClosed = errors.New("the embedded nats server is closed")
	errEvicted      = fmt.Errorf("it had not proved itself yet when another needed its place: %d connections may be so at a time", maxHandshakes)
)

// clientConn is one HTTP connection that has become a NATS connection.
type clientConn struct {
	from  netip.Prefix // the address that it counts under
	n     uint64       // in the order in which they came
	since time.Time

	// Guarded by clients.mu, peer and server until both are there.
	peer, server  net.Conn
	id            core.AgentID // once it has proved itself
	authenticated bool         // it has, and has a client's place
	pinned        bool         // it gives that to nobody
	removed       bool         // it has no place any more
}

func (u *clientConn) close() {
	// Errors of closing do not matter here.
	_ = hangUp(u.peer)
	_ = u.server.Close()
}

// clients are the upgraded connections of a server. Those that have not proved themselves have places of their
// own. If all places are taken, a newcomer gets one of an address that has the most, if that has at least two more than its own.
type clients struct {
	max int // clients at one time

	mu            sync.Mutex
	closed        bool
	conns         map[*clientConn]struct{}
	n             uint64
	authenticated int            // how many connections of conns were let in
	held          quota.Counts   // the places of these connections, by address
	waiting       quota.Counts   // the places of the other connections, by address
	wg            sync.WaitGroup // of all connections that were admitted
	now           func() time.Time
}

func newClients(most int) *clients {
	return &clients{max: most, conns: map[*clientConn]struct{}{}, held: quota.Counts{}, waiting: quota.Counts{}, now: time.Now}
}

// admit reserves a place for a connection from an address. If connections that have not proved themselves have them all, one of these may be evicted.
func (c *clients) admit(u *clientConn, from netip.Prefix) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return errServerClosed
	}
	if c.authenticated >= c.max && c.evictable(from) == nil { // it need not prove itself for that
		return c.full()
	}
	if waiting := len(c.conns) - c.authenticated; waiting >= maxHandshakes {
		victim := c.evictableHandshake(from)
		if victim == nil {
			return fmt.Errorf("%d control connections have not proved themselves yet, the most at a time", waiting)
		}
		c.end(victim)
	}
	c.n++
	u.peer, u.server, u.from, u.n, u.since = noConn, noConn, from, c.n, c.now()
	c.conns[u] = struct{}{}
	c.waiting.Add(from, 1)
	c.wg.Add(1)
	return nil
}

// evictableHandshake is the connection that gives its place to one from an address before it has proved itself: the oldest of an address that
// has the most. If that has fewer than two more than the other, the connection keeps its place for handshakeGrace: so a
// burst of agents does not cut itself off. nil: there is none. c.mu is held.
func (c *clients) evictableHandshake(to netip.Prefix) (victim *clientConn) {
	if fault.On("bus-handshakes-stay") {
		return nil
	}
	most, over := c.waiting.Over(to)
	for u := range c.conns {
		if !u.authenticated && c.waiting[u.from] == most && (over || c.now().Sub(u.since) >= handshakeGrace) && (victim == nil || u.n < victim.n) {
			victim = u
		}
	}
	return victim
}

func (c *clients) full() error {
	return fmt.Errorf("%d control connections are open, the most that this agent takes, and no address has so many more than this one that it gives one up", c.authenticated)
}

// connected makes the connection one that close closes. false: it has ended meanwhile.
func (c *clients) connected(u *clientConn, peer, inside net.Conn) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	u.peer, u.server = peer, inside
	return !c.closed && !u.removed
}

// promote gives a connection that has proved itself a client's place, and keeps it if it is one that gives none up. It returns
// the connection that has lost its place for it; nil if one was free.
func (c *clients) promote(u *clientConn, id core.AgentID, pinned bool) (evicted *clientConn, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if u.removed {
		return nil, errEvicted
	}
	if c.authenticated >= c.max {
		if evicted = c.evictable(u.from); evicted == nil {
			return nil, c.full()
		}
		c.end(evicted)
	}
	c.waiting.Add(u.from, -1)
	u.id, u.authenticated, u.pinned = id, true, pinned
	c.authenticated++
	if !pinned {
		c.held.Add(u.from, placesOfOne())
	}
	return evicted, nil
}

// evictable returns the client that must give its place to a newcomer from an address. It is the newest client of the address that has
// the most clients, if that address has at least two more than the newcomer's. So clients that came before a flood keep their places.
// nil: no client must. c.mu is held.
func (c *clients) evictable(to netip.Prefix) (victim *clientConn) {
	most, over := c.held.Over(to)
	if !over || fault.On("bus-places-kept") {
		return nil
	}
	for u := range c.conns {
		if u.authenticated && !u.pinned && c.held[u.from] == most && (victim == nil || u.n > victim.n) {
			victim = u
		}
	}
	return victim
}

// end takes a connection's place away and closes the connection; c.mu is held.
func (c *clients) end(u *clientConn) {
	c.remove(u)
	u.close()
}

// remove takes a connection out of all counts; c.mu is held.
func (c *clients) remove(u *clientConn) {
	if u.removed {
		return
	}
	u.removed = true
	delete(c.conns, u)
	if !u.authenticated {
		c.waiting.Add(u.from, -1)
		return
	}
	c.authenticated--
	if !u.pinned {
		c.held.Add(u.from, -placesOfOne())
	}
}

// placesOfOne is how many places of its address a client takes.
func placesOfOne() int { return fault.Pick("bus-places-uncounted", 1, 0) }

// evicted says whether a connection has lost its place to another.
func (c *clients) evicted(u *clientConn) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return u.removed
}

// release is the end of a connection that was admitted.
func (c *clients) release(u *clientConn) {
	c.mu.Lock()
	c.remove(u)
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
