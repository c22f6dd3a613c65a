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
	"syscall"
	"time"

	"github.com/nats-io/nats.go"
	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/safe"
	"github.com/kvconn/kvconn/wire"
)

// Bounds of a Bus.
const (
	maxHandlers = 64          // requests answered at one time; more wait
	maxArrival  = time.Second // for so long, which only a fault makes it; then they are refused
	maxLinks    = 1024        // bootstrap addresses in use at one time
	maxReason   = 1024        // bytes of a Reply's reason

	absentAgain = 50 * time.Millisecond // a replica that lags behind is read again
)

var errClosed = errors.New("the bus is closed")

// Options sets up a Bus.
type Options struct {
	AgentID core.AgentID
	// Server is this agent's own; nil for an agent that is never looked up, or
	// with a ClusterURL.
	Server *Server
	// ClusterURL is a NATS cluster to use in place of all agents' own servers:
	// nats://host:port, or tls://; several are separated by commas.
	ClusterURL string
	// Join is the bootstrap address of the server to use, without a server and
	// cluster of its own: http://host:port. Its agent registers this one. Open waits
	// for it for JoinTimeout.
	Join        string
	JoinTimeout time.Duration
	// Token is what the servers want their clients to know; "" for none. It is
	// sent to a cluster only.
	Token string
	// Seed is the seed of this agent's own user nkey, in the token's place.
	Seed string
	// TLS is for https:// bootstrap addresses and for the cluster; nil means that
	// the system's authorities are trusted.
	TLS *tls.Config
	// OnlyTLS makes http:// in a bootstrap address mean https://.
	OnlyTLS bool
	// Allow, if set, is asked before anything is sent to a bootstrap address's
	// host. The Control that it returns may be nil; else it is called with every
	// IP address before it is dialled. An error ends the Lookup.
	Allow func(host string) (Control, error)
	// TTL is how long a registration outlives its last renewal, in whole
	// seconds; 0 means 6 s, with a cluster 30 s: an entry must outlive the
	// election of a leader. 1 s is the least.
	TTL time.Duration
	// Replicas is how many servers of the cluster hold the registry; 0 means 3
	// where there are as many, else 1. A registry that is there is used as it is.
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

// entry is a link or the making of one.
type entry struct {
	ready chan struct{} // closed when link or err is set
	link  *link
	err   error
}

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
		opt.ConnectTimeout = 3 * time.Second
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

// Serve implements core.Bus.
func (b *Bus) Serve(h core.Handler) {
	if !b.handler.CompareAndSwap(nil, &h) {
		b.log.Error("natsbus: Serve is called a second time; the first handler stays")
		return
	}
	if home := b.homeLink(); home != nil {
		if err := home.subscribe(); err != nil { // closed: opened again with the subscription
			b.log.Sugar().Warnf("natsbus: no requests over %s yet: %v", home.name, err)
		}
	}
}

func (b *Bus) homeLink() *link {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.home
}

// arrived takes a request from nats.go's goroutine. A burst waits here, in
// nats.go's bounded queue: handlers return at once.
func (b *Bus) arrived(l *link, m *nats.Msg) {
	if m.Reply == "" {
		return // not a request
	}
	select {
	case b.slots <- struct{}{}:
	default:
		full := time.NewTimer(maxArrival)
		defer full.Stop()
		select {
		case b.slots <- struct{}{}:
		case <-b.ctx.Done():
			b.answer(l, m, refuse("agent %s is closing", b.opt.AgentID))
			return
		case <-full.C:
			b.answer(l, m, refuse("overloaded: %d requests are being answered", maxHandlers))
			return
		}
	}
	if !b.spawn("natsbus.handler", func() {
		defer func() { <-b.slots }()
		b.answer(l, m, b.handle(l.via, m.Data))
	}) {
		<-b.slots
		b.answer(l, m, refuse("agent %s is closing", b.opt.AgentID))
	}
}

func refuse(format string, args ...any) *wire.Reply {
	return &wire.Reply{Code: int(core.Refused), Reason: fmt.Sprintf(format, args...)}
}

func (b *Bus) handle(via core.Via, data []byte) (reply *wire.Reply) {
	req := new(wire.Request)
	if err := wire.Decode(data, req); err != nil {
		return refuse("%v", err)
	}
	defer func() {
		if p := recover(); p != nil {
			safe.Report("natsbus.handler", p)
			reply = &wire.Reply{Code: int(core.Failed), Reason: fmt.Sprintf("agent %s: a fault while answering, see its log", b.opt.AgentID)}
		}
	}()
	if reply = (*b.handler.Load())(via, req); reply == nil {
		reply = &wire.Reply{Code: int(core.Failed), Reason: fmt.Sprintf("agent %s: the handler gave no reply", b.opt.AgentID)}
	}
	return reply
}

func (b *Bus) answer(l *link, m *nats.Msg, r *wire.Reply) {
	if len(r.Reason) > maxReason {
		short := *r
		short.Reason = strings.ToValidUTF8(r.Reason[:maxReason], "")
		r = &short
	}
	data, err := r.MarshalMsg(nil)
	if err != nil {
		b.log.Sugar().Errorf("natsbus: a reply cannot be encoded: %v", err)
		return
	}
	if _, ok := l.current(); !ok {
		return // who asked has learned that by the broken connection
	}
	if limit := l.nc.MaxPayload(); int64(len(data)) > limit {
		data, _ = refuse("the reply has %d bytes, the server takes %d", len(data), limit).MarshalMsg(nil)
	}
	if err := m.Respond(data); err != nil {
		b.log.Sugar().Debugf("natsbus: a reply over %s is lost: %v", l.name, err)
	}
}

// link returns the link to a bootstrap address, and makes it if there is none.
func (b *Bus) link(ctx context.Context, addr string) (*link, error) {
	if b.ctx.Err() != nil {
		return nil, errClosed
	}
	if b.opt.ClusterURL != "" || addr == "" {
		if home := b.homeLink(); home != nil {
			return home, nil
		}
		return nil, fmt.Errorf("%w: no bootstrap address is given, and this agent has no server or cluster of its own", core.ErrUnreachable)
	}
	at, err := ParseAddress(addr)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", core.ErrUnreachable, err)
	}
	at.TLS = at.TLS || b.opt.OnlyTLS
	via := core.Via(at.String())
	var control Control
	if b.opt.Allow != nil {
		if control, err = b.opt.Allow(at.Name); err != nil {
			return nil, fmt.Errorf("bootstrap address %q: %w", addr, err)
		}
	}
	b.mu.Lock()
	e := b.links[via]
	if e == nil {
		if b.down {
			b.mu.Unlock()
			return nil, errClosed
		}
		if len(b.links) >= maxLinks {
			b.mu.Unlock()
			return nil, fmt.Errorf("%w: bootstrap address %s: %d others are in use, the most there can be", core.ErrUnreachable, via, maxLinks)
		}
		e = &entry{ready: make(chan struct{})}
		b.links[via] = e
		b.mu.Unlock()
		if !b.spawn("natsbus.connect", func() { b.connectEntry(e, via, at, control) }) {
			b.settle(e, via, nil, errClosed)
		}
	} else {
		b.mu.Unlock()
	}
	select {
	case <-e.ready: // as nearly always; ctx may have ended too
		return e.link, e.err
	default:
	}
	bound := time.NewTimer(b.opt.ConnectTimeout)
	defer bound.Stop()
	select {
	case <-e.ready:
		return e.link, e.err
	case <-bound.C:
		return nil, unreachable("bootstrap address "+string(via), fmt.Errorf("no connection within %v", b.opt.ConnectTimeout))
	case <-ctx.Done():
		return nil, unreachable("bootstrap address "+string(via), fmt.Errorf("still connecting: %w", ctx.Err()))
	}
}

func (b *Bus) connectEntry(e *entry, via core.Via, at Address, control Control) {
	l, err := (*link)(nil), errors.New("a fault while connecting, see the log")
	defer func() { b.settle(e, via, l, err) }() // also after a panic
	l, err = b.connectPort(portLink, via, at, control)
}

func (b *Bus) connectPort(kind linkKind, via core.Via, at Address, control Control) (*link, error) {
	var secure *tls.Config
	if at.TLS {
		if secure = b.opt.TLS; secure == nil {
			secure = &tls.Config{}
		}
	}
	return b.connect(kind, via, "bootstrap address "+at.String(), "nats://"+at.Host, dialUpgrade(at, secure, control))
}

// settle ends the making of a link.
func (b *Bus) settle(e *entry, via core.Via, l *link, err error) {
	b.mu.Lock()
	if err == nil {
		select {
		case <-l.gone: // before it was here to be removed
			err = unreachable(l.name, l.why())
		default:
		}
	}
	down := b.down
	if err == nil && down {
		err = errClosed
	}
	if err != nil && b.links[via] == e {
		delete(b.links, via)
	}
	if e.err = err; err == nil {
		e.link = l
	}
	b.mu.Unlock()
	close(e.ready)
	if down && l != nil {
		l.close()
	}
}

// drop closes a link that is not wanted any more.
func (b *Bus) drop(l *link) {
	if b.forget(l) {
		b.log.Sugar().Debugf("natsbus: %s is given up: not connected and not used for %v", l.name, b.opt.linkIdle)
		b.spawn("natsbus.drop", l.close)
	}
}

func (b *Bus) forget(l *link) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	e := b.links[l.via]
	if e == nil || e.link != l || b.down {
		return false
	}
	delete(b.links, l.via)
	return true
}

// lost takes the news that a connection ended for good though nobody closed
// it. The next Lookup makes a new link; home is opened again here.
func (b *Bus) lost(l *link) {
	b.log.Sugar().Warnf("natsbus: the connection to %s was ended: %v", l.name, l.why())
	if l.via != "" {
		b.forget(l)
		return
	}
	b.spawn("natsbus.reopen", func() {
		for b.ctx.Err() == nil {
			home, err := b.openHome()
			if err == nil {
				b.mu.Lock()
				down := b.down
				if !down {
					b.home = home
				}
				b.mu.Unlock()
				if down {
					home.close()
				} else if _, ok := home.current(); ok {
					b.renewNow()
				}
				return
			}
			b.log.Sugar().Debugf("natsbus: %v", err)
			select {
			case <-b.ctx.Done():
			case <-time.After(reconnectWait):
			}
		}
	})
}

// Request implements core.Bus.
func (b *Bus) Request(ctx context.Context, via core.Via, to core.AgentID, req *wire.Request) (*wire.Reply, error) {
	l, err := b.known(via)
	if err != nil {
		return nil, err
	}
	if !legalID.MatchString(string(to)) {
		return nil, fmt.Errorf("request over %s: agent id %q is not 1 to 64 letters, digits, - and _", l.name, string(to))
	}
	data, err := req.MarshalMsg(nil)
	if err != nil {
		return nil, fmt.Errorf("request to agent %s over %s: %w", to, l.name, err)
	}
	session, ok := l.current()
	if !ok {
		err := unreachable(l.name, l.why())
		if l.kind == portLink && errors.Is(err, syscall.ECONNREFUSED) { // the agent is the server's process
			err = fmt.Errorf("%w: %w", core.ErrAbsent, err)
		}
		return nil, fmt.Errorf("request to agent %s: %w", to, err)
	}
	if limit := min(l.nc.MaxPayload(), wire.MaxMessage); int64(len(data)) > limit {
		return nil, fmt.Errorf("request to agent %s over %s: %w: %d bytes, at most %d are carried (max_payload of the NATS servers)",
			to, l.name, core.ErrTooLarge, len(data), limit)
	}
	both, cancel := during(ctx, session)
	defer cancel()
	m, err := l.nc.RequestWithContext(both, subject(to), data)
	switch {
	case err == nil:
	case errors.Is(err, nats.ErrNoResponders):
		err = core.ErrAbsent
		if l.kind == clusterLink {
			err = fmt.Errorf("%w: %w", core.ErrAbsent, core.ErrAway)
		}
		return nil, fmt.Errorf("%w: nobody listens as agent %s at %s", err, to, l.name)
	case ctx.Err() != nil:
		return nil, fmt.Errorf("request to agent %s over %s: no reply: %w", to, l.name, ctx.Err())
	case session.Err() != nil, broken(err):
		return nil, fmt.Errorf("request to agent %s: %w", to, unreachable(l.name, either(l.why(), err)))
	default:
		return nil, fmt.Errorf("request to agent %s over %s: %w", to, l.name, err)
	}
	reply := new(wire.Reply)
	if err := wire.Decode(m.Data, reply); err != nil {
		return nil, fmt.Errorf("reply of agent %s over %s: %w", to, l.name, err)
	}
	return reply, nil
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

// known returns the link of a Via that Lookup or a Handler was given.
func (b *Bus) known(via core.Via) (*link, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.down {
		return nil, errClosed
	}
	if via == "" {
		if b.home == nil {
			return nil, fmt.Errorf("%w: this agent has no server or cluster of its own", core.ErrUnreachable)
		}
		return b.home, nil
	}
	e := b.links[via]
	if e == nil || e.link == nil {
		return nil, unreachable("bootstrap address "+string(via), errors.New("not connected; look the agent up again"))
	}
	return e.link, nil
}

// Close implements core.Bus. It ends sooner than a handler that does not
// return when ctx does, and says so.
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
	b.down = true // from now on connectEntry closes what it makes
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

func (b *Bus) allLinks() []*link {
	b.mu.Lock()
	defer b.mu.Unlock()
	var links []*link
	for _, e := range b.links {
		if e.link != nil {
			links = append(links, e.link)
		}
	}
	if b.home != nil {
		links = append(links, b.home)
	}
	return links
}

// all calls f for all links at once.
func all(links []*link, f func(*link)) {
	var wg sync.WaitGroup
	for _, l := range links {
		wg.Add(1)
		safe.Go("natsbus.Close", func() {
			defer wg.Done()
			f(l)
		})
	}
	wg.Wait()
}
