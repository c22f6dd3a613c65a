// Another process may open a region's memory: what that process needs, and whether the memory is the same still.

package cuda

import (
	"fmt"
	"os"

	"github.com/kvconn/kvconn/cuda/internal/driver"
	"github.com/kvconn/kvconn/internal/fault"
)

// Allocation is memory of a process as another process of its host can open it: a whole allocation, or
// one mapping of memory that was mapped by handles.
type Allocation struct {
	ID, Block uint64 // the owner's process never has the same pair of them twice
	Addr      uint64 // in the owner's process
	Bytes     uint64
	Device    string // its UUID
	Region    string // the first region that lies in it, for errors
	Handle    []byte // an IPC handle; nil: the memory is opened by a file, Shared.File
}

func (a *Allocation) piece() driver.Piece {
	return driver.Piece{Addr: a.Addr, ID: a.ID, Block: a.Block}
}

// Shared is the memory under a device's regions, at the time of Share.
type Shared struct {
	Allocations []Allocation // each once, however many regions lie in it

	d      *Device
	pieces []driver.Piece
}

// Share returns what another process of this host needs to read the regions. That process gets the whole
// allocations that the regions lie in, and CUDA lets it write there too. So only a process that is trusted like this
// one may have it.
func (d *Device) Share() (*Shared, error) {
	if !d.enter() {
		return nil, d.over()
	}
	defer d.leave()
	s := &Shared{d: d}
	for _, of := range d.sharedPieces() {
		a := Allocation{ID: of.ID, Block: of.Block, Addr: of.Base, Bytes: of.Size, Device: d.info.UUID, Region: d.regionAt(of.first)}
		var err error
		switch {
		case of.Kind == driver.Allocated:
			a.Handle, err = d.drv.IPCHandle(of.Base)
		case of.Kind == driver.Pool:
			err = fmt.Errorf("%#x is of a pool in stream order (cudaMallocAsync), which no other process can open: have the engine use another allocator "+
				"(PyTorch's own, without backend:cudaMallocAsync)", of.Base)
		case !of.Files:
			err = fmt.Errorf("%#x was mapped by a handle that cannot be given to another process: its allocator did not ask cuMemCreate for file descriptors (requestedHandleTypes)", of.Base)
		}
		if err != nil { // if it is the device's end, the next copy says so
			return nil, fmt.Errorf("region %s: it cannot be shared with another process: %w", a.Region, err)
		}
		s.Allocations, s.pieces = append(s.Allocations, a), append(s.pieces, driver.Piece{Addr: of.first, ID: of.ID, Block: of.Block})
	}
	return s, d.unchanged(s.pieces, d.regionAt) // a handle may be of what was mapped there meanwhile
}

// sharedPiece is a mapping under a region, which begins there at first.
type sharedPiece struct {
	driver.Memory
	first uint64
}

// sharedPieces are the mappings under the regions, each once.
func (d *Device) sharedPieces() (all []sharedPiece) {
	d.mu.Lock()
	defer d.mu.Unlock()
	seen := map[driver.Piece]bool{}
	for _, r := range d.regions {
		for i, m := range r.pieces {
			if id := (driver.Piece{Addr: m.Base, ID: m.ID, Block: m.Block}); !seen[id] {
				seen[id] = true
				all = append(all, sharedPiece{m, r.was[i].Addr})
			}
		}
	}
	return all
}

// File gives an allocation without a Handle as a file, which another process gets over a socket. The caller
// closes it. As long as it is open the memory exists, even if its owner gives it back.
func (s *Shared) File(i int) (*os.File, error) {
	if !s.d.enter() {
		return nil, s.d.over()
	}
	defer s.d.leave()
	of := s.pieces[i : i+1]
	name := s.d.regionAt(of[0].Addr)
	fd, err := s.d.drv.File(of[0].Addr)
	if err != nil {
		return nil, fmt.Errorf("region %s: it cannot be shared with another process: %w", name, err)
	}
	file := os.NewFile(uintptr(fd), "memory of "+name)
	if err := s.d.unchanged(of, s.d.regionAt); err != nil { // the descriptor may be of what was mapped there meanwhile
		file.Close()
		return nil, err
	}
	return file, nil
}

// Check returns an error if any memory that was shared is not the same any more. The owner calls it after
// another process has read, and before that process counts what it has read. If the memory is the same now, it was the same all
// the time, since new memory at the same addresses has another ID. Check takes some 0.2 µs for each allocation.
func (s *Shared) Check() error {
	if fault.On("gpu-shared-check") {
		return nil
	}
	return s.d.check(s.pieces, s.d.regionAt)
}
