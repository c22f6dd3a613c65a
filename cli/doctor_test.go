package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/local"
	"github.com/kvconn/kvconn/node"
	"github.com/kvconn/kvconn/rdma"
)

func TestDoctorSaysWhatItFinds(t *testing.T) {
	report := rdma.Report{Available: true, Memlock: rdma.Memlock{Bytes: 64 << 10, Why: "RLIMIT_MEMLOCK", Remedy: "ulimit -l unlimited"},
		Devices: []rdma.DeviceReport{
			{Name: "mlx5_0", File: "/dev/infiniband/uverbs0", Selected: true, Transport: "IB", NUMANode: 1, Firmware: "22.1", MaxMRSize: 1 << 40, RelaxedOrdering: true, DMABuf: true,
				Ports: []rdma.PortReport{
					{Number: 1, Usable: true, State: "active", LinkLayer: "Ethernet", Speed: 100e9, MTU: 4096, Address: "GID 3, the best of 2", GIDs: []rdma.GIDReport{
						{Index: 3, Address: "10.0.0.1", Type: "RoCE v2", Scope: "private", NetDev: "eth2", Usable: true, Chosen: true},
						{Index: 0, Address: "fe80::1", Type: "IB", Scope: "link-local"}}},
					{Number: 2, State: "down", LinkLayer: "Ethernet", Problem: "the port is down: check the cable"}}},
			{Name: "mlx5_1", Problem: "no permission to open /dev/infiniband/uverbs1"},
		}}
	cfg := node.DefaultConfig()
	cfg.TCPListenHost, cfg.RDMAGIDIndex = "127.0.0.1", 5
	d := examine(cfg, func(c rdma.Config) rdma.Report {
		if c.GIDIndex != 5 {
			t.Errorf("looked with %+v, not with the configuration", c)
		}
		return report
	}, local.Inspect)
	var out bytes.Buffer
	d.print(&out)
	for _, want := range []string{"tcp   available", "rdma  available", "64K (RLIMIT_MEMLOCK); ulimit -l unlimited", "mlx5_0: /dev/infiniband/uverbs0, NUMA node 1, firmware 22.1, regions of at most 1024G, relaxed ordering, registers dma-bufs",
		"port 1: active, Ethernet, 100 Gb/s, MTU 4096: GID 3, the best of 2", "GID 3: 10.0.0.1, RoCE v2, private, eth2  <- preferred", "fe80::1, IB, link-local, -  cannot be used",
		"port 2: down, Ethernet, unknown speed, MTU 0: cannot be used: the port is down: check the cable", "mlx5_1: cannot be used: no permission", "auto: local with engines of this host, rdma with peers that have it and are reached by it, else tcp with others"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("it does not say %q:\n%s", want, out.String())
		}
	}
	for what, c := range map[string]struct {
		host string
		rdma rdma.Report
		ok   bool
		auto string
	}{
		"both": {"127.0.0.1", rdma.Report{Available: true}, true, "rdma"}, "tcp": {"127.0.0.1", rdma.Report{}, true, "tcp"},
		"a port is down": {"127.0.0.1", rdma.Report{Later: true}, true, "tcp, and rdma once"},
		"rdma":           {"203.0.113.1", rdma.Report{Available: true}, true, "transport rdma works"}, "none": {"203.0.113.1", rdma.Report{}, false, "fails"},
	} {
		cfg.TCPListenHost = c.host
		d := examine(cfg, func(rdma.Config) rdma.Report { return c.rdma }, local.Inspect)
		if d.OK != c.ok || !strings.Contains(d.Auto, c.auto) || d.TCP.Available == (d.TCP.Problem != "") {
			t.Errorf("%s: %+v", what, d)
		}
	}
}

// TestDoctorOfLocal: what two processes cannot do is said with their reason, and that auto does without.
func TestDoctorOfLocal(t *testing.T) {
	for what, c := range map[string]struct {
		tried, mapped error
		says          []string
	}{
		"works":        {nil, nil, []string{"local available", "exchanged a block by process_vm_readv\n", "exchanged a block of shared memory (kvconn_alloc) by a mapping\n", "auto: local with engines of this host, tcp with others\n"}},
		"not mapped":   {nil, errors.New("no seals"), []string{"local available", "exchanged a block by process_vm_readv\n", "is NOT mapped: no seals", "auto: local with"}},
		"mapped alone": {errors.New("EPERM"), nil, []string{"local NOT available: a second process could not", "shared memory (kvconn_alloc) by a mapping", "EPERM; local where all of a prefill engine's caches are shared memory (kvconn_alloc)\n"}},
		"refused":      {errors.New("set kernel.yama.ptrace_scope to 1"), errors.New("either"), []string{"local NOT available: a second process could not", "ptrace_scope to 1", "auto: tcp; not local, with engines of this host either: "}},
		"not tried":    {errNoTrial, errNoTrial, []string{"local available", "  not tried with a second process\n", "may be read by"}},
	} {
		var out bytes.Buffer
		cfg := node.DefaultConfig()
		cfg.TCPListenHost = "127.0.0.1"
		d := examine(cfg, func(rdma.Config) rdma.Report { return rdma.Report{} }, func() local.Report {
			return examineLocal(t.Context(), func(_ context.Context, shared bool) error {
				if shared {
					return c.mapped
				}
				return c.tried
			})
		})
		d.print(&out)
		for _, want := range c.says {
			if !strings.Contains(out.String(), want) {
				t.Errorf("%s: it does not say %q:\n%s", what, want, out.String())
			}
		}
		if d.Local.Tried != (c.tried == nil) || d.Local.Mapped != (c.mapped == nil) || !d.OK {
			t.Errorf("%s: %+v", what, d)
		}
	}
}

// TestDoctorOnThisMachine: the answer is whole, whatever transports this machine has.
func TestDoctorOnThisMachine(t *testing.T) {
	var out bytes.Buffer
	if err := runDoctor(t.Context(), []string{"--json"}, &out); err != nil {
		t.Fatal(err)
	}
	var d diagnosis
	if err := json.Unmarshal(out.Bytes(), &d); err != nil || !d.OK || !d.TCP.Available || d.RDMA.Available == (d.RDMA.Problem != "") || d.Auto == "" {
		t.Errorf("%v: %s", err, out.String())
	}
	file := filepath.Join(t.TempDir(), "agent.json")
	write := func(text string) {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(`{"engine_id": "e", "role": "prefill", "tcp_listen_host": "203.0.113.1", "rdma_devices": ["no_such_device"]}`)
	out.Reset()
	if err := runDoctor(t.Context(), []string{"--config", file}, &out); !errors.Is(err, errNoTransport) || !strings.Contains(out.String(), "203.0.113.1") {
		t.Errorf("%v: %s", err, out.String())
	}
	write(`{"engine_id": "e", "role": "prefill", "rdma_mtu": 1500}`)
	for _, args := range [][]string{{"--config", file}, {"--config", file + ".none"}, {"more"}, {"--nope"}} {
		if err := runDoctor(t.Context(), args, &out); !errors.Is(err, errUsage) {
			t.Errorf("%q: %v", args, err)
		}
	}
}

// TestDoctorNamesATakenPort: a port of the configuration that another process holds is named, with its key and what to do.
func TestDoctorNamesATakenPort(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	cfg := node.DefaultConfig()
	cfg.TCPListenHost, cfg.TCPPort = "127.0.0.1", l.Addr().(*net.TCPAddr).Port
	if r := examineTCP(cfg); r.Available || !strings.Contains(r.Problem, l.Addr().String()) || !strings.Contains(r.Problem, "or set tcp_port to a free one") {
		t.Errorf("%+v", r)
	}
}
