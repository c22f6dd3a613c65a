package faultnet

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/kvconn/kvconn/internal/freeport"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// bound is how long a test waits for what must come.
const bound = 30 * time.Second

// pair opens a relay to a listener and one connection over it.
func pair(t *testing.T) (r *Relay, near, far *net.TCPConn) {
	t.Helper()
	leaktest.Check(t)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	r, err = Open("127.0.0.1:0", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Close)
	return r, dial(t, r), take(t, ln)
}

func dial(t *testing.T, r *Relay) *net.TCPConn {
	t.Helper()
	c, err := net.Dial("tcp", r.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(bound))
	return c.(*net.TCPConn)
}

func take(t *testing.T, ln net.Listener) *net.TCPConn {
	t.Helper()
	_ = ln.(*net.TCPListener).SetDeadline(time.Now().Add(bound))
	c, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(bound))
	return c.(*net.TCPConn)
}

func send(t *testing.T, from, to net.Conn, text string) {
	t.Helper()
	if _, err := io.WriteString(from, text); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(text))
	if _, err := io.ReadFull(to, got); err != nil || string(got) != text {
		t.Fatalf("got %q, %v; want %q", got, err, text)
	}
}

func TestForwardsBothDirectionsAndEnds(t *testing.T) {
	r, near, far := pair(t)
	send(t, near, far, "up")
	send(t, far, near, "down")
	if err := near.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(far); err != nil || len(b) != 0 {
		t.Fatalf("after the end: %q, %v", b, err)
	}
	send(t, far, near, "still") // the other direction is open
	far.Close()
	if b, err := io.ReadAll(near); err != nil || len(b) != 0 {
		t.Fatalf("after both ends: %q, %v", b, err)
	}
	if up, down := r.Carried(Up), r.Carried(Down); up != 2 || down != 9 {
		t.Errorf("carried %d up, %d down", up, down)
	}
}

func TestCut(t *testing.T) {
	for _, reset := range []bool{true, false} {
		r, near, far := pair(t)
		send(t, near, far, "hello")
		if n := r.Cut(reset); n != 1 {
			t.Fatalf("%d connections cut", n)
		}
		for _, c := range []net.Conn{near, far} {
			_, err := c.Read(make([]byte, 1))
			if want := errors.Is(err, syscall.ECONNRESET); err == nil || want != reset || !want && !errors.Is(err, io.EOF) {
				t.Errorf("reset %v: read says %v", reset, err)
			}
		}
		if r.Open() != 0 {
			t.Errorf("%d connections are open", r.Open())
		}
	}
}

func TestHalfClose(t *testing.T) {
	r, near, far := pair(t)
	send(t, near, far, "hello")
	r.HalfClose(Up)
	if b, err := io.ReadAll(far); err != nil || len(b) != 0 {
		t.Fatalf("the closed direction: %q, %v", b, err)
	}
	if _, err := io.WriteString(near, "into nothing"); err != nil {
		t.Fatal(err)
	}
	send(t, far, near, "the other direction")
}

// A held direction keeps its bytes and gives them in order when it is let go. A new
// connection waits too.
func TestHold(t *testing.T) {
	r, near, far := pair(t)
	send(t, near, far, "before")
	r.Set(Impairment{Hold: [2]bool{Down: true}})
	if _, err := io.WriteString(far, "held"); err != nil {
		t.Fatal(err)
	}
	send(t, near, far, "the other direction")
	if n := r.Carried(Down); n != 0 {
		t.Fatalf("%d bytes passed", n)
	}
	r.Set(Impairment{})
	got := make([]byte, 4)
	if _, err := io.ReadFull(near, got); err != nil || string(got) != "held" {
		t.Fatalf("%q, %v", got, err)
	}
	r.Set(Impairment{Hold: [2]bool{true, true}})
	r.Cut(true) // held bytes can be cut off
	if _, err := near.Read(got); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("a held connection that was cut: %v", err)
	}
}

func TestRefuse(t *testing.T) {
	r, near, far := pair(t)
	send(t, near, far, "hello")
	r.Set(Impairment{Refuse: true})
	if err := try(r); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("a refused connection: %v", err)
	}
	send(t, far, near, "the old one lives")
}

// Delay and rate change when bytes come, not which bytes.
func TestDelayAndRateKeepBytes(t *testing.T) {
	r, near, far := pair(t)
	r.Set(Impairment{Delay: 20 * time.Millisecond, Rate: 1 << 20})
	want := bytes.Repeat([]byte("0123456789abcdef"), 16<<10)
	start := time.Now()
	done := make(chan error, 1)
	go func() {
		_, err := near.Write(want)
		near.CloseWrite()
		done <- err
	}()
	got, err := io.ReadAll(far)
	if err != nil || !bytes.Equal(got, want) {
		t.Fatalf("%d bytes, %v; want %d", len(got), err, len(want))
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	// 256 KiB at 1 MiB/s cannot come at once. The machine may take longer than a quarter of
	// a second.
	if took := time.Since(start); took < 100*time.Millisecond {
		t.Errorf("it took %v only", took)
	}
}

// Where nobody listens, the connection ends instead of waiting.
func TestNobodyThere(t *testing.T) {
	leaktest.Check(t)
	ports, err := freeport.Take(1)
	if err != nil {
		t.Fatal(err)
	}
	r, err := Open("127.0.0.1:0", fmt.Sprint("127.0.0.1:", ports[0]))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if err := try(r); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("a connection to nobody: %v", err)
	}
}

// try reads from a new connection; the reset may come before it is made.
func try(r *Relay) error {
	c, err := net.Dial("tcp", r.Addr())
	if err != nil {
		return err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(bound))
	_, err = c.Read(make([]byte, 1))
	return err
}
