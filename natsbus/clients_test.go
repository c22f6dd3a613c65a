package natsbus

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// tally is a connection that says whether it was closed.
type tally struct {
	net.Conn
	closed bool
}

func (c *tally) Close() error {
	c.closed = true
	return nil
}

// from is an address that connections count under.
func from(host byte) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, 0, host}), 32)
}

// newcomer is admitted, and has a connection then.
func newcomer(t *testing.T, c *clients, of netip.Prefix) (u *clientConn, conn *tally) {
	t.Helper()
	u, conn = &clientConn{}, &tally{}
	if err := c.admit(u, of); err != nil {
		t.Fatalf("one of %v: %v", of, err)
	}
	if !c.connected(u, conn, noConn) {
		t.Fatalf("one of %v has lost its place before it was there", of)
	}
	return u, conn
}

// TestHandshakePlaces: of those who have not proved themselves, one of an address that has the most gives its place to an address
// that has at least two fewer, the oldest first, and to any once it has had its time: so a burst of agents from one address, or from many,
// is let in one after another, and nobody keeps a place by silence.
func TestHandshakePlaces(t *testing.T) {
	now := time.Now()
	c := newClients(2)
	c.now = func() time.Time { return now }
	mine, kept := newcomer(t, c, from(1))
	var silent []*tally
	for range maxHandshakes - 1 {
		_, conn := newcomer(t, c, from(2))
		silent = append(silent, conn)
	}
	if err := c.admit(&clientConn{}, from(2)); err == nil || !strings.Contains(err.Error(), "not proved themselves") {
		t.Errorf("one more of the crowd's address: %v", err)
	}
	late := &clientConn{}
	if err := c.admit(late, from(1)); err != nil {
		t.Fatalf("one more of another address: %v", err)
	}
	now = now.Add(handshakeGrace)
	if err := c.admit(&clientConn{}, from(2)); err != nil {
		t.Errorf("one more of the crowd's address, when those before have had their time: %v", err)
	}
	for i, conn := range append(silent, kept) {
		if conn.closed != (i < 2) {
			t.Errorf("connection %d is closed: %v", i, conn.closed)
		}
	}
	if len(c.conns) != maxHandshakes || c.waiting[from(2)] != maxHandshakes-2 || c.waiting[from(1)] != 2 {
		t.Errorf("%d connections, %v", len(c.conns), c.waiting)
	}
	for range maxHandshakes { // others come until the two addresses have about as many
		_ = c.admit(&clientConn{}, from(3))
	}
	if a, b := c.waiting[from(2)], c.waiting[from(3)]; c.waiting[from(1)] != 2 || a-b > 2 || b-a > 2 {
		t.Errorf("%v", c.waiting)
	}
	gone := &clientConn{}
	if err := c.admit(gone, from(4)); err != nil {
		t.Fatal(err)
	}
	c.mu.Lock()
	c.end(gone) // before its connection is there
	c.mu.Unlock()
	if c.connected(gone, noConn, noConn) || !c.evicted(gone) {
		t.Error("a connection goes on without a place")
	}
	if _, err := c.promote(gone, "G", false); !errors.Is(err, errEvicted) {
		t.Errorf("it is let in: %v", err)
	}
	c.release(gone)
	if evicted, err := c.promote(mine, "M", false); evicted != nil || err != nil || c.waiting[from(1)] != 1 || c.held[from(1)] != 1 {
		t.Errorf("%v, %v; %v, %v", evicted, err, c.waiting, c.held)
	}
}

// TestHandshakesOfManyAddresses: silent connections of as many addresses as there are places, one of each, give way too.
func TestHandshakesOfManyAddresses(t *testing.T) {
	now := time.Now()
	c := newClients(2)
	c.now = func() time.Time { return now }
	for i := range maxHandshakes {
		newcomer(t, c, netip.PrefixFrom(netip.AddrFrom16([16]byte{0x20, 1, byte(i)}), 64))
	}
	if err := c.admit(&clientConn{}, from(1)); err == nil {
		t.Error("a connection that has just come gives its place up")
	}
	now = now.Add(handshakeGrace)
	newcomer(t, c, from(1))
}

// TestPlacesOfClients: if all places of clients are taken, the newest client of an address that has the most loses its
// place to a newcomer, of an address that has at least two fewer. A rank that has proved a secret keeps its place, and does not
// count.
func TestPlacesOfClients(t *testing.T) {
	c := newClients(5)
	enter := func(of netip.Prefix, id core.AgentID, pinned bool) (u *clientConn, conn *tally, evicted *clientConn) {
		t.Helper()
		u, conn = newcomer(t, c, of)
		evicted, err := c.promote(u, id, pinned)
		if err != nil {
			t.Fatal(err)
		}
		return u, conn, evicted
	}
	_, first, _ := enter(from(1), "A1", false)
	second, ended, _ := enter(from(1), "A2", false)
	_, rank, _ := enter(from(2), "R1", true)
	enter(from(2), "R2", true)
	_, other, evicted := enter(from(2), "B1", false)
	if evicted != nil {
		t.Fatalf("%v gave up a place though one was free", evicted.id)
	}
	for _, of := range []byte{1, 2} { // 2 and 1
		if err := c.admit(&clientConn{}, from(of)); err == nil || !strings.Contains(err.Error(), "5 control connections") {
			t.Errorf("one more of %v: %v", from(of), err)
		}
	}
	_, _, evicted = enter(from(3), "C1", false)
	if evicted != second || !ended.closed || first.closed || rank.closed || other.closed {
		t.Errorf("%+v gave its place up", evicted)
	}
	u := &clientConn{}
	if err := c.admit(u, from(4)); err == nil {
		t.Error("1, 1 and 1: one more has a place")
	}
	for u := range c.conns {
		c.remove(u)
	}
	if c.authenticated != 0 || len(c.held) != 0 || len(c.waiting) != 0 {
		t.Errorf("after all have gone: %d in, %v, %v", c.authenticated, c.held, c.waiting)
	}
	two, _ := newcomer(t, c, from(4)) // two that are on their way to the last place
	three, _ := newcomer(t, c, from(5))
	for i := range 4 {
		enter(from(byte(6+i)), "X", false)
	}
	if evicted, err := c.promote(two, "D1", false); err != nil || evicted != nil {
		t.Errorf("%v, %v", evicted, err)
	}
	if evicted, err := c.promote(three, "D2", false); err == nil {
		t.Errorf("1 each: %v gave its place up", evicted)
	}
	c.close()
	if err := c.admit(&clientConn{}, from(1)); !errors.Is(err, errServerClosed) {
		t.Errorf("after the end: %v", err)
	}
}

// TestPlaceIsGivenUp: with real connections. Clients at one address have all places. One at another address gets in, an agent
// that was there before goes on, and the client that has lost its place is gone.
func TestPlaceIsGivenUp(t *testing.T) {
	leaktest.Check(t)
	log, logs := observed()
	p := newPort(t, "127.0.0.1:0", ServerOptions{MaxConns: 3, Logger: log})
	prefill := newBus(t, Options{Identity: named("P"), Server: p.Server})
	serve(prefill)
	register(t, prefill, "e")
	d := newBus(t, Options{Identity: named("D")})
	_, via, err := d.Lookup(ctxOf(t, within), core.Target{Bootstrap: p.url()})
	if err != nil {
		t.Fatal(err)
	}
	at := func(host byte) Control { // a dialer's address
		return func(_, _ string, raw syscall.RawConn) (err error) {
			cerr := raw.Control(func(fd uintptr) { err = unix.Bind(int(fd), &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, host}}) })
			return errors.Join(err, cerr)
		}
	}
	var agents []net.Conn
	for i := range 2 {
		e := &clientHandshake{self: named(fmt.Sprint("E", i)), right: rightAsk}
		conn, err := dialUpgrade(Address{Host: p.addr, Name: "127.0.0.1"}, nil, at(2), e)(ctxOf(t, within))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		_ = conn.SetDeadline(time.Now().Add(within))
		if _, err := fmt.Fprint(conn, "CONNECT {}\r\nPING\r\n"); err != nil {
			t.Fatal(err)
		}
		if _, err := told(bufio.NewReader(conn), "PONG"); err != nil { // it is in
			t.Fatal(err)
		}
		agents = append(agents, conn)
	}
	c := &clientHandshake{self: named("C"), right: rightAsk}
	late, err := dialUpgrade(Address{Host: p.addr, Name: "127.0.0.1"}, nil, at(3), c)(ctxOf(t, within))
	if err != nil {
		t.Fatal(err)
	}
	defer late.Close()
	_ = late.SetDeadline(time.Now().Add(within))
	_, _ = fmt.Fprint(late, "CONNECT {}\r\nPING\r\n")
	if _, err := told(bufio.NewReader(late), "PONG"); err != nil {
		t.Errorf("the newcomer is not in: %v", err)
	}
	if _, err := io.Copy(io.Discard, agents[1]); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("the newest of the crowd is still connected")
	}
	ask(t, d, via, "P", "P via : hello D")
	if logs.FilterMessageSnippet("gave its one up").Len() != 1 {
		t.Errorf("the log: %v", logs.All())
	}
}
