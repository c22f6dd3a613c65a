// An agent's memory on a device is registered, and checked to be the same memory still.

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
	d     *Device
	name  string
	addr  uint64
	bytes uint64

	// Guarded by the device's mu; a Remapping replaces both.
	pieces []driver.Memory
	was    []driver.Piece // an address of each piece, and the ids that lay there when it was registered: Check compares them
}

// mapping is a piece of device memory that copies may not leave.
type mapping struct {
	base, end, id, block uint64
	otherGPU             bool // it is a peer's, on another GPU
}

// Register makes memory of the device known to it. The name is for errors.
func (d *Device) Register(name string, addr uintptr, bytes uint64) (*Region, error) {
	if !d.enter() {
		return nil, d.over()
	}
	defer d.leave()
	at, err := new(Locator).Find(addr, bytes)
	if err != nil {
		return nil, fmt.Errorf("region %s: %w", name, err)
	}
	list, err := d.registerAll([]string{name}, []Place{at})
	if err != nil {
		return nil, err
	}
	return list[0], nil
}

// RegisterAll is Register of places that one Locator has found. It takes no longer for many of them.
func (d *Device) RegisterAll(names []string, at []Place) ([]*Region, error) {
	if !d.enter() {
		return nil, d.over()
	}
	defer d.leave()
	return d.registerAll(names, at)
}

// registerAll is RegisterAll for callers that have entered.
func (d *Device) registerAll(names []string, at []Place) ([]*Region, error) {
	list := make([]*Region, len(at))
	for i, p := range at {
		if p.Device != d.info.Ordinal {
			return nil, fmt.Errorf("region %s: %#x lies on CUDA device %d and not on %d", names[i], p.addr, p.Device, d.info.Ordinal)
		}
		list[i] = &Region{d: d, name: names[i], addr: p.addr, bytes: p.bytes}
		list[i].pieces, list[i].was = p.pieces, list[i].asked(p.pieces)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	regions := slices.Concat(d.regions, list)
	u, err := unionOf(regions, piecesOf(regions))
	if err != nil {
		return nil, err
	}
	d.regions = regions
	d.setMappings(u)
	return list, nil
}

// asked is what a check asks for, if these pieces lie under the region.
func (r *Region) asked(pieces []driver.Memory) []driver.Piece {
	was := make([]driver.Piece, len(pieces))
	for i, p := range pieces {
		was[i] = driver.Piece{Addr: max(p.Base, r.addr), ID: p.ID, Block: p.Block}
	}
	return was
}

// now is what lies under the region, as Register or the last Remapping found it.
func (r *Region) now() ([]driver.Memory, []driver.Piece) {
	r.d.mu.Lock()
	defer r.d.mu.Unlock()
	return r.pieces, r.was
}

// Close forgets the region. From then on the device copies from it and to it only if another region
// lies in the same allocation. The caller has waited for the region's copies before.
func (r *Region) Close() {
	d := r.d
	d.mu.Lock()
	defer d.mu.Unlock()
	if i := slices.Index(d.regions, r); i >= 0 {
		d.regions = slices.Delete(d.regions, i, i+1)
		u, _ := unionOf(d.regions, piecesOf(d.regions)) // no error: without a region no further mappings overlap
		d.setMappings(u)
	}
}

// union is what lies under some regions: each mapping once, however many regions lie in it.
type union struct {
	known  []mapping
	pieces []driver.Piece // of known, for Check
	sample []driver.Piece // of pieces, for Moved
}

// unionOf finds what lies under regions; of has the pieces of each region.
func unionOf(regions []*Region, of [][]driver.Memory) (u union, err error) {
	first := map[mapping]*Region{} // by mapping: the first region that lies in it
	for k, r := range regions {
		for _, p := range of[k] {
			m := mapping{base: p.Base, end: p.Base + p.Size, id: p.ID, block: p.Block}
			if first[m] == nil {
				first[m] = r
				u.known = append(u.known, m)
			}
		}
	}
	slices.SortFunc(u.known, func(a, b mapping) int {
		return cmp.Or(cmp.Compare(a.base, b.base), cmp.Compare(a.id, b.id))
	})
	for i := 1; i < len(u.known); i++ {
		if u.known[i].base < u.known[i-1].end {
			return union{}, fmt.Errorf("region %s: the memory at %#x was mapped anew after another region there was registered: "+
				"close the older region first", first[u.known[i]].name, u.known[i].base)
		}
	}
	u.pieces = make([]driver.Piece, len(u.known))
	for i, m := range u.known {
		u.pieces[i] = driver.Piece{Addr: max(m.base, first[m].addr), ID: m.id, Block: m.block}
	}
	for i := range min(len(u.pieces), mostSampled) {
		u.sample = append(u.sample, u.pieces[i*len(u.pieces)/min(len(u.pieces), mostSampled)])
	}
	return u, nil
}

// setMappings takes what lies under all regions; mu is held.
func (d *Device) setMappings(u union) {
	d.epoch++
	d.known.Store(&u.known)
	d.pieces, d.sample = u.pieces, u.sample
}

// piecesOf are those of each region; the device's mu is held.
func piecesOf(regions []*Region) (of [][]driver.Memory) {
	for _, r := range regions {
		of = append(of, r.pieces)
	}
	return of
}

// Device is where the region lies.
func (r *Region) Device() *Device { return r.d }

// Kind is how the region's memory was allocated.
func (r *Region) Kind() Kind {
	pieces, _ := r.now()
	return pieces[0].Kind
}

// RDMA says whether GPUDirect RDMA may be used on the whole region.
func (r *Region) RDMA() bool {
	pieces, _ := r.now()
	return !slices.ContainsFunc(pieces, func(p driver.Memory) bool { return !p.RDMA })
}

// Mappings is how many Check asks for.
func (r *Region) Mappings() int {
	_, was := r.now()
	return len(was)
}

// Mappings is how many Check asks for.
func (d *Device) Mappings() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.pieces)
}

// Check says whether the region's memory is the same as when it was registered. It costs
// some 0.2 µs for each mapping.
func (r *Region) Check() error {
	_, was := r.now()
	return r.d.check(was, func(uint64) string { return r.name })
}

// Check is Region.Check of all regions, but asks for each mapping once.
func (d *Device) Check() error {
	d.mu.Lock()
	pieces := d.pieces
	d.mu.Unlock()
	return d.check(pieces, d.regionAt)
}

// regionAt names the region that an address lies in.
func (d *Device) regionAt(addr uint64) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, r := range d.regions {
		if addr >= r.addr && addr < r.addr+r.bytes {
			return r.name
		}
	}
	return "unknown" // it was closed meanwhile
}

// check names a region that has other memory now than one of the pieces; nil: there is none.
func (d *Device) check(pieces []driver.Piece, regionAt func(addr uint64) string) error {
	if !d.enter() {
		return d.over()
	}
	defer d.leave()
	return d.unchanged(pieces, regionAt)
}

// unchanged is check for callers that have entered.
func (d *Device) unchanged(pieces []driver.Piece, regionAt func(addr uint64) string) error {
	same, err := d.still(pieces)
	if err != nil {
		d.suspect(err)
		return fmt.Errorf("region %s: %w", regionAt(pieces[same].Addr), err)
	}
	if same < len(pieces) {
		return &ChangedError{Region: regionAt(pieces[same].Addr), Addr: pieces[same].Addr}
	}
	return nil
}

// still is how many of the pieces are the same memory as they were, from the first on.
func (d *Device) still(pieces []driver.Piece) (int, error) {
	if fault.On("gpu-buffer-id") {
		return len(pieces), nil
	}
	return d.drv.Same(pieces)
}
