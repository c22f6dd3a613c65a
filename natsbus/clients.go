package natsbus

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/internal/quota"
)

// maxHandshakes bounds the connections that have not proved themselves yet.
const maxHandshakes = 256

var (
	errServerClosed = errors.New("the embedded nats server is closed")
	errPlaceLost    = fmt.Errorf("it had not proved itself yet when another needed its place: %d connections may be so at a time", maxHandshakes)
)

// upgraded is one HTTP connection that has become a NATS connection.
type upgraded struct {
	from netip.Prefix // the address that it counts under
	n    uint64       // in the order in which they came

	// Guarded by clients.mu, peer and server until both are there.
	peer, server net.Conn
	id           core.AgentID // once it has proved itself
	in           bool         // it has, and has a client's place
	keeps        bool         // it gives that to nobody
	out          bool         // it has no place any more
}

func (u *upgraded) close() {
	// Errors of closing do not matter here.
	_ = hangUp(u.peer)
	_ = u.server.Close()
}

// clients are the upgraded connections of a server. Those that have not proved themselves have places of their
// own. If all places are taken, a newcomer gets one of the address that has the most.
type clients struct {
	max int // clients at one time

	mu      sync.Mutex
	closed  bool
	conns   map[*upgraded]struct{}
	n       uint64
	in      int            // connections of conns that were let in
	held    quota.Counts   // the places of those, by address
	waiting quota.Counts   // of the others
	wg      sync.WaitGroup // of all that were admitted
}

func newClients(most int) *clients {
	return &clients{max: most, conns: map[*upgraded]struct{}{}, held: quota.Counts{}, waiting: quota.Counts{}}
}

// admit reserves a place for a connection from an address. If strangers have them all, the oldest of the address that has the
// most loses its place: an agent proves itself at once.
func (c *clients) admit(u *upgraded, from netip.Prefix) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return errServerClosed
	}
	if c.in >= c.max && c.gives(from) == nil { // it need not prove itself for that
		return c.full()
	}
	if len(c.conns)-c.in >= maxHandshakes {
		most, gives := c.waiting.Greediest(), (*upgraded)(nil)
		for other := range c.conns {
			if !other.in && other.from == most && (gives == nil || other.n < gives.n) {
				gives = other
			}
		}
		if fault.On("bus-strangers-stay") {
			return errPlaceLost
		}
		c.end(gives)
	}
	c.n++
	u.peer, u.server, u.from, u.n = noConn, noConn, from, c.n
	c.conns[u] = struct{}{}
	c.waiting.Add(from, 1)
	c.wg.Add(1)
	return nil
}

func (c *clients) full() error {
	return fmt.Errorf("%d control connections are open, the most that this agent takes, and no address has more of them than this one", c.in)
}

// connected makes the connection one that close closes. false: it has ended meanwhile.
func (c *clients) connected(u *upgraded, peer, inside net.Conn) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	u.peer, u.server = peer, inside
	return !c.closed && !u.out
}

// letIn gives a connection that has proved itself a client's place, and keeps it if it is one that gives none up. It returns
// the connection that has lost its place for it; nil if one was free.
func (c *clients) letIn(u *upgraded, id core.AgentID, keeps bool) (gave *upgraded, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if u.out {
		return nil, errPlaceLost
	}
	if c.in >= c.max {
		if gave = c.gives(u.from); gave == nil {
			return nil, c.full()
		}
		c.end(gave)
	}
	c.waiting.Add(u.from, -1)
	c.held.Add(u.from, 1)
	u.id, u.in, u.keeps = id, true, keeps
	c.in++
	return gave, nil
}

// gives is the client that gives its place to one from an address: the newest of the address that has the most, if that has at
// least two more. So those who were there before a flood stay. nil: there is none. c.mu is held.
func (c *clients) gives(to netip.Prefix) (gives *upgraded) {
	most, over := c.held.Over(to)
	if !over || fault.On("bus-places-kept") {
		return nil
	}
	for u := range c.conns {
		if u.in && !u.keeps && u.from == most && (gives == nil || u.n > gives.n) {
			gives = u
		}
	}
	return gives
}

// end takes a connection's place from it, and closes it; c.mu is held.
func (c *clients) end(u *upgraded) {
	c.remove(u)
	u.close()
}

// remove counts a connection no longer; c.mu is held.
func (c *clients) remove(u *upgraded) {
	if u.out {
		return
	}
	u.out = true
	delete(c.conns, u)
	if u.in {
		c.held.Add(u.from, -1)
		c.in--
	} else {
		c.waiting.Add(u.from, -1)
	}
}

// lost says whether a connection has lost its place to another.
func (c *clients) lost(u *upgraded) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return u.out
}

// dismiss is the end of a connection that was admitted.
func (c *clients) dismiss(u *upgraded) {
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
