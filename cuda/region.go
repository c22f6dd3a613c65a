package cuda

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/kvconn/kvconn/cuda/internal/driver"
	"github.com/kvconn/kvconn/internal/fault"
)

// Region is device memory that was registered.
type Region struct {
	d      *Device
	name   string
	addr   uint64
	bytes  uint64
	pieces []driver.Memory
	was    []driver.Piece // what Check asks for: an address of each piece, and what lay there
}

// mapping is a piece of device memory that copies may not leave.
type mapping struct{ base, end, id uint64 }

// Register makes memory of the device known to it. The name is for errors.
func (d *Device) Register(name string, addr uintptr, bytes uint64) (*Region, error) {
	if !d.enter() {
		return nil, d.over()
	}
	defer d.leave()
	pieces, err := mappings(addr, bytes)
	if err != nil {
		return nil, fmt.Errorf("region %s: %w", name, err)
	}
	if pieces[0].Device != d.info.Ordinal {
		return nil, fmt.Errorf("region %s: %#x lies on CUDA device %d and not on %d", name, addr, pieces[0].Device, d.info.Ordinal)
	}
	r := &Region{d: d, name: name, addr: uint64(addr), bytes: bytes, pieces: pieces}
	for _, p := range pieces {
		r.was = append(r.was, driver.Piece{Addr: max(p.Base, r.addr), ID: p.ID, Block: p.Block})
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	known, err := d.union(append(slices.Clone(d.regions), r))
	if err != nil {
		return nil, fmt.Errorf("region %s: %w", name, err)
	}
	d.regions = append(d.regions, r)
	d.known.Store(&known)
	return r, nil
}

// Close forgets the region: the device copies from and to it no more, unless another region
// lies in the same allocation. Its transfers were fenced before.
func (r *Region) Close() {
	d := r.d
	d.mu.Lock()
	defer d.mu.Unlock()
	if i := slices.Index(d.regions, r); i >= 0 {
		d.regions = slices.Delete(d.regions, i, i+1)
		known, _ := d.union(d.regions) // fewer regions overlap no more than before
		d.known.Store(&known)
	}
}

// union is what lies under the regions, sorted.
func (d *Device) union(regions []*Region) ([]mapping, error) {
	var all []mapping
	for _, r := range regions {
		for _, p := range r.pieces {
			all = append(all, mapping{p.Base, p.Base + p.Size, p.ID})
		}
	}
	slices.SortFunc(all, func(a, b mapping) int {
		return cmp.Or(cmp.Compare(a.base, b.base), cmp.Compare(a.id, b.id))
	})
	all = slices.Compact(all)
	for i := 1; i < len(all); i++ {
		if all[i].base < all[i-1].end {
			return nil, fmt.Errorf("the memory at %#x was mapped anew since another region there was registered: close that one first", all[i].base)
		}
	}
	return all, nil
}

// Device is where the region lies.
func (r *Region) Device() *Device { return r.d }

// Kind is how the region's memory was allocated.
func (r *Region) Kind() Kind { return r.pieces[0].Kind }

// RDMA says whether GPUDirect RDMA may be used on the whole region.
func (r *Region) RDMA() bool {
	return !slices.ContainsFunc(r.pieces, func(p driver.Memory) bool { return !p.RDMA })
}

// Check says whether the region's memory is the same as when it was registered. It costs
// some 0.2 µs for each mapping.
func (r *Region) Check() error {
	if !r.d.enter() {
		return r.d.over()
	}
	defer r.d.leave()
	if fault.On("gpu-buffer-id") {
		return nil
	}
	same, err := r.d.drv.Same(r.was)
	if err != nil {
		r.d.suspect(err)
		return fmt.Errorf("region %s: %w", r.name, err)
	}
	if same < len(r.was) {
		return fmt.Errorf("region %s: its memory at %#x was freed or mapped anew since it was registered (an engine that slept or reallocated its cache): "+
			"register the cache again", r.name, r.was[same].Addr)
	}
	return nil
}
