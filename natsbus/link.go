// A link is a connection to one server or cluster that comes back by itself; this file keeps how it is.

package natsbus

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/safe"
)

// Bounds of a link.
const (
	reconnectWait = 200 * time.Millisecond
	// When a link breaks that has stood for steadyLink, it is dialled again within
	// firstWait, since the agent is missed. The wait is random, so that the links of a
	// server that has gone do not all come back at once.
	steadyLink = time.Second
	firstWait  = 50 * time.Millisecond
	// What waits of a prefill engine's host for a handler.
	maxQueuedRequests     = 8192
	maxQueuedRequestBytes = 16 << 20
	// drainTimeout is how long an open connection may take to send what it holds.
	drainTimeout = time.Second
)

// common is what a bus and its links share.
type common struct {
	opt     Options
	log     *zap.Logger
	temp    string          // TMPDIR when the bus was opened: later a host's threads may change the environment
	ctx     context.Context // ends at Close
	handler atomic.Pointer[core.Handler]
	events  linkEvents
	seals   *seals // nil without a cluster
}

// linkEvents are the events that a link tells its bus.
type linkEvents interface {
	arrived(l *link, m *nats.Msg) // a request came
	linkReconnected(l *link)      // the link is connected again
	linkUnused(l *link)           // it is broken, and nothing has used it for Options.linkIdle
	linkLost(l *link)             // it has ended for good, though this agent did not close it
}

// endpoint is the server or cluster that a link leads to.
type endpoint struct {
	kind linkKind
	via  core.Via
	name string // for errors and logs
	urls string
	open func(context.Context) (net.Conn, error)
	// handshake proves this agent to the server behind a bootstrap port; else nil.
	handshake *clientHandshake
}

// link is a connection to one NATS server or cluster that comes back by itself. It
// keeps its state from nats.go's callbacks, since nats.go's own methods wait while it
// dials.
type link struct {
	endpoint
	bus  *common
	dial *dialer
	id   core.AgentID // by which this agent is known at the server
	made time.Time
	nc   *nats.Conn
	// answers are to this agent's requests.
	answers *answers
	seals   *seals // of a link to a cluster
	js      jetstream.JetStream
	gone    chan struct{} // closed when nats.go has closed the connection for good

	mu      sync.Mutex
	up      chan struct{}      // closed while connected
	session context.Context    // ends when the connection breaks
	since   time.Time          // when the session began
	broke   context.CancelFunc // ends session
	cause   error              // why it is not connected
	closing bool
	used    time.Time
	idle    *time.Timer   // runs while not connected
	drained chan struct{} // closed when no request comes in any more; nil if none ever did
	sub     *nats.Subscription
	writing *writing        // nil: no entry
	right   context.Context // the session in which the registry's stream was found right
}

// linkKind is where a link leads.
type linkKind int

const (
	homeLink    linkKind = iota // this process's own server
	clusterLink                 // Options.ClusterURL
	portLink                    // the server behind a bootstrap port
	joinLink                    // as portLink, in the place of a server of this agent's own
)

// rankKey is a rank's key at a link of a kind.
func (k linkKind) rankKey(engine string, tp, pp int) string {
	if k == clusterLink {
		return clusterKey(engine, tp, pp)
	}
	return rankKey(engine, tp, pp)
}

// subscribe makes this agent reachable over the link, if it serves. The queue
// group keeps a request from coming twice when two links lead to one server. To a cluster there is one
// link, and a user there who may hear others could join the group and take their requests.
func (l *link) subscribe() error {
	if l.bus.handler.Load() == nil {
		return nil
	}
	arrived := func(m *nats.Msg) { l.bus.events.arrived(l, m) }
	hear := func() (*nats.Subscription, error) { return l.nc.QueueSubscribe(l.subscriberOf(), "agent", arrived) }
	if l.kind == clusterLink {
		hear = func() (*nats.Subscription, error) { return l.nc.Subscribe(l.subscriberOf(), arrived) }
	}
	sub, err := hear()
	if err != nil {
		return err
	}
	if l.kind == homeLink { // ranks without a server of their own ask this agent
		if _, err := l.nc.Subscribe(subject(hostID, "*"), func(m *nats.Msg) { l.bus.events.arrived(l, m) }); err != nil {
			return err
		}
	}
	if l.kind == portLink { // a client's request may have named the host: beyond this its messages are lost
		if err := sub.SetPendingLimits(maxQueuedRequests, maxQueuedRequestBytes); err != nil {
			return err
		}
		l.handshake.subscription.Store(sub) // before so much can wait that the connection is not read any more
	}
	drained := make(chan struct{})
	sub.SetClosedHandler(func(string) { close(drained) })
	l.mu.Lock()
	l.sub, l.drained = sub, drained
	l.mu.Unlock()
	// After the flush the server knows the subscription. A link that is down tells it later.
	if err := l.nc.FlushTimeout(l.bus.opt.ConnectTimeout); err != nil && !broken(err) {
		return err
	}
	return nil
}

// subscriberOf is the subject at which an agent hears all others.
func (l *link) subscriberOf() string {
	if l.kind == clusterLink { // others' ids may be two tokens
		return subject(l.id, ">")
	}
	return subject(l.id, "*")
}

// quit ends the subscription and waits until all requests that came are with their
// handlers. A later request learns at once that nobody listens.
func (l *link) quit(ctx context.Context) {
	l.mu.Lock()
	sub, drained, session := l.sub, l.drained, l.session
	l.mu.Unlock()
	if sub == nil || session.Err() != nil || sub.Drain() != nil {
		return
	}
	select {
	case <-drained:
	case <-session.Done():
	case <-ctx.Done():
	}
}

// broken reports whether an error of nats.go means that it is not connected.
func broken(err error) bool {
	return errors.Is(err, nats.ErrReconnectBufExceeded) || errors.Is(err, nats.ErrConnectionReconnecting) ||
		errors.Is(err, nats.ErrConnectionClosed) || errors.Is(err, nats.ErrDisconnected)
}

func unreachable(name string, cause error) error {
	if cause == nil {
		cause = nats.ErrDisconnected
	}
	return fmt.Errorf("%w: %s: %w", core.ErrUnreachable, name, cause)
}

func explain(err error) error {
	switch {
	case errors.Is(err, nats.ErrAuthorization), errors.Is(err, nats.ErrAuthExpired):
		return fmt.Errorf("it refuses this agent: nats_token, or the key of nats_nkey_seed_file, is not one that it admits: %w", err)
	case errors.Is(err, nats.ErrNkeysNotSupported):
		return fmt.Errorf("it admits no nkeys: take nats_nkey_seed_file away or give its server nkeys: %w", err)
	case errors.Is(err, nats.ErrSecureConnWanted):
		return fmt.Errorf("it speaks no TLS: write nats:// in front, or give its servers certificates: %w", err)
	}
	if tlsError(err) {
		return explainTLS(err)
	}
	return err
}

// end marks the link as not connected; mu is held.
func (l *link) end() {
	if l.session.Err() == nil {
		l.broke()
		l.up = make(chan struct{})
	}
}

// delay is the wait before all servers are tried once more; tried counts from 1.
func (l *link) delay(tried int) time.Duration {
	l.mu.Lock()
	steady := time.Since(l.since) >= steadyLink
	l.mu.Unlock()
	if steady && tried == 1 && l.kind != clusterLink { // in a cluster others were tried already
		return rand.N(firstWait)
	}
	return reconnectWait + rand.N(reconnectWait/2)
}

func (l *link) disconnected(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.end()
	if l.closing {
		return
	}
	if err == nil {
		err = nats.ErrDisconnected
	}
	l.cause = err
	if l.via != "" && l.idle == nil {
		l.idle = time.AfterFunc(l.bus.opt.linkIdle, l.expire)
	}
	l.bus.log.Sugar().Debugf("natsbus: the connection to %s broke: %v", l.name, err)
}

func (l *link) reconnected() {
	l.mu.Lock()
	if l.closing {
		l.mu.Unlock()
		return
	}
	l.session, l.broke = context.WithCancel(context.Background())
	l.cause, l.since = nil, time.Now()
	close(l.up)
	if l.idle != nil {
		l.idle.Stop()
		l.idle = nil
	}
	l.mu.Unlock()
	l.bus.log.Sugar().Debugf("natsbus: connected to %s again", l.name)
	l.bus.events.linkReconnected(l)
}

// failed notes an error of the link.
func (l *link) failed(err error) {
	l.mu.Lock()
	if l.session.Err() != nil {
		l.cause = explain(err)
	}
	l.writing.failed(err)
	l.mu.Unlock()
	l.bus.log.Sugar().Debugf("natsbus: %s: %v", l.name, err)
}

// closed is nats.go's last callback. It also comes when the server ended the
// connection with an error after which nats.go does not dial again.
func (l *link) closed(nc *nats.Conn) {
	l.mu.Lock()
	l.end()
	closing := l.closing
	if l.idle != nil {
		l.idle.Stop()
		l.idle = nil
	}
	if l.cause == nil {
		l.cause = nats.ErrConnectionClosed
	}
	if err := nc.LastError(); err != nil && !closing {
		l.cause = err
	}
	l.mu.Unlock()
	close(l.gone)
	l.dial.abort()
	if !closing {
		l.bus.events.linkLost(l)
	}
}

// expire drops a link that is broken and unused.
func (l *link) expire() {
	defer safe.Recover("natsbus.link.expire")
	l.mu.Lock()
	if l.idle == nil || l.closing {
		l.mu.Unlock()
		return
	}
	if left := l.bus.opt.linkIdle - time.Since(l.used); left > 0 {
		l.idle.Reset(left)
		l.mu.Unlock()
		return
	}
	l.mu.Unlock()
	l.bus.events.linkUnused(l)
}

// current returns the context of the present connection; ok is false while the link
// is down.
func (l *link) current() (session context.Context, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.used = time.Now()
	return l.session, l.session.Err() == nil && !l.closing
}

// wait returns when the link is connected.
func (l *link) wait(ctx context.Context) (session context.Context, err error) {
	for {
		l.mu.Lock()
		up, session := l.up, l.session
		l.used = time.Now()
		l.mu.Unlock()
		if session.Err() == nil {
			return session, nil
		}
		select {
		case <-up:
		case <-l.gone:
			return nil, unreachable(l.name, l.why())
		case <-l.bus.ctx.Done():
			return nil, unreachable(l.name, errClosed)
		case <-ctx.Done():
			return nil, fmt.Errorf("%w (%w)", unreachable(l.name, l.why()), ctx.Err())
		}
	}
}

func (l *link) why() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.cause
}

// during ends when ctx does or when the session breaks.
func during(ctx, session context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(session, cancel)
	return ctx, func() { stop(); cancel() }
}

// close ends the link and waits for nats.go, about a second at most when the
// peer does not read.
func (l *link) close() {
	l.mu.Lock()
	l.closing = true
	down := l.session.Err() != nil
	if l.idle != nil {
		l.idle.Stop()
		l.idle = nil
	}
	l.mu.Unlock()
	if down {
		l.dial.abort() // nats.go may be dialling, with its lock held
	}
	done := make(chan struct{})
	safe.Go("natsbus.link.close", func() {
		defer close(done)
		l.nc.Close()
		<-l.gone
	})
	bound := time.NewTimer(drainTimeout)
	defer bound.Stop()
	select {
	case <-done:
	case <-bound.C:
		l.dial.abort()
		<-done
	}
}

// either returns the first of two causes that is not nil.
func either(a, b error) error {
	if a != nil {
		return a
	}
	return b
}
