package httpserve

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/rig/nettest"
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

// Connections that say nothing cannot keep others out.
func TestMaxConnsEvictsWhoWaits(t *testing.T) {
	leaktest.Check(t)
	s := New(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "hello") }), Options{Name: "test", MaxConns: 4})
	if err := s.Listen("127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve() }()
	for range 20 {
		c, err := net.Dial("tcp", s.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	c, err := net.Dial("tcp", s.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	if answer, err := io.ReadAll(c); err != nil || !strings.HasSuffix(string(answer), "hello") {
		t.Errorf("%q, %v", answer, err)
	}
	s.mu.Lock()
	open := 0
	for _, state := range s.conns {
		if state.ConnState != http.StateClosed {
			open++
		}
	}
	s.mu.Unlock()
	if open > 4 {
		t.Errorf("%d connections are open", open)
	}
	if err := s.Close(context.Background()); err != nil {
		t.Error(err)
	}
	if err := <-served; err != nil {
		t.Error(err)
	}
}

// A plain request to a TLS port gets an answer in words, and one line in the log with its
// address. A probe that only connects gets neither.
func TestPlainRequestToTLSPort(t *testing.T) {
	leaktest.Check(t)
	ca := nettest.NewAuthority(t)
	o, logs := observer.New(zap.WarnLevel)
	s := New(http.NotFoundHandler(), Options{Name: "test", TLS: ca.Server(time.Now().Add(time.Hour), "127.0.0.1"), ReadHeaderTimeout: time.Minute, Logger: zap.New(o)})
	if err := s.Listen("127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve() }()
	probe, err := net.Dial("tcp", s.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	_ = probe.Close()
	c, err := net.Dial("tcp", s.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	if answer, err := io.ReadAll(c); err != nil || !strings.Contains(string(answer), "HTTP request to an HTTPS server") {
		t.Errorf("%q, %v", answer, err)
	}
	if err := s.Close(context.Background()); err != nil {
		t.Error(err)
	}
	if err := <-served; err != nil {
		t.Error(err)
	}
	if logs.Len() != 1 || !strings.Contains(logs.All()[0].Message, c.LocalAddr().String()) {
		t.Errorf("the log holds %v", logs.All())
	}
}
