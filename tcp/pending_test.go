package tcp

import (
	"io"
	"net"
	"testing"
	"time"

	"github.com/kvconn/kvconn/rig/leaktest"
)

// TestHelloBesideAFlood: the connections that one address opens and leaves open push out its own, and none of another address: that one's
// hello may come late.
func TestHelloBesideAFlood(t *testing.T) {
	leaktest.Check(t)
	p := newAgent(t, Config{MaxUnauthenticated: 4, DialTimeout: time.Hour})
	from := func(ip string) net.Conn {
		c, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(ip)}}).Dial("tcp", p.Endpoint())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		_ = c.SetDeadline(time.Now().Add(bound))
		return c
	}
	answered := func(who string, c net.Conn, rest []byte) {
		t.Helper()
		if _, err := c.Write(rest); err != nil {
			t.Fatalf("%s: %v", who, err)
		}
		if h, err := readHeader(c); err != nil || h.kind != frameLeave { // P does not know the ticket
			t.Fatalf("%s gets %+v, %v", who, h, err)
		}
		if _, err := io.ReadAll(c); err != nil {
			t.Errorf("%s: %v", who, err)
		}
	}
	honest, says := from("127.0.0.1"), hello(newRandom(), 0, 1, 0)
	if _, err := honest.Write(says[:9]); err != nil {
		t.Fatal(err)
	}
	for range 40 {
		from("127.0.0.2")
	}
	answered("the last of the flood", from("127.0.0.2"), says) // P takes them in their order
	answered("another address", honest, says[9:])
}
