// A server's connections have places. If all are taken, one that waits or takes too much gives way to a new one.

package httpserve

import (
	"container/list"
	"context"
	"net"
	"net/http"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/internal/quota"
)

// smallHead is how much of a header any connection may have sent and leave unfinished. What net/http makes of a hostile one
// takes some twenty times its length.
const smallHead = 512

// withEnding times MaxConns bounds the connections whose goroutines have not ended, with those that were dropped.
// If so many have not ended, a new connection waits in the kernel's queue, for forEnding at most.
const (
	withEnding = 4
	forEnding  = time.Second
)

// conn is a connection's state, and its place among the others.
type conn struct {
	http.ConnState
	c    net.Conn
	from netip.Prefix  // the address that it counts under
	list *places       // waiting, awaiting, busy, or nil
	turn *list.Element // among all that wait
	then time.Time     // since when it waits
	head int           // bytes of a header that has not come whole
}

// places are connections by their addresses.
type places = quota.Places[netip.Prefix, *conn]

// connKey is under which a request's context has its connOf.
type connKey struct{}

type connOf struct {
	s *Server
	c net.Conn
}

// Awaiting says that a request waits for its client until done is called. Meanwhile its connection may give way to a new
// one, if no connection is idle.
func Awaiting(ctx context.Context) (done func()) {
	of, ok := ctx.Value(connKey{}).(connOf)
	if !ok {
		return func() {}
	}
	of.move(&of.s.awaiting)
	return func() { of.move(&of.s.busy) }
}

// answering is h, for which a connection is busy. Before that it waits.
func (s *Server) answering(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if of, ok := r.Context().Value(connKey{}).(connOf); ok {
			of.move(&s.busy)
		}
		h.ServeHTTP(w, r)
	})
}

// move puts the connection of a request into a list.
func (of connOf) move(l *places) {
	of.s.mu.Lock()
	defer of.s.mu.Unlock()
	if k := of.s.conns[of.c]; k != nil && k.ConnState == http.StateActive {
		of.s.move(k, l)
	}
}

// track follows each connection until its goroutine ends or gives it away.
func (s *Server) track(c net.Conn, state http.ConnState) {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := s.conns[c]
	if state == http.StateClosed || state == http.StateHijacked {
		if k != nil {
			if k.ConnState == http.StateClosed {
				s.ending--
			} else {
				s.leave(k)
			}
		}
		delete(s.conns, c)
		select {
		case s.left <- struct{}{}:
		default:
		}
		if len(s.conns) == 0 && s.empty != nil {
			close(s.empty)
			s.empty = nil
		}
		return
	}
	if k == nil {
		k = &conn{c: c, from: fault.Pick("http-addresses-alike", quota.AddressOf(c.RemoteAddr()), netip.Prefix{})}
		// One that was dropped has given its place back, though its goroutine may take half a second to end. Else a burst
		// of unknown clients, each dropped for the next one, would hold all places with what is about to end.
		full := s.opt.MaxConns > 0 && (len(s.conns) >= withEnding*s.opt.MaxConns || len(s.conns)-s.ending >= s.opt.MaxConns && !s.evict())
		s.conns[c] = k
		if full {
			s.drop(k)
		}
	}
	if k.ConnState == http.StateClosed { // its goroutine is about to end
		return
	}
	k.ConnState = state
	h, _ := c.(*headConn)
	if state == http.StateActive {
		s.endHead(k) // answering moves it; a header that is refused is active too, and half a second long
	} else {
		s.move(k, &s.waiting)
	}
	if h != nil {
		h.until.Store(nil)
		h.inHead.Store(state != http.StateActive)
	}
}

// evict makes room for a connection: unknown clients that hold all places must not keep others out. It ends the first that there is of these:
//   - if requests are brief, and one address has more than half of all places busy, the one of these that has been busy for the longest;
//   - of those without a request, the one that has waited for the longest, if for s.stale;
//   - of the address with the most without a request, the one of them that has waited for the longest;
//   - of the address with the most whose requests wait for their clients, the one of them that has waited for the longest;
//   - if requests are brief, of the address with the most that are busy, the one that has been busy for the longest.
//
// So no client that works with many at a time loses one that works to one that says nothing. mu is held.
func (s *Server) evict() bool {
	k, ok := (*conn)(nil), false
	if s.opt.Brief && (s.busy.Most() > int64(s.opt.MaxConns)/2 || fault.On("http-work-gives-way") && s.busy.Most() > s.waiting.Most()) {
		k, ok = s.busy.Oldest()
	}
	if first := s.turns.Front(); !ok && first != nil && time.Since(first.Value.(*conn).then) >= s.stale {
		k, ok = first.Value.(*conn), true
	}
	if !ok {
		k, ok = s.waiting.Oldest()
	}
	if !ok {
		k, ok = s.awaiting.Oldest()
	}
	if !ok && s.opt.Brief {
		k, ok = s.busy.Oldest()
	}
	if ok {
		s.drop(k)
	}
	return ok
}

// drop ends a connection. mu is held.
func (s *Server) drop(k *conn) {
	s.leave(k)
	k.ConnState = http.StateClosed
	s.ending++
	hangUp(k.c)
}

// leave takes a connection out of all lists. mu is held.
func (s *Server) leave(k *conn) {
	s.endHead(k)
	s.move(k, nil)
}

// move puts a connection behind all others of a list. mu is held.
func (s *Server) move(k *conn, to *places) {
	if k.list != nil {
		k.list.Remove(k)
	}
	if k.turn != nil {
		s.turns.Remove(k.turn)
		k.turn = nil
	}
	if k.list = to; to != nil {
		to.Put(k.from, k, 1)
	}
	if to == &s.waiting {
		k.turn, k.then = s.turns.PushBack(k), time.Now()
	}
}

// endHead forgets a header. mu is held.
func (s *Server) endHead(k *conn) {
	if s.longHeads.Has(k) {
		s.longHeads.Remove(k)
		s.longBytes -= k.head
	}
	k.head = 0
}

// readHead counts bytes of a header.
func (s *Server) readHead(c net.Conn, n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := s.conns[c]
	if k == nil || k.ConnState != http.StateNew && k.ConnState != http.StateIdle {
		return
	}
	k.head += n
	switch {
	case s.longHeads.Has(k):
		s.longHeads.Weigh(k, int64(n))
		s.longBytes += n
	case k.head > smallHead:
		s.longHeads.Put(k.from, k, int64(k.head))
		s.longBytes += k.head
	}
	for s.longBytes > s.opt.MaxLongHeads && s.longHeads.Len() > 1 {
		long, _ := s.longHeads.Oldest()
		s.drop(long)
	}
}

// patientListener takes no connection while too many that were dropped have not ended.
type patientListener struct {
	net.Listener
	s *Server
}

func (l patientListener) Accept() (net.Conn, error) {
	if most := withEnding * l.s.opt.MaxConns; most > 0 && l.s.open() >= most {
		wait := time.NewTimer(forEnding)
		defer wait.Stop()
		for waiting := true; waiting && l.s.open() >= most; {
			select {
			case <-l.s.left:
			case <-wait.C:
				waiting = false
			}
		}
	}
	return l.Listener.Accept()
}

// headListener's connections count the bytes of headers.
type headListener struct {
	net.Listener
	s *Server
}

func (l headListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	if t, ok := c.(*net.TCPConn); ok {
		return &headConn{TCPConn: t, s: l.s}, nil
	}
	return c, nil
}

type headConn struct {
	*net.TCPConn
	s      *Server
	inHead atomic.Bool
	until  atomic.Pointer[time.Time] // the header must have come by then; nil while no byte of it has
	before int                       // bytes of a header that the last Read brought
}

// SetReadDeadline is net/http's, which knows when it began to wait for a header, and not when the header began.
func (c *headConn) SetReadDeadline(t time.Time) error {
	if until := c.until.Load(); until != nil && t.After(*until) {
		t = *until
	}
	return c.TCPConn.SetReadDeadline(t)
}

func (c *headConn) Read(p []byte) (int, error) {
	if c.before > 0 && c.inHead.Load() { // that was not all: a header that comes whole counts for nothing
		c.s.readHead(c, c.before)
	}
	c.before = 0
	n, err := c.TCPConn.Read(p)
	if c.inHead.Load() {
		c.before = n
		if most := c.s.opt.HeadTimeout; most > 0 && n > 0 && c.until.Load() == nil {
			until := time.Now().Add(most)
			c.until.Store(&until)
			_ = c.TCPConn.SetReadDeadline(until)
		}
	}
	return n, err
}

// wholeListener's connections end with the first write that fails. TLS closes with a close_notify: after a write that ran out of time in the
// middle of a record, the client would read it as the record's rest, and tell of a "bad record MAC" in place of an end.
type wholeListener struct{ net.Listener }

func (l wholeListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &wholeConn{Conn: c}, nil
}

type wholeConn struct {
	net.Conn
	torn atomic.Pointer[error] // of the write that failed
}

func (c *wholeConn) Write(p []byte) (int, error) {
	if err := c.torn.Load(); err != nil {
		return 0, *err
	}
	n, err := c.Conn.Write(p)
	if err != nil {
		c.torn.Store(&err)
	}
	return n, err
}

// drained returns a channel that is closed when no connection is left.
func (s *Server) drained() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.empty == nil {
		s.empty = make(chan struct{})
	}
	done := s.empty
	if len(s.conns) == 0 {
		close(s.empty)
		s.empty = nil
	}
	return done
}

func (s *Server) open() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.conns)
}
