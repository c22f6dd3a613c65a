package cli

import (
	"fmt"
	"os"
	"strings"

	"github.com/kvconn/kvconn/cli/gpuhost"
	"github.com/kvconn/kvconn/cuda"
	"github.com/kvconn/kvconn/rdma"
)

// examineGPUs starts the CUDA driver, in this process alone, where the kernel has the driver's
// modules or where somebody asks for it.
func examineGPUs(force bool, cards rdma.Report) gpuhost.Report {
	return gpuhost.Look(gpuhost.Host{Root: os.DirFS("/"), Visible: os.Getenv("CUDA_VISIBLE_DEVICES"), Ask: cuda.Devices, Version: cuda.DriverVersion, RDMA: cards,
		Force: force || os.Getenv("KVCONN_LIBCUDA") != ""})
}

func printGPUs(r *gpuhost.Report, line func(indent int, format string, args ...any)) {
	if r.Problem != "" {
		line(0, "gpu   NOT available: %s", r.Problem)
		return
	}
	line(0, "gpu   available: CUDA %s, %s, %s", r.CUDA, describeModules(r.Modules), describePeermem(r.Peermem))
	for _, d := range r.Devices {
		line(1, "GPU %d: %s", d.Ordinal, describeGPU(d))
		var cards []string
		for _, c := range d.Cards {
			cards = append(cards, describeCard(c))
		}
		if len(cards) > 0 {
			line(2, "RDMA devices, the nearest first: %s", strings.Join(cards, ", "))
		}
	}
	for _, remedy := range r.Remedies {
		line(1, "%s", remedy)
	}
}

func describePeermem(module string) string {
	if module == "" {
		return "nvidia-peermem is not loaded"
	}
	return module + " is loaded"
}

// describeCard says how far a card is from a GPU, and how the card reaches the GPU's memory.
func describeCard(c gpuhost.Card) string {
	switch {
	case c.By == "":
		return fmt.Sprintf("%s (%s, not for its memory: %s)", c.Name, c.Distance, c.Problem)
	case c.Taken:
		return fmt.Sprintf("%s (%s, by %s, taken)", c.Name, c.Distance, c.By)
	}
	return fmt.Sprintf("%s (%s, by %s)", c.Name, c.Distance, c.By)
}

func describeModules(m *gpuhost.Modules) string {
	switch {
	case m == nil:
		return "no kernel modules are seen"
	case m.Open:
		return "open kernel modules " + m.Version
	}
	return "closed kernel modules " + m.Version
}

func describeGPU(d gpuhost.Device) string {
	parts := []string{d.Name, d.UUID, "PCI " + d.PCI, "compute " + d.Compute}
	for _, has := range []struct {
		is   bool
		what string
	}{{d.RDMA, "GPUDirect RDMA"}, {d.DMABuf, "dma-buf"}} {
		if has.is {
			parts = append(parts, has.what)
		} else {
			parts = append(parts, "no "+has.what)
		}
	}
	if d.BAR1 > 0 {
		parts = append(parts, "BAR1 "+formatSize(int(d.BAR1)))
	} else {
		parts = append(parts, "BAR1 not told")
	}
	if d.NUMANode >= 0 {
		parts = append(parts, fmt.Sprintf("NUMA node %d", d.NUMANode))
	}
	return strings.Join(parts, ", ")
}
