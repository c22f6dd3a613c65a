package launch

import (
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/rig/leaktest"
)

// An impossible configuration is refused before anything starts.
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
		"no memory":           {func(_ *testing.T, c *Config) { c.BodyMemory = 1 << 20 }, []string{"--body-memory 1048576 has no room", "raise --body-memory to 37748736"}},
		"no model":            {func(_ *testing.T, c *Config) { c.Model = "" }, []string{"no model"}},
		"no vllm":             {func(_ *testing.T, c *Config) { c.VLLM = "vllm-of-nobody" }, []string{"the program vllm was not found", "pip install vllm", "--vllm"}},
		"prefill port taken":  {func(_ *testing.T, c *Config) { c.PrefillPorts = []int{taken} }, []string{strconv.Itoa(taken), "prefill server 1", "is taken", "--prefill-ports"}},
		"bootstrap taken":     {func(_ *testing.T, c *Config) { c.BootstrapPorts = []int{taken} }, []string{strconv.Itoa(taken), "--bootstrap-ports"}},
		"router's port taken": {func(_ *testing.T, c *Config) { c.Port = taken }, []string{strconv.Itoa(taken), "the router", "--port"}},
		"one port twice":      {func(_ *testing.T, c *Config) { c.DecodePorts = c.PrefillPorts }, []string{"decode server 1", "prefill server 1"}},
		"bad port":            {func(_ *testing.T, c *Config) { c.Port = 65536 }, []string{"65536", "--port"}},
		"ports for two":       {func(_ *testing.T, c *Config) { c.DecodePorts = []int{1, 2} }, []string{"--decode-ports", "2 ports for 1"}},
		"no driver": {func(t *testing.T, c *Config) {
			t.Setenv("PATH", strings.Split(os.Getenv("PATH"), ":")[0]) // this machine may have one
			c.PrefillDevices, c.DecodeDevices = []string{"0"}, []string{"1"}
		}, []string{"nvidia-smi", "--prefill-devices"}},
		"device missing": {func(t *testing.T, c *Config) {
			smi(t, two)
			c.PrefillDevices, c.DecodeDevices = []string{"0"}, []string{"1,2"}
		}, []string{`device "2" is missing`, "lists 2"}},
		"too few devices": {func(t *testing.T, c *Config) {
			smi(t, two)
			ports := freePorts(t, 6) // at once: what is asked for later may be one of these
			c.Prefill, c.PrefillPorts, c.BootstrapPorts, c.DecodePorts, c.Port = 2, ports[:2], ports[2:4], ports[4:5], ports[5]
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
// TestRouterLimits: the router has launch's limits, and its defaults where there are none.
func TestRouterLimits(t *testing.T) {
	r := Config{Host: "h", Port: 7, MaxRequests: 11, MaxBody: 12, BodyMemory: 13}.routes()
	if r.Host != "h" || r.Port != 7 || r.MaxRequests != 11 || r.MaxBody != 12 || r.BodyMemory != 13 {
		t.Errorf("%+v", r)
	}
	if err := (Config{}).routes().CheckLimits(); err != nil {
		t.Error(err)
	}
}

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
