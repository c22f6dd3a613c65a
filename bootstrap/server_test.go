package bootstrap

import (
	"errors"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"

	"github.com/kvconn/kvconn/rig/leaktest"
)

func TestPortInUse(t *testing.T) {
	leaktest.Check(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	err = NewServer(http.NotFoundHandler(), nil, nil).Listen(l.Addr().String())
	if !errors.Is(err, syscall.EADDRINUSE) ||
		!strings.Contains(err.Error(), l.Addr().String()) || !strings.Contains(err.Error(), "bootstrap_port") {
		t.Fatalf("error %v; want EADDRINUSE with the address and bootstrap_port", err)
	}
}
