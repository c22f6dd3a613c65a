package natsbus

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// connect opens a link. It returns within twice the connect time-out, sooner
// when the bus is closed.
func connect(bus *common, to endpoint) (*link, error) {
	opt := &bus.opt
	l := &link{bus: bus, endpoint: to, dial: newDialer(opt.ConnectTimeout, to.open),
		gone: make(chan struct{}), up: make(chan struct{}), used: time.Now(), made: time.Now()}
	l.dial.bare = to.kind != clusterLink
	if to.kind == clusterLink {
		l.seals = bus.seals
	}
	l.session, l.broke = context.WithCancel(context.Background())
	l.since = time.Now()
	close(l.up)
	stop := context.AfterFunc(bus.ctx, l.dial.abort)
	defer stop()
	l.id = opt.Identity.ID()
	if to.handshake != nil { // the first connection decides about the id
		if err := l.dial.prepare(); err != nil {
			l.broke()
			l.dial.abort()
			return nil, unreachable(to.name, explain(err))
		}
		l.id = to.handshake.id()
	}
	l.answers = newAnswers(inboxOf(l.id))
	opts := []nats.Option{
		nats.Name(clientName + string(l.id)), nats.CustomInboxPrefix(inboxOf(l.id) + "." + randomName()),
		nats.SetCustomDialer(l.dial), nats.SkipHostLookup(), nats.Timeout(opt.ConnectTimeout),
		nats.PingInterval(opt.PingInterval), nats.MaxPingsOutstanding(2), nats.FlusherTimeout(writeWait),
		nats.MaxReconnects(-1), nats.CustomReconnectDelay(l.delay),
		nats.ReconnectBufSize(-1), nats.IgnoreAuthErrorAbort(),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) { l.disconnected(err) }),
		nats.ReconnectHandler(func(*nats.Conn) { l.reconnected() }),
		nats.ReconnectErrHandler(func(_ *nats.Conn, err error) { l.failed(err) }),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { l.failed(err) }),
		nats.ClosedHandler(func(nc *nats.Conn) { l.closed(nc) }),
	}
	if to.kind != clusterLink {
		opts = append(opts, nats.IgnoreDiscoveredServers())
	} else if opt.TLS != nil {
		// nats.go uses this when the server or the URL wants TLS.
		opts = append(opts, func(o *nats.Options) error { o.TLSConfig = opt.TLS.Clone(); return nil })
	}
	proof, err := opt.credentials(to.kind)
	if err != nil {
		l.broke()
		return nil, fmt.Errorf("natsbus: %w", err)
	}
	opts = append(opts, proof...)
	nc, err := nats.Connect(to.urls, opts...)
	for end := time.Now().Add(opt.ConnectTimeout); err != nil && interrupted(err) && time.Now().Before(end); {
		nc, err = nats.Connect(to.urls, opts...)
	}
	if err != nil {
		l.broke()
		l.dial.abort()
		return nil, unreachable(to.name, either(l.dial.failure(), explain(err)))
	}
	l.nc = nc
	if l.js, err = jetstream.NewWithAPIPrefix(nc, opt.JSPrefix); err == nil {
		err = l.answers.listen(nc)
	}
	if err == nil {
		err = l.subscribe()
	}
	if err != nil {
		l.close()
		return nil, unreachable(to.name, err)
	}
	return l, nil
}

// interrupted says whether the handshake took a second, so that the server's first ping
// came into it. nats.go has no type for that error.
func interrupted(err error) bool { return strings.Contains(err.Error(), "expected 'PONG', got 'PING'") }

// credentials are what nats.go shows to a server.
func (o *Options) credentials(kind linkKind) ([]nats.Option, error) {
	switch {
	case kind == homeLink:
		return []nats.Option{nats.UserInfo(homeUser, o.Server.authenticator.home)}, nil
	case kind != clusterLink: // the handshake proves it
		return nil, nil
	case o.Seed != "":
		key, public, err := seedKey(o.Seed)
		if err != nil {
			return nil, err
		}
		return []nats.Option{nats.Nkey(public, func(nonce []byte) ([]byte, error) { return signNonce(key, nonce) })}, nil
	case o.Token == "":
		return nil, nil
	}
	return []nats.Option{nats.Token(o.Token)}, nil
}
