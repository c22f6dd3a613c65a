// Package nettest has helpers for tests of broken networks.
package nettest

import (
	"io"
	"net"
	"slices"
	"sync"
	"testing"
)

// Forwarder is a way to a TCP address that can be cut and opened again, and
// held for a time.
type Forwarder struct {
	l     net.Listener
	to    string
	mu    sync.Mutex
	more  sync.Cond // on mu: something may pass again
	shut  bool
	conns []*forwarded
	gone  []*forwarded // lost
	left  int          // bytes that held connections may still bring back
	wg    sync.WaitGroup
}

// forwarded is one connection, with its two ends.
type forwarded struct {
	in, out net.Conn
	held    bool
	lost    bool // the end that listens does not know that it is over
}

func (c *forwarded) close() {
	c.in.Close()
	c.out.Close()
}

// Forward opens a way to an address; it ends with the test.
func Forward(t testing.TB, to string) *Forwarder {
	t.Helper()
	return ForwardFrom(t, "127.0.0.1:0", to)
}

// ForwardFrom is Forward with an address at which the way begins.
func ForwardFrom(t testing.TB, at, to string) *Forwarder {
	t.Helper()
	l, err := net.Listen("tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	f := &Forwarder{l: l, to: to}
	f.more.L = &f.mu
	f.wg.Go(f.accept)
	t.Cleanup(func() {
		l.Close()
		f.Shut(true) // also for the one that was accepted just now
		f.Cut()
		f.mu.Lock()
		for _, c := range f.gone {
			c.out.Close()
		}
		f.mu.Unlock()
		f.wg.Wait()
	})
	return f
}

// Addr is where the way begins, host:port.
func (f *Forwarder) Addr() string { return f.l.Addr().String() }

func (f *Forwarder) accept() {
	for {
		in, err := f.l.Accept()
		if err != nil {
			return
		}
		f.mu.Lock()
		shut := f.shut
		f.mu.Unlock()
		if shut {
			in.Close()
			continue
		}
		out, err := net.Dial("tcp", f.to)
		if err != nil {
			in.Close()
			continue
		}
		c := &forwarded{in: in, out: out}
		f.mu.Lock()
		if shut = f.shut; !shut {
			f.conns = append(f.conns, c)
		}
		f.mu.Unlock()
		if shut {
			c.close()
			continue
		}
		f.wg.Go(func() {
			_, _ = io.Copy(out, in)
			f.end(c)
		})
		f.wg.Go(func() {
			f.bring(c)
			f.end(c)
		})
	}
}

// end closes a connection; bytes that are held are lost.
func (f *Forwarder) end(c *forwarded) {
	f.mu.Lock()
	if !c.lost {
		c.close()
	}
	c.held = false
	f.mu.Unlock()
	f.more.Broadcast()
}

// bring copies the bytes that come back, as far as they are let through.
func (f *Forwarder) bring(c *forwarded) {
	buf := make([]byte, 32<<10)
	for {
		n, err := c.out.Read(buf)
		for part := buf[:n]; len(part) > 0; {
			n := f.pass(c, len(part))
			if _, err := c.in.Write(part[:n]); err != nil {
				return
			}
			part = part[n:]
		}
		if err != nil {
			return
		}
	}
}

// pass waits until some of n bytes may pass and says how many.
func (f *Forwarder) pass(c *forwarded, n int) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	for c.held && f.left == 0 {
		f.more.Wait()
	}
	if c.held {
		n = min(n, f.left)
		f.left -= n
	}
	return n
}

// Hold lets the present connections bring back n more bytes, all together, and then
// nothing until Release. Later ones are not held.
func (f *Forwarder) Hold(n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.left = n
	for _, c := range f.conns {
		c.held = true
	}
}

// Holds reports whether the bytes that Hold lets through have come.
func (f *Forwarder) Holds() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.left == 0 && slices.ContainsFunc(f.conns, func(c *forwarded) bool { return c.held })
}

// Release lets everything through again, in its order.
func (f *Forwarder) Release() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range f.conns {
		c.held = false
	}
	f.more.Broadcast()
}

// Open is the number of connections since the last cut.
func (f *Forwarder) Open() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.conns)
}

// Cut ends all connections; new ones are let through.
func (f *Forwarder) Cut() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range f.conns {
		c.close()
		c.held = false
	}
	f.conns = nil
	f.more.Broadcast()
}

// Lose ends all connections for the dialling end only, as a middlebox does that has
// forgotten them. The listening end keeps its connections until the test ends, and nobody
// reads the bytes that it writes. New ones are let through.
func (f *Forwarder) Lose() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range f.conns {
		c.lost, c.held = true, false
		c.in.Close()
	}
	f.gone = append(f.gone, f.conns...)
	f.conns = nil
	f.more.Broadcast()
}

// Shut closes the way, or opens it again: new connections end at once.
func (f *Forwarder) Shut(shut bool) {
	f.mu.Lock()
	f.shut = shut
	f.mu.Unlock()
}
