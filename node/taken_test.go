package node

import (
	"errors"
	"net"
	"strings"
	"syscall"
	"testing"

	"github.com/kvconn/kvconn/rig/leaktest"
)

// TestTakenPorts: if a port that a key names is taken, the error says which port, which key, and what to do.
func TestTakenPorts(t *testing.T) {
	for key, set := range map[string]func(c *Config, port int){
		"bootstrap_port": func(c *Config, port int) { c.BootstrapPort = port },
		"tcp_port":       func(c *Config, port int) { c.TCPPort = port },
	} {
		t.Run(key, func(t *testing.T) {
			leaktest.Check(t)
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			c := forced(RolePrefill, "tcp")
			set(&c, l.Addr().(*net.TCPAddr).Port)
			a, err := Open(c, Options{})
			if err == nil {
				defer a.Close()
				err = a.RegisterKVCaches(regions(make([]byte, layers*numBlocks*blockBytes)))
			}
			if !errors.Is(err, syscall.EADDRINUSE) || !strings.Contains(err.Error(), l.Addr().String()) || !strings.Contains(err.Error(), key+" to a free one") {
				t.Errorf("error %v, want one with the address, %s and what to do", err, key)
			}
		})
	}
}
