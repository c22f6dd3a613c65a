// The devices as package rdma sees them: memory that cards can register, and scratch memory to try them.

package devices

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/kvconn/kvconn/cuda"
	"github.com/kvconn/kvconn/rdma"
)

var _ rdma.GPUs = (*Devices)(nil)

// Count implements rdma.GPUs, as the methods below do.
func (d *Devices) Count() int {
	if d == nil {
		return 0
	}
	return len(d.list)
}

// Name is for people.
func (d *Devices) Name(gpu int) string {
	i := d.list[gpu].Info()
	return fmt.Sprintf("%s (%s)", i.Name, i.UUID)
}

// PCI is the device's place, as in /sys/bus/pci/devices.
func (d *Devices) PCI(gpu int) string { return strings.ToLower(d.list[gpu].Info().PCI) }

// Export gives memory as a dma-buf.
func (d *Devices) Export(gpu int, name string, addr, bytes uint64) (*os.File, uint64, error) {
	return d.list[gpu].ExportRange(name, addr, bytes)
}

// Capable says why no card may reach the memory.
func (d *Devices) Capable(gpu int, name string, addr, bytes uint64) error {
	info := d.list[gpu].Info()
	at, err := cuda.Locate(uintptr(addr), bytes)
	switch {
	case err != nil:
		return fmt.Errorf("region %s: %w", name, err)
	case !info.RDMA:
		return fmt.Errorf("%s has no GPUDirect RDMA", d.Name(gpu))
	case !at.RDMA:
		return errors.New("its memory was not allocated for GPUDirect RDMA: an allocator that maps handles must ask for it (gpuDirectRDMACapable)")
	}
	return nil
}

// Flushable says why Flush cannot work.
func (d *Devices) Flushable(gpu int) error { return d.list[gpu].Flushable() }

// Flush returns when what cards have written before is seen by later work.
func (d *Devices) Flush(gpu int) error { return d.list[gpu].Flush() }

// Scratch is memory of the device's that is no region's.
func (d *Devices) Scratch(gpu int, bytes uint64) (rdma.GPUScratch, error) {
	s, err := d.list[gpu].Scratch(bytes)
	if err != nil {
		return nil, err
	}
	return s, nil
}
