package launch

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/proxy"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/rig/stubengine"
)

// stubLacks names the modules that the stub Python lacks.
const stubLacks = "STUB_LACKS"

// stubPython is a Python with SGLang.
func stubPython(args []string) int {
	switch args[0] {
	case "-c":
		fmt.Println(os.Getenv(stubLacks))
		return 0
	case "-m":
		if args[1] == "sglang.bench_serving" {
			return stubBench(append([]string{"bench"}, args[1:]...))
		}
		if args[1] == "sglang.launch_server" {
			return stubSGLang(args)
		}
	}
	return 2
}

// stubSGLang is python -m sglang.launch_server. It answers only a router's requests:
// prefill and decode servers know a request by its room.
func stubSGLang(args []string) int {
	fs := flag.NewFlagSet("sglang", flag.ExitOnError)
	port, boot := fs.Int("port", 0, ""), fs.Int("disaggregation-bootstrap-port", 0, "")
	mode := fs.String("disaggregation-mode", "", "")
	for _, name := range []string{"host", "model-path", "disaggregation-transfer-backend", "attention-backend", "api-key"} {
		fs.String(name, "", "")
	}
	_ = fs.Parse(args[2:]) // exits on errors
	engine := stubengine.Handler(stubengine.Options{Model: "m", Chunks: 2})
	mux := http.NewServeMux()
	mux.HandleFunc("GET /server_info", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, `{"disaggregation_mode":%q,"disaggregation_bootstrap_port":%d,"dp_size":1}`, *mode, *boot)
	})
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		var req struct {
			Room *int64 `json:"bootstrap_room"`
		}
		if r.Method == http.MethodPost && (err != nil || json.Unmarshal(body, &req) != nil || req.Room == nil) {
			http.Error(w, "send requests to the router", http.StatusInternalServerError)
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		engine.ServeHTTP(w, r)
	})
	return stubServe(args, *port, *boot, mux)
}

// setUpSGLang is setUp with SGLang's servers.
func setUpSGLang(t *testing.T, prefill, decode int) (Config, *output) {
	t.Helper()
	c, out := setUp(t, prefill, decode)
	bin := strings.Split(os.Getenv("PATH"), ":")[0]
	if err := os.Rename(filepath.Join(bin, "vllm"), filepath.Join(bin, "python3")); err != nil {
		t.Fatal(err)
	}
	c.Engine = SGLang
	return c, out
}

func TestSGLang(t *testing.T) {
	leaktest.Check(t)
	c, out := setUpSGLang(t, 2, 1)
	c.Args = []string{"--attention-backend", "torch_native"}
	c.ConnectorConfig = map[string]any{"transport": "tcp"}
	stop, ended := start(t, c)
	eventually(t, "ready", func() bool {
		select {
		case err := <-ended:
			t.Fatal(err)
		default:
		}
		return strings.Contains(out.String(), "ready: send requests to")
	})
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
	if len(all) != 3 {
		t.Fatalf("stubs %v", all)
	}
	const common = "--disaggregation-transfer-backend kvconn"
	for i, port := range c.PrefillPorts {
		want := fmt.Sprintf("-m sglang.launch_server --model-path m --host 127.0.0.1 --port %d --disaggregation-mode prefill %s --disaggregation-bootstrap-port %d --attention-backend torch_native", port, common, c.BootstrapPorts[i])
		if got := strings.Join(all[port].Args, " "); got != want {
			t.Errorf("prefill %d was started as %s\nwant %s", i, got, want)
		}
	}
	d := all[c.DecodePorts[0]]
	want := fmt.Sprintf("-m sglang.launch_server --model-path m --host 127.0.0.1 --port %d --disaggregation-mode decode %s --attention-backend torch_native", c.DecodePorts[0], common)
	if got := strings.Join(d.Args, " "); got != want || d.Config != `{"transport":"tcp"}` {
		t.Errorf("decode was started as %s with %s\nwant %s", got, d.Config, want)
	}
	stop()
	if err := recv(t, ended); err != nil {
		t.Error(err)
	}
	if left := alive(t); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestSGLangServerEnds(t *testing.T) {
	leaktest.Check(t)
	for mode, want := range map[string]string{"dies": "ValueError: no such model", "refuses": "no forward pass"} {
		t.Run(mode, func(t *testing.T) {
			leaktest.Check(t)
			c, _ := setUpSGLang(t, 1, 1)
			t.Setenv(stubMode, mode)
			_, ended := start(t, c)
			if err := recv(t, ended); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("error %v, want one with %q", err, want)
			}
			if left := alive(t); len(left) > 0 {
				t.Errorf("left behind: %v", left)
			}
		})
	}
}

func TestSGLangBench(t *testing.T) {
	leaktest.Check(t)
	c, out := setUpSGLang(t, 1, 1)
	c.Bench, c.BenchArgs = true, []string{"--num-prompts", "3"}
	if err := Run(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	if line := strings.Join(stubs(t)[0].Args, " "); !strings.Contains(out.String(), "Successful requests: 3") || !strings.Contains(line, "--backend sglang --host 127.0.0.1 --port "+strconv.Itoa(c.Port)+" --model m") {
		t.Errorf("%s\nstarted as %s", out, line)
	}
}

// For SGLang too, an impossible configuration is refused before anything starts.
func TestSGLangRefusals(t *testing.T) {
	leaktest.Check(t)
	for name, tt := range map[string]struct {
		change func(t *testing.T, c *Config)
		want   []string
	}{
		"no engine":        {func(_ *testing.T, c *Config) { c.Engine = "tgi" }, []string{`"tgi"`, "vllm or sglang"}},
		"no python":        {func(_ *testing.T, c *Config) { c.Python = "python-of-nobody" }, []string{"no Python", "--python"}},
		"no sglang":        {func(t *testing.T, _ *Config) { t.Setenv(stubLacks, "sglang\nkvconn") }, []string{"SGLang is not installed", "pip install sglang", "python3"}},
		"no kvconn":        {func(t *testing.T, _ *Config) { t.Setenv(stubLacks, "kvconn") }, []string{"kvconn is not installed", "pip install kvconn"}},
		"a broken python":  {func(_ *testing.T, c *Config) { c.Python = "false" }, []string{"cannot say whether it has SGLang", "exit status 1"}},
		"vLLM's contract":  {func(_ *testing.T, c *Config) { c.Contract = proxy.Mooncake }, []string{`"mooncake"`, "sglang speaks [sglang]"}},
		"SGLang's of vLLM": {func(_ *testing.T, c *Config) { c.Engine, c.Contract = VLLM, proxy.SGLang }, []string{"vllm speaks [mooncake nixl]"}},
		"our own mode":     {func(_ *testing.T, c *Config) { c.Args = []string{"--disaggregation-mode=null"} }, []string{"--disaggregation-mode after --"}},
		"our own port":     {func(_ *testing.T, c *Config) { c.Args = []string{"--disaggregation-bootstrap-port", "1"} }, []string{"--bootstrap-ports"}},
		"bootstrap taken":  {func(_ *testing.T, c *Config) { c.BootstrapPorts = c.DecodePorts }, []string{"--bootstrap-ports", "decode server 1"}},
	} {
		t.Run(name, func(t *testing.T) {
			c, _ := setUpSGLang(t, 1, 1)
			tt.change(t, &c)
			refuses(t, c, tt.want)
		})
	}
}

// TestNIXL: vLLM's other contract is the router's business.
func TestNIXL(t *testing.T) {
	leaktest.Check(t)
	c, out := setUp(t, 1, 1)
	c.Contract = proxy.NIXL
	stop, ended := start(t, c)
	eventually(t, "ready", func() bool { return strings.Contains(out.String(), "ready: send requests to") })
	post, err := http.Post(fmt.Sprintf("http://127.0.0.1:%d/v1/completions", c.Port), "application/json", strings.NewReader(`{"prompt":"x"}`))
	if err != nil {
		t.Fatal(err)
	}
	post.Body.Close()
	defer http.DefaultClient.CloseIdleConnections()
	resp, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d/metrics", c.Port))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	// Only by this contract does the router count an answer of P without parameters.
	if after, err := io.ReadAll(resp.Body); err != nil || !bytes.Contains(after, []byte("without_params_total 1")) {
		t.Errorf("%s, %v", after, err)
	}
	stop()
	if err := recv(t, ended); err != nil {
		t.Error(err)
	}
}
