// kvconn launch's options become a launch.Config.

package cli

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/launch"
	"github.com/kvconn/kvconn/proxy"
)

const launchUsage = `usage: kvconn launch MODEL [OPTIONS] [-- ARGUMENTS OF THE SERVERS]

Starts prefill and decode servers of vLLM, or of SGLang, on this machine, with kvconn between them, and the router.

`

// launchOptions are the options as they are written.
type launchOptions struct {
	launch.Config
	contract, connector, bench                string
	prefillDevices, decodeDevices             string
	prefillPorts, decodePorts, bootstrapPorts string
}

func (c *launchOptions) flags() *flag.FlagSet {
	fs := newFlags("launch")
	fs.Usage = func() {
		fmt.Fprint(os.Stderr, launchUsage)
		fs.PrintDefaults()
	}
	router := proxy.DefaultConfig()
	fs.StringVar(&c.Engine, "engine", launch.VLLM, "the engine of the servers: vllm or sglang")
	fs.StringVar(&c.contract, "contract", "", "how the router tells the servers of each other: for vllm mooncake (default) or nixl, for sglang its own")
	fs.IntVar(&c.Prefill, "prefill", 0, "how many prefill servers (default: as many as --prefill-devices names, else 1)")
	fs.IntVar(&c.Decode, "decode", 0, "how many decode servers (default: as many as --decode-devices names, else 1)")
	fs.StringVar(&c.prefillDevices, "prefill-devices", "", "each prefill server's devices, separated by commas; several of one server by +, as 0+1,2+3")
	fs.StringVar(&c.decodeDevices, "decode-devices", "", "each decode server's devices, in the same form")
	fs.StringVar(&c.DeviceVariable, "device-variable", launch.DefaultDeviceVariable, "the environment variable that tells an engine its devices")
	fs.StringVar(&c.prefillPorts, "prefill-ports", strconv.Itoa(launch.DefaultPrefillPort), "the first prefill server's port, or each one's, separated by commas")
	fs.StringVar(&c.decodePorts, "decode-ports", strconv.Itoa(launch.DefaultDecodePort), "the first decode server's port, or each one's")
	fs.StringVar(&c.bootstrapPorts, "bootstrap-ports", strconv.Itoa(launch.DefaultBootstrapPort), "the first prefill server's bootstrap port, or each one's")
	fs.StringVar(&c.Host, "host", router.Host, "address on which the router listens; servers listen on 127.0.0.1")
	fs.IntVar(&c.Port, "port", router.Port, "the router's port")
	fs.IntVar(&c.MaxRequests, "max-requests", router.MaxRequests, "how many requests the router may have in flight, as in kvconn proxy")
	fs.Int64Var(&c.MaxBody, "max-body", router.MaxBody, "the longest body of a request in bytes, as in kvconn proxy")
	fs.Int64Var(&c.BodyMemory, "body-memory", router.BodyMemory, "the router's memory for requests in bytes, as in kvconn proxy")
	fs.StringVar(&c.connector, "connector-config", "", "JSON object: further keys of kv_connector_extra_config, or of KVCONN_SGLANG_CONFIG")
	fs.StringVar(&c.FailurePolicy, "failure-policy", launch.DefaultFailurePolicy, "vllm's kv_load_failure_policy: recompute or fail")
	fs.StringVar(&c.LogDir, "log-dir", "kvconn-logs", "directory for each server's log")
	fs.DurationVar(&c.Ready, "timeout", launch.DefaultReady, "how long the servers may take until they are ready")
	fs.StringVar(&c.VLLM, "vllm", launch.DefaultVLLM, "the vllm program")
	fs.StringVar(&c.Python, "python", launch.DefaultPython, "the Python that has SGLang")
	fs.BoolVar(&c.Bench, "bench", false, "run vllm bench serve (or sglang.bench_serving) on the router, print its table, and end")
	fs.StringVar(&c.bench, "bench-args", "", "further arguments of the benchmark; one that launch gives too replaces launch's")
	return fs
}

// parseLaunch reads the command line: the model, options, and behind -- the engine's
// arguments.
func parseLaunch(args []string) (launch.Config, error) {
	var o launchOptions
	c := &o.Config
	if i := slices.Index(args, "--"); i >= 0 {
		args, c.Args = args[:i], args[i+1:]
	}
	fs := o.flags()
	// The model may stand before the options, as with vllm serve.
	if len(args) > 0 && !strings.HasPrefix(args[0], "-") {
		c.Model, args = args[0], args[1:]
	}
	if err := parseFlags(fs, args); err != nil {
		return *c, err
	}
	if c.Model == "" && fs.NArg() == 1 {
		c.Model = fs.Arg(0)
	} else if fs.NArg() > 0 {
		return *c, fmt.Errorf("%w: launch takes one model, and not %q: arguments of the servers go behind --", errUsage, fs.Args())
	}
	c.PrefillDevices, c.DecodeDevices = splitDevices(o.prefillDevices), splitDevices(o.decodeDevices)
	var errs [3]error
	c.PrefillPorts, errs[0] = splitPorts("--prefill-ports", o.prefillPorts)
	c.DecodePorts, errs[1] = splitPorts("--decode-ports", o.decodePorts)
	c.BootstrapPorts, errs[2] = splitPorts("--bootstrap-ports", o.bootstrapPorts)
	if err := errors.Join(errs[:]...); err != nil {
		return *c, err
	}
	if o.connector != "" {
		if err := json.Unmarshal([]byte(o.connector), &c.ConnectorConfig); err != nil {
			return *c, fmt.Errorf("%w: --connector-config %q is no JSON object: %w", errUsage, o.connector, err)
		}
	}
	if c.FailurePolicy != "recompute" && c.FailurePolicy != "fail" {
		return *c, fmt.Errorf("%w: --failure-policy %q: want recompute or fail", errUsage, c.FailurePolicy)
	}
	if c.Ready < time.Second {
		return *c, fmt.Errorf("%w: --timeout %v: want at least 1s", errUsage, c.Ready)
	}
	c.BenchArgs, c.Contract = strings.Fields(o.bench), proxy.Contract(o.contract)
	return *c, nil
}

func splitDevices(s string) []string {
	if s == "" {
		return nil
	}
	list := strings.Split(s, ",")
	for i := range list {
		list[i] = strings.ReplaceAll(list[i], "+", ",")
	}
	return list
}

func splitPorts(name, s string) ([]int, error) {
	var ports []int
	for _, p := range strings.Split(s, ",") {
		n, err := strconv.Atoi(p)
		if err != nil {
			return nil, fmt.Errorf("%w: %s %q: want ports separated by commas", errUsage, name, s)
		}
		ports = append(ports, n)
	}
	return ports, nil
}

func runLaunch(ctx context.Context, args []string, out io.Writer) error {
	c, err := parseLaunch(args)
	if err != nil {
		return err
	}
	if c.Self, err = selfCommand(); err != nil {
		return err
	}
	c.Out = out
	if f, ok := out.(*os.File); ok {
		_, err = unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
		c.Terminal = err == nil
	}
	return launch.Run(ctx, c)
}

// runGuard is the command under which launch runs each server.
func runGuard(args []string, in io.Reader) (int, error) {
	if len(args) == 0 {
		return exitUsage, errUsage
	}
	return launch.Guard(in, args, launch.StopGrace)
}
