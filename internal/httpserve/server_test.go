package httpserve

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
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

// tearing's connections keep the last bytes of a write back, once, when they are told to. That is a write that ran out of time. A
// close_notify is longer than what is missing then.
type tearing struct {
	net.Listener
	now *atomic.Bool
}

func (l tearing) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	return tearingConn{c, l.now}, err
}

type tearingConn struct {
	net.Conn
	now *atomic.Bool
}

func (c tearingConn) Write(p []byte) (int, error) {
	if !c.now.CompareAndSwap(true, false) {
		return c.Conn.Write(p)
	}
	n, err := c.Conn.Write(p[:max(0, len(p)-8)])
	return n, errors.Join(err, os.ErrDeadlineExceeded)
}

// TestAnswerThatIsCutOff: if an answer is cut off in the middle of a TLS record, its client reads an unexpected end. TLS's close_notify does
// not come in the record's place.
func TestAnswerThatIsCutOff(t *testing.T) {
	ca := nettest.NewAuthority(t)
	var now atomic.Bool
	s := New(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		now.Store(true)
		_, _ = w.Write(make([]byte, 64<<10))
	}), Options{Name: "test", TLS: ca.Server(time.Now().Add(time.Hour), "127.0.0.1")})
	if err := s.Listen("127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	s.listener = tearing{s.listener, &now}
	served := make(chan error, 1)
	go func() { served <- s.Serve() }()
	defer func() { _ = s.Close(context.Background()); <-served }()
	c, err := tls.Dial("tcp", s.Addr().String(), &tls.Config{InsecureSkipVerify: true})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: h\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	if answer, err := io.ReadAll(c); !errors.Is(err, io.ErrUnexpectedEOF) || now.Load() {
		t.Errorf("an answer that is cut off: %d bytes, %v", len(answer), err)
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
