// Package natsbus is [core.Bus] over NATS: requests between agents and the
// registry of prefill ranks.
//
// A prefill agent embeds a [Server] that has no port: peers reach it through
// the bootstrap port, by an HTTP upgrade at [Path]. A decode agent holds one
// connection, a link, to each bootstrap address that it looked an agent up at,
// and can be reached over it. With Options.ClusterURL all agents meet in a NATS
// cluster instead.
//
// The registry is a key-value bucket in the server's memory. An entry ends by
// itself when its agent stops renewing it.
package natsbus

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/url"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/safe"
)

// Bounds of a Bus.
const (
	maxHandlers = 64          // requests that are answered at one time; more wait
	maxArrival  = time.Second // a request that has waited so long is refused; only a fault makes it wait so long
	maxLinks    = 1024        // bootstrap addresses in use at one time
	maxReason   = 1024        // bytes of a Reply's reason

	absentAgain = 50 * time.Millisecond // a replica that lags behind is read again
)

var errClosed = errors.New("the bus is closed")

// Options sets up a Bus.
type Options struct {
	AgentID core.AgentID
	// Server is this agent's own. It is nil for an agent that is never looked up, and
	// with a ClusterURL.
	Server *Server
	// ClusterURL is a NATS cluster to use in place of all agents' own servers:
	// nats://host:port, or tls://; several are separated by commas.
	ClusterURL string
	// Join is the bootstrap address, http://host:port, of the server that an agent
	// without a server or cluster uses. The server's agent registers this one. Open
	// waits for the server for JoinTimeout.
	Join        string
	JoinTimeout time.Duration
	// Token is the secret that the servers' clients prove to know; "" for none. It is
	// sent to a cluster only.
	Token string
	// Seed is the seed of this agent's own user nkey, in the token's place.
	Seed string
	// TLS is for https:// bootstrap addresses and for the cluster; nil means that
	// the system's authorities are trusted.
	TLS *tls.Config
	// OnlyTLS makes http:// in a bootstrap address mean https://.
	OnlyTLS bool
	// Allow, if set, is called before anything is sent to the host of a bootstrap
	// address. It may return a Control, which is called with every IP address before
	// that is dialled. An error ends the Lookup.
	Allow func(host string) (Control, error)
	// TTL is how long a registration outlives its last renewal, in whole
	// seconds; 0 means 6 s, with a cluster 30 s: an entry must outlive the
	// election of a leader. 1 s is the least.
	TTL time.Duration
	// Replicas is how many servers of the cluster hold the registry; 0 means 3, or 1
	// in a smaller cluster. A registry that exists is used as it is.
	Replicas int
	// ConnectTimeout bounds the making of a connection; 0 means 3 s.
	ConnectTimeout time.Duration
	Logger         *zap.Logger

	linkIdle time.Duration // tests only
}

// Bus implements core.Bus. Its methods are safe for concurrent use.
type Bus struct {
	opt      Options
	log      *zap.Logger
	ctx      context.Context // ends at Close
	cancel   context.CancelFunc
	openHome func() (*link, error)
	handler  atomic.Pointer[core.Handler]
	slots    chan struct{}

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

var _ core.Bus = (*Bus)(nil)

const inProcess = "nats://in-process:4222"

// An AgentID is a part of a NATS subject.
var legalID = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)

func subject(id core.AgentID) string { return "kvconn.v1.agent." + string(id) }

// Open connects to this agent's own server or to the cluster, if there is one.
func Open(opt Options) (*Bus, error) {
	if !legalID.MatchString(string(opt.AgentID)) {
		return nil, fmt.Errorf("natsbus: agent id %q is not 1 to 64 letters, digits, - and _", string(opt.AgentID))
	}
	if opt.TTL == 0 {
		opt.TTL = 6 * time.Second
		if opt.ClusterURL != "" {
			opt.TTL = 30 * time.Second
		}
	}
	if opt.TTL < time.Second {
		return nil, fmt.Errorf("natsbus: a registration's TTL of %v is under the least of 1s", opt.TTL)
	}
	// The server counts whole seconds and cuts off the rest.
	opt.TTL = (opt.TTL + time.Second - 1).Truncate(time.Second)
	if opt.ConnectTimeout == 0 {
		opt.ConnectTimeout = core.DefaultConnectTimeout
	}
	if opt.ConnectTimeout < 0 {
		return nil, fmt.Errorf("natsbus: a connect time-out of %v", opt.ConnectTimeout)
	}
	if opt.Logger == nil {
		opt.Logger = zap.NewNop()
	}
	if opt.linkIdle == 0 {
		opt.linkIdle = defaultIdle
	}
	b := &Bus{opt: opt, log: opt.Logger, slots: make(chan struct{}, maxHandlers),
		links: map[core.Via]*entry{}, kick: make(chan struct{}, 1)}
	b.ctx, b.cancel = context.WithCancel(context.Background())
	switch {
	case opt.ClusterURL != "":
		name, err := CheckCluster(opt.ClusterURL)
		if err != nil {
			b.cancel()
			return nil, err
		}
		b.openHome = func() (*link, error) {
			return b.connect(clusterLink, "", name, opt.ClusterURL, dialTCP)
		}
	case opt.Server != nil:
		if opt.Server.opt.Token != opt.Token {
			b.cancel()
			return nil, errors.New("natsbus: this agent's own server wants another token than its bus has")
		}
		b.openHome = func() (*link, error) {
			return b.connect(homeLink, "", "this agent's own server", inProcess, opt.Server.dialContext)
		}
	case opt.Join != "":
		if err := b.openJoin(); err != nil {
			b.cancel()
			return nil, err
		}
		return b, nil
	default:
		return b, nil
	}
	var err error
	if b.home, err = b.openHome(); err != nil {
		b.cancel()
		return nil, err
	}
	return b, nil
}

// CheckCluster checks the URLs of a cluster, separated by commas, and returns a
// name for it without users and passwords.
func CheckCluster(urls string) (name string, err error) {
	var names []string
	for s := range strings.SplitSeq(urls, ",") {
		u, err := url.Parse(strings.TrimSpace(s))
		if err != nil || u.Host == "" || (u.Scheme != "nats" && u.Scheme != "tls") {
			s = "(it cannot be read)"
			if err == nil {
				u.User = nil // a user may be a token
				s = u.String()
			}
			return "", fmt.Errorf("cluster URL %s must be like nats://host:port", s)
		}
		u.User = nil
		names = append(names, u.String())
	}
	return "NATS cluster " + strings.Join(names, ","), nil
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

// pause waits for d; an error is that of ctx.
func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Close implements core.Bus. If ctx ends before all handlers have returned, Close
// does not wait for them, and its error says so.
func (b *Bus) Close(ctx context.Context) error {
	b.mu.Lock()
	if b.closed != nil {
		closed := b.closed
		b.mu.Unlock()
		select {
		case <-closed:
			return b.err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	b.closed = make(chan struct{})
	reg, home := b.reg, b.home
	b.mu.Unlock()

	b.withdraw(ctx, home, reg)
	soon, cancel := context.WithTimeout(ctx, goodbyeWait)
	all(b.allLinks(), func(l *link) { l.quit(soon) })
	cancel()
	b.mu.Lock()
	b.down = true // from now on connectEntry closes the link that it makes
	b.mu.Unlock()
	b.cancel()

	// Handlers finish first, so that their replies still go out.
	idle := make(chan struct{})
	safe.Go("natsbus.Close", func() {
		defer close(idle)
		b.wg.Wait()
	})
	select {
	case <-idle:
	case <-ctx.Done():
		b.err = fmt.Errorf("natsbus: closed while %d requests were being answered: %w", len(b.slots), ctx.Err())
	}
	all(b.allLinks(), (*link).close)
	close(b.closed)
	return b.err
}
