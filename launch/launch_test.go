package launch

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvconn/kvconn/internal/freeport"
	"github.com/kvconn/kvconn/internal/leaktest"
)

// patience bounds every wait; none takes nearly as long unless it fails.
const patience = 20 * time.Second

// output is what Run tells.
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

// stubs are what the stub engines have said, by port.
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

func TestRun(t *testing.T) {
	leaktest.Check(t)
	c, out := setUp(t, 2, 1)
	c.Args = []string{"--served-model-name", "tiny", "--enforce-eager"}
	c.ConnectorConfig = map[string]any{"transport": "tcp"}
	stop, ended := start(t, c)
	eventually(t, "ready", func() bool { return strings.Contains(out.String(), "ready: send requests to") })
	resp, err := http.Post(fmt.Sprintf("http://127.0.0.1:%d/v1/completions", c.Port), "application/json", strings.NewReader(`{"prompt":"x"}`))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	http.DefaultClient.CloseIdleConnections()
	if resp.StatusCode != 200 {
		t.Errorf("through the router: %s", resp.Status)
	}
	all := stubs(t)
	if len(all) != 3 || len(alive(t)) != 12 {
		t.Fatalf("stubs %v, alive %v", all, alive(t))
	}
	for i, port := range append(slices.Clone(c.PrefillPorts), c.DecodePorts...) {
		line := strings.Join(all[port].Args, " ")
		want := []string{"serve m --host 127.0.0.1 --port " + strconv.Itoa(port), `"kv_role":"kv_producer"`, fmt.Sprintf(`"bootstrap_port":%d`, c.BootstrapPorts[min(i, 1)]),
			`"transport":"tcp"`, `"advertise_host":"127.0.0.1"`, "--served-model-name tiny --enforce-eager"}
		if i == 2 {
			want[1], want[2] = `"kv_role":"kv_consumer"`, `"kv_load_failure_policy":"recompute"`
		}
		for _, w := range want {
			if !strings.Contains(line, w) {
				t.Errorf("server %d was started as %s: no %s", i, line, w)
			}
		}
	}
	for _, name := range []string{"prefill-1.log", "prefill-2.log", "decode-1.log", "router.log"} {
		if text, err := os.ReadFile(filepath.Join(c.LogDir, name)); err != nil || len(text) == 0 {
			t.Errorf("%s: %q, %v", name, text, err)
		}
	}
	stop()
	if err := recv(t, ended); err != nil {
		t.Error(err)
	}
	if left := alive(t); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// The end of one server, before and after all are ready, ends all, with the
// reason.
func TestServerEnds(t *testing.T) {
	leaktest.Check(t)
	for mode, want := range map[string]string{"dies": "ValueError: no such model", "refuses": "no forward pass", "killed": "signal 9", "hangs": "not ready after"} {
		t.Run(mode, func(t *testing.T) {
			leaktest.Check(t)
			c, out := setUp(t, 1, 1)
			t.Setenv(stubMode, mode)
			if mode == "hangs" {
				c.Ready = time.Second
			}
			_, ended := start(t, c)
			if mode == "killed" {
				eventually(t, "ready", func() bool { return strings.Contains(out.String(), "ready: send") })
				_ = syscall.Kill(stubs(t)[c.DecodePorts[0]].Pids[0], syscall.SIGKILL)
				want = "exit status 137"
			}
			err := recv(t, ended)
			if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "decode 1") || !strings.Contains(err.Error(), "decode-1.log") {
				t.Errorf("error %v, want one of decode 1 with %q", err, want)
			}
			if left := alive(t); len(left) > 0 {
				t.Errorf("left behind: %v", left)
			}
		})
	}
}

// A launcher that is killed takes everything with it.
func TestLauncherKilled(t *testing.T) {
	leaktest.Check(t)
	c, _ := setUp(t, 1, 2)
	c.Out = nil
	b, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(c.Self[0])
	cmd.Env = append(os.Environ(), stubLaunch+"="+string(b))
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "all run", func() bool { return len(stubs(t)) == 3 && len(alive(t)) == 12 })
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // killed
	eventually(t, "nothing is left", func() bool { return len(alive(t)) == 0 })
}

// A server whose guard is killed does not outlive it.
func TestGuardKilled(t *testing.T) {
	leaktest.Check(t)
	c, out := setUp(t, 1, 1)
	_, ended := start(t, c)
	eventually(t, "ready", func() bool { return strings.Contains(out.String(), "ready: send") })
	d := stubs(t)[c.DecodePorts[0]]
	_ = syscall.Kill(d.Pids[1], syscall.SIGKILL)
	if err := recv(t, ended); err == nil || !strings.Contains(err.Error(), "decode 1 has ended") {
		t.Errorf("error %v", err)
	}
	eventually(t, "the server has ended", func() bool { return !slices.Contains(alive(t), d.Pids[0]) })
	for _, pid := range d.Pids[2:] { // of vLLM's own, which this stub's core does not do
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
}

func TestBench(t *testing.T) {
	leaktest.Check(t)
	c, out := setUp(t, 1, 1)
	c.Args = []string{"--served-model-name=tiny"}
	t.Setenv("VLLM_API_KEY", "secret")
	c.Bench, c.BenchArgs = true, []string{"--num-prompts", "3"}
	if err := Run(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), "Successful requests: 3") {
		t.Errorf("no table in %s", out)
	}
	if text, err := os.ReadFile(filepath.Join(c.LogDir, "bench.log")); err != nil || !strings.Contains(string(text), "Successful requests: 3") {
		t.Errorf("bench.log: %q, %v", text, err)
	}
	if key := stubs(t)[0].Key; key != "secret" {
		t.Errorf("the benchmark has the API key %q", key)
	}
	line := strings.Join(stubs(t)[0].Args, " ")
	if !strings.Contains(line, fmt.Sprintf("--port %d --model m --served-model-name tiny", c.Port)) || strings.Count(line, "--num-prompts") != 1 {
		t.Errorf("vllm was started as %s", line)
	}
	if left := alive(t); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}

	c.PrefillPorts, c.DecodePorts, c.BootstrapPorts, c.Port = freePorts(t, 1), freePorts(t, 1), freePorts(t, 1), freePorts(t, 1)[0]
	c.BenchArgs = []string{"--nope"}
	if err := Run(t.Context(), c); err == nil || !strings.Contains(err.Error(), "vllm bench serve failed") {
		t.Errorf("error %v", err)
	}
}

// What cannot work is said before anything starts.
func TestRefusals(t *testing.T) {
	leaktest.Check(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	taken := l.Addr().(*net.TCPAddr).Port
	smi := func(t *testing.T, script string) {
		if err := os.WriteFile(filepath.Join(strings.Split(os.Getenv("PATH"), ":")[0], "nvidia-smi"), []byte("#!/bin/sh\n"+script), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	two := "echo 'GPU 0: X (UUID: GPU-aa)'; echo 'GPU 1: X (UUID: GPU-bb)'"
	for name, tt := range map[string]struct {
		change func(t *testing.T, c *Config)
		want   []string
	}{
		"no model":            {func(_ *testing.T, c *Config) { c.Model = "" }, []string{"no model"}},
		"no vllm":             {func(_ *testing.T, c *Config) { c.VLLM = "vllm-of-nobody" }, []string{"vLLM is not installed", "pip install vllm", "--vllm"}},
		"prefill port taken":  {func(_ *testing.T, c *Config) { c.PrefillPorts = []int{taken} }, []string{strconv.Itoa(taken), "prefill server 1", "is taken", "--prefill-ports"}},
		"bootstrap taken":     {func(_ *testing.T, c *Config) { c.BootstrapPorts = []int{taken} }, []string{strconv.Itoa(taken), "--bootstrap-ports"}},
		"router's port taken": {func(_ *testing.T, c *Config) { c.Port = taken }, []string{strconv.Itoa(taken), "the router", "--port"}},
		"one port twice":      {func(_ *testing.T, c *Config) { c.DecodePorts = c.PrefillPorts }, []string{"decode server 1", "prefill server 1"}},
		"bad port":            {func(_ *testing.T, c *Config) { c.Port = 65536 }, []string{"65536", "--port"}},
		"ports for two":       {func(_ *testing.T, c *Config) { c.DecodePorts = []int{1, 2} }, []string{"--decode-ports", "2 ports for 1"}},
		"no driver":           {func(_ *testing.T, c *Config) { c.PrefillDevices, c.DecodeDevices = []string{"0"}, []string{"1"} }, []string{"nvidia-smi", "--prefill-devices"}},
		"device missing": {func(t *testing.T, c *Config) {
			smi(t, two)
			c.PrefillDevices, c.DecodeDevices = []string{"0"}, []string{"1,2"}
		}, []string{`device "2" is missing`, "lists 2"}},
		"too few devices": {func(t *testing.T, c *Config) {
			smi(t, two)
			c.PrefillPorts, c.BootstrapPorts, c.Prefill = freePorts(t, 2), freePorts(t, 2), 2
		}, []string{"3 servers", "2 devices"}},
		"too few of the caller's devices": {func(t *testing.T, _ *Config) {
			smi(t, two)
			t.Setenv(cudaDevices, "1")
		}, []string{"2 servers", "CUDA_VISIBLE_DEVICES=1 names 1 devices"}},
		"a third GPU beside a part": {func(t *testing.T, c *Config) {
			smi(t, two+"; echo '  MIG 1g.5gb Device 0: (UUID: MIG-cc)'")
			c.PrefillDevices, c.DecodeDevices = []string{"0"}, []string{"2"}
		}, []string{`device "2" is missing`, "lists 2"}},
		"devices of one side":  {func(_ *testing.T, c *Config) { c.PrefillDevices = []string{"0"} }, []string{"--prefill-devices and --decode-devices"}},
		"devices for two":      {func(_ *testing.T, c *Config) { c.PrefillDevices = []string{"0", "1"} }, []string{"--prefill-devices", "2 servers, but there are 1"}},
		"our own argument":     {func(_ *testing.T, c *Config) { c.Args = []string{"--port=1"} }, []string{"--port after --"}},
		"our own key":          {func(_ *testing.T, c *Config) { c.ConnectorConfig = map[string]any{"bootstrap_port": 1} }, []string{"bootstrap_port"}},
		"no directory of logs": {func(_ *testing.T, c *Config) { c.LogDir = "/dev/null/logs" }, []string{"/dev/null"}},
	} {
		t.Run(name, func(t *testing.T) {
			c, _ := setUp(t, 1, 1)
			tt.change(t, &c)
			refuses(t, c, tt.want)
		})
	}
}

// refuses checks that a launch ends with the reason before any server starts.
func refuses(t *testing.T, c Config, want []string) {
	t.Helper()
	err := Run(t.Context(), c)
	for _, text := range want {
		if err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("error %v, want one with %q", err, text)
		}
	}
	if len(stubs(t)) > 0 {
		t.Error("a server was started")
	}
}

// Devices are told to each server, and given out where none are named.
func TestDevices(t *testing.T) {
	leaktest.Check(t)
	for _, tt := range []struct{ visible, prefill, decode, wantPrefill, wantDecode string }{
		{"", "", "", "0", "1"},
		{"", "0,1", "GPU-bb", "0,1", "GPU-bb"},
		{"", "1", "MIG-cc", "1", "MIG-cc"},
		{"1,GPU-aa", "", "", "1", "GPU-aa"},
		{"1", "0", "1", "0", "1"},
		{"1,GPU-aa,-1,0", "", "", "1", "GPU-aa"},
		{"-1", "", "", "-1", "-1"}, // none: as it was
	} {
		c, out := setUp(t, 1, 1)
		if tt.visible != "" {
			t.Setenv(cudaDevices, tt.visible)
		} else {
			t.Setenv(cudaDevices, "-") // so that it is put back
			_ = os.Unsetenv(cudaDevices)
		}
		script := "#!/bin/sh\necho 'GPU 0: X (UUID: GPU-aa)'; echo '  MIG 1g.5gb Device 0: (UUID: MIG-cc)'; echo 'GPU 1: X (UUID: GPU-bb)'"
		if err := os.WriteFile(filepath.Join(strings.Split(os.Getenv("PATH"), ":")[0], "nvidia-smi"), []byte(script), 0o700); err != nil {
			t.Fatal(err)
		}
		if tt.prefill != "" {
			c.PrefillDevices, c.DecodeDevices = []string{tt.prefill}, []string{tt.decode}
		}
		stop, ended := start(t, c)
		eventually(t, "ready", func() bool { return strings.Contains(out.String(), "ready: send") })
		all := stubs(t)
		if p, d := all[c.PrefillPorts[0]].Devices, all[c.DecodePorts[0]].Devices; p != tt.wantPrefill || d != tt.wantDecode {
			t.Errorf("devices %q and %q: %+v", p, d, tt)
		}
		stop()
		if err := recv(t, ended); err != nil {
			t.Error(err)
		}
	}
}

// The end before anything is ready is no error either, and leaves nothing.
func TestEndWhileStarting(t *testing.T) {
	leaktest.Check(t)
	c, _ := setUp(t, 1, 1)
	t.Setenv(stubMode, "hangs")
	stop, ended := start(t, c)
	eventually(t, "both run", func() bool { return len(stubs(t)) == 2 })
	stop()
	if err := recv(t, ended); err != nil && !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if left := alive(t); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}
