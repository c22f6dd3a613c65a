package httpserve

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"testing"
	"time"

	"github.com/kvconn/kvconn/internal/leaktest"
)

// Within the grace a running request ends in its own time: its context lives
// on, and its client gets the whole answer.
func TestGraceLetsRequestsFinish(t *testing.T) {
	leaktest.Check(t)
	running, finish := make(chan struct{}), make(chan struct{})
	s := New(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		close(running)
		<-finish
		if r.Context().Err() != nil {
			t.Error("the context ended within the grace")
		}
		io.WriteString(w, "whole")
	}), Options{Name: "test", Grace: time.Minute})
	if err := s.Listen("127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	served, closed := make(chan error, 1), make(chan error, 1)
	go func() { served <- s.Serve() }()
	c, err := net.Dial("tcp", s.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	<-running
	go func() { closed <- s.Close(context.Background()) }()
	if err := <-served; err != nil { // Serve returns when the port is closed
		t.Errorf("Serve: %v", err)
	}
	close(finish)
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if body, err := io.ReadAll(resp.Body); err != nil || string(body) != "whole" {
		t.Errorf("body %q, %v", body, err)
	}
	if err := <-closed; err != nil {
		t.Errorf("Close: %v", err)
	}
}
