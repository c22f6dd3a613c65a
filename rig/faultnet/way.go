// Package faultnet is a bad network: ways to TCP addresses that can be cut,
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

// Direction is one of the two that bytes take on a way.
type Direction int

// Up is from the dialling end to the address; Down is back.
const (
	Up Direction = iota
	Down
)

// Trouble is done to a way's bytes and new connections. The zero value does nothing.
type Trouble struct {
	Delay  time.Duration // each byte comes so much later
	Rate   int           // bytes a second of each connection and direction; 0 = any
	Hold   [2]bool       // per Direction: bytes stay where they are, as in a black hole that TCP survives
	Refuse bool          // new connections are reset
}

// Way forwards the connections of one address to another. Its methods may be
// called from any goroutine.
type Way struct {
	ln net.Listener
	to string

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu      sync.Mutex
	trouble Trouble
	changed chan struct{} // closed, and made anew, when trouble changes
	conns   map[*conn]struct{}
	carried [2]uint64
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
func Open(listen, to string) (*Way, error) {
	ln, err := net.Listen("tcp", listen)
	if err != nil {
		return nil, fmt.Errorf("way to %s: %w", to, err)
	}
	w := &Way{ln: ln, to: to, changed: make(chan struct{}), conns: map[*conn]struct{}{}}
	w.ctx, w.cancel = context.WithCancel(context.Background())
	w.goRun(w.accept)
	return w, nil
}

func (w *Way) goRun(f func()) {
	w.wg.Add(1)
	safe.Go("faultnet", func() {
		defer w.wg.Done()
		f()
	})
}

// Addr is where the way begins, host:port.
func (w *Way) Addr() string { return w.ln.Addr().String() }

// Set changes the way's trouble, also for open connections.
func (w *Way) Set(t Trouble) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.trouble = t
	close(w.changed)
	w.changed = make(chan struct{})
}

// Cut ends all open connections, with a reset or in order, and returns how many there
// were. New ones are let through.
func (w *Way) Cut(reset bool) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	for c := range w.conns {
		c.end(reset)
	}
	n := len(w.conns)
	clear(w.conns)
	return n
}

// HalfClose ends one direction of all open connections: its receiver reads an end, and
// bytes that still come for it are thrown away. It returns how many connections there
// were.
func (w *Way) HalfClose(d Direction) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	for c := range w.conns {
		c.halfClose(d)
	}
	return len(w.conns)
}

// Open is the number of connections that are open.
func (w *Way) Open() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.conns)
}

// Carried is how many bytes were forwarded in a direction.
func (w *Way) Carried(d Direction) uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.carried[d]
}

// Close ends the way and its connections, and waits until nothing of it runs.
func (w *Way) Close() {
	w.cancel()
	w.ln.Close()
	w.Cut(false)
	w.wg.Wait()
}

func (w *Way) now() (Trouble, <-chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.trouble, w.changed
}

func (w *Way) accept() {
	for {
		in, err := w.ln.Accept()
		if err != nil {
			if w.ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			if sleep.For(w.ctx, 10*time.Millisecond) != nil { // descriptors are short; others end soon
				return
			}
			continue
		}
		c := &conn{way: w, done: make(chan struct{})}
		c.ends[Up] = tune(in)
		w.mu.Lock()
		if w.ctx.Err() != nil || w.trouble.Refuse {
			c.end(true)
			w.mu.Unlock()
			continue
		}
		w.conns[c] = struct{}{}
		w.mu.Unlock()
		w.goRun(c.run)
	}
}

func tune(c net.Conn) *net.TCPConn {
	t := c.(*net.TCPConn)
	_ = t.SetReadBuffer(socketBuffer) // it may have been reset already
	_ = t.SetWriteBuffer(socketBuffer)
	return t
}

func (w *Way) forget(c *conn) {
	w.mu.Lock()
	delete(w.conns, c)
	w.mu.Unlock()
}

// conn is a forwarded connection: ends[Up] is the side that dialled, which
// bytes going up are read from; ends[Down] the address's.
type conn struct {
	way  *Way
	done chan struct{}

	mu    sync.Mutex
	ends  [2]*net.TCPConn
	ended bool
	deaf  [2]bool // per Direction: half-closed by HalfClose
}

func (c *conn) run() {
	defer c.way.forget(c)
	// Nor is a connection made through a black hole.
	if !c.pass(Up) {
		return
	}
	out, err := (&net.Dialer{Timeout: dialTimeout}).DialContext(c.way.ctx, "tcp", c.way.to)
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
		c.way.goRun(func() {
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
	if to := c.ends[1-d]; to != nil && !c.ended && !c.deaf[d] {
		c.deaf[d] = true
		_ = to.CloseWrite()
	}
}

func (c *conn) isDeaf(d Direction) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.deaf[d]
}

// pass waits while a direction is held; false when the connection has ended.
func (c *conn) pass(d Direction) bool {
	for {
		t, changed := c.way.now()
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
	c.way.goRun(func() { c.read(d, from, pieces) })
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
			} else if !c.isDeaf(d) {
				_ = to.CloseWrite()
			}
			return
		}
		if c.isDeaf(d) {
			continue
		}
		if _, err := to.Write(p.bytes); err != nil {
			if !c.isDeaf(d) {
				c.end(true)
				return
			}
			continue
		}
		c.way.mu.Lock()
		c.way.carried[d] += uint64(len(p.bytes))
		c.way.mu.Unlock()
		if t, _ := c.way.now(); t.Rate > 0 {
			if !c.wait(time.Duration(float64(len(p.bytes)) / float64(t.Rate) * float64(time.Second))) {
				return
			}
		}
	}
}

func (c *conn) read(d Direction, from *net.TCPConn, pieces chan<- piece) {
	for {
		size := chunk
		if t, _ := c.way.now(); t.Rate > 0 {
			size = min(chunk, max(t.Rate/20, 64)) // some twenty writes a second
		}
		buf := make([]byte, size)
		n, err := from.Read(buf)
		t, _ := c.way.now()
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
