package gpuhost

import (
	"reflect"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/cuda"
	"github.com/kvconn/kvconn/rdma"
)

// ways are a GPU's cards as text, the nearest first.
func ways(d Device) (list []string) {
	for _, c := range d.Cards {
		text := c.Name + " " + c.Distance
		if c.By != "" {
			text += ", by " + c.By
		} else {
			text += ": " + c.Problem
		}
		if c.Taken {
			text += ", taken"
		}
		list = append(list, text)
	}
	return list
}

// TestWaysToAGPU: a GPU's transfers go by the nearest of the cards that the transport uses and that take the GPU's memory.
func TestWaysToAGPU(t *testing.T) {
	const far = "mlx5_1 same root complex, by dma-buf"
	const soft = "rxe0 unknown: it registers no dma-buf"
	for what, c := range map[string]struct {
		change func(near *rdma.DeviceReport, gpu *cuda.Info)
		want   []string
		remedy string
	}{
		"all": {func(*rdma.DeviceReport, *cuda.Info) {}, []string{"mlx5_0 same switch, by dma-buf, taken", far, soft}, ""},
		"left out": {func(d *rdma.DeviceReport, _ *cuda.Info) { d.Selected = false },
			[]string{"mlx5_0 same switch: rdma_devices and rdma_deny leave it out", far + ", taken", soft}, ""},
		"cannot be opened": {func(d *rdma.DeviceReport, _ *cuda.Info) { d.Problem = "no permission" },
			[]string{"mlx5_0 same switch: it cannot be used, see above", far + ", taken", soft}, ""},
		"no port": {func(d *rdma.DeviceReport, _ *cuda.Info) { d.Ports = nil },
			[]string{"mlx5_0 same switch: no port of it can be used, see above", far + ", taken", soft}, ""},
		"not shown": {func(d *rdma.DeviceReport, _ *cuda.Info) { d.Name = "mlx5_7" },
			[]string{"mlx5_0 same switch: libibverbs does not show it", far + ", taken", soft}, ""},
		"an old card": {func(d *rdma.DeviceReport, _ *cuda.Info) { d.DMABuf, d.NoDMABuf = false, "protocol not supported" },
			[]string{"mlx5_0 same switch: it registers no dma-buf", far + ", taken", soft}, "RDMA device mlx5_0 takes no GPU's memory: protocol not supported; and nvidia-peermem is not loaded"},
		"no export": {func(_ *rdma.DeviceReport, g *cuda.Info) { g.DMABuf = false },
			[]string{"mlx5_0 same switch: the GPU exports no dma-buf", "mlx5_1 same root complex: the GPU exports no dma-buf", "rxe0 unknown: the GPU exports no dma-buf"}, "GPU 0 exports no dma-buf"},
		"no GPUDirect": {func(_ *rdma.DeviceReport, g *cuda.Info) { g.RDMA = false },
			[]string{"mlx5_0 same switch: the GPU has no GPUDirect RDMA", "mlx5_1 same root complex: the GPU has no GPUDirect RDMA", "rxe0 unknown: the GPU has no GPUDirect RDMA"}, "GPU 0 (NVIDIA H100) has no GPUDirect RDMA"},
	} {
		h := host(tree(), infos()[:1], nil)
		list, _ := h.Ask()
		c.change(&h.RDMA.Devices[0], &list[0])
		r := Look(h)
		if r.Problem != "" || len(r.Devices) != 1 {
			t.Fatalf("%s: %+v", what, r)
		}
		if got := ways(r.Devices[0]); !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %q, want %q", what, got, c.want)
		}
		if all := strings.Join(r.Remedies, "\n"); !strings.Contains(all, c.remedy) || strings.Contains(all, "mlx5_0") != (what == "an old card") {
			t.Errorf("%s: the remedies are %q, want %q", what, all, c.remedy)
		}
	}
}
