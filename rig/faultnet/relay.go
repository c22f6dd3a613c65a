// Package faultnet is a bad network: relays to TCP addresses that can be cut,
// delayed, throttled, half-closed and held while connections use them.
package faultnet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/kvconn/kvconn/internal/safe"
	"github.com/kvconn/kvconn/internal/sleep"
)

// Direction is one of the two that bytes take on a relay.
type Direction int

// Up is from the dialling end to the address; Down is back.
const (
	Up Direction = iota
	Down
)

// Impairment is done to a relay's bytes and new connections. The zero value does nothing.
type Impairment struct {
	Delay  time.Duration // each byte comes so much later
	Rate   int           // bytes a second of each connection and direction; 0 = any
	Hold   [2]bool       // per Direction: bytes stay where they are, as in a black hole that TCP survives
	Refuse bool          // new connections are reset
}

// Relay forwards the connections of one address to another. Its methods may be
// called from any goroutine.
type Relay struct {
	ln net.Listener
	to string

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu         sync.Mutex
	impairment Impairment
	changed    chan struct{} // closed, and made anew, when the impairment changes
	conns      map[*conn]struct{}
	carried    [2]uint64
}

const (
	dialTimeout = 3 * time.Second
	chunk       = 32 << 10
	// inFlight bounds the chunks that a direction of a connection holds, and socketBuffer
	// the system's: the end of a sender is not to lie long behind its bytes.
	inFlight     = 8
	socketBuffer = 128 << 10
)

// Open listens on an address and forwards to another, until Close.
func Open(listen, to string) (*Relay, error) {
	ln, err := net.Listen("tcp", listen)
	if err != nil {
		return nil, fmt.Errorf("relay to %s: %w", to, err)
	}
	r := &Relay{ln: ln, to: to, changed: make(chan struct{}), conns: map[*conn]struct{}{}}
	r.ctx, r.cancel = context.WithCancel(context.Background())
	r.goRun(r.accept)
	return r, nil
}

func (r *Relay) goRun(f func()) {
	r.wg.Add(1)
	safe.Go("faultnet", func() {
		defer r.wg.Done()
		f()
	})
}

// Addr is where the relay listens, host:port.
func (r *Relay) Addr() string { return r.ln.Addr().String() }

// Set changes the relay's impairment, also for open connections.
func (r *Relay) Set(t Impairment) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.impairment = t
	close(r.changed)
	r.changed = make(chan struct{})
}

// Cut ends all open connections, with a reset or in order, and returns how many there
// were. New ones are let through.
func (r *Relay) Cut(reset bool) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	for c := range r.conns {
		c.end(reset)
	}
	n := len(r.conns)
	clear(r.conns)
	return n
}

// HalfClose ends one direction of all open connections: its receiver reads an end, and
// bytes that still come for it are thrown away. It returns how many connections there
// were.
func (r *Relay) HalfClose(d Direction) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	for c := range r.conns {
		c.halfClose(d)
	}
	return len(r.conns)
}

// Open is the number of connections that are open.
func (r *Relay) Open() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.conns)
}

// Carried is how many bytes were forwarded in a direction.
func (r *Relay) Carried(d Direction) uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.carried[d]
}

// Close ends the relay and its connections, and waits until nothing of it runs.
func (r *Relay) Close() {
	r.cancel()
	r.ln.Close()
	r.Cut(false)
	r.wg.Wait()
}

func (r *Relay) now() (Impairment, <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.impairment, r.changed
}

func (r *Relay) accept() {
	for {
		in, err := r.ln.Accept()
		if err != nil {
			if r.ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			if sleep.For(r.ctx, 10*time.Millisecond) != nil { // descriptors are short; others end soon
				return
			}
			continue
		}
		c := &conn{relay: r, done: make(chan struct{})}
		c.ends[Up] = tune(in)
		r.mu.Lock()
		if r.ctx.Err() != nil || r.impairment.Refuse {
			c.end(true)
			r.mu.Unlock()
			continue
		}
		r.conns[c] = struct{}{}
		r.mu.Unlock()
		r.goRun(c.run)
	}
}

func tune(c net.Conn) *net.TCPConn {
	t := c.(*net.TCPConn)
	_ = t.SetReadBuffer(socketBuffer) // it may have been reset already
	_ = t.SetWriteBuffer(socketBuffer)
	return t
}

func (r *Relay) forget(c *conn) {
	r.mu.Lock()
	delete(r.conns, c)
	r.mu.Unlock()
}

// conn is a forwarded connection: ends[Up] is the side that dialled, which
// bytes going up are read from; ends[Down] the address's.
type conn struct {
	relay *Relay
	done  chan struct{}

	mu      sync.Mutex
	ends    [2]*net.TCPConn
	ended   bool
	stalled [2]bool // per Direction: half-closed by HalfClose
}

func (c *conn) run() {
	defer c.relay.forget(c)
	// Nor is a connection made through a black hole.
	if !c.pass(Up) {
		return
	}
	out, err := (&net.Dialer{Timeout: dialTimeout}).DialContext(c.relay.ctx, "tcp", c.relay.to)
	if err != nil {
		c.end(true)
		return
	}
	c.mu.Lock()
	if c.ended {
		c.mu.Unlock()
		out.Close()
		return
	}
	c.ends[Down] = tune(out)
	c.mu.Unlock()
	var both sync.WaitGroup
	for _, d := range []Direction{Up, Down} {
		both.Add(1)
		c.relay.goRun(func() {
			defer both.Done()
			c.carry(d)
		})
	}
	both.Wait()
	c.end(false)
}

// end closes both sockets; with reset the peers read a broken connection.
func (c *conn) end(reset bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		return
	}
	c.ended = true
	close(c.done)
	for _, s := range c.ends {
		if s == nil {
			continue
		}
		if reset {
			_ = s.SetLinger(0)
		}
		_ = s.Close()
	}
}

func (c *conn) halfClose(d Direction) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if to := c.ends[1-d]; to != nil && !c.ended && !c.stalled[d] {
		c.stalled[d] = true
		_ = to.CloseWrite()
	}
}

func (c *conn) isStalled(d Direction) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.stalled[d]
}

// pass waits while a direction is held; false when the connection has ended.
func (c *conn) pass(d Direction) bool {
	for {
		t, changed := c.relay.now()
		if !t.Hold[d] {
			return c.wait(0)
		}
		select {
		case <-c.done:
			return false
		case <-changed:
		}
	}
}

// wait sleeps; false when the connection ended meanwhile.
func (c *conn) wait(d time.Duration) bool {
	if d <= 0 {
		select {
		case <-c.done:
			return false
		default:
			return true
		}
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-c.done:
		return false
	case <-t.C:
		return true
	}
}

// piece is some bytes on their way. The last one has none, and says how the direction
// ended.
type piece struct {
	bytes []byte
	due   time.Time
	err   error
}

// carry moves one direction's bytes. Reading is apart from writing, so that a
// delay does not become a rate.
func (c *conn) carry(d Direction) {
	from, to := c.ends[d], c.ends[1-d]
	pieces := make(chan piece, inFlight)
	c.relay.goRun(func() { c.read(d, from, pieces) })
	for {
		var p piece
		select {
		case <-c.done:
			return
		case p = <-pieces:
		}
		if !c.wait(time.Until(p.due)) || !c.pass(d) {
			return
		}
		if p.err != nil {
			if !errors.Is(p.err, io.EOF) {
				c.end(true)
			} else if !c.isStalled(d) {
				_ = to.CloseWrite()
			}
			return
		}
		if c.isStalled(d) {
			continue
		}
		if _, err := to.Write(p.bytes); err != nil {
			if !c.isStalled(d) {
				c.end(true)
				return
			}
			continue
		}
		c.relay.mu.Lock()
		c.relay.carried[d] += uint64(len(p.bytes))
		c.relay.mu.Unlock()
		if t, _ := c.relay.now(); t.Rate > 0 {
			if !c.wait(time.Duration(float64(len(p.bytes)) / float64(t.Rate) * float64(time.Second))) {
				return
			}
		}
	}
}

func (c *conn) read(d Direction, from *net.TCPConn, pieces chan<- piece) {
	for {
		size := chunk
		if t, _ := c.relay.now(); t.Rate > 0 {
			size = min(chunk, max(t.Rate/20, 64)) // some twenty writes a second
		}
		buf := make([]byte, size)
		n, err := from.Read(buf)
		t, _ := c.relay.now()
		due := time.Now().Add(t.Delay)
		for _, p := range []piece{{bytes: buf[:n], due: due}, {err: err, due: due}} {
			if len(p.bytes) == 0 && p.err == nil {
				continue
			}
			select {
			case pieces <- p:
			case <-c.done:
				return
			}
		}
		if err != nil {
			return
		}
	}
}
