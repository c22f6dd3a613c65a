// Package nettest has what tests of broken networks share.
package nettest

import (
	"io"
	"net"
	"sync"
	"testing"
)

// Forwarder is a way to a TCP address that can be cut and opened again.
type Forwarder struct {
	l     net.Listener
	to    string
	mu    sync.Mutex
	shut  bool
	conns []net.Conn
	wg    sync.WaitGroup
}

// Forward opens a way to an address; it ends with the test.
func Forward(t testing.TB, to string) *Forwarder {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f := &Forwarder{l: l, to: to}
	f.wg.Go(f.accept)
	t.Cleanup(func() {
		l.Close()
		f.Cut()
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
		f.mu.Lock()
		f.conns = append(f.conns, in, out)
		f.mu.Unlock()
		for _, way := range [][2]net.Conn{{in, out}, {out, in}} {
			f.wg.Go(func() {
				_, _ = io.Copy(way[0], way[1])
				way[0].Close()
				way[1].Close()
			})
		}
	}
}

// Open is the number of connections since the last cut.
func (f *Forwarder) Open() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.conns) / 2
}

// Cut ends all connections; new ones are let through.
func (f *Forwarder) Cut() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range f.conns {
		c.Close()
	}
	f.conns = nil
}

// Shut closes the way, or opens it again: new connections end at once.
func (f *Forwarder) Shut(shut bool) {
	f.mu.Lock()
	f.shut = shut
	f.mu.Unlock()
}
