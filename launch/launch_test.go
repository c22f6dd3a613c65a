package launch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvconn/kvconn/rig/leaktest"
)

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

// The end of one server, before or after all are ready, ends all, with the reason.
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
	for _, pid := range d.Pids[2:] { // vLLM's own processes would end by themselves; this stub's core does not
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

	ports := freePorts(t, 4)
	c.PrefillPorts, c.DecodePorts, c.BootstrapPorts, c.Port = ports[:1], ports[1:2], ports[2:3], ports[3]
	c.BenchArgs = []string{"--nope"}
	if err := Run(t.Context(), c); err == nil || !strings.Contains(err.Error(), "vllm bench serve failed") {
		t.Errorf("error %v", err)
	}
}

// If the context ends before anything is ready, that is no error either, and leaves nothing.
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
