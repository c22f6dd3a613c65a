// If an engine has slept, other memory lies under its regions: it is noticed, found, and taken between transfers.

package cuda

import (
	"fmt"
	"slices"

	"github.com/kvconn/kvconn/cuda/internal/driver"
)

// ChangedError says that a region's memory is not what was registered any more.
type ChangedError struct {
	Region string
	Addr   uint64
}

func (e *ChangedError) Error() string {
	return fmt.Sprintf("region %s: its memory at %#x was freed or mapped anew since it was registered (an engine that slept or reallocated its cache): "+
		"repeat the request when the engine is awake; register a cache that was allocated anew with another agent", e.Region, e.Addr)
}

// mostSampled bounds the mappings that Moved asks for.
const mostSampled = 8

// Moved says whether some of the regions' memory is not what was registered any more. It asks
// for a few mappings only, and so is cheap enough for each call of an engine. Transfers rely on
// Check instead. If the driver fails, Moved says no.
func (d *Device) Moved() bool {
	d.mu.Lock()
	sample := d.sample
	d.mu.Unlock()
	if !d.enter() {
		return false
	}
	defer d.leave()
	same, err := d.still(sample)
	return err == nil && same < len(sample)
}

// Remapping is the memory that lies under a device's regions now, in place of what was registered.
type Remapping struct {
	d     *Device
	epoch uint64 // of the device, when the memory was looked at
	found [][]driver.Memory
	was   [][]driver.Piece // of found, like Region.was
	union
}

// Look finds the memory that lies under the regions now: an engine that has slept has other memory at the
// same addresses. It asks the driver for each mapping, which takes milliseconds. It refuses memory that was not
// mapped by handles, or is mapped in other pieces, since this may be something else than a cache.
func (d *Device) Look() (*Remapping, error) {
	if !d.enter() {
		return nil, d.over()
	}
	defer d.leave()
	d.mu.Lock()
	regions, was, epoch := slices.Clone(d.regions), make([][]driver.Memory, len(d.regions)), d.epoch
	for i, r := range regions {
		was[i] = r.pieces
	}
	d.mu.Unlock()
	n := &Remapping{d: d, epoch: epoch, found: make([][]driver.Memory, len(regions)), was: make([][]driver.Piece, len(regions))}
	l := new(Locator)
	for i, r := range regions {
		pieces, err := l.mappings(uintptr(r.addr), r.bytes)
		if err != nil {
			return nil, fmt.Errorf("region %s: %w", r.name, err)
		}
		if !slices.EqualFunc(pieces, was[i], follows) {
			return nil, fmt.Errorf("region %s: what lies at %#x now was not mapped by handles at the places of the cache that was registered: register it with another agent", r.name, r.addr)
		}
		n.found[i], n.was[i] = pieces, r.asked(pieces)
	}
	var err error
	n.union, err = unionOf(regions, n.found) // fails if the engine maps memory just now
	return n, err
}

// Takes is how often Take has taken a Remapping.
func (d *Device) Takes() uint64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.takes
}

// Current says whether the regions are as they were when Look was called.
func (n *Remapping) Current() bool {
	n.d.mu.Lock()
	defer n.d.mu.Unlock()
	return n.d.epoch == n.epoch
}

// Take makes the Remapping's memory what is registered, if the Remapping is Current. It asks the driver for nothing.
// The caller makes sure that no transfer in the old memory is under way. If the memory has changed since Look, a
// later check says so.
func (n *Remapping) Take() {
	d := n.d
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.epoch != n.epoch {
		return
	}
	for i, r := range d.regions {
		r.pieces, r.was = n.found[i], n.was[i]
	}
	d.setMappings(n.union)
	d.takes++
}

// follows says whether memory may take the place of what was registered at its address.
func follows(now, was driver.Memory) bool {
	same := now.ID == was.ID && now.Block == was.Block
	return now.Base == was.Base && now.Size == was.Size && now.Device == was.Device && now.Kind == was.Kind && now.RDMA == was.RDMA && (same || now.Kind == driver.VMM)
}

// under returns the mappings that runs lie in. If an address lies in no mapping, it returns the first such address.
func under(known []mapping, runs []Run) (pieces []driver.Piece, missing uint64) {
	for _, r := range runs {
		addr, end := uint64(r.Addr), uint64(r.Addr)+r.Len
		if end < addr {
			return nil, addr
		}
		for addr < end {
			m, ok := find(known, addr)
			if !ok {
				return nil, addr
			}
			if n := len(pieces); n == 0 || pieces[n-1].ID != m.id || pieces[n-1].Block != m.block {
				pieces = append(pieces, driver.Piece{Addr: addr, ID: m.id, Block: m.block})
			}
			addr = m.end
		}
	}
	return pieces, 0
}

// same looks whether the memory that lies under a copy is still the memory in which the copy was begun.
// If it is not, the copy must neither read nor write it, and same returns the reason.
func (d *Device) same(j *job) error {
	same, err := d.still(j.under)
	if err == nil && same >= j.own && same < len(j.under) {
		return j.Peer.closed()
	}
	if err == nil && same < len(j.under) {
		err = &ChangedError{Region: d.regionAt(j.under[same].Addr), Addr: j.under[same].Addr}
	}
	return err
}
