package tcp

import (
	"errors"
	"net"
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// The guard sees the address of an endpoint's name before it is dialled. If it refuses the
// address, there is no connection.
func TestGuard(t *testing.T) {
	leaktest.Check(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	accepted := make(chan error, 1)
	go func() {
		c, err := l.Accept()
		if err == nil {
			_ = c.Close()
		}
		accepted <- err
	}()
	t.Cleanup(func() { _ = l.Close() })
	_, port, _ := net.SplitHostPort(l.Addr().String())
	named := "localhost:" + port
	refusal := errors.New("not this one")
	d := newAgent(t, Config{Streams: 1, Guard: func(endpoint, address string) error {
		host, p, err := net.SplitHostPort(address)
		if ip := net.ParseIP(host); err != nil || endpoint != named || ip == nil || !ip.IsLoopback() || p != port {
			t.Errorf("asked about %q at %q", endpoint, address)
		}
		return refusal
	}})
	if err := d.Connect("p", named, make([]byte, 16)); err != nil {
		t.Fatal(err)
	}
	until(t, "the failure is told", func() bool { return len(d.sink.All("down", "")) == 1 })
	if err := d.sink.All("down", "")[0].Err; !errors.Is(err, refusal) || !errors.Is(err, core.ErrConnectionLost) {
		t.Errorf("told %v, want the guard's error", err)
	}
	_ = l.Close()
	if err := <-accepted; err == nil {
		t.Error("a connection came")
	}
}
