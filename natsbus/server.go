// A NATS server runs inside this process, and has no port of its own.

package natsbus

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"go.uber.org/zap"

	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/internal/ratelog"
	"github.com/kvconn/kvconn/internal/safe"
	"github.com/kvconn/kvconn/wire"
)

// Limits of the embedded server, unless ServerOptions say otherwise.
const (
	defaultMaxMemory = 64 << 20
	defaultMaxConns  = 2048

	// maxSubs bounds what one client makes the server keep: an agent listens at its own
	// subject and for answers.
	maxSubs = 64
	// maxUnansweredBytes bounds the requests of all clients that are not answered yet, and
	// maxUnreadBytes the answers that they have not read.
	maxUnansweredBytes = 32 << 20
	maxUnreadBytes     = 32 << 20
	// maxPending is what the server may keep for this process's own agent: more than all
	// clients can send it. For clients it keeps next to nothing, see clientWriter.
	maxPending = 3*maxUnansweredBytes + 2*wire.MaxMessage

	// defaultServerPing finds a peer that vanished without closing its connection:
	// two unanswered pings end it.
	defaultServerPing = 2 * time.Second
	// serverStop bounds Close.
	serverStop = 10 * time.Second
)

// ServerOptions sets up a Server. The zero value is fine.
type ServerOptions struct {
	// Identity is that of the agent of this process; nil makes a new one.
	Identity *Identity
	// Token, if not empty, is a secret that a client must know. The client proves it
	// without sending the token.
	Token string
	// JoinToken, if not empty, is a secret that a rank must know to join from another host
	// or user. Without it, where there is a token or there are NKeys, ranks join only from
	// processes of the same user on this host.
	JoinToken string
	// NKeys are public user nkeys whose owners are let in too. With neither a token nor
	// keys all clients are let in.
	NKeys []string
	// MaxConns bounds the upgraded connections at one time; 0 means 2048.
	MaxConns int
	// MaxMemory bounds the registry's memory in bytes; 0 means 64 MiB.
	MaxMemory int64
	Logger    *zap.Logger
	// AuthTimeout is how long a client may take to prove itself; 0 means 10 s. A client that leaves two pings unanswered
	// is gone; PingInterval is the time between them, and 0 means 2 s.
	AuthTimeout, PingInterval time.Duration
}

// Server is a NATS server inside this process without a port of its own: peers
// come through Handler, this agent's Bus comes in-process.
type Server struct {
	opt           ServerOptions
	log           *zap.Logger
	nats          *server.Server
	store         *store
	authenticator *authenticator
	tls           *tls.Config              // of the connections inside upgraded ones
	inside        func() (net.Conn, error) // the way into nats

	unanswered, unread *budget
	queries            *registryQueries

	clients *clients

	refused   ratelog.Limit
	evictions ratelog.Limit

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
	opt.AuthTimeout, opt.PingInterval = cmp.Or(opt.AuthTimeout, defaultProof), cmp.Or(opt.PingInterval, defaultServerPing)
	if opt.Identity == nil {
		opt.Identity = NewIdentity()
	}
	secure, err := opt.Identity.serverTLS()
	if err != nil {
		return nil, err
	}
	st, err := newStore(opt.Identity.ID())
	if err != nil {
		return nil, err
	}
	local, err := st.secret()
	if err != nil {
		return nil, errors.Join(err, st.remove())
	}
	auth, err := newAuthenticator(secrets{token: opt.Token, join: opt.JoinToken}, local, opt.NKeys)
	if err != nil {
		return nil, errors.Join(err, st.remove())
	}
	s := &Server{opt: opt, log: opt.Logger, store: st, authenticator: auth, tls: secure,
		unanswered: newBudget(maxUnansweredBytes), unread: newBudget(maxUnreadBytes), queries: newRegistryQueries(),
		clients: newClients(opt.MaxConns)}
	log := &serverLogger{log: opt.Logger.Sugar()}
	s.nats, err = server.NewServer(&server.Options{
		ServerName:                 filepath.Base(st.dir),
		DontListen:                 true,
		NoSigs:                     true,
		JetStream:                  true,
		JetStreamMaxMemory:         opt.MaxMemory,
		JetStreamMaxStore:          1 << 20, // nothing is stored in files; 0 would mean most of the disk
		StoreDir:                   st.dir,
		MaxPayload:                 wire.MaxMessage,
		MaxConn:                    opt.MaxConns + maxHandshakes + 16, // and the in-process ones
		MaxSubs:                    maxSubs,
		MaxClosedClients:           1, // nobody asks who has gone
		MaxPending:                 maxPending,
		AuthTimeout:                opt.AuthTimeout.Seconds(),
		CustomClientAuthentication: auth,
		PingInterval:               opt.PingInterval,
		MaxPingsOut:                2,
		WriteDeadline:              writeWait,
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("embedded nats server: %w", err), st.remove())
	}
	s.inside = s.nats.InProcessConn
	s.nats.SetLoggerV2(log, false, false, false)
	s.nats.Start()
	if !s.nats.ReadyForConnections(serverStop) || !s.nats.JetStreamEnabled() {
		err := fmt.Errorf("embedded nats server does not start: %s", log.last())
		return nil, errors.Join(err, s.Close())
	}
	if !auth.provesRanks() && !fault.On("bus-keeps-store") {
		// The server needed the folder at its start alone, and anybody may join without the secret in it. So a SIGKILL leaves nothing.
		if err := st.remove(); err != nil {
			opt.Logger.Warn("the embedded nats server's folder, which it needs no more, is not removed", zap.String("folder", st.dir), zap.Error(err))
		}
	}
	return s, nil
}

// ProvesRanks says whether all ranks that join this server have proved a secret.
func (s *Server) ProvesRanks() bool { return s.authenticator.provesRanks() }

// Close ends every connection and the server, and waits until they have ended,
// at most ten seconds.
func (s *Server) Close() error {
	s.once.Do(func() { s.err = s.close() })
	return s.err
}

func (s *Server) close() error {
	s.clients.close()
	done := make(chan struct{})
	safe.Go("natsbus.Server.Close", func() {
		defer close(done)
		s.clients.wg.Wait()
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
	if s.clients.isClosed() {
		return nil, errServerClosed
	}
	return s.inside()
}

// serverLogger gives the server's log to zap. A fatal line would end the process;
// here it ends the start.
type serverLogger struct {
	log     *zap.SugaredLogger
	clients ratelog.Limit // lines that a client can cause: one for each of its messages

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

func (l *serverLogger) Warnf(format string, v ...any) {
	l.line(l.log.Warn, fmt.Sprintf("nats: "+format, v...))
}

// line writes a line. The lines of a connection, which name its number, are bounded.
func (l *serverLogger) line(write func(...any), text string) {
	if !strings.Contains(text, "cid:") {
		write(text)
		return
	}
	l.clients.Do(func(note string) { write(text + note) })
}

// Errorf does not log refused clients: the upgrade does, with their addresses.
func (l *serverLogger) Errorf(format string, v ...any) {
	text := fmt.Sprintf("nats: "+format, v...)
	if strings.Contains(text, server.ErrAuthentication.Error()) || strings.Contains(text, server.ErrAuthTimeout.Error()) {
		l.log.Debug(text)
		return
	}
	l.line(l.log.Error, text)
}

func (l *serverLogger) Debugf(string, ...any) {}

func (l *serverLogger) Tracef(string, ...any) {}
