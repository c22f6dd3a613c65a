package natsbus

import (
	"errors"
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/kvconn/kvconn/internal/safe"
)

// lastWords bounds how long a client may take to end a connection that the server ended.
const lastWords = 500 * time.Millisecond

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
	u := &upgraded{}
	if err := s.clients.admit(u); err != nil {
		w.Header().Set("Retry-After", "1")
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	defer s.clients.dismiss(u)
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
	if !s.clients.connected(u, peer, inside) {
		return
	}
	_ = peer.SetWriteDeadline(time.Now().Add(writeWait))
	if _, err := io.WriteString(peer, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: "+protocol+"\r\n\r\n"); err != nil {
		return // the client has gone
	}
	_ = peer.SetWriteDeadline(time.Time{})

	both := make(chan struct{})
	var left atomic.Bool // the client went away by itself
	hs := &handshake{w: peer, done: func() { s.clients.letIn(u) }}
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
	if why := hs.refusal(); why != "" && !s.clients.isClosed() {
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
