// Package httpserve runs an HTTP server whose Close is bounded and leaves no
// goroutine behind. The bootstrap port and the router both stand on it.
package httpserve

import (
	"container/list"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log"
	"net"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/internal/ratelog"
)

// Bounds of Close after the grace: handlers whose context has ended get
// closeGrace to answer, then their connections are closed and they get reap to
// return.
const (
	closeGrace = time.Second
	reap       = 2 * time.Second
)

// ErrClosed is returned by Listen and Serve after Close.
var ErrClosed = errors.New("httpserve: the server is closed")

// Options sets the bounds of a Server.
type Options struct {
	// Name begins every error, so that its reader knows which server it is.
	Name string
	// PortSetting is what a user must change when the port is in use.
	PortSetting string
	// ReadHeaderTimeout and IdleTimeout are those of http.Server.
	ReadHeaderTimeout, IdleTimeout time.Duration
	// HeadTimeout bounds the time of a header from its first byte. 0 means no bound but ReadHeaderTimeout. Only with MaxLongHeads.
	HeadTimeout time.Duration
	// MaxHeaderBytes is that of http.Server.
	MaxHeaderBytes int
	// MaxConns bounds the connections that are not hijacked. A new one ends the one that has waited for its client the longest, of the
	// address of which most wait. 0 means no bound.
	MaxConns int
	// MaxLongHeads bounds the bytes of headers that have not come whole, of those of more than
	// smallHead bytes. Beyond it the one that began first ends, of the address that has the most. 0 means no bound. Not with TLS.
	MaxLongHeads int
	// Brief says that all requests are brief. If each connection has one under way, a new connection ends the one whose request has taken
	// the longest, of the address that has the most. Else the new one ends.
	Brief bool
	// TLS makes the server speak https.
	TLS *tls.Config
	// Grace is how long Close lets running requests go on before it ends their
	// contexts. Zero ends them at once.
	Grace time.Duration
	// Logger may be nil.
	Logger *zap.Logger
}

// Server is an HTTP server that is opened once and closed once. Its methods
// are safe for concurrent use.
type Server struct {
	opt    Options
	http   *http.Server
	cancel context.CancelFunc

	mu       sync.Mutex
	listener net.Listener
	served   chan struct{} // made by Serve, closed when it returns
	closed   bool
	conns    map[net.Conn]*conn
	ending   int           // of conns: those that were dropped
	left     chan struct{} // holds a value when a connection has ended
	empty    chan struct{} // made by a waiting Close, closed with the last conn

	// Connections in the order in which they came there.
	waiting   places        // for a request
	turns     *list.List    // of waiting, without regard to addresses
	stale     time.Duration // who has waited so long for a request gives way first
	awaiting  places        // with a request that waits for its client
	busy      places        // with a request that does not
	longHeads places        // for the rest of a long header; these wait too
	longBytes int           // of those headers
}

// New returns a server for h, not yet listening.
func New(h http.Handler, opt Options) *Server {
	if opt.Logger == nil {
		opt.Logger = zap.NewNop()
	}
	base, cancel := context.WithCancel(context.Background())
	s := &Server{opt: opt, cancel: cancel, conns: map[net.Conn]*conn{}, left: make(chan struct{}, 1), turns: list.New(), stale: 30 * time.Second}
	s.http = &http.Server{
		Handler:           s.answering(h),
		ReadHeaderTimeout: opt.ReadHeaderTimeout,
		IdleTimeout:       opt.IdleTimeout,
		MaxHeaderBytes:    opt.MaxHeaderBytes,
		BaseContext:       func(net.Listener) context.Context { return base },
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, connKey{}, connOf{s, c})
		},
		ConnState: s.track,
	}
	// net/http writes to the host program's standard log unless told otherwise.
	s.http.ErrorLog = log.New(&errorLog{opt: &s.opt}, "", 0)
	return s
}

// Listen opens the port. From then on connections queue, until Serve takes
// them.
func (s *Server) Listen(addr string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return fmt.Errorf("%s: cannot listen on %q: %w", s.opt.Name, addr, ErrClosed)
	}
	if s.listener != nil {
		return fmt.Errorf("%s: cannot listen on %q: already listening on %v", s.opt.Name, addr, s.listener.Addr())
	}
	l, err := net.Listen("tcp", addr)
	if errors.Is(err, syscall.EADDRINUSE) {
		return fmt.Errorf("%s: the port of %q is in use: stop the process that holds it, or set %s to a free one: %w",
			s.opt.Name, addr, s.opt.PortSetting, err)
	}
	if err != nil {
		return fmt.Errorf("%s: cannot listen on %q, check the host and %s: %w", s.opt.Name, addr, s.opt.PortSetting, err)
	}
	s.listener = l
	return nil
}

// Addr is the address that Listen opened, with the port that was chosen; nil
// before Listen.
func (s *Server) Addr() net.Addr {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.listener == nil {
		return nil
	}
	return s.listener.Addr()
}

// Serve answers requests until Close, and then returns nil.
func (s *Server) Serve() error {
	s.mu.Lock()
	switch {
	case s.closed:
		s.mu.Unlock()
		return fmt.Errorf("%s: cannot serve: %w", s.opt.Name, ErrClosed)
	case s.listener == nil:
		s.mu.Unlock()
		return fmt.Errorf("%s: cannot serve: call Listen first", s.opt.Name)
	case s.served != nil:
		s.mu.Unlock()
		return fmt.Errorf("%s: cannot serve %v: it is served already", s.opt.Name, s.listener.Addr())
	}
	l, served := s.listener, make(chan struct{})
	s.served = served
	s.mu.Unlock()

	defer close(served)
	l = patientListener{l, s}
	switch {
	case s.opt.TLS == nil && s.opt.MaxLongHeads > 0:
		l = headListener{l, s}
	case s.opt.TLS != nil:
		l = tls.NewListener(wholeListener{l}, s.opt.TLS)
	}
	if err := s.http.Serve(l); err != nil && !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("%s: serving %v ended: %w", s.opt.Name, l.Addr(), err)
	}
	return nil
}

// Close stops listening and lets running requests finish within the grace and ctx. Then it
// ends their contexts, then their connections. It returns when Serve and every
// connection's goroutine have ended. If a handler does not return, Close returns an error
// at most three seconds after the grace or ctx.
//
// Hijacked connections belong to their hijackers: Close ends the contexts of their
// requests, but neither closes them nor waits for them.
func (s *Server) Close(ctx context.Context) error {
	s.mu.Lock()
	s.closed = true
	l, served := s.listener, s.served
	s.mu.Unlock()
	if l == nil {
		s.cancel()
		return nil
	}
	if served == nil {
		_ = l.Close() // the http.Server does not know it, and closes it otherwise
	}

	if s.opt.Grace > 0 {
		s.shutdown(ctx, s.opt.Grace)
	}
	s.cancel()
	s.shutdown(ctx, closeGrace)
	// It closes the connections that are still open; errors are of connections already gone.
	_ = s.http.Close()

	bound := time.NewTimer(reap)
	defer bound.Stop()
	for _, done := range []<-chan struct{}{served, s.drained()} {
		if done == nil {
			continue
		}
		select {
		case <-done:
		case <-bound.C:
			return fmt.Errorf("%s: %d requests on %v still run after Close: their handlers ignore the request's context",
				s.opt.Name, s.open(), l.Addr())
		}
	}
	return nil
}

// shutdown waits for running requests, at most for the given time.
func (s *Server) shutdown(ctx context.Context, limit time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	// http.Server.Shutdown would give a connection that has sent nothing yet
	// five seconds to do so.
	s.mu.Lock()
	for c, is := range s.conns {
		if is.ConnState == http.StateNew {
			hangUp(c)
		}
	}
	s.mu.Unlock()
	_ = s.http.Shutdown(ctx) // its only error is that of ctx: the next step is harsher
}

// hangUp closes a connection without TLS's close_notify, which may wait.
func hangUp(c net.Conn) {
	if t, ok := c.(*tls.Conn); ok {
		c = t.NetConn()
	}
	_ = c.Close()
}

// errorLog takes net/http's own messages. A failed handshake is a refused client, which is
// a warning unless the client has just broken off.
type errorLog struct {
	opt     *Options
	refused ratelog.Limit
}

func (e *errorLog) Write(p []byte) (int, error) {
	text := strings.TrimSpace(string(p))
	if !strings.Contains(text, "TLS handshake error") || strings.HasSuffix(text, ": EOF") || strings.Contains(text, "connection reset") || strings.HasSuffix(text, ": context canceled") { // the client, or this server, has gone
		e.opt.Logger.Debug(text)
		return len(p), nil
	}
	e.refused.Do(func(note string) { e.opt.Logger.Warn(e.opt.Name + ": " + text + note) })
	return len(p), nil
}
