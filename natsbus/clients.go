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
// patience any gives its place to another.
const (
	maxHandshakes = 256
	patience      = 500 * time.Millisecond
)

var (
	errServerClosed = errors.New("the embedded nats server is closed")
	errPlaceLost    = fmt.Errorf("it had not proved itself yet when another needed its place: %d connections may be so at a time", maxHandshakes)
)

// upgraded is one HTTP connection that has become a NATS connection.
type upgraded struct {
	from  netip.Prefix // the address that it counts under
	n     uint64       // in the order in which they came
	since time.Time

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
// own. If all places are taken, a newcomer gets one of an address that has the most, if that has at least two more than its own.
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
	now     func() time.Time
}

func newClients(most int) *clients {
	return &clients{max: most, conns: map[*upgraded]struct{}{}, held: quota.Counts{}, waiting: quota.Counts{}, now: time.Now}
}

// admit reserves a place for a connection from an address. If strangers have them all, one of theirs may be given up.
func (c *clients) admit(u *upgraded, from netip.Prefix) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return errServerClosed
	}
	if c.in >= c.max && c.gives(from) == nil { // it need not prove itself for that
		return c.full()
	}
	if waiting := len(c.conns) - c.in; waiting >= maxHandshakes {
		gives := c.tardy(from)
		if gives == nil {
			return fmt.Errorf("%d control connections have not proved themselves yet, the most at a time", waiting)
		}
		c.end(gives)
	}
	c.n++
	u.peer, u.server, u.from, u.n, u.since = noConn, noConn, from, c.n, c.now()
	c.conns[u] = struct{}{}
	c.waiting.Add(from, 1)
	c.wg.Add(1)
	return nil
}

// tardy is the connection that gives its place to one from an address before it has proved itself: the oldest of an address that
// has the most. If that has fewer than two more than the other, the connection keeps its place for as long as its patience: so a
// burst of agents does not cut itself off. nil: there is none. c.mu is held.
func (c *clients) tardy(to netip.Prefix) (gives *upgraded) {
	if fault.On("bus-strangers-stay") {
		return nil
	}
	most, over := c.waiting.Over(to)
	for u := range c.conns {
		if !u.in && c.waiting[u.from] == most && (over || c.now().Sub(u.since) >= patience) && (gives == nil || u.n < gives.n) {
			gives = u
		}
	}
	return gives
}

func (c *clients) full() error {
	return fmt.Errorf("%d control connections are open, the most that this agent takes, and no address has so many more than this one that it gives one up", c.in)
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
	u.id, u.in, u.keeps = id, true, keeps
	c.in++
	if !keeps {
		c.held.Add(u.from, 1)
	}
	return gave, nil
}

// gives is the client that gives its place to one from an address: the newest of an address that has the most, if that has at
// least two more. So those who were there before a flood stay. nil: there is none. c.mu is held.
func (c *clients) gives(to netip.Prefix) (gives *upgraded) {
	most, over := c.held.Over(to)
	if !over || fault.On("bus-places-kept") {
		return nil
	}
	for u := range c.conns {
		if u.in && !u.keeps && c.held[u.from] == most && (gives == nil || u.n > gives.n) {
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
	if !u.in {
		c.waiting.Add(u.from, -1)
		return
	}
	c.in--
	if !u.keeps {
		c.held.Add(u.from, -1)
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
