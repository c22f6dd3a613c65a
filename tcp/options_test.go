package tcp

import (
	"errors"
	"net"
	"strings"
	"syscall"
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// TestConfigDefaults: a Config that sets nothing has the bounds of core.
func TestConfigDefaults(t *testing.T) {
	c := (Config{}).withDefaults()
	if c.StallTimeout != core.DefaultStallTimeout || c.DialTimeout != core.DefaultConnectTimeout {
		t.Errorf("the stall timeout is %s, DialTimeout is %s, want %s and %s", c.StallTimeout, c.DialTimeout, core.DefaultStallTimeout, core.DefaultConnectTimeout)
	}
	if c := (Config{Streams: 1}).withDefaults(); c.First != 1 {
		t.Errorf("%d of %d streams are opened at first", c.First, c.Streams)
	}
}

// TestTakenPort: if the port is taken, the error says which one, which key sets it, and what to do.
func TestTakenPort(t *testing.T) {
	leaktest.Check(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, err = New(Config{Listen: true, ListenHost: "127.0.0.1", ListenPort: l.Addr().(*net.TCPAddr).Port}, new(kv.Layout), nil)
	if !errors.Is(err, syscall.EADDRINUSE) || !strings.Contains(err.Error(), l.Addr().String()) || !strings.Contains(err.Error(), "or set tcp_port to a free one") {
		t.Errorf("error %v", err)
	}
}
