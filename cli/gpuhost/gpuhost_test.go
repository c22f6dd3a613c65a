package gpuhost

import (
	"encoding/binary"
	"errors"
	"io/fs"
	"path"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/kvconn/kvconn/cuda"
	"github.com/kvconn/kvconn/rdma"
)

const (
	openModules   = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (builder@host)\nGCC version:  gcc 12\n"
	closedModules = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n"

	root    = "devices/pci0000:3a/0000:3a:00.0"
	gpu0    = root + "/0000:3b:00.0/0000:3c:08.0/0000:3e:00.0"
	card0   = root + "/0000:3b:00.0/0000:3c:04.0/0000:3d:00.0"
	card1   = "devices/pci0000:3a/0000:3a:02.0/0000:41:00.0"
	gpu1    = "devices/pci0000:c9/0000:c9:00.0/0000:ca:00.0"
	windows = "0x00000000f0000000 0x00000000f0ffffff 0x0000000000040200\n0x0000380000000000 0x0000381fffffffff 0x000000000014220c\n"
)

// config is a bridge's configuration space with ACS's control word, behind another capability.
func config(control uint16) *fstest.MapFile {
	b := make([]byte, 4096)
	binary.LittleEndian.PutUint32(b[0x100:], 0x148<<20|1<<16|0x0001)
	binary.LittleEndian.PutUint32(b[0x148:], 0<<20|1<<16|0x000d)
	binary.LittleEndian.PutUint16(b[0x148+6:], control)
	return &fstest.MapFile{Data: b}
}

// tree is a host with two GPUs, of which the first shares a switch with a card.
func tree() fstest.MapFS {
	text := func(s string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(s)} }
	link := func(s string) *fstest.MapFile {
		return &fstest.MapFile{Data: []byte(s), Mode: fs.ModeSymlink | 0o777}
	}
	m := fstest.MapFS{
		"proc/driver/nvidia/version":                        text(openModules),
		"sys/" + card0 + "/infiniband/mlx5_0/node_guid":     text("0\n"),
		"sys/" + card1 + "/infiniband/mlx5_1/node_guid":     text("0\n"),
		"sys/devices/virtual/infiniband/rxe0/node_guid":     text("0\n"),
		"sys/class/infiniband/mlx5_0":                       link("../../" + card0 + "/infiniband/mlx5_0"),
		"sys/class/infiniband/mlx5_1":                       link("../../" + card1 + "/infiniband/mlx5_1"),
		"sys/class/infiniband/rxe0":                         link("../../devices/virtual/infiniband/rxe0"),
		"sys/" + gpu0 + "/resource":                         text(windows),
		"sys/" + gpu1 + "/resource":                         text("0x00000000f0000000 0x00000000f0ffffff 0x0000000000040200\n0x0000380000000000 0x000038000fffffff 0x000000000014220c\n"),
		"sys/" + gpu0 + "/vendor":                           text("0x10de\n"),
		"sys/" + gpu0 + "/class":                            text("0x030200\n"),
		"sys/" + root + "/config":                           config(0x0011),
		"sys/" + root + "/0000:3b:00.0/config":              config(0x0011),
		"sys/" + root + "/0000:3b:00.0/0000:3c:04.0/config": config(0x0011),
		"sys/" + root + "/0000:3b:00.0/0000:3c:08.0/config": config(0x0011),
	}
	for dir, node := range map[string]string{root: "0", root + "/0000:3b:00.0": "0", root + "/0000:3b:00.0/0000:3c:04.0": "0", root + "/0000:3b:00.0/0000:3c:08.0": "0",
		gpu0: "0", gpu1: "1", card0: "0", card1: "0"} {
		m["sys/"+dir+"/numa_node"] = text(node + "\n")
		m["sys/bus/pci/devices/"+path.Base(dir)] = link("../../../" + dir)
	}
	return m
}

func infos() []cuda.Info {
	return []cuda.Info{
		{Ordinal: 0, Name: "NVIDIA H100", UUID: "GPU-0", PCI: "0000:3E:00.0", Major: 9, RDMA: true, DMABuf: true, FlushOnHost: true},
		{Ordinal: 1, Name: "NVIDIA H100", UUID: "GPU-1", PCI: "0000:CA:00.0", Major: 9, RDMA: true, DMABuf: true, FlushOnHost: true},
	}
}

const noDMABuf = "operation not supported"

// cards is what libibverbs says of the tree's cards: Soft-RoCE registers no dma-buf.
func cards() rdma.Report {
	port := []rdma.PortReport{{Number: 1, Usable: true}}
	return rdma.Report{Available: true, Devices: []rdma.DeviceReport{
		{Name: "mlx5_0", Selected: true, DMABuf: true, Ports: port}, {Name: "mlx5_1", Selected: true, DMABuf: true, Ports: port},
		{Name: "rxe0", Selected: true, NoDMABuf: noDMABuf, Ports: port}}}
}

func host(files fstest.MapFS, list []cuda.Info, err error) Host {
	return Host{Root: files, Ask: func() ([]cuda.Info, error) { return list, err }, Version: func() int { return 13000 }, RDMA: cards()}
}

func TestAHostWithGPUs(t *testing.T) {
	r := Look(host(tree(), infos(), nil))
	if r.Problem != "" || r.CUDA != "13.0" || r.Modules == nil || *r.Modules != (Modules{"580.65.06", true}) || r.Peermem != "" || len(r.Devices) != 2 {
		t.Fatalf("%+v", r)
	}
	if got, want := ways(r.Devices[0]), []string{"mlx5_0 same switch, by dma-buf, taken", "mlx5_1 same root complex, by dma-buf", "rxe0 unknown: it registers no dma-buf"}; !reflect.DeepEqual(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	if got, want := ways(r.Devices[1]), []string{"mlx5_0 other NUMA node, by dma-buf, taken", "mlx5_1 other NUMA node, by dma-buf, taken", "rxe0 unknown: it registers no dma-buf"}; !reflect.DeepEqual(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	if d := r.Devices[0]; d.PCI != "0000:3e:00.0" || d.BAR1 != 128<<30 || d.NUMANode != 0 || d.Compute != "9.0" || d.ACS.Redirects != nil || d.ACS.Unreadable != nil {
		t.Errorf("%+v", d)
	}
	if d := r.Devices[1]; d.BAR1 != 256<<20 || d.NUMANode != 1 || d.Cards[0].Distance != "other NUMA node" {
		t.Errorf("%+v", d)
	}
	want := []string{"RDMA device rxe0 takes no GPU's memory: " + noDMABuf + "; and nvidia-peermem is not loaded: modprobe nvidia-peermem", "GPU 1 has a BAR1 of 256 MiB",
		"GPU 1 shares no PCI root with a card: the nearest, mlx5_0, is at the other NUMA node"}
	if len(r.Remedies) != len(want) || !strings.Contains(r.Remedies[0], want[0]) || !strings.Contains(r.Remedies[1], want[1]) || !strings.Contains(r.Remedies[2], want[2]) {
		t.Errorf("%q, want %q", r.Remedies, want)
	}
}

// TestWhatIsMissing: each thing that a host lacks is named, with the remedy.
func TestWhatIsMissing(t *testing.T) {
	for what, c := range map[string]struct {
		change func(files fstest.MapFS, list []cuda.Info) ([]cuda.Info, error)
		says   string // part of the problem
		remedy string // part of a remedy
	}{
		"no driver": {func(f fstest.MapFS, l []cuda.Info) ([]cuda.Info, error) {
			delete(f, "proc/driver/nvidia/version")
			return l, nil
		}, "there is one at PCI 0000:3e:00.0, so install NVIDIA's driver", ""},
		"no GPU": {func(f fstest.MapFS, l []cuda.Info) ([]cuda.Info, error) {
			delete(f, "proc/driver/nvidia/version")
			delete(f, "sys/"+gpu0+"/vendor")
			return l, nil
		}, "--gpus all", ""},
		"a driver that fails": {func(f fstest.MapFS, l []cuda.Info) ([]cuda.Info, error) {
			return nil, errors.New("CUDA is not available: the driver is too old; install a newer one")
		}, "install a newer one", ""},
		"hidden devices": {func(f fstest.MapFS, l []cuda.Info) ([]cuda.Info, error) { return nil, nil }, `CUDA_VISIBLE_DEVICES, which is "7"`, ""},
		"closed modules": {func(f fstest.MapFS, l []cuda.Info) ([]cuda.Info, error) {
			f["proc/driver/nvidia/version"] = &fstest.MapFile{Data: []byte(closedModules)}
			l[0].DMABuf = false
			return l, nil
		}, "", "open kernel modules (kvconn found the closed ones, 535.183.01), or modprobe nvidia-peermem"},
		"an old kernel": {func(f fstest.MapFS, l []cuda.Info) ([]cuda.Info, error) {
			l[0].DMABuf = false
			return l, nil
		}, "", "Linux 5.12"},
		"no GPUDirect": {func(f fstest.MapFS, l []cuda.Info) ([]cuda.Info, error) {
			l[0].RDMA = false
			return l, nil
		}, "", "GPU 0 (NVIDIA H100) has no GPUDirect RDMA"},
		"no flush": {func(f fstest.MapFS, l []cuda.Info) ([]cuda.Info, error) {
			l[1].FlushOnHost = false
			return l, nil
		}, "", "GPU 1 (NVIDIA H100) neither orders what cards write nor can be told to flush it"},
		"ACS": {func(f fstest.MapFS, l []cuda.Info) ([]cuda.Info, error) {
			f["sys/"+root+"/0000:3b:00.0/0000:3c:04.0/config"] = config(0x001d)
			return l, nil
		}, "", "ACS at PCI 0000:3c:04.0 sends what goes between GPU 0 and its card"},
		"ACS for root alone": {func(f fstest.MapFS, l []cuda.Info) ([]cuda.Info, error) {
			f["sys/"+root+"/0000:3b:00.0/config"] = &fstest.MapFile{Data: make([]byte, 64)}
			return l, nil
		}, "", "as root"},
	} {
		t.Run(what, func(t *testing.T) {
			files := tree()
			list, err := c.change(files, infos())
			h := host(files, list, err)
			h.Visible = "7"
			r := Look(h)
			if c.says == "" && r.Problem != "" || !strings.Contains(r.Problem, c.says) || strings.Contains(r.Problem, "\n") {
				t.Errorf("the problem is %q, want %q", r.Problem, c.says)
			}
			if c.remedy != "" && !slices.ContainsFunc(r.Remedies, func(s string) bool { return strings.Contains(s, c.remedy) }) {
				t.Errorf("the remedies are %q, want %q", r.Remedies, c.remedy)
			}
		})
	}
}

// TestPeermem: the module takes dma-buf's place, at the GPU and at the card.
func TestPeermem(t *testing.T) {
	files := tree()
	files["sys/module/nv_peer_mem/refcnt"] = &fstest.MapFile{Data: []byte("0\n")}
	list := infos()[:1]
	list[0].DMABuf = false
	if r := Look(host(files, list, nil)); r.Peermem != "nv-peer-mem" || len(r.Remedies) != 0 || r.Devices[0].Cards[0].By != "nv-peer-mem" {
		t.Errorf("%+v", r)
	}
	list = infos()[:1]
	r := Look(host(files, list, nil))
	if got, want := ways(r.Devices[0]), []string{"mlx5_0 same switch, by dma-buf, taken", "mlx5_1 same root complex, by dma-buf", "rxe0 unknown, by nv-peer-mem"}; !reflect.DeepEqual(got, want) || len(r.Remedies) != 0 {
		t.Errorf("%q, want %q; %q", got, want, r.Remedies)
	}
}

// TestNobodyIsAskedUnlessForced: where the kernel has no modules the driver is not started.
func TestNobodyIsAskedUnlessForced(t *testing.T) {
	files, asked := fstest.MapFS{}, 0
	h := Host{Root: files, Ask: func() ([]cuda.Info, error) { asked++; return infos(), nil }, Version: func() int { return 12020 }}
	if r := Look(h); asked != 0 || r.Problem == "" {
		t.Errorf("asked %d times: %+v", asked, r)
	}
	h.Force = true
	if r := Look(h); asked != 1 || r.Problem != "" || r.CUDA != "12.2" || len(r.Devices) != 2 || r.Devices[0].NUMANode != -1 || r.Devices[0].BAR1 != 0 {
		t.Errorf("asked %d times: %+v", asked, r)
	}
}
