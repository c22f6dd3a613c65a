// Package gpuhost says what this host has for KV caches in GPU memory and what is missing, for kvconn doctor. What the kernel
// shows is read below a root, so that tests can make it up.
package gpuhost

import (
	"cmp"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/kvconn/kvconn/cuda"
	"github.com/kvconn/kvconn/rdma"
)

// Report is what was found.
type Report struct {
	Problem  string   `json:"problem,omitempty"` // why no GPU can be used here, and the remedy
	CUDA     string   `json:"cuda,omitempty"`    // the newest that the driver knows, "13.0"
	Modules  *Modules `json:"kernel_modules,omitempty"`
	Peermem  string   `json:"peermem,omitempty"` // the loaded kernel module by which cards reach a GPU's memory without a dma-buf
	Devices  []Device `json:"devices,omitempty"`
	Remedies []string `json:"remedies,omitempty"` // for what is missing on the way from a card to a GPU
}

// Modules are the driver's kernel modules.
type Modules struct {
	Version string `json:"version"`
	Open    bool   `json:"open"`
}

// Device is a GPU that this process sees.
type Device struct {
	Ordinal  int    `json:"ordinal"` // CUDA's number
	Name     string `json:"name"`
	UUID     string `json:"uuid"`
	PCI      string `json:"pci"`
	Compute  string `json:"compute"` // "9.0"
	RDMA     bool   `json:"gpudirect_rdma"`
	DMABuf   bool   `json:"dma_buf"`
	Seen     bool   `json:"writes_are_seen"`      // what a card wrote is seen by later work, by order or by a flush
	BAR1     uint64 `json:"bar1_bytes,omitempty"` // 0: not told
	NUMANode int    `json:"numa_node"`            // -1: none, or not told
	Cards    []Card `json:"cards,omitempty"`      // the nearest first
	ACS      ACS    `json:"acs"`
}

// ACS is access control on the way between a GPU and the cards that share a switch with it.
type ACS struct {
	Redirects  []string `json:"redirects,omitempty"`  // bridges that send peers' traffic through the root complex
	Unreadable []string `json:"unreadable,omitempty"` // bridges of which this user cannot read it
}

// Host is what Look asks.
type Host struct {
	Root    fs.FS // of the file system
	Visible string
	Ask     func() ([]cuda.Info, error) // starts the driver
	Version func() int                  // of the driver, once it was asked
	RDMA    rdma.Report                 // of the same configuration
	// Force: the driver is asked although the kernel shows none of its modules. As root that makes /dev/nvidiactl.
	Force bool
}

// Look looks. Without the driver's kernel modules it starts no driver, unless it is forced to.
func Look(h Host) Report {
	var r Report
	r.Modules = modules(h.Root)
	sys, err := fs.Sub(h.Root, "sys")
	if err != nil {
		r.Problem = err.Error()
		return r
	}
	if loaded, err := fs.Sub(sys, "module"); err == nil {
		r.Peermem, _ = rdma.Peermem(loaded) // the remedies have the error's
	}
	if r.Modules == nil && !h.Force {
		r.Problem = "no NVIDIA GPU can be used: the kernel has none of the driver's modules (/proc/driver/nvidia/version); "
		if functions := pciFunctions(h.Root); len(functions) > 0 {
			r.Problem += fmt.Sprintf("there is one at PCI %s, so install NVIDIA's driver, or load it (modprobe nvidia)", strings.Join(functions, ", "))
		} else {
			r.Problem += "in a container, start it with GPUs (docker run --gpus all); kvconn doctor --gpu asks the driver's library nevertheless"
		}
		return r
	}
	infos, err := h.Ask()
	if v := h.Version(); v > 0 {
		r.CUDA = fmt.Sprintf("%d.%d", v/1000, v%1000/10)
	}
	switch {
	case err != nil:
		r.Problem = err.Error()
		return r
	case len(infos) == 0:
		r.Problem = fmt.Sprintf("the driver shows this process no GPU: see CUDA_VISIBLE_DEVICES, which is %q", h.Visible)
		return r
	}
	cards := cardsOf(sys, h.RDMA)
	for _, info := range infos {
		r.Devices = append(r.Devices, device(sys, info, cards, r.Peermem))
	}
	r.remedy()
	return r
}

func device(sys fs.FS, info cuda.Info, cards []Card, peermem string) Device {
	d := Device{Ordinal: info.Ordinal, Name: info.Name, UUID: info.UUID, PCI: strings.ToLower(info.PCI), Compute: fmt.Sprintf("%d.%d", info.Major, info.Minor),
		RDMA: info.RDMA, DMABuf: info.DMABuf, Seen: info.WritesOrdered || info.FlushOnHost, NUMANode: -1}
	d.BAR1 = bar1(sys, d.PCI)
	at := rdma.GPUPlace(sys, d.PCI)
	d.NUMANode = at.Node
	bridges := bridgesOf(at)
	for _, c := range cards {
		c.order, c.Distance = rdma.Near(at, c.place)
		c.By, c.Problem = c.registers(&d, peermem)
		d.Cards = append(d.Cards, c)
		if c.order == 0 {
			bridges = append(bridges, bridgesOf(c.place)...)
		}
	}
	slices.SortStableFunc(d.Cards, func(a, b Card) int { return cmp.Or(cmp.Compare(a.order, b.order), cmp.Compare(a.Name, b.Name)) })
	take(d.Cards)
	if len(d.Cards) > 0 && d.Cards[0].order == 0 {
		d.ACS = acsOf(sys, bridges)
	}
	return d
}

// smallBAR1 is what GPUs have whose firmware was not told to map all of their memory.
const smallBAR1 = 256 << 20

// remedy says what to do about what RDMA into a GPU lacks.
func (r *Report) remedy() {
	add := func(format string, args ...any) {
		if text := fmt.Sprintf(format, args...); !slices.Contains(r.Remedies, text) {
			r.Remedies = append(r.Remedies, text)
		}
	}
	for _, d := range r.Devices {
		gpu := fmt.Sprintf("GPU %d", d.Ordinal)
		switch {
		case !d.RDMA:
			add("%s (%s) has no GPUDirect RDMA: its memory goes by tcp; data centre and professional GPUs have it", gpu, d.Name)
		case !d.DMABuf && r.Peermem == "" && r.Modules != nil && !r.Modules.Open:
			add("%s exports no dma-buf, and nvidia-peermem is not loaded: load the driver's open kernel modules (kvconn found the closed ones, %s), or modprobe nvidia-peermem", gpu, r.Modules.Version)
		case !d.DMABuf && r.Peermem == "":
			add("%s exports no dma-buf, and nvidia-peermem is not loaded: that needs the driver's open kernel modules, 515 or newer, and Linux 5.12 or newer; or modprobe nvidia-peermem", gpu)
		}
		if d.RDMA && !d.Seen {
			add("%s (%s) neither orders what cards write nor can be told to flush it: a decode engine's memory there goes by tcp", gpu, d.Name)
		}
		if d.BAR1 > 0 && d.BAR1 <= smallBAR1 {
			add("%s has a BAR1 of %d MiB, and no more than that can be registered for RDMA: let the firmware give it all of its memory (Above 4G Decoding, Resizable BAR)", gpu, d.BAR1>>20)
		}
		for i := range d.Cards {
			if text := d.Cards[i].noDMABuf(r.Peermem); d.RDMA && text != "" {
				add("%s", text)
			}
		}
		if c := d.nearest(); c != nil && c.order > 1 && c.Distance != "unknown" {
			add("%s shares no PCI root with a card: the nearest, %s, is at the %s, and RDMA between them is slow", gpu, c.Name, c.Distance)
		}
		if len(d.ACS.Redirects) > 0 {
			add("ACS at PCI %s sends what goes between %s and its card through the root complex: where no virtual machine is given these devices, switch it off in the firmware, "+
				"or by setpci -s BRIDGE ECAP_ACS+0x6.w=0000", strings.Join(d.ACS.Redirects, ", "), gpu)
		}
		if len(d.ACS.Unreadable) > 0 {
			add("whether ACS is on between %s and its card is not readable: run kvconn doctor as root", gpu)
		}
	}
}
