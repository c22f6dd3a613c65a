package cli

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvconn/kvconn/bootstrap"
	"github.com/kvconn/kvconn/internal/freeport"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/rig/stubengine"
)

// signalPatience bounds every wait; none takes nearly as long unless it fails.
const signalPatience = 20 * time.Second

// TestMain lets this binary be the router's program.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "proxy" {
		os.Exit(Main(os.Args))
	}
	os.Exit(m.Run())
}

// halfway lets two events of a streamed answer pass at once. The others wait until the gate is closed.
type halfway struct {
	http.ResponseWriter
	writes int
	gate   <-chan struct{}
}

func (h *halfway) Write(b []byte) (int, error) {
	if h.writes++; h.writes == 3 {
		<-h.gate
	}
	return h.ResponseWriter.Write(b)
}

func (h *halfway) Unwrap() http.ResponseWriter { return h.ResponseWriter }

// router is kvconn proxy as a program, in the middle of an answer.
type router struct {
	t     *testing.T
	cmd   *exec.Cmd
	addr  string
	log   string
	ended chan struct{} // closed when the program has ended; cmd.ProcessState says how
	// answer is the client's answer, of which it has read first; want is the whole answer.
	answer io.Reader
	first  string
	want   string
	finish func() // lets the engine finish
}

func startRouter(t *testing.T, options ...string) *router {
	t.Helper()
	leaktest.Check(t)
	gate := make(chan struct{})
	r := &router{t: t, ended: make(chan struct{}), log: filepath.Join(t.TempDir(), "log"), finish: sync.OnceFunc(func() { close(gate) })}
	engine := stubengine.Handler(stubengine.Options{Model: "m", Chunks: 6})
	prefill := httptest.NewServer(engine)
	t.Cleanup(prefill.Close)
	var table bootstrap.Table
	if err := table.Register(bootstrap.Registration{EngineID: "stub", Addr: "tcp://127.0.0.1:1"}); err != nil {
		t.Fatal(err)
	}
	boot := httptest.NewServer(bootstrap.NewHandler(&table, nil, nil))
	t.Cleanup(boot.Close)
	bootstrapPort := boot.URL[strings.LastIndexByte(boot.URL, ':')+1:]
	decode := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		engine.ServeHTTP(&halfway{ResponseWriter: w, gate: gate}, req)
	}))
	t.Cleanup(decode.Close)
	t.Cleanup(r.finish)

	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ports, err := freeport.Take(1)
	if err != nil {
		t.Fatal(err)
	}
	r.addr = net.JoinHostPort("127.0.0.1", strconv.Itoa(ports[0]))
	log, err := os.Create(r.log)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close() // the program has it
	r.cmd = exec.Command(exe, append([]string{"proxy", "--prefill", prefill.URL, bootstrapPort,
		"--decode", decode.URL, "--port", strconv.Itoa(ports[0])}, options...)...)
	r.cmd.Stdout, r.cmd.Stderr = log, log
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = r.cmd.Wait() // the state says how
		close(r.ended)
	}()
	t.Cleanup(func() {
		_ = r.cmd.Process.Kill()
		<-r.ended
	})

	tr := &http.Transport{DisableKeepAlives: true}
	t.Cleanup(tr.CloseIdleConnections)
	client := &http.Client{Transport: tr, Timeout: signalPatience}
	r.eventually("the router is ready", func() bool {
		if !r.alive() {
			said, _ := os.ReadFile(r.log)
			t.Fatalf("the router ended: %v\n%s", r.cmd.ProcessState, said)
		}
		resp, err := client.Get("http://" + r.addr + "/health")
		if err == nil {
			resp.Body.Close()
		}
		return err == nil && resp.StatusCode == http.StatusOK
	})
	alone := httptest.NewRecorder()
	engine.ServeHTTP(alone, httptest.NewRequest("POST", "/v1/completions", strings.NewReader(`{"stream":true}`)))
	r.want = alone.Body.String()
	resp, err := client.Post("http://"+r.addr+"/v1/completions", "application/json", strings.NewReader(`{"stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { resp.Body.Close() })
	body := bufio.NewReader(resp.Body)
	if r.first, err = body.ReadString('\n'); err != nil || r.first == "" || !strings.HasPrefix(r.want, r.first) {
		t.Fatalf("the answer begins with %q, %v", r.first, err)
	}
	r.answer = body
	return r
}

func (r *router) eventually(what string, cond func() bool) {
	r.t.Helper()
	for deadline := time.Now().Add(signalPatience); !cond(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			log, _ := os.ReadFile(r.log)
			r.t.Fatalf("not within %v: %s\n%s", signalPatience, what, log)
		}
	}
}

// drain sends the first signal and waits until the router takes no connection any more.
func (r *router) drain(s syscall.Signal) {
	r.t.Helper()
	if err := r.cmd.Process.Signal(s); err != nil {
		r.t.Fatal(err)
	}
	r.eventually("new connections are refused", func() bool {
		c, err := net.Dial("tcp", r.addr)
		if err == nil {
			c.Close()
		}
		return errors.Is(err, syscall.ECONNREFUSED)
	})
	if !r.alive() {
		r.t.Fatalf("the router ended (%v) with a request under way", r.cmd.ProcessState)
	}
}

func (r *router) alive() bool {
	select {
	case <-r.ended:
		return false
	default:
		return true
	}
}

// status waits for the end: an exit status, or -1 and the signal.
func (r *router) status() (int, syscall.Signal) {
	r.t.Helper()
	r.eventually("the router ends", func() bool { return !r.alive() })
	how := r.cmd.ProcessState.Sys().(syscall.WaitStatus)
	return how.ExitStatus(), how.Signal()
}

// brokenOff: the client sees that its answer is not whole.
func (r *router) brokenOff() {
	r.t.Helper()
	if rest, err := io.ReadAll(r.answer); err == nil || os.IsTimeout(err) {
		r.t.Errorf("the rest of an answer that is to be broken off: %q, %v", rest, err)
	}
}

var endings = []syscall.Signal{syscall.SIGTERM, syscall.SIGINT}

// A signal closes the port. The answer under way comes in full, and the exit status is 0.
func TestSignalDrainsTheRouter(t *testing.T) {
	for _, s := range endings {
		t.Run(fmt.Sprint(s), func(t *testing.T) {
			r := startRouter(t, "--drain-timeout", "600")
			r.drain(s)
			r.finish()
			rest, err := io.ReadAll(r.answer)
			if text := r.first + string(rest); err != nil || text != r.want {
				t.Errorf("the answer is %q, %v; want %q", text, err, r.want)
			}
			if code, by := r.status(); code != 0 {
				log, _ := os.ReadFile(r.log)
				t.Errorf("exit status %d, signal %v; want 0\n%s", code, by, log)
			}
		})
	}
}

// The drain is bounded. Its end is no failure of the program: the sender of the signal knows
// how long the drain may take.
func TestDrainOfTheRouterIsBounded(t *testing.T) {
	r := startRouter(t, "--drain-timeout", "2")
	r.drain(syscall.SIGTERM)
	r.brokenOff()
	if code, by := r.status(); code != 0 {
		t.Errorf("exit status %d, signal %v; want 0", code, by)
	}
	if log, err := os.ReadFile(r.log); err != nil || !strings.Contains(string(log), `"outcome": "broken_off"`) {
		t.Errorf("the log does not say that the router has cut it: %v %s", err, log)
	}
}

// The second signal ends the router as it would end any program.
func TestSecondSignalEndsTheRouterAtOnce(t *testing.T) {
	for _, s := range endings {
		t.Run(fmt.Sprint(s), func(t *testing.T) {
			r := startRouter(t, "--drain-timeout", "600")
			r.drain(s)
			// The signal is sent again and again: a signal in the very moment of the first may
			// be one with it.
			r.eventually("the router ends", func() bool {
				_ = r.cmd.Process.Signal(s) // an error when it has ended
				return !r.alive()
			})
			if code, by := r.status(); by != s {
				t.Errorf("exit status %d, signal %v; want to be ended by %v", code, by, s)
			}
			r.brokenOff()
		})
	}
}
