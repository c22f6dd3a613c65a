package bootstrap

import (
	"context"
	"io"
	"net"
	"net/http"
	"testing"
	"time"

	"github.com/kvconn/kvconn/internal/leaktest"
)

// TestBodiesThatNeverCome: whoever announces a body and sends none must not keep
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
		client := &http.Client{Timeout: 20 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
		answered := false
		for end := time.Now().Add(20 * time.Second); !answered && time.Now().Before(end); {
			if resp, err := client.Get("http://" + s.Addr().String() + "/health"); err == nil {
				resp.Body.Close()
				answered = true
			}
		}
		if !answered {
			t.Errorf("%.20q: the port is shut", head)
		}
		for _, c := range conns {
			c.Close()
		}
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		if err := s.Close(ctx); err != nil {
			t.Error(err)
		}
		cancel()
		<-served
	}
}
