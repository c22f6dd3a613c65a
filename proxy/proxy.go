package proxy

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"time"

	"go.uber.org/zap"
)

// Proxy routes completion requests. New makes one, Close ends it.
type Proxy struct {
	cfg    Config
	log    *zap.Logger
	client *http.Client
	// bootstraps is the client for bootstrap ports, whose authority may be another.
	bootstraps *http.Client
	balancer   balancer
	places     chan struct{} // one for each request in flight

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
	p := &Proxy{cfg: cfg, log: cfg.Logger, client: newClient(nil), bootstraps: newClient(trust), places: make(chan struct{}, cfg.MaxRequests)}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	for _, c := range cfg.Prefill {
		base, err := baseURL(c.URL)
		if err != nil {
			return nil, err
		}
		p.balancer.prefill = append(p.balancer.prefill, &server{
			role: "prefill", url: c.URL, base: base, bootstrap: bootstrapURL(base, c.BootstrapPort, cfg.BootstrapCA != ""), reason: "not asked yet",
		})
	}
	for _, c := range cfg.Decode {
		base, err := baseURL(c)
		if err != nil {
			return nil, err
		}
		p.balancer.decode = append(p.balancer.decode, &server{role: "decode", url: c, base: base, reason: "not asked yet"})
	}
	for _, s := range append(append([]*server(nil), p.balancer.prefill...), p.balancer.decode...) {
		p.wg.Go(func() { p.watch(p.ctx, s) })
	}
	return p, nil
}

// newClient returns a client for servers; trust nil means the system's
// authorities.
func newClient(trust *tls.Config) *http.Client {
	return &http.Client{
		Transport: &http.Transport{
			// No Proxy: engines are near, and not behind the environment's.
			DialContext:         (&net.Dialer{Timeout: 5 * time.Second, KeepAlive: 15 * time.Second}).DialContext,
			TLSHandshakeTimeout: 5 * time.Second,
			TLSClientConfig:     trust,
			MaxIdleConnsPerHost: 256,
			// uvicorn closes idle connections after 5 s. A POST that meets such
			// a close fails and may not be sent again, so we close first.
			IdleConnTimeout:        3 * time.Second,
			DisableCompression:     true, // bodies pass as they are
			MaxResponseHeaderBytes: 64 << 10,
		},
		// A redirect is an answer like others; following it would send a
		// client's credentials to a server that nobody configured.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// begin takes a place among the requests in flight, and the reason if there is
// none.
func (p *Proxy) begin() (done func(), reason string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, shuttingDown
	}
	select {
	case p.places <- struct{}{}:
	default:
		return nil, fmt.Sprintf("%d requests are in flight, the limit: try again later", cap(p.places))
	}
	p.wg.Add(1)
	return func() {
		<-p.places
		p.wg.Done()
	}, ""
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
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return errors.Join(fmt.Errorf("proxy: %d requests still run after Close", len(p.places)), ctx.Err())
	}
}
