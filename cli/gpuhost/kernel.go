// What the kernel shows of GPUs: the driver's modules, PCI functions, and the bridges above them.

package gpuhost

import (
	"encoding/binary"
	"io/fs"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/kvconn/kvconn/rdma"
)

func line(sys fs.FS, name string) string {
	b, err := fs.ReadFile(sys, name)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// moduleVersion is in "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build …" and in
// "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 …".
var moduleVersion = regexp.MustCompile(`\s(\d{3,}\.\d+(?:\.\d+)?)\s`)

// modules reads which kernel modules are loaded; nil: none.
func modules(root fs.FS) *Modules {
	text, err := fs.ReadFile(root, "proc/driver/nvidia/version")
	if err != nil {
		return nil
	}
	first, _, _ := strings.Cut(string(text), "\n")
	m := &Modules{Version: "of unknown version", Open: strings.Contains(first, "Open Kernel Module")}
	if found := moduleVersion.FindStringSubmatch(first + " "); found != nil {
		m.Version = found[1]
	}
	return m
}

// pciFunctions are NVIDIA's GPUs on PCI.
func pciFunctions(root fs.FS) (list []string) {
	const folder = "sys/bus/pci/devices"
	entries, _ := fs.ReadDir(root, folder)
	for _, e := range entries {
		at := folder + "/" + e.Name()
		if class := line(root, at+"/class"); line(root, at+"/vendor") == "0x10de" && (strings.HasPrefix(class, "0x0300") || strings.HasPrefix(class, "0x0302")) {
			list = append(list, e.Name())
		}
	}
	return list
}

// bar1 is the size of the window through which cards reach a GPU's memory, 0 if the kernel does not tell. A line of the file
// is a window's first and last address, and its flags.
func bar1(sys fs.FS, address string) uint64 {
	lines := strings.Split(line(sys, "bus/pci/devices/"+address+"/resource"), "\n")
	if len(lines) < 2 {
		return 0
	}
	fields := strings.Fields(lines[1])
	if len(fields) < 2 {
		return 0
	}
	first, err := strconv.ParseUint(fields[0], 0, 64)
	last, err2 := strconv.ParseUint(fields[1], 0, 64)
	if err != nil || err2 != nil || last <= first {
		return 0
	}
	return last - first + 1
}

// bridgesOf are the PCI functions above a device, without the root complex.
func bridgesOf(at rdma.Place) []string {
	if len(at.PCI) < 3 {
		return nil
	}
	return slices.Clone(at.PCI[1 : len(at.PCI)-1])
}

func acsOf(sys fs.FS, bridges []string) (a ACS) {
	slices.Sort(bridges)
	for _, bridge := range slices.Compact(bridges) {
		config, _ := fs.ReadFile(sys, "bus/pci/devices/"+bridge+"/config")
		on, told := redirects(config)
		switch {
		case !told:
			a.Unreadable = append(a.Unreadable, bridge)
		case on:
			a.Redirects = append(a.Redirects, bridge)
		}
	}
	return a
}

// redirects reads a bridge's configuration space: whether ACS sends requests or completions between peers upwards. Nobody but
// root reads more than the first 64 bytes.
func redirects(config []byte) (on, told bool) {
	const (
		first      = 0x100  // where the extended capabilities begin
		acs        = 0x000d // the number of this one
		control    = 6
		redirected = 1<<2 | 1<<3 // requests, completions
	)
	if len(config) <= first {
		return false, false
	}
	for at, left := first, 64; at >= first && at+8 <= len(config) && left > 0; left-- {
		head := binary.LittleEndian.Uint32(config[at:])
		if head == 0 || head == 0xffffffff {
			break
		}
		if head&0xffff == acs {
			return binary.LittleEndian.Uint16(config[at+control:])&redirected != 0, true
		}
		at = int(head >> 20)
	}
	return false, true
}
