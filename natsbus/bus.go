// Package natsbus is [core.Bus] over NATS: requests between agents and the
// registry of prefill ranks.
//
// A prefill agent embeds a [Server] that has no port of its own: peers reach
// the server through the bootstrap port, by an HTTP upgrade at [Path]. A decode
// agent holds one connection, a link, to each bootstrap address at which it has
// looked an agent up; others reach the decode agent over this link. With
// Options.ClusterURL all agents meet in a NATS cluster instead.
//
// The registry is a key-value bucket in the server's memory. An entry ends by
// itself when its agent stops renewing it.
package natsbus

import (
	"context"
	"sync"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/safe"
)

// Bounds of a Bus.
const (
	maxHandlers = 64          // requests that are answered at one time; more wait
	maxLong     = 1           // long ones among them that came from prefill engines' hosts: the other processors stay free
	longMessage = 64 << 10    // a longer request is long: decoded it may take ten times its bytes
	handlerIdle = time.Second // a handler that gets no request for so long ends
	maxArrival  = time.Second // a request that has waited so long is refused; only a fault makes it wait so long
	arrivalStep = 50 * time.Millisecond
	maxLinks    = 1024        // bootstrap addresses in use at one time
	goodbyeWait = time.Second // for what a closing bus tells others
)

// Bus implements core.Bus. Its methods are safe for concurrent use.
type Bus struct {
	common
	cancel       context.CancelFunc
	openHome     func() (*link, error)
	requestSlots chan struct{}       // one for each request that is being answered
	longSlots    chan struct{}       // one for each long request of a portLink that is being answered
	handoff      chan inboundRequest // to handlers that wait for a request

	sessionless   *sessionless // in a cluster
	longQueue     *longQueue   // over its own server or cluster
	longJoinQueue *longQueue

	mu     sync.Mutex
	down   bool           // no goroutine or handler starts any more
	wg     sync.WaitGroup // of handlers and of goroutines that this Bus started
	home   *link          // nil without a server or cluster
	links  map[core.Via]*entry
	reg    *registration
	kick   chan struct{} // renew now
	closed chan struct{}
	err    error
}

// entry is a link that is there or being made.
type entry struct {
	ready chan struct{} // closed when link or err is set
	link  *link
	err   error
}

func (b *Bus) homeLink() *link {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.home
}

// renewNow makes the next renewal happen now.
func (b *Bus) renewNow() {
	select {
	case b.kick <- struct{}{}:
	default:
	}
}

// spawn runs f on a goroutine that Close waits for; false after Close.
func (b *Bus) spawn(name string, f func()) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.down {
		return false
	}
	b.wg.Add(1)
	safe.Go(name, func() {
		defer b.wg.Done()
		f()
	})
	return true
}

// TTL is how long a registration outlives its last renewal.
func (b *Bus) TTL() time.Duration { return b.opt.TTL }
