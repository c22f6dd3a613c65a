package tcp

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"unsafe"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/kv"
)

// Mover copies between registered device memory, which sockets cannot read or write, and
// slots of pinned host memory, which they can. Its methods may be called from any
// goroutine.
type Mover interface {
	// Of is the device on which a region of the layout lies, -1 for host memory.
	Of(region uint32) int

	// Slot takes a slot for copies of a device in one direction. While none is free it
	// waits, until ctx ends. With an ended ctx it does not wait. The peer is whom the bytes
	// go to or come from: peers that wait share the slots.
	Slot(ctx context.Context, device int, to Direction, peer core.AgentID) (Slot, error)
}

// Slot is a piece of pinned host memory. One goroutine uses it at a time.
type Slot interface {
	// Memory is the slot's bytes.
	Memory() []byte

	// Copy queues the slot's one copy, between its bytes from the first on and runs of the
	// device's memory, one after the other. The caller may change runs when Copy has returned.
	Copy(runs []Run)

	// Wait returns when the copy reads and writes no more; it may be called again. An error
	// means that the bytes are not where they should be. If it wraps ErrMayCopy, the copy
	// may still read or write, and Release must not be called.
	Wait() error

	// Release gives the slot back, after Wait if it copies.
	Release()
}

// ErrMayCopy is wrapped by the error of a copy if the device does not answer, so that nobody knows
// whether the copy has ended.
var ErrMayCopy = errors.New("the device may still copy")

// Direction of a copy, as seen from the device.
type Direction int

// The directions.
const (
	FromDevice Direction = iota
	ToDevice
)

// Run is contiguous registered memory of one device.
type Run struct {
	Addr uintptr
	Len  uint64
}

// devices says which registered memory lies on which device. By the zero value all memory is the host's.
type devices struct {
	mover  Mover
	ranges []deviceRange // by address
}

type deviceRange struct {
	from, to uintptr
	device   int
}

func devicesOf(mover Mover, l *kv.Layout) (d devices) {
	if mover == nil {
		return d
	}
	for i := range l.Regions {
		r := &l.Regions[i]
		if on := mover.Of(uint32(i)); on >= 0 && !fault.On("tcp-host-pointer") {
			d.mover = mover
			d.ranges = append(d.ranges, deviceRange{uintptr(r.Base), uintptr(r.Base + r.Extent()), on})
		}
	}
	slices.SortFunc(d.ranges, func(a, b deviceRange) int { return cmp.Compare(a.from, b.from) })
	merged := d.ranges[:0] // regions may be strided views of one storage
	for _, r := range d.ranges {
		if n := len(merged) - 1; n >= 0 && merged[n].to >= r.from && merged[n].device == r.device {
			merged[n].to = max(merged[n].to, r.to)
			continue
		}
		merged = append(merged, r)
	}
	d.ranges = merged
	return d
}

// of is the device of an address, -1 for host memory.
func (d *devices) of(address uintptr) int {
	i, _ := slices.BinarySearchFunc(d.ranges, address, func(r deviceRange, a uintptr) int {
		if r.to <= a {
			return -1
		}
		return 1
	})
	if i == len(d.ranges) || address < d.ranges[i].from {
		return -1
	}
	return d.ranges[i].device
}

// alike counts the entries, from the first on, that lie in one memory. It stops when
// they have limit bytes; the last of them may be longer than is needed.
func (d *devices) alike(vec []iovec, limit uint64) (device, entries int, bytes uint64) {
	device = d.of(vec[0].base)
	for i := range vec {
		if bytes >= limit || i > 0 && d.of(vec[i].base) != device {
			return device, i, min(bytes, limit)
		}
		bytes += uint64(vec[i].len)
	}
	return device, len(vec), min(bytes, limit)
}

// runs appends the first bytes of a vector to out.
func runs(out []Run, vec []iovec, bytes uint64) []Run {
	for i := 0; bytes > 0; i++ {
		n := min(bytes, uint64(vec[i].len))
		out = append(out, Run{vec[i].base, n})
		bytes -= n
	}
	return out
}

// entry is the first bytes of a slot, for a system call.
func entry(slot Slot, bytes uint64) iovec {
	return iovec{uintptr(unsafe.Pointer(unsafe.SliceData(slot.Memory()))), uintptr(bytes)}
}
