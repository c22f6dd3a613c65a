// What differs between vLLM and SGLang when their servers are found and started.

package launch

import (
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvconn/kvconn/proxy"
)

// The engines that Run can start.
const (
	VLLM   = "vllm"
	SGLang = "sglang"
)

// An engine's side.
const (
	prefillRole = "prefill"
	decodeRole  = "decode"
)

// engine has the differences between the engines.
type engine interface {
	// find returns the program that serves and benchmarks.
	find(ctx context.Context, c *Config) (program []string, err error)
	// taken are the names of the server arguments that Run sets; instead says where to look in
	// their place.
	taken() (names []string, instead string)
	// serve is the command line of a server, without Args, and its environment.
	serve(c *Config, program []string, role string, port, bootstrap int) (command, env []string, err error)
	// bench is the benchmark's command line, without the arguments for which BenchArgs
	// may have other values: these come as name and value.
	bench(c *Config, program []string) (name string, command []string, defaults [][2]string)
	// alone: a server can answer a request by itself, without the router.
	alone() bool
	contracts() []proxy.Contract
}

var engines = map[string]engine{VLLM: vllmEngine{}, SGLang: sglangEngine{}}

type vllmEngine struct{}

func (vllmEngine) contracts() []proxy.Contract { return []proxy.Contract{proxy.Mooncake, proxy.NIXL} }

func (vllmEngine) alone() bool { return true }

func (vllmEngine) taken() ([]string, string) {
	return []string{"--port", "--host", "--kv-transfer-config"}, "--prefill-ports, --decode-ports and --connector-config"
}

func (vllmEngine) find(_ context.Context, c *Config) ([]string, error) {
	path, err := exec.LookPath(c.VLLM)
	if err != nil {
		return nil, fmt.Errorf("launch: the program vllm was not found (%w): activate the environment that has vLLM, "+
			"install vLLM with pip install vllm, or name its program with --vllm", err)
	}
	return []string{path}, nil
}

func (vllmEngine) serve(c *Config, program []string, role string, port, bootstrap int) (command, env []string, err error) {
	extra := map[string]any{"advertise_host": localhost, "bootstrap_host": localhost}
	for k, v := range c.ConnectorConfig {
		extra[k] = v
	}
	kind := "kv_consumer"
	if role == prefillRole {
		kind, extra["bootstrap_port"] = "kv_producer", bootstrap
	}
	transfer, err := json.Marshal(map[string]any{
		"kv_connector": "KVConnConnector", "kv_connector_module_path": "kvconn.vllm", "kv_role": kind,
		"kv_load_failure_policy": c.FailurePolicy, "kv_connector_extra_config": extra,
	})
	return append(slices.Clone(program), "serve", c.Model, "--host", localhost, "--port", strconv.Itoa(port), "--kv-transfer-config", string(transfer)), nil, err
}

func (vllmEngine) bench(c *Config, program []string) (string, []string, [][2]string) {
	// The arguments are those of vLLM's launch script for Mooncake.
	return "vllm bench serve", append(slices.Clone(program), "bench", "serve"), [][2]string{{"--backend", "vllm"}, {"--host", c.Host}, {"--port", strconv.Itoa(c.Port)}, {"--model", c.Model},
		{"--served-model-name", c.servedName()}, {"--seed", strconv.FormatInt(time.Now().Unix(), 10)}, {"--dataset-name", "random"},
		{"--random-input-len", "7500"}, {"--random-output-len", "200"}, {"--num-prompts", "200"}, {"--burstiness", "100"}, {"--request-rate", "2"}}
}

type sglangEngine struct{}

func (sglangEngine) contracts() []proxy.Contract { return []proxy.Contract{proxy.SGLang} }

// Prefill and decode know a request by its room only.
func (sglangEngine) alone() bool { return false }

func (sglangEngine) taken() ([]string, string) {
	return []string{"--port", "--host", "--model", "--model-path", "--disaggregation-mode", "--disaggregation-transfer-backend", "--disaggregation-bootstrap-port"},
		"the model, --prefill-ports, --decode-ports and --bootstrap-ports"
}

// sglangVariable is the environment variable that configures kvconn.sglang.
const sglangVariable = "KVCONN_SGLANG_CONFIG"

func (sglangEngine) find(ctx context.Context, c *Config) ([]string, error) {
	python, err := exec.LookPath(c.Python)
	if err != nil {
		return nil, fmt.Errorf("launch: no Python was found (%w): name the Python that has SGLang with --python", err)
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	// The modules are looked for, not imported: an import takes long, and a GPU.
	const look = "import importlib.util as u\nfor m in 'sglang', 'kvconn':\n    u.find_spec(m) is None and print(m)"
	cmd := exec.CommandContext(ctx, python, "-c", look)
	cmd.WaitDelay = 5 * time.Second
	out, err := cmd.Output()
	missing := strings.Fields(string(out))
	switch {
	case err != nil:
		return nil, fmt.Errorf("launch: %s cannot say whether it has SGLang: %w", python, err)
	case slices.Contains(missing, "sglang"):
		return nil, fmt.Errorf("launch: SGLang is not installed for %s: activate the environment that has SGLang, install it with pip install sglang, or name its Python with --python", python)
	case len(missing) > 0:
		return nil, fmt.Errorf("launch: kvconn is not installed for %s, where SGLang is: pip install kvconn there", python)
	}
	return []string{python}, nil
}

func (sglangEngine) serve(c *Config, program []string, role string, port, bootstrap int) (command, env []string, err error) {
	command = append(slices.Clone(program), "-m", "sglang.launch_server", "--model-path", c.Model, "--host", localhost, "--port", strconv.Itoa(port),
		"--disaggregation-mode", role, "--disaggregation-transfer-backend", "kvconn")
	if role == prefillRole {
		command = append(command, "--disaggregation-bootstrap-port", strconv.Itoa(bootstrap))
	}
	if c.ConnectorConfig != nil {
		text, err := json.Marshal(c.ConnectorConfig)
		if err != nil {
			return nil, nil, err
		}
		env = []string{sglangVariable + "=" + string(text)}
	}
	return command, env, nil
}

func (sglangEngine) bench(c *Config, program []string) (string, []string, [][2]string) {
	return "sglang.bench_serving", append(slices.Clone(program), "-m", "sglang.bench_serving"), [][2]string{{"--backend", "sglang"}, {"--host", c.Host}, {"--port", strconv.Itoa(c.Port)},
		{"--model", c.Model}, {"--seed", strconv.FormatInt(time.Now().Unix(), 10)}, {"--dataset-name", "random"},
		{"--random-input-len", "7500"}, {"--random-output-len", "200"}, {"--num-prompts", "200"}, {"--request-rate", "2"}}
}
