package bootstrap

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"testing"
	"time"

	"github.com/kvconn/kvconn/rig/leaktest"
)

// TestBodiesThatNeverCome: a client that announces a body and sends none must not keep
// a place for longer than its answer takes.
func TestBodiesThatNeverCome(t *testing.T) {
	leaktest.Check(t)
	for _, head := range []string{
		"GET /nope HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n",
		"GET /query HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n",
		"POST /register HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n", // without a token
	} {
		s := NewServer(NewHandler(&Table{}, &Access{Token: "t"}, nil), nil, nil)
		if err := s.Listen("127.0.0.1:0"); err != nil {
			t.Fatal(err)
		}
		served := make(chan struct{})
		go func() {
			defer close(served)
			_ = s.Serve()
		}()
		var conns []net.Conn
		for range maxConns + 8 {
			c, err := net.Dial("tcp", s.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			_, _ = io.WriteString(c, head) // it may be closed already
			conns = append(conns, c)
		}
		for _, c := range conns {
			_ = c.SetReadDeadline(time.Now().Add(20 * time.Second))
			if _, err := io.ReadAll(c); errors.Is(err, os.ErrDeadlineExceeded) {
				t.Fatalf("%.20q: it keeps its place", head)
			}
			c.Close()
		}
		client := &http.Client{Timeout: 20 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
		resp, err := client.Get("http://" + s.Addr().String() + "/health")
		if err != nil {
			t.Fatalf("%.20q: %v", head, err)
		}
		resp.Body.Close()
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		if err := s.Close(ctx); err != nil {
			t.Error(err)
		}
		cancel()
		<-served
	}
}
