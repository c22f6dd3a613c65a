package cli

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/cli/gpuhost"
	"github.com/kvconn/kvconn/rdma"
	"github.com/kvconn/kvconn/rig/testdouble"
)

// runChild has TestDoctorProcess run doctor in a process of its own, since a process loads one driver.
const runChild = "KVCONN_TEST_DOCTOR"

func TestDoctorProcess(t *testing.T) {
	args, child := os.LookupEnv(runChild)
	if !child {
		return
	}
	if err := runDoctor(t.Context(), strings.Fields(args), os.Stdout); err != nil {
		os.Exit(1)
	}
	os.Exit(0)
}

func doctor(t *testing.T, args string, env ...string) []byte {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestDoctorProcess$")
	cmd.Env = append(append(os.Environ(), env...), runChild+"="+args)
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %s%s", err, out, errs.Bytes())
	}
	return out
}

// TestDoctorAsksTheDriver: what the driver double tells, a driver that is too old, and none at all.
func TestDoctorAsksTheDriver(t *testing.T) {
	library := "KVCONN_LIBCUDA=" + testdouble.Library(t, testdouble.Newest)
	var d diagnosis
	out := doctor(t, "--json", library, "KVGPU_ATTRIBUTES=124=0")
	if err := json.Unmarshal(out, &d); err != nil || d.GPU.Problem != "" || len(d.GPU.Devices) != 2 || !strings.HasPrefix(d.GPU.Devices[0].UUID, "GPU-") || d.GPU.Devices[0].DMABuf {
		t.Errorf("%v: %s", err, out)
	}
	for _, c := range []struct {
		env  []string
		says []string
	}{
		{[]string{library, "KVGPU_ATTRIBUTES=124=0"}, []string{"gpu   available: CUDA 13", "GPU 0: ", "GPU 1: ", "no dma-buf", "modprobe nvidia-peermem"}},
		{[]string{library}, []string{", dma-buf, "}},
		{[]string{library, "CUDA_VISIBLE_DEVICES=-1"}, []string{"gpu   NOT available: ", "NO_DEVICE", "see nvidia-smi, CUDA_VISIBLE_DEVICES"}},
		{[]string{library, "KVGPU_DRIVER=11080"}, []string{"gpu   NOT available: ", "CUDA 11.8, and CUDA 12.2 or newer is needed; install a newer driver"}},
		{[]string{"KVCONN_LIBCUDA=/nowhere/libcuda.so"}, []string{"gpu   NOT available: ", "/nowhere/libcuda.so", "docker run --gpus all"}},
	} {
		text := string(doctor(t, "", c.env...))
		for _, say := range c.says {
			if !strings.Contains(text, say) {
				t.Errorf("%q: it does not say %q:\n%s", c.env, say, text)
			}
		}
	}
}

// TestDoctorSaysHowCardsReachGPUs: which cards a GPU's transfers go by, and why others do not reach its memory.
func TestDoctorSaysHowCardsReachGPUs(t *testing.T) {
	d := diagnosis{GPU: gpuhost.Report{CUDA: "13.0", Peermem: "nv-peer-mem", Remedies: []string{"do this"}, Devices: []gpuhost.Device{{Name: "H100", NUMANode: -1, Cards: []gpuhost.Card{
		{Name: "mlx5_0", Distance: "same switch", By: "dma-buf", Taken: true}, {Name: "mlx5_1", Distance: "same NUMA node", By: "nv-peer-mem"},
		{Name: "rxe0", Distance: "unknown", Problem: "it registers no dma-buf"}}}}}}
	d.RDMA.Devices = []rdma.DeviceReport{{Name: "rxe0", File: "uverbs0"}}
	var out bytes.Buffer
	d.print(&out)
	for _, want := range []string{"rxe0: uverbs0, ", "registers no dma-buf\n", "gpu   available: CUDA 13.0, no kernel modules are seen, nv-peer-mem is loaded\n", "  do this\n",
		"    RDMA devices, the nearest first: mlx5_0 (same switch, by dma-buf, taken), mlx5_1 (same NUMA node, by nv-peer-mem), rxe0 (unknown, not for its memory: it registers no dma-buf)\n"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("it does not say %q:\n%s", want, out.String())
		}
	}
}
