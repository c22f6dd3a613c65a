package proxy

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvconn/kvconn/rig/leaktest"
)

// runRouter runs Run and returns its address, how to stop it and its result.
func runRouter(t *testing.T, cfg Config) (addr string, stop func(), result <-chan error, client *http.Client) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	listening, ended := make(chan net.Addr, 1), make(chan error, 1)
	cfg.Listening = func(a net.Addr) { listening <- a }
	cfg.RetryInterval = 5 * time.Millisecond
	go func() { ended <- Run(ctx, cfg, nil) }()
	tr := &http.Transport{}
	t.Cleanup(tr.CloseIdleConnections)
	client = &http.Client{Transport: tr}
	addr = "http://" + recv(t, listening, "address").String()
	eventually(t, "the router is ready", func() bool {
		resp, err := client.Get(addr + "/health")
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		return resp.StatusCode == 200
	})
	return addr, cancel, ended, client
}

// A request that runs at the end of the context still gets its whole answer.
func TestRunShutsDownGracefully(t *testing.T) {
	leaktest.Check(t)
	release := make(chan struct{})
	p := newPrefill(t, ok, "engine-0")
	d := newEngine(t, func(w http.ResponseWriter, _ *http.Request) {
		io.WriteString(w, "first\n")
		w.(http.Flusher).Flush()
		<-release
		io.WriteString(w, "last\n")
	})
	addr, stop, ended, client := runRouter(t, Config{Prefill: []Prefill{p.prefill(t)}, Decode: []string{d.URL}, ShutdownTimeout: patience})
	resp, err := client.Post(addr+"/v1/completions", "application/json", strings.NewReader(`{}`))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body := bufio.NewReader(resp.Body)
	if line, err := body.ReadString('\n'); line != "first\n" || err != nil {
		t.Fatalf("%q, %v", line, err)
	}
	stop()
	eventually(t, "the port is closed", func() bool {
		c, err := net.Dial("tcp", strings.TrimPrefix(addr, "http://"))
		if err == nil {
			c.Close()
		}
		return err != nil
	})
	close(release)
	if line, err := body.ReadString('\n'); line != "last\n" || err != nil {
		t.Fatalf("%q, %v", line, err)
	}
	if err := recv(t, ended, "end of Run"); err != nil {
		t.Fatal(err)
	}
}

// TestIPv6: every address on the way is one of IPv6, the address that D is told among them.
func TestIPv6(t *testing.T) {
	leaktest.Check(t)
	serve := func(h http.Handler) *httptest.Server {
		l, err := net.Listen("tcp", "[::1]:0")
		if err != nil {
			t.Skip("this machine has no IPv6: ", err)
		}
		s := &httptest.Server{Listener: l, Config: &http.Server{Handler: h}}
		s.Start()
		t.Cleanup(s.Close)
		return s
	}
	p, d := newPrefill(t, ok, "engine-0"), newEngine(t, ok)
	p.Server, p.boot, d.Server = serve(p.Config.Handler), serve(p.boot.Config.Handler), serve(d.Config.Handler)
	addr, stop, ended, client := runRouter(t, Config{Host: "::1", Prefill: []Prefill{p.prefill(t)}, Decode: []string{d.URL}})
	if !strings.HasPrefix(addr, "http://[::1]:") {
		t.Errorf("the router listens on %s", addr)
	}
	resp, err := client.Post(addr+"/v1/completions", "application/json", strings.NewReader(`{}`))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if got := d.next(t).params(t)["remote_bootstrap_addr"]; resp.StatusCode != 200 || got != p.boot.URL {
		t.Errorf("%s, D is told %v, want %s", resp.Status, got, p.boot.URL)
	}
	stop()
	if err := recv(t, ended, "end of Run"); err != nil {
		t.Error(err)
	}
}

// A request that would never end does not hold Run: it gets an error, and both
// engines see it go.
func TestRunEndsInBoundedTime(t *testing.T) {
	leaktest.Check(t)
	p, d := newPrefill(t, hang, "engine-0"), newEngine(t, hang)
	addr, stop, ended, client := runRouter(t, Config{Prefill: []Prefill{p.prefill(t)}, Decode: []string{d.URL}, ShutdownTimeout: 50 * time.Millisecond})
	answered := make(chan int, 1)
	go func() {
		resp, err := client.Post(addr+"/v1/completions", "application/json", strings.NewReader(`{}`))
		if err != nil {
			answered <- 0
			return
		}
		resp.Body.Close()
		answered <- resp.StatusCode
	}()
	pc, dc := p.next(t), d.next(t)
	stop()
	if err := recv(t, ended, "end of Run"); err != nil {
		t.Error(err)
	}
	recv(t, pc.ctx.Done(), "end of P's request")
	recv(t, dc.ctx.Done(), "end of D's request")
	if code := recv(t, answered, "answer"); code != 503 {
		t.Errorf("the client got %d, want 503", code)
	}
}

func TestRunWithPortInUse(t *testing.T) {
	leaktest.Check(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	n, _ := strconv.Atoi(port)
	cfg := Config{Port: n, Prefill: []Prefill{{URL: "http://" + freeAddr(t)}}, Decode: []string{"http://" + freeAddr(t)}}
	err = Run(t.Context(), cfg, nil)
	if !errors.Is(err, syscall.EADDRINUSE) || !strings.Contains(err.Error(), port) || !strings.Contains(err.Error(), "--port") {
		t.Fatalf("error %v; want EADDRINUSE with the port and --port", err)
	}
}

func TestRunWithBadConfig(t *testing.T) {
	leaktest.Check(t)
	if err := Run(t.Context(), Config{}, nil); err == nil || !strings.Contains(err.Error(), "no prefill server") {
		t.Fatalf("error %v", err)
	}
}
