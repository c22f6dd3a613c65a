package bootstrap

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/internal/httpserve"
)

// DefaultPort is the bootstrap port of a prefill engine whose configuration names none.
const DefaultPort = 8998

// Server listens on the bootstrap port. Its methods are safe for concurrent
// use.
type Server struct {
	s *httpserve.Server
}

// maxConns bounds the connections that speak HTTP. Connections that were upgraded to
// the control plane do not count.
const maxConns = 1024

// NewServer returns a server for h, usually NewHandler's. It speaks https if a
// configuration for that is given. The logger may be nil.
func NewServer(h http.Handler, secure *tls.Config, logger *zap.Logger) *Server {
	return &Server{httpserve.New(h, httpserve.Options{
		Name:              "bootstrap",
		PortSetting:       "the config key bootstrap_port",
		ReadHeaderTimeout: 5 * time.Second,
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    16 << 10,
		MaxConns:          maxConns,
		TLS:               secure,
		Logger:            logger,
	})}
}

// Listen opens the port; port 0 takes a free one, which Addr tells.
// Connections queue until Serve.
func (s *Server) Listen(addr string) error { return s.s.Listen(addr) }

// Addr is the address that Listen opened, nil before.
func (s *Server) Addr() net.Addr { return s.s.Addr() }

// Serve answers requests until Close, and then returns nil.
func (s *Server) Serve() error { return s.s.Serve() }

// Close ends the contexts of running requests, stops listening, and returns
// when Serve and the goroutines of all connections have ended: within three
// seconds, or within two of ctx's end. An error says that a handler has not
// returned. Close neither closes hijacked connections nor waits for them. Close may
// be called more than once.
func (s *Server) Close(ctx context.Context) error { return s.s.Close(ctx) }
