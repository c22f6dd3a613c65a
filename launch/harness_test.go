package launch

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvconn/kvconn/internal/freeport"
)

// patience bounds every wait; none takes nearly as long unless it fails.
const patience = 20 * time.Second

// output collects the progress that Run tells.
type output struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.Write(b)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.String()
}

// setUp is a Config of stub servers on free ports, with vllm on PATH.
func setUp(t *testing.T, prefill, decode int) (Config, *output) {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	bin, said := t.TempDir(), t.TempDir()
	if err := os.Symlink(exe, filepath.Join(bin, "vllm")); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", bin+":/usr/bin:/bin")
	t.Setenv(stubDir, said)
	t.Setenv(stubGrace, "300ms")
	ports := freePorts(t, 2*prefill+decode+1)
	out := &output{}
	return Config{Model: "m", Prefill: prefill, Decode: decode, PrefillPorts: ports[:prefill], BootstrapPorts: ports[prefill : 2*prefill],
		DecodePorts: ports[2*prefill : 2*prefill+decode], Port: ports[len(ports)-1], LogDir: filepath.Join(t.TempDir(), "logs"),
		Ready: patience, Self: []string{exe}, Out: out}, out
}

func freePorts(t *testing.T, n int) []int {
	t.Helper()
	ports, err := freeport.Take(n)
	if err != nil {
		t.Fatal(err)
	}
	return ports
}

func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !cond(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", patience, what)
		}
	}
}

// stubs are the words of the stub engines on themselves, by port.
func stubs(t *testing.T) map[int]started {
	t.Helper()
	all := map[int]started{}
	names, err := filepath.Glob(filepath.Join(os.Getenv(stubDir), "*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		port, err := strconv.Atoi(filepath.Base(name))
		if err != nil {
			continue // half written
		}
		var s started
		text, err := os.ReadFile(name)
		if err == nil {
			err = json.Unmarshal(text, &s)
		}
		if err != nil {
			t.Fatal(err)
		}
		all[port] = s
	}
	return all
}

// alive are the processes of the stubs that still run, and their guards.
func alive(t *testing.T) []int {
	t.Helper()
	var pids []int
	for _, s := range stubs(t) {
		for _, pid := range s.Pids {
			stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
			if err == nil && !strings.Contains(string(stat), ") Z ") {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

// start runs Run, and returns how to end it and its result.
func start(t *testing.T, c Config) (stop func(), result <-chan error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	ended := make(chan error, 1)
	go func() { ended <- Run(ctx, c) }()
	return cancel, ended
}

func recv(t *testing.T, c <-chan error) error {
	t.Helper()
	select {
	case err := <-c:
		return err
	case <-time.After(patience):
		t.Fatalf("Run did not end within %v", patience)
		return nil
	}
}
