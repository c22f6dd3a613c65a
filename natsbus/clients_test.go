package natsbus

import (
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/core"
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
func newcomer(t *testing.T, c *clients, of netip.Prefix) (u *upgraded, conn *tally) {
	t.Helper()
	u, conn = &upgraded{}, &tally{}
	if err := c.admit(u, of); err != nil {
		t.Fatalf("one of %v: %v", of, err)
	}
	if !c.connected(u, conn, noConn) {
		t.Fatalf("one of %v has lost its place before it was there", of)
	}
	return u, conn
}

// TestPlacesOfStrangers: of those who have not proved themselves the address that has the most gives a place up, its oldest first.
func TestPlacesOfStrangers(t *testing.T) {
	c := newClients(2)
	mine, kept := newcomer(t, c, from(1))
	var silent []*tally
	for range 3 * maxHandshakes {
		_, conn := newcomer(t, c, from(2))
		silent = append(silent, conn)
	}
	if kept.closed {
		t.Error("a flood from another address takes the place of one that is about to prove itself")
	}
	for i, conn := range silent {
		if ended := i < len(silent)-(maxHandshakes-1); conn.closed != ended {
			t.Fatalf("connection %d of %d is closed: %v", i, len(silent), conn.closed)
		}
	}
	if len(c.conns) != maxHandshakes || c.waiting[from(2)] != maxHandshakes-1 {
		t.Errorf("%d connections, %v", len(c.conns), c.waiting)
	}
	late := &upgraded{}
	if err := c.admit(late, from(2)); err != nil {
		t.Fatal(err)
	}
	for range maxHandshakes { // it loses its place before its connection is there
		newcomer(t, c, from(2))
	}
	if c.connected(late, noConn, noConn) || !c.lost(late) {
		t.Error("a connection goes on without a place")
	}
	if _, err := c.letIn(late, "L", false); !errors.Is(err, errPlaceLost) {
		t.Errorf("it is let in: %v", err)
	}
	c.dismiss(late)
	if gave, err := c.letIn(mine, "M", false); gave != nil || err != nil || c.waiting[from(1)] != 0 || c.held[from(1)] != 1 {
		t.Errorf("%v, %v; %v, %v", gave, err, c.waiting, c.held)
	}
}

// TestPlacesOfClients: if all places of clients are taken, the newest client of the address that has the most loses its
// place to a newcomer, of an address that has at least two fewer. A rank that has proved a secret keeps its place.
func TestPlacesOfClients(t *testing.T) {
	c := newClients(4)
	enter := func(of netip.Prefix, id core.AgentID, keeps bool) (u *upgraded, conn *tally, gave *upgraded) {
		t.Helper()
		u, conn = newcomer(t, c, of)
		gave, err := c.letIn(u, id, keeps)
		if err != nil {
			t.Fatal(err)
		}
		return u, conn, gave
	}
	_, first, _ := enter(from(1), "A1", false)
	second, ended, _ := enter(from(1), "A2", false)
	_, rank, _ := enter(from(1), "R", true)
	_, other, gave := enter(from(2), "B1", false)
	if gave != nil {
		t.Fatalf("%v gave up a place though one was free", gave.id)
	}
	for _, full := range []byte{1, 2} { // 3 to 3, and 3 to 1: the second has at least two fewer
		err := c.admit(&upgraded{}, from(full))
		if full == 1 && (err == nil || !strings.Contains(err.Error(), "4 control connections")) {
			t.Errorf("one more of the address that has the most: %v", err)
		}
		if full == 2 && err != nil {
			t.Error(err)
		}
	}
	_, _, gave = enter(from(3), "C1", false)
	if gave != second || !ended.closed || first.closed || rank.closed || other.closed {
		t.Errorf("%+v gave its place up", gave)
	}
	if err := c.admit(&upgraded{}, from(2)); err == nil {
		t.Error("2, 1 and 1: one more of the second has a place")
	}
	two, _ := newcomer(t, c, from(4)) // and of those that are on their way to one place, one gets it
	three, _ := newcomer(t, c, from(4))
	if gave, err := c.letIn(two, "D1", false); err != nil || gave == nil || gave.id != "A1" {
		t.Errorf("%v, %v", gave, err)
	}
	if gave, err := c.letIn(three, "D2", false); err == nil {
		t.Errorf("1, 1, 1 and 1: %v gave its place up", gave.id)
	}
	for u := range c.conns {
		c.remove(u)
	}
	if c.in != 0 || len(c.held) != 0 || len(c.waiting) != 0 {
		t.Errorf("after all have gone: %d in, %v, %v", c.in, c.held, c.waiting)
	}
	c.close()
	if err := c.admit(&upgraded{}, from(1)); !errors.Is(err, errServerClosed) {
		t.Errorf("after the end: %v", err)
	}
}
