// GET /nats turns an HTTP connection into a NATS connection of a client that has proved what it is.

package natsbus

import (
	"bufio"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/quota"
	"github.com/kvconn/kvconn/internal/safe"
)

// closeTimeout bounds how long a client may take to end a connection that the server ended.
const closeTimeout = 500 * time.Millisecond

// Handler is the bootstrap port's GET /nats: it turns an HTTP connection into
// one of this server's NATS connections.
func (s *Server) Handler() http.Handler { return http.HandlerFunc(s.upgrade) }

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
	u := &clientConn{}
	from, _ := netip.ParseAddrPort(r.RemoteAddr) // what has no address counts under none
	if err := s.clients.admit(u, quota.Of(from.Addr())); err != nil {
		w.Header().Set("Retry-After", "1")
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	proxied := false
	defer func() {
		if !proxied {
			s.clients.release(u)
		}
	}()
	peer, rw, err := http.NewResponseController(w).Hijack()
	if err != nil { // HTTP/2, or a wrapped ResponseWriter
		http.Error(w, "this connection cannot be upgraded: "+err.Error(), http.StatusHTTPVersionNotSupported)
		return
	}
	defer func() {
		if !proxied {
			_ = hangUp(peer)
		}
	}()
	conn, who, err := s.handshake(u, peer, rw.Reader)
	if err != nil {
		s.refuse(peer, err)
		return
	}
	// The HTTP server keeps buffers of some KiB, and a stack that the handshake has made large, until this handler returns.
	proxied = true
	safe.Go("natsbus.proxy", func() {
		defer s.clients.release(u)
		defer func() { _ = hangUp(peer) }()
		if err := s.proxy(u, peer, conn, who); err != nil && !s.clients.isClosed() {
			s.refuse(peer, err)
		}
	})
}

// handshake makes a connection one of the control plane, and lets the client prove what it is.
func (s *Server) handshake(u *clientConn, peer net.Conn, head *bufio.Reader) (*tls.Conn, client, error) {
	if !s.clients.connected(u, peer, noConn) {
		return nil, client{}, errEvicted
	}
	// This replaces the HTTP server's deadlines, which stay on a hijacked connection.
	if err := peer.SetDeadline(time.Now().Add(s.opt.AuthTimeout)); err != nil {
		return nil, client{}, fmt.Errorf("%w: %w", io.EOF, err) // closed already
	}
	if _, err := io.WriteString(peer, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: "+protocol+"\r\n\r\n"); err != nil {
		return nil, client{}, fmt.Errorf("%w: %w", io.EOF, err)
	}
	conn := tls.Server(&headConn{Conn: peer, r: head}, s.tls)
	who, err := s.prove(conn)
	switch {
	case err == nil:
	case s.clients.evicted(u):
		err = errEvicted
	case errors.Is(err, os.ErrDeadlineExceeded):
		err = fmt.Errorf("it did not prove itself within %v", s.opt.AuthTimeout)
	}
	return conn, who, err
}

// prove lets a client prove its identity and what it may do.
func (s *Server) prove(conn *tls.Conn) (client, error) {
	if err := conn.Handshake(); err != nil {
		return client{}, err
	}
	state := conn.ConnectionState()
	id, err := peerOf(state)
	if err != nil {
		return client{}, err
	}
	r, key, err := s.authenticator.authenticate(conn, state)
	return client{id, r, core.Account(key)}, err
}

// refuse logs why a client is sent away, and gives it time to read the reason.
func (s *Server) refuse(peer net.Conn, why error) {
	_ = peer.SetDeadline(time.Now().Add(closeTimeout))
	if c, ok := peer.(interface{ CloseWrite() error }); ok {
		_ = c.CloseWrite() // the client may have gone
	}
	// The system would drop what the client has not read yet if bytes of its own were left.
	_, _ = io.Copy(io.Discard, peer)
	if errors.Is(why, io.EOF) || s.clients.isClosed() {
		return // it went away by itself
	}
	s.refused.Do(func(note string) {
		s.log.Sugar().Warnf("natsbus: a client at %v is refused: %v%s", peer.RemoteAddr(), why, note)
	})
}

// proxy passes both sides of the protocol on until either end ends. An error says that
// the client does what no agent does.
func (s *Server) proxy(u *clientConn, peer net.Conn, conn *tls.Conn, who client) error {
	if who.account == "" {
		who.account = core.Account(u.from.String())
	}
	connect, leave, err := s.authenticator.addUser(who)
	if err != nil {
		return err
	}
	defer leave()
	inside, err := s.dial()
	if err != nil {
		s.log.Sugar().Warnf("natsbus: no connection to the embedded server for %v: %v", peer.RemoteAddr(), err)
		return nil
	}
	defer func() { _ = inside.Close() }()
	if !s.clients.connected(u, peer, inside) || peer.SetDeadline(time.Time{}) != nil {
		return nil
	}
	evicted, err := s.clients.promote(u, who.id, who.right == rightJoin && s.authenticator.provesRanks())
	if err != nil {
		return &clientError{who.id, err}
	}
	if evicted != nil {
		s.evictions.Do(func(note string) {
			s.log.Sugar().Warnf("natsbus: all %d control connections were taken: agent %s gave its one up, since %v has the most%s", s.clients.max, evicted.id, evicted.from, note)
		})
	}
	asked, kept := s.unanswered.newShare(who.account, u.close), s.unread.newShare(who.account, u.close)
	defer asked.release()
	defer kept.release()
	w := newWindow(asked, s.queries)
	out := newClientWriter(inside, conn, w, kept)
	both := make(chan error, 1)
	safe.Go("natsbus.upgrade", func() {
		err := out.run()
		_ = peer.SetReadDeadline(time.Now().Add(closeTimeout))
		w.close()
		_ = inside.Close()
		both <- err
	})
	in := &commandFilter{from: bufio.NewReaderSize(newPaced(conn), maxCommand), to: bufio.NewWriterSize(inside, writeSize), connect: connect, inbox: inboxOf(who.id), window: w}
	err = in.run()
	_ = inside.Close()
	if errors.Is(err, errProtocol) {
		u.close()
	}
	if oerr := <-both; errors.Is(oerr, errUnread) {
		err = oerr
	}
	u.close()
	if errors.Is(err, errProtocol) || errors.Is(err, errUnread) {
		return &clientError{who.id, err}
	}
	return nil
}

// clientError is what a client did that had proved to be an agent.
type clientError struct {
	id  core.AgentID
	err error
}

func (e *clientError) Error() string { return "agent " + string(e.id) + ": " + e.err.Error() }
func (e *clientError) Unwrap() error { return e.err }
