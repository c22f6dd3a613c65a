// A link's connections are made by an upgrade at a bootstrap port, or to the servers of a cluster.

package natsbus

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/kvconn/kvconn/internal/sleep"
)

var errClosed = errors.New("the bus is closed")

// dialer makes a link's connections. nats.go calls Dial at each reconnect with its
// own lock held, so that only abort can end it early.
type dialer struct {
	open    func(ctx context.Context) (net.Conn, error)
	timeout time.Duration
	ctx     context.Context
	cancel  context.CancelFunc
	bare    bool // nats.go adds no TLS: the guard must see the bytes that nats.go reads

	mu      sync.Mutex
	aborted bool
	ready   net.Conn // made before nats.go asks for one
	last    net.Conn
	err     error // of the last Dial; nats.Connect does not tell all of them
}

func newDialer(timeout time.Duration, open func(ctx context.Context) (net.Conn, error)) *dialer {
	d := &dialer{open: open, timeout: timeout}
	d.ctx, d.cancel = context.WithCancel(context.Background())
	return d
}

// Dial implements nats.CustomDialer. The way is the dialer's own; addr is the
// address of one server of a cluster.
func (d *dialer) Dial(_, addr string) (net.Conn, error) {
	d.mu.Lock()
	ready := d.ready
	d.ready = nil
	d.mu.Unlock()
	if ready != nil {
		return ready, nil
	}
	ctx, cancel := context.WithTimeout(d.ctx, d.timeout)
	defer cancel()
	conn, err := d.open(context.WithValue(ctx, addrKey{}, addr))
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.err = err; err != nil {
		return nil, err
	}
	if d.aborted {
		_ = conn.Close()
		return nil, errClosed
	}
	d.last = conn
	return conn, nil
}

// prepare makes the connection that the first Dial returns.
func (d *dialer) prepare() error {
	conn, err := d.Dial("", "")
	if err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.ready = conn
	return nil
}

// SkipTLSHandshake tells nats.go whether it may follow a server that wants TLS.
func (d *dialer) SkipTLSHandshake() bool { return d.bare }

type addrKey struct{}

func (d *dialer) failure() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.err
}

// abort ends a Dial that is under way and the last connection, without a close_notify.
func (d *dialer) abort() {
	d.cancel()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.aborted = true
	if d.last != nil {
		_ = d.last.Close() // a second close, or an end without a close_notify
	}
}

func dialTCP(ctx context.Context) (net.Conn, error) {
	var nd net.Dialer
	return nd.DialContext(ctx, "tcp", ctx.Value(addrKey{}).(string))
}

// dialUpgrade returns a function that connects to the control plane behind a bootstrap
// port, with TLS if secure is not nil.
func dialUpgrade(at Address, secure *tls.Config, control Control, e *clientHandshake) func(context.Context) (net.Conn, error) {
	return func(ctx context.Context) (net.Conn, error) {
		for {
			conn, err := dialOnce(ctx, at, secure, control, e)
			// A burst of agents is let in one after another.
			if !errors.Is(err, errBusy) || pause(ctx, busyPause+rand.N(busyPause)) != nil {
				return conn, err
			}
		}
	}
}

const busyPause = 50 * time.Millisecond

func dialOnce(ctx context.Context, at Address, secure *tls.Config, control Control, e *clientHandshake) (net.Conn, error) {
	nd := net.Dialer{Control: control}
	conn, err := nd.DialContext(ctx, "tcp", at.Host)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	up, err := upgradeOver(ctx, conn, at, secure)
	if err == nil {
		up, err = e.run(ctx, up)
	}
	if !stop() && err == nil {
		err = ctx.Err() // the deadline is set, or about to be
	}
	if err != nil {
		_ = conn.Close()
		if ctx.Err() != nil {
			err = fmt.Errorf("it does not answer GET %s: %w", Path, ctx.Err())
		}
		return nil, err
	}
	return up, nil
}

func upgradeOver(ctx context.Context, conn net.Conn, at Address, secure *tls.Config) (net.Conn, error) {
	if secure == nil {
		return clientUpgrade(conn, at.Host)
	}
	cfg := secure.Clone()
	cfg.ServerName, _, _ = strings.Cut(at.Name, "%") // a zone belongs to this host
	t := tls.Client(conn, cfg)
	if err := t.HandshakeContext(ctx); err != nil {
		return nil, explainTLS(err)
	}
	return clientUpgrade(t, at.Host)
}

// wantsTLS is net/http's answer to plain HTTP on a TLS port.
const wantsTLS = "HTTP request to an HTTPS server"

// errBusy: the server has no place at this moment.
var errBusy = errors.New("it takes no more connections now")

// maxResponse bounds the head of the answer to an upgrade.
const maxResponse = 16 << 10

func clientUpgrade(conn net.Conn, host string) (net.Conn, error) {
	// A zone belongs to this host and is no part of the Host header.
	h := host
	if i := strings.IndexByte(h, '%'); i >= 0 {
		h = h[:i] + h[strings.LastIndexByte(h, ']'):]
	}
	if _, err := io.WriteString(conn, "GET "+Path+" HTTP/1.1\r\nHost: "+h+"\r\nUser-Agent: kvconn\r\nConnection: Upgrade\r\nUpgrade: "+protocol+"\r\n\r\n"); err != nil {
		return nil, err
	}
	limited := &io.LimitedReader{R: conn, N: maxResponse}
	br := bufio.NewReader(limited)
	resp, err := http.ReadResponse(br, nil)
	if err != nil {
		return nil, fmt.Errorf("no HTTP answer to GET %s: %.200s", Path, err)
	}
	if resp.StatusCode != http.StatusSwitchingProtocols {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 200)) // only to explain
		_ = resp.Body.Close()
		if resp.StatusCode == http.StatusBadRequest && strings.Contains(string(text), wantsTLS) {
			return nil, errors.New("the port speaks https: write https:// in front, or set tls_ca_file on the decode engine")
		}
		if resp.StatusCode == http.StatusServiceUnavailable && resp.Header.Get("Retry-After") != "" {
			return nil, fmt.Errorf("%w: %s", errBusy, strings.TrimSpace(string(text)))
		}
		return nil, fmt.Errorf("GET %s is answered with %.200s, not by a kvconn agent: %q", Path, resp.Status, strings.TrimSpace(string(text)))
	}
	if !hasToken(resp.Header["Upgrade"], protocol) {
		return nil, fmt.Errorf("GET %s upgrades to %.200q, not to %s", Path, resp.Header.Get("Upgrade"), protocol)
	}
	limited.N = math.MaxInt64
	return &headConn{Conn: conn, r: br}, nil
}

func tlsError(err error) bool {
	var verify *tls.CertificateVerificationError
	var plain tls.RecordHeaderError
	return errors.As(err, &verify) || errors.As(err, &plain)
}

// explainTLS adds the remedy to an error of a TLS handshake.
func explainTLS(err error) error {
	var (
		plain   tls.RecordHeaderError
		unknown x509.UnknownAuthorityError
		name    x509.HostnameError
		invalid x509.CertificateInvalidError
		roots   x509.SystemRootsError
	)
	switch {
	case errors.As(err, &plain):
		return fmt.Errorf("the port speaks no TLS: write http:// in front and set no tls_ca_file here, or give the prefill engine tls_cert_file and tls_key_file: %w", err)
	case errors.As(err, &unknown), errors.As(err, &roots):
		return fmt.Errorf("its certificate is of an authority that is not known here: set tls_ca_file to the file with that authority's certificate: %w", err)
	case errors.As(err, &name):
		return fmt.Errorf("its certificate is for another host: reach it under a name of the certificate, or give it one with this name: %w", err)
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return fmt.Errorf("its certificate is not valid at this time: give the prefill engine a new tls_cert_file, or set this host's clock: %w", err)
	}
	return fmt.Errorf("TLS handshake: %w", err)
}

// pause waits for d; an error is that of ctx.
func pause(ctx context.Context, d time.Duration) error { return sleep.For(ctx, d) }
