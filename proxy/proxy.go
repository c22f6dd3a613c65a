package proxy

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/internal/memrelease"
	"github.com/kvconn/kvconn/internal/ratelog"
)

// Proxy routes completion requests. New makes one, Close ends it.
type Proxy struct {
	cfg    Config
	log    *zap.Logger
	client *http.Client
	// bootstraps is the client for bootstrap ports, which may have another authority.
	bootstraps *http.Client
	balancer   balancer
	places     chan struct{} // one for each request in flight
	metrics    *metrics
	draining   atomic.Bool
	lines      struct{ alone, refused, noParams ratelog.Limit } // of the log, about prompts that no prefill server computes
	unsaid     unsaid
	bodies     bodies
	uploads    uploads
	askTimeout time.Duration // the constant, but in tests

	ctx    context.Context // ends with Close
	cancel context.CancelFunc

	mu     sync.Mutex // closed and wg.Add against wg.Wait
	closed bool
	wg     sync.WaitGroup
}

// New checks the configuration and begins to look for its servers in the
// background; until they are found, requests get a 503. The Proxy must be
// closed.
func New(cfg Config) (*Proxy, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	trust, err := bootstrapTrust(cfg.BootstrapCA)
	if err != nil {
		return nil, err
	}
	p := &Proxy{cfg: cfg, log: cfg.Logger, client: newClient(nil), bootstraps: newClient(trust), places: make(chan struct{}, cfg.MaxRequests), askTimeout: askTimeout}
	p.bodies.init(cfg)
	if cfg.BodyMemory < int64(cfg.MaxRequests)*requestMemory {
		p.log.Warn(fmt.Sprintf("--body-memory %d has no room for --max-requests %d: requests get a 503 before so many are in flight; raise --body-memory to %d",
			cfg.BodyMemory, cfg.MaxRequests, memoryFor(cfg.MaxRequests)))
	}
	p.uploads.most = max(1, cfg.MaxRequests/4)
	p.ctx, p.cancel = context.WithCancel(context.Background())
	p.balancer.policy, p.balancer.fallback = cfg.Balance, cfg.FallbackDecode
	for _, c := range cfg.Prefill {
		base, err := baseURL(c.URL)
		if err != nil {
			return nil, err
		}
		s := &server{role: prefillRole, url: c.URL, base: base, bootstrapPort: c.BootstrapPort, reason: "not asked yet"}
		if cfg.Contract == Mooncake || cfg.Contract == NIXL && c.BootstrapPort != 0 {
			s.bootstrap = bootstrapURL(base, c.BootstrapPort, cfg.BootstrapCA != "")
		}
		p.balancer.prefill.servers = append(p.balancer.prefill.servers, s)
	}
	for _, c := range cfg.Decode {
		base, err := baseURL(c)
		if err != nil {
			return nil, err
		}
		p.balancer.decode.servers = append(p.balancer.decode.servers, &server{role: decodeRole, url: c, base: base, reason: "not asked yet"})
	}
	if cfg.Contract == SGLang {
		p.balancer.mayChangeRole()
	}
	p.metrics = newMetrics(p)
	p.unsaid.waits = make(chan struct{}, 1)
	p.wg.Go(func() { memrelease.Run(p.ctx) })
	p.wg.Go(p.sayComputed)
	for _, s := range p.balancer.servers() {
		p.wg.Go(func() { p.watch(p.ctx, s) })
	}
	return p, nil
}

// hostGone is the silence after which a host counts as gone: it has vanished, or it takes no
// byte of a request. Answers have no time limit.
const hostGone = 20 * time.Second

// dialer makes connections that end with their host. While nothing is under way, keep-alives
// show that the host is gone. While bytes are unacknowledged the system sends no
// keep-alives, and the user time-out shows it.
var dialer = &net.Dialer{
	Timeout:         5 * time.Second,
	KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 5 * time.Second, Interval: 5 * time.Second, Count: 3},
	Control: func(_, _ string, c syscall.RawConn) (err error) {
		if failed := c.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(hostGone.Milliseconds()))
		}); failed != nil {
			return failed
		}
		return err
	},
}

// newClient returns a client for servers; trust nil means the system's
// authorities.
func newClient(trust *tls.Config) *http.Client {
	return &http.Client{
		Transport: &http.Transport{
			// No Proxy: engines are near, and not behind the environment's proxy.
			DialContext:         dialer.DialContext,
			TLSHandshakeTimeout: 5 * time.Second,
			TLSClientConfig:     trust,
			MaxIdleConnsPerHost: 1024,
			// uvicorn closes idle connections after 5 s. If a POST meets such a close,
			// it fails and may not be sent again. So we close idle connections sooner.
			IdleConnTimeout:        3 * time.Second,
			DisableCompression:     true, // bodies pass as they are
			MaxResponseHeaderBytes: 64 << 10,
			ReadBufferSize:         16 << 10,
		},
		// A redirect is an answer like others; following it would send a
		// client's credentials to a server that nobody configured.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// Close ends all requests and the background work, and waits for them within
// ctx.
func (p *Proxy) Close(ctx context.Context) error {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.cancel()
	done := make(chan struct{})
	go func() {
		p.wg.Wait()
		close(done)
	}()
	defer p.client.CloseIdleConnections()
	defer p.bootstraps.CloseIdleConnections()
	defer func() { p.writeComputed(p.unsaid.rest()) }()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return errors.Join(fmt.Errorf("proxy: %d requests still run after Close", len(p.places)), ctx.Err())
	}
}
