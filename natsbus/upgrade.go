package natsbus

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvconn/kvconn/internal/safe"
)

// Path is the route of the bootstrap port that [Server.Handler] belongs at.
const Path = "/nats"

const (
	protocol  = "nats"
	lastWords = 500 * time.Millisecond
)

// upgraded is one HTTP connection that has become a NATS connection.
type upgraded struct {
	peer, server net.Conn
	in           bool // the server has let the client in; guarded by Server.mu
}

func (u *upgraded) close() {
	// Errors of closing do not matter here.
	_ = hangUp(u.peer)
	_ = u.server.Close()
}

func (s *Server) upgrade(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet {
		w.Header().Set("Allow", http.MethodGet)
		http.Error(w, "method not allowed", http.StatusMethodNotAllowed)
		return
	}
	if !hasToken(r.Header["Connection"], "upgrade") || !hasToken(r.Header["Upgrade"], protocol) {
		w.Header().Set("Connection", "Upgrade")
		w.Header().Set("Upgrade", protocol)
		http.Error(w, "this is kvconn's control plane: it wants \"Upgrade: nats\"", http.StatusUpgradeRequired)
		return
	}
	u := &upgraded{}
	if err := s.admit(u); err != nil {
		w.Header().Set("Retry-After", "1")
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	defer s.dismiss(u)
	peer, rw, err := http.NewResponseController(w).Hijack()
	if err != nil { // HTTP/2, or a wrapped ResponseWriter
		http.Error(w, "this connection cannot be upgraded: "+err.Error(), http.StatusHTTPVersionNotSupported)
		return
	}
	defer func() { _ = hangUp(peer) }()
	inside, err := s.dial()
	if err != nil {
		s.log.Sugar().Warnf("natsbus: no connection to the embedded server for %v: %v", peer.RemoteAddr(), err)
		return
	}
	defer func() { _ = inside.Close() }()
	// The HTTP server's deadlines stay on a hijacked connection.
	if err := peer.SetDeadline(time.Time{}); err != nil {
		return // closed already
	}
	if !s.connected(u, peer, inside) {
		return
	}
	_ = peer.SetWriteDeadline(time.Now().Add(writeWait))
	if _, err := io.WriteString(peer, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: "+protocol+"\r\n\r\n"); err != nil {
		return // the client has gone
	}
	_ = peer.SetWriteDeadline(time.Time{})

	both := make(chan struct{})
	var left atomic.Bool // the client went away by itself
	hs := &handshake{w: peer, done: func() { s.letIn(u) }}
	safe.Go("natsbus.upgrade", func() {
		defer close(both)
		_, _ = io.Copy(hs, inside) // either end's error ends both
		hs.dropped = !left.Load()
		farewellTo(peer)
		_ = inside.Close()
	})
	var early io.Reader = peer
	if n := rw.Reader.Buffered(); n > 0 {
		early = io.MultiReader(io.LimitReader(rw.Reader, int64(n)), peer)
	}
	if _, err := io.Copy(inside, early); !errors.Is(err, io.ErrClosedPipe) {
		left.Store(true)
		u.close()
	}
	<-both
	// Read the rest of the client's bytes. Otherwise the system would drop the bytes
	// that the client has not read yet, which say why it was refused.
	_, _ = io.Copy(io.Discard, peer)
	u.close()
	if why := hs.refusal(); why != "" && !s.isClosed() {
		s.refused.Do(func(note string) {
			s.log.Sugar().Warnf("natsbus: a client at %v is refused: %s%s", peer.RemoteAddr(), why, note)
		})
	}
}

// farewellTo ends this side of a connection, and bounds how long the other side
// may take to end its own.
func farewellTo(peer net.Conn) {
	_ = peer.SetDeadline(time.Now().Add(lastWords))
	if c, ok := peer.(interface{ CloseWrite() error }); ok {
		_ = c.CloseWrite() // the client may have gone
	}
}

func (s *Server) isClosed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closed
}

// admit reserves a place for a connection.
func (s *Server) admit(u *upgraded) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return errServerClosed
	}
	waiting := len(s.conns) - s.clients
	if s.clients >= s.opt.MaxConns {
		return fmt.Errorf("%d control connections are open, the most that this agent takes", s.clients)
	}
	if waiting >= maxHandshakes {
		return fmt.Errorf("%d control connections have not proved themselves yet, the most at a time", waiting)
	}
	u.peer, u.server = noConn, noConn
	s.conns[u] = struct{}{}
	s.wg.Add(1)
	return nil
}

// connected makes the connection one that Close closes.
func (s *Server) connected(u *upgraded, peer, inside net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	u.peer, u.server = peer, inside
	return !s.closed
}

// letIn counts a connection that has proved itself. Connections that have not done so
// cannot take the places of clients.
func (s *Server) letIn(u *upgraded) {
	s.mu.Lock()
	defer s.mu.Unlock()
	u.in = true
	s.clients++
	if s.clients > s.opt.MaxConns { // several were in the handshake for the last place
		u.close()
	}
}

func (s *Server) dismiss(u *upgraded) {
	s.mu.Lock()
	delete(s.conns, u)
	if u.in {
		s.clients--
	}
	s.mu.Unlock()
	s.wg.Done()
}

// noConn stands in until there is one; only Close is called.
var noConn net.Conn = closeOnly{}

type closeOnly struct{ net.Conn }

func (closeOnly) Close() error { return nil }

func hasToken(values []string, want string) bool {
	for _, v := range values {
		for tok := range strings.SplitSeq(v, ",") {
			if strings.EqualFold(strings.TrimSpace(tok), want) {
				return true
			}
		}
	}
	return false
}

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

// SkipTLSHandshake tells nats.go whether it may follow a server that wants TLS.
func (d *dialer) SkipTLSHandshake() bool { return d.bare }

type addrKey struct{}

func (d *dialer) failure() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.err
}

// abort ends a Dial that is under way and the last connection, without a farewell.
func (d *dialer) abort() {
	d.cancel()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.aborted = true
	if d.last != nil {
		_ = d.last.Close() // a second close, or an end without a farewell
	}
}

func dialTCP(ctx context.Context) (net.Conn, error) {
	var nd net.Dialer
	return nd.DialContext(ctx, "tcp", ctx.Value(addrKey{}).(string))
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
	return &upgradedConn{Conn: conn, r: br}, nil
}

// upgradedConn first reads the bytes that came in one packet with the HTTP answer. Its
// guard sees all bytes before the caller does.
type upgradedConn struct {
	net.Conn
	r       *bufio.Reader // nil when it is empty
	guard   guard
	refused error
}

// Close ends the connection at once.
func (c *upgradedConn) Close() error { return hangUp(c.Conn) }

// hangUp closes a connection without TLS's farewell, which would wait for a
// peer that does not read. NATS's messages tell where they end.
func hangUp(c net.Conn) error {
	if t, ok := c.(*tls.Conn); ok {
		c = t.NetConn()
	}
	return c.Close()
}

func (c *upgradedConn) Read(b []byte) (int, error) {
	if c.refused != nil {
		return 0, c.refused
	}
	n, err := c.next(b)
	if c.refused = c.guard.check(b[:n]); c.refused != nil {
		return 0, c.refused
	}
	return n, err
}

func (c *upgradedConn) next(b []byte) (int, error) {
	if c.r != nil {
		if c.r.Buffered() > 0 {
			return c.r.Read(b)
		}
		c.r = nil
	}
	return c.Conn.Read(b)
}
