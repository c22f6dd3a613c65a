// Memory of another process of this host is opened on a device of this one, to be read only.

package cuda

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"syscall"

	"github.com/kvconn/kvconn/cuda/internal/driver"
	"github.com/kvconn/kvconn/internal/fault"
)

// ErrPeerClosed ends copies from memory of a peer that was closed here before they had ended.
var ErrPeerClosed = errors.New("the peer's memory was closed before it was read: the peer has given it back, or is gone")

// mostOpened bounds what a device has opened of one peer.
const mostOpened = 1 << 16

// Process names a process to other processes of its host.
type Process struct {
	ID        int    // in its PID namespace
	Namespace uint64 // that one; 0 if it is not known
}

// ThisProcess is the process that asks.
func ThisProcess() Process {
	p := Process{ID: os.Getpid()}
	if told, err := os.Stat("/proc/self/ns/pid"); err == nil {
		if s, ok := told.Sys().(*syscall.Stat_t); ok {
			p.Namespace = s.Ino
		}
	}
	return p
}

// Peer is memory of another process of this host, opened for reading on a device of this process.
type Peer struct {
	d    *Device
	name string
	of   Process

	mu sync.Mutex // one Open or Close at a time

	// Guarded by the device's mu.
	opened []opened // by the peer's addresses
	hidden bool     // Close is under way: no copy begins
}

// opened is an allocation of a peer's, and where it lies here.
type opened struct {
	Allocation
	here mapping
}

// Peer gives the handle by which the memory of a process is opened on the device. Nothing is opened yet. The name is for errors.
func (d *Device) Peer(name string, of Process) *Peer { return &Peer{d: d, name: name, of: of} }

// RefusedError says why memory of a peer cannot be opened here.
type RefusedError struct {
	Peer   string
	Device string // the UUID of the one that the memory lies on
	Reason string // with the remedy
	Err    *Error
}

func (e *RefusedError) Error() string {
	return fmt.Sprintf("memory of %s on %s: %s (%s: %s (%d))", e.Peer, e.Device, e.Reason, e.Err.Call, e.Err.Name, e.Err.Code)
}

func (e *RefusedError) Unwrap() error { return e.Err }

// Open opens an allocation of the peer's Share. If it has no Handle, file is the file that came beside it; the caller
// closes the file. An allocation that is open already stays open. Open believes nothing that the peer says of the
// allocation. So only the bytes that are read from it depend on the peer's word.
func (p *Peer) Open(a Allocation, file *os.File) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	d := p.d
	if !d.enter() {
		return d.over()
	}
	defer d.leave()
	if done, err := p.place(a, file); done || err != nil {
		return err
	}
	var m driver.Memory
	var err error
	if a.Handle != nil {
		m, err = d.drv.OpenIPC(a.Handle)
	} else {
		m, err = d.drv.OpenFile(int(file.Fd()), a.Bytes)
	}
	if err != nil {
		return p.refused(a, err)
	}
	o := opened{a, mapping{m.Base, m.Base + a.Bytes, m.ID, m.Block, a.Device != d.info.UUID || m.Device != d.info.Ordinal}}
	if m.Size < a.Bytes {
		err = fmt.Errorf("memory of %s: it says that %d bytes lie at %#x, but only %d do", p.name, a.Bytes, a.Addr, m.Size)
		return errors.Join(err, p.release(o))
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(p.opened) == 0 {
		d.peers = append(d.peers, p)
	}
	i, _ := p.search(a.Addr)
	p.opened = slices.Insert(p.opened, i, o)
	d.addForeign(o.here)
	return nil
}

// search is the index of an address among the open allocations, or the index that it would have; the device's mu is held.
func (p *Peer) search(addr uint64) (i int, found bool) {
	return slices.BinarySearchFunc(p.opened, addr, func(o opened, at uint64) int { return cmp.Compare(o.Addr, at) })
}

// place says why the allocation cannot be opened beside those that are open; done says that it is open already.
func (p *Peer) place(a Allocation, file *os.File) (done bool, err error) {
	switch {
	case a.Bytes == 0 || a.Addr+a.Bytes < a.Addr:
		return false, fmt.Errorf("memory of %s: %d bytes at %#x are no allocation", p.name, a.Bytes, a.Addr)
	case a.Handle == nil && file == nil:
		return false, fmt.Errorf("memory of %s: there is neither a handle nor a file for the %d bytes at %#x", p.name, a.Bytes, a.Addr)
	}
	p.d.mu.Lock()
	defer p.d.mu.Unlock()
	i, found := p.search(a.Addr)
	switch {
	case found && p.opened[i].piece() == a.piece() && p.opened[i].Bytes == a.Bytes:
		return true, nil
	case i < len(p.opened) && p.opened[i].Addr < a.Addr+a.Bytes, i > 0 && a.Addr < p.opened[i-1].Addr+p.opened[i-1].Bytes:
		return false, fmt.Errorf("memory of %s: what it had at %#x before is open: close the peer first", p.name, a.Addr)
	}
	if len(p.opened) == mostOpened {
		return false, fmt.Errorf("memory of %s: more than %d allocations", p.name, mostOpened)
	}
	return false, nil
}

// refused says why an allocation cannot be opened, with the remedy. The error may be one that elsewhere means the end of the
// device, as if the context were gone: if it is, the next copy says so.
func (p *Peer) refused(a Allocation, err error) error {
	var e *Error
	if !errors.As(err, &e) {
		return fmt.Errorf("memory of %s: %w", p.name, err)
	}
	return &RefusedError{Peer: p.name, Device: a.Device, Reason: p.reason(a, e), Err: e}
}

func (p *Peer) reason(a Allocation, e *Error) string {
	self := ThisProcess()
	switch {
	case a.Handle != nil && p.of == self:
		return "it is this very process, and CUDA opens memory of other processes only: use one agent for both"
	case a.Handle != nil && e.Code == driver.InvalidContext && p.of.Namespace != self.Namespace:
		return "it is in another PID namespace, and CUDA does not find its memory from here: start both containers with --pid=host, or this one with --pid=container:NAME of the other"
	case !p.d.visible(a.Device):
		return "that GPU is not visible in this process: add it to CUDA_VISIBLE_DEVICES, and start the container with it (docker run --gpus)"
	case e.Code == driver.NoPeerAccess || e.Code == driver.TooManyPeers || a.Device != p.d.info.UUID && e.Code == driver.InvalidDevice:
		return fmt.Sprintf("%s has no way to that GPU: see nvidia-smi topo -p2p r", p.d.info.UUID)
	case e.Code == driver.InvalidContext:
		return "CUDA does not find its process: see whether both are in one PID namespace and of one user"
	case e.Code == driver.InvalidValue:
		return "CUDA does not know it: the peer has given it back meanwhile, or is gone"
	case e.Code == noMemory:
		return "there are too few addresses or tables left to map it"
	}
	return "CUDA does not open it"
}

// visible says whether a device is visible in this process. If it cannot find that out, it says yes.
func (d *Device) visible(uuid string) bool {
	all, err := Devices()
	return err != nil || slices.ContainsFunc(all, func(i Info) bool { return i.UUID == uuid })
}

// addForeign adds a mapping that was opened; mu is held. If two peers of one process have the same allocation open,
// CUDA gives the same address twice, and counts how often.
func (d *Device) addForeign(m mapping) {
	all := *d.foreign.Load()
	i, found := slices.BinarySearchFunc(all, m.base, func(m mapping, base uint64) int { return cmp.Compare(m.base, base) })
	if !found {
		all = slices.Insert(slices.Clone(all), i, m) // copies read the old one
		d.foreign.Store(&all)
	}
}

// updateForeign takes what all peers have open; mu is held.
func (d *Device) updateForeign() {
	all := []mapping{}
	for _, p := range d.peers {
		if p.hidden {
			continue
		}
		for _, o := range p.opened {
			all = append(all, o.here)
		}
	}
	slices.SortFunc(all, func(a, b mapping) int { return cmp.Or(cmp.Compare(a.base, b.base), cmp.Compare(a.end, b.end)) })
	all = slices.CompactFunc(all, func(a, b mapping) bool { return a.base == b.base })
	d.foreign.Store(&all)
}

// here translates runs of the peer's memory to the addresses that they have in this process, and returns what lies there. A run that
// lies in several allocations becomes several runs.
func (p *Peer) here(runs []Run) (all []Run, pieces []driver.Piece, err error) {
	d := p.d
	d.mu.Lock()
	defer d.mu.Unlock()
	if p.hidden {
		return nil, nil, p.closed()
	}
	all = make([]Run, 0, len(runs))
	for _, r := range runs {
		at, end := uint64(r.Addr), uint64(r.Addr)+r.Len
		if end < at {
			return nil, nil, fmt.Errorf("%d bytes at %#x of %s end beyond the address space", r.Len, at, p.name)
		}
		for at < end {
			i, found := p.search(at)
			if !found {
				i--
			}
			if i < 0 || at-p.opened[i].Addr >= p.opened[i].Bytes {
				return nil, nil, fmt.Errorf("%d bytes at %#x: %s has not opened to us what lies at %#x", r.Len, r.Addr, p.name, at)
			}
			o := &p.opened[i]
			n := min(end, o.Addr+o.Bytes) - at
			r := Run{Addr: uintptr(o.here.base + at - o.Addr), Len: n}
			all = append(all, r)
			if k := len(pieces); k == 0 || pieces[k-1].ID != o.here.id || pieces[k-1].Block != o.here.block {
				pieces = append(pieces, driver.Piece{Addr: uint64(r.Addr), ID: o.here.id, Block: o.here.block})
			}
			at += n
		}
	}
	return all, pieces, nil
}

func (p *Peer) closed() error { return fmt.Errorf("memory of %s: %w", p.name, ErrPeerClosed) }

// Opened is how many allocations are open.
func (p *Peer) Opened() int {
	p.d.mu.Lock()
	defer p.d.mu.Unlock()
	return len(p.opened)
}

// Close closes all that was opened. Copies that the device does not have yet end with ErrPeerClosed, and Close waits for
// the others. When Close has returned nil, this process uses nothing of the peer's memory: the peer may free it, and Open may open
// memory of the peer anew. If the device does not end a copy, the error is ErrStuck, and the memory stays open.
func (p *Peer) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	d := p.d
	d.mu.Lock()
	p.hidden = true
	d.updateForeign()
	all := p.opened
	d.mu.Unlock()
	if len(all) > 0 && !fault.On("gpu-peer-close") {
		if err := errors.Join(d.drain(FromPeer), d.drain(FromDevice)); err != nil {
			return fmt.Errorf("closing the memory of %s: %w", p.name, err)
		}
	}
	if !d.enter() {
		if len(all) == 0 {
			return nil
		}
		return d.over() // its end gives the memory back
	}
	defer d.leave()
	var err error
	for _, o := range all {
		err = errors.Join(err, p.release(o))
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	p.opened, p.hidden = nil, false
	d.peers = slices.DeleteFunc(d.peers, func(o *Peer) bool { return o == p })
	d.updateForeign()
	return err
}

func (p *Peer) release(o opened) error {
	var err error
	if o.Handle != nil {
		err = p.d.drv.CloseIPC(o.here.base)
	} else {
		err = p.d.drv.CloseFile(o.here.base, o.Bytes)
	}
	if err != nil {
		return fmt.Errorf("memory of %s: %w", p.name, err)
	}
	return nil
}

// closePeers gives back what peers have open; nothing is copied any more. The driver is called without mu: who asks what is open does
// not wait for it.
func (d *Device) closePeers() (err error) {
	d.mu.Lock()
	of := make([][]opened, len(d.peers))
	peers := d.peers
	for i, p := range peers {
		of[i], p.opened = p.opened, nil
	}
	d.peers = nil
	d.mu.Unlock()
	for i, p := range peers {
		for _, o := range of[i] {
			err = errors.Join(err, p.release(o))
		}
	}
	return err
}
