// What is to be started, and which values cannot work.

package launch

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/kvconn/kvconn/bootstrap"
	"github.com/kvconn/kvconn/proxy"
)

// Defaults of Config.
const (
	DefaultPrefillPort    = 8010
	DefaultDecodePort     = 8020
	DefaultBootstrapPort  = bootstrap.DefaultPort
	DefaultReady          = 20 * time.Minute
	DefaultDeviceVariable = cudaDevices
	DefaultFailurePolicy  = "recompute"
	DefaultVLLM           = "vllm"
	DefaultPython         = "python3"
)

// localhost is where the servers listen: they are all on this machine, and only the router
// needs them.
const localhost = "127.0.0.1"

// Config says what to start.
type Config struct {
	// Engine is VLLM or SGLang: VLLM.
	Engine string
	// Contract is how the router tells the servers of each other. The engine must speak
	// it. For VLLM it is Mooncake by default.
	Contract proxy.Contract
	// Model is the model that the servers are given.
	Model string
	// Prefill and Decode are how many servers there are of each.
	Prefill, Decode int
	// PrefillDevices and DecodeDevices have an entry for each server: its devices, as the
	// device variable takes them ("0", "0,1", a UUID). Empty: one device for each server if
	// there is an NVIDIA driver, else none.
	PrefillDevices, DecodeDevices []string
	// DeviceVariable is the variable that names devices: CUDA_VISIBLE_DEVICES.
	DeviceVariable string
	// PrefillPorts, BootstrapPorts and DecodePorts have a port for each server. If one port
	// is named for several servers, the others get the ports that follow it.
	PrefillPorts, BootstrapPorts, DecodePorts []int
	// Host and Port are where the router listens.
	Host string
	Port int
	// MaxRequests, MaxBody and BodyMemory are the router's limits; 0 gives its default.
	MaxRequests         int
	MaxBody, BodyMemory int64
	// ConnectorConfig has the keys of kvconn's configuration besides those that Run sets:
	// kv_connector_extra_config, for SGLang KVCONN_SGLANG_CONFIG.
	ConnectorConfig map[string]any
	// FailurePolicy is the decode servers' kv_load_failure_policy: recompute. SGLang
	// has none.
	FailurePolicy string
	// LogDir is the directory of the servers' logs. If it does not exist, Run makes it.
	LogDir string
	// Ready bounds how long the servers may take to be ready: 20 min.
	Ready time.Duration
	// VLLM is the vllm program, found on PATH unless it has a slash.
	VLLM string
	// Python is the program that has SGLang: python3, found as VLLM is.
	Python string
	// Args are further arguments of each server.
	Args []string
	// Bench runs the engine's benchmark on the router when all is ready, with BenchArgs
	// after its own arguments, and then ends.
	Bench     bool
	BenchArgs []string

	// Self is the command that, with GuardCommand and a command line behind it,
	// runs Guard.
	Self []string
	// Out is where Run tells its progress.
	Out io.Writer
	// Terminal says that Out is a terminal: the status is then one line that is written
	// over.
	Terminal bool
}

// routes is the router's configuration, without its servers.
func (c Config) routes() proxy.Config {
	r := proxy.DefaultConfig()
	r.Contract, r.Host, r.Port, r.ShutdownTimeout = c.Contract, c.Host, c.Port, routerGrace
	r.MaxRequests, r.MaxBody, r.BodyMemory = c.MaxRequests, c.MaxBody, c.BodyMemory
	return r
}

// withDefaults fills in zero values, and refuses impossible ones.
func (c Config) withDefaults() (Config, error) {
	if c.Engine == "" {
		c.Engine = VLLM
	}
	e := engines[c.Engine]
	if e == nil {
		return c, fmt.Errorf("launch: engine %q: want %s or %s", c.Engine, VLLM, SGLang)
	}
	if c.Contract == "" {
		c.Contract = e.contracts()[0]
	}
	if !slices.Contains(e.contracts(), c.Contract) {
		return c, fmt.Errorf("launch: contract %q: %s speaks %v", c.Contract, c.Engine, e.contracts())
	}
	if err := c.routes().CheckLimits(); err != nil { // before the servers start, which takes minutes
		return c, fmt.Errorf("launch: %w", err)
	}
	if c.Model == "" {
		return c, errors.New("launch: no model: name one, as kvconn launch Qwen/Qwen2.5-7B-Instruct")
	}
	for _, d := range []struct {
		n       *int
		devices []string
		role    string
	}{{&c.Prefill, c.PrefillDevices, "prefill"}, {&c.Decode, c.DecodeDevices, "decode"}} {
		if *d.n == 0 {
			*d.n = max(len(d.devices), 1)
		}
		if *d.n < 0 || *d.n > 64 {
			return c, fmt.Errorf("launch: %d %s servers: want 1 to 64", *d.n, d.role)
		}
		if len(d.devices) > 0 && len(d.devices) != *d.n {
			return c, fmt.Errorf("launch: --%s-devices names devices of %d servers, but there are %d: give each server's, separated by commas (several of one server by +)",
				d.role, len(d.devices), *d.n)
		}
	}
	if (len(c.PrefillDevices) == 0) != (len(c.DecodeDevices) == 0) {
		return c, errors.New("launch: name both --prefill-devices and --decode-devices, or neither")
	}
	for _, p := range []struct {
		ports *[]int
		first int
		n     int
		flag  string
	}{
		{&c.PrefillPorts, DefaultPrefillPort, c.Prefill, "--prefill-ports"},
		{&c.DecodePorts, DefaultDecodePort, c.Decode, "--decode-ports"},
		{&c.BootstrapPorts, DefaultBootstrapPort, c.Prefill, "--bootstrap-ports"},
	} {
		if len(*p.ports) == 0 {
			*p.ports = []int{p.first}
		}
		if len(*p.ports) == 1 {
			for i := 1; i < p.n; i++ {
				*p.ports = append(*p.ports, (*p.ports)[0]+i)
			}
		}
		if len(*p.ports) != p.n {
			return c, fmt.Errorf("launch: %s has %d ports for %d servers: give the first one, or each", p.flag, len(*p.ports), p.n)
		}
	}
	names, instead := e.taken()
	for _, a := range c.Args {
		if name, _, _ := strings.Cut(a, "="); slices.Contains(names, name) {
			return c, fmt.Errorf("launch: %s after -- is set for each server by launch itself: see %s", name, instead)
		}
	}
	for _, key := range []string{"bootstrap_port", "bootstrap_host", "advertise_host"} {
		if _, ok := c.ConnectorConfig[key]; ok {
			return c, fmt.Errorf("launch: --connector-config: %s is set for each server by launch itself", key)
		}
	}
	if c.DeviceVariable == "" {
		c.DeviceVariable = DefaultDeviceVariable
	}
	if c.Host == "" {
		c.Host = proxy.DefaultConfig().Host
	}
	if c.FailurePolicy == "" {
		c.FailurePolicy = DefaultFailurePolicy
	}
	if c.Ready == 0 {
		c.Ready = DefaultReady
	}
	if c.VLLM == "" {
		c.VLLM = DefaultVLLM
	}
	if c.Python == "" {
		c.Python = DefaultPython
	}
	return c, nil
}

// servedName is the name by which requests ask for the model.
func (c Config) servedName() string { return cmp.Or(c.argument("--served-model-name"), c.Model) }

// apiKey is the key that the servers ask of their clients, and so of Run.
func (c Config) apiKey() string { return cmp.Or(c.argument("--api-key"), os.Getenv("VLLM_API_KEY")) }

// argument is the value of one of Args, "" where it is not there.
func (c Config) argument(name string) string {
	for i, a := range c.Args {
		if value, ok := strings.CutPrefix(a, name+"="); ok {
			return value
		}
		if a == name && i+1 < len(c.Args) {
			return c.Args[i+1]
		}
	}
	return ""
}
