package natsbus

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/ratelog"
	"github.com/kvconn/kvconn/internal/safe"
	"github.com/kvconn/kvconn/wire"
)

// Limits of the embedded server, unless ServerOptions say otherwise.
const (
	defaultMaxMemory = 64 << 20
	defaultMaxConns  = 4096

	// maxHandshakes bounds the connections that have not proved themselves yet,
	// and proofWithin the time that they have.
	maxHandshakes = 256
	proofWithin   = 2 * time.Second

	// maxSubs and maxPending bound what one client makes the server keep: an agent
	// listens at its own subject and for answers.
	maxSubs    = 64
	maxPending = 2 * wire.MaxMessage

	// serverPing finds a peer that vanished without closing its connection:
	// two unanswered pings end it.
	serverPing = 2 * time.Second
	// writeWait bounds one write to a connection whose peer does not read.
	writeWait = 5 * time.Second
	// serverStop bounds Close.
	serverStop = 10 * time.Second
)

// ServerOptions sets up a Server. The zero value is fine.
type ServerOptions struct {
	// Owner is the agent of this process: no client may go by its id.
	Owner core.AgentID
	// Token, if not empty, is a secret that a client must know. The client proves it
	// without sending the token.
	Token string
	// NKeys are public user nkeys that are let in too. With neither a token nor keys
	// all clients are let in.
	NKeys []string
	// MaxConns bounds the upgraded connections at one time; 0 means 4096.
	MaxConns int
	// MaxMemory bounds the registry's memory in bytes; 0 means 64 MiB.
	MaxMemory int64
	Logger    *zap.Logger
}

// Server is a NATS server inside this process without a port of its own: peers
// come through Handler, this agent's Bus comes in-process.
type Server struct {
	opt   ServerOptions
	log   *zap.Logger
	nats  *server.Server
	store *store
	gate  *gate

	mu      sync.Mutex
	closed  bool
	conns   map[*upgraded]struct{}
	clients int            // connections of conns that were let in
	wg      sync.WaitGroup // of upgraded connections

	refused ratelog.Limit

	once sync.Once
	err  error
}

// StartServer starts the embedded server and returns when it can be used.
func StartServer(opt ServerOptions) (*Server, error) {
	if opt.Logger == nil {
		opt.Logger = zap.NewNop()
	}
	if opt.MaxConns == 0 {
		opt.MaxConns = defaultMaxConns
	}
	if opt.MaxMemory == 0 {
		opt.MaxMemory = defaultMaxMemory
	}
	gate, err := newGate(&opt)
	if err != nil {
		return nil, err
	}
	st, err := newStore()
	if err != nil {
		return nil, err
	}
	s := &Server{opt: opt, log: opt.Logger, store: st, gate: gate, conns: map[*upgraded]struct{}{}}
	log := &serverLogger{log: opt.Logger.Sugar()}
	s.nats, err = server.NewServer(&server.Options{
		ServerName:         filepath.Base(st.dir),
		DontListen:         true,
		NoSigs:             true,
		JetStream:          true,
		JetStreamMaxMemory: opt.MaxMemory,
		JetStreamMaxStore:  1 << 20, // nothing is stored in files; 0 would mean most of the disk
		StoreDir:           st.dir,
		MaxPayload:         wire.MaxMessage,
		MaxConn:            opt.MaxConns + maxHandshakes + 16, // and the in-process ones
		MaxSubs:            maxSubs,
		MaxPending:         maxPending,
		AuthTimeout:        proofWithin.Seconds(),
		AlwaysEnableNonce:  true,

		CustomClientAuthentication: gate,
		PingInterval:               serverPing,
		MaxPingsOut:                2,
		WriteDeadline:              writeWait,
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("embedded nats server: %w", err), st.remove())
	}
	s.nats.SetLoggerV2(log, false, false, false)
	s.nats.Start()
	if !s.nats.ReadyForConnections(serverStop) || !s.nats.JetStreamEnabled() {
		err := fmt.Errorf("embedded nats server does not start: %s", log.last())
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// Close ends every connection and the server, and waits until they have ended,
// at most ten seconds.
func (s *Server) Close() error {
	s.once.Do(func() { s.err = s.close() })
	return s.err
}

func (s *Server) close() error {
	s.mu.Lock()
	s.closed = true
	for c := range s.conns {
		c.close()
	}
	s.mu.Unlock()

	done := make(chan struct{})
	safe.Go("natsbus.Server.Close", func() {
		defer close(done)
		s.wg.Wait()
		s.nats.Shutdown()
		s.nats.WaitForShutdown()
	})
	bound := time.NewTimer(serverStop)
	defer bound.Stop()
	var err error
	select {
	case <-done:
	case <-bound.C:
		err = fmt.Errorf("embedded nats server: it still runs %v after it was told to stop", serverStop)
	}
	return errors.Join(err, s.store.remove())
}

func (s *Server) dialContext(context.Context) (net.Conn, error) { return s.dial() }

// dial is the way into the server.
func (s *Server) dial() (net.Conn, error) {
	if s.isClosed() {
		return nil, errServerClosed
	}
	return s.nats.InProcessConn()
}

var errServerClosed = errors.New("the embedded nats server is closed")

// Handler is the bootstrap port's GET /nats: it turns an HTTP connection into
// one of this server's NATS connections.
func (s *Server) Handler() http.Handler { return http.HandlerFunc(s.upgrade) }

// serverLogger gives the server's log to zap. A fatal line would end the process;
// here it ends the start.
type serverLogger struct {
	log *zap.SugaredLogger

	mu    sync.Mutex
	fatal string
}

func (l *serverLogger) last() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.fatal == "" {
		return fmt.Sprintf("not ready within %v", serverStop)
	}
	return l.fatal
}

func (l *serverLogger) Fatalf(format string, v ...any) {
	l.mu.Lock()
	l.fatal = fmt.Sprintf(format, v...)
	l.mu.Unlock()
	l.log.Errorf("nats: "+format, v...)
}

func (l *serverLogger) Noticef(format string, v ...any) { l.log.Debugf("nats: "+format, v...) }
func (l *serverLogger) Warnf(format string, v ...any)   { l.log.Warnf("nats: "+format, v...) }

// Errorf does not log refused clients: the upgrade does, with their addresses.
func (l *serverLogger) Errorf(format string, v ...any) {
	text := fmt.Sprintf("nats: "+format, v...)
	if strings.Contains(text, server.ErrAuthentication.Error()) || strings.Contains(text, server.ErrAuthTimeout.Error()) {
		l.log.Debug(text)
		return
	}
	l.log.Error(text)
}

func (l *serverLogger) Debugf(string, ...any) {}
func (l *serverLogger) Tracef(string, ...any) {}
