// What lies at an address: on which device, of which kind, in which mappings.

package cuda

import (
	"fmt"
	"slices"

	"github.com/kvconn/kvconn/cuda/internal/driver"
)

// Info is what a device is.
type Info = driver.Info

// Kind of memory, by its allocation.
type Kind = driver.Kind

// Error is a failed call of the driver.
type Error = driver.Error

// UnavailableError says why this process cannot use CUDA at all.
type UnavailableError = driver.UnavailableError

// Errors of moments and contexts.
var (
	ErrClosed    = driver.ErrClosed
	ErrInactive  = driver.ErrInactive
	ErrCapturing = driver.ErrCapturing
	ErrMoments   = driver.ErrMoments
	ErrMoment    = driver.ErrMoment
	ErrAbsent    = driver.ErrAbsent
)

// InProcess says whether somebody in this process, the engine perhaps, has opened the driver's
// library. It opens nothing.
func InProcess() bool { return driver.InProcess() }

// Devices are those that this process sees.
func Devices() ([]Info, error) {
	if err := driver.Load(); err != nil {
		return nil, err
	}
	n, err := driver.Count()
	if err != nil {
		return nil, err
	}
	all := make([]Info, n)
	for i := range all {
		if all[i], err = driver.Inform(i); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// DriverVersion is the newest CUDA that the driver knows: 12080 is 12.8. 0 before anything
// was asked of it.
func DriverVersion() int { return driver.Version() }

// KindOf says what lies at an address.
func KindOf(addr uintptr) (Kind, error) {
	if err := driver.Load(); err != nil {
		return 0, err
	}
	m, err := driver.Locate(uint64(addr))
	return m.Kind, err
}

// Location is where a piece of device memory lies.
type Location struct {
	Device   int // ordinal, as of Open
	Kind     Kind
	Mappings int  // one, except for memory that was mapped by handles
	RDMA     bool // GPUDirect RDMA may be used on all of it
}

// KindError says that memory that was declared as a device's cannot be used as such.
type KindError struct {
	Addr uintptr
	Kind Kind
}

func (e *KindError) Error() string {
	return fmt.Sprintf("%#x is %s", e.Addr, refusals[e.Kind])
}

var refusals = map[Kind]string{
	driver.Pageable: "no memory of CUDA's in this process: host memory, freed memory, or another process's address. " +
		"Declare host memory as such; device memory is allocated by the process that registers it",
	driver.Host:         "pinned host memory: declare it as host memory",
	driver.Managed:      "managed memory, which moves between host and devices: kvconn takes memory of cudaMalloc, of a pool, or mapped by handles",
	driver.OtherContext: "memory of another context than the device's primary one: kvconn uses primary contexts, as PyTorch and the CUDA runtime do",
	driver.Elsewhere:    "mapped by handles, but not on a device: declare host memory as such",
	driver.Odd:          "memory of a kind that kvconn does not know: it takes memory of cudaMalloc, of a pool, or mapped by handles",
}

// Locate says where a piece of device memory lies. If the memory is not a device's the error
// is a *KindError.
func Locate(addr uintptr, bytes uint64) (Location, error) {
	p, err := new(Locator).Find(addr, bytes)
	return p.Location, err
}

// Place is a piece of device memory, and what lies there.
type Place struct {
	Location
	addr, bytes uint64
	pieces      []driver.Memory
}

// Locator asks the driver for each mapping once, whatever lies in it. So it is for places of one time.
type Locator struct {
	known []driver.Memory // by their addresses
}

// Find is Locate of one of the places.
func (l *Locator) Find(addr uintptr, bytes uint64) (Place, error) {
	if err := driver.Load(); err != nil {
		return Place{}, err
	}
	pieces, err := l.mappings(addr, bytes)
	if err != nil {
		return Place{}, err
	}
	p := Place{Location{Device: pieces[0].Device, Kind: pieces[0].Kind, Mappings: len(pieces), RDMA: true}, uint64(addr), bytes, pieces}
	for i := range pieces {
		p.RDMA = p.RDMA && pieces[i].RDMA
	}
	return p, nil
}

// at is what lies at an address, and whether that is known already.
func (l *Locator) at(addr uint64) (m driver.Memory, known bool, err error) {
	i, known := slices.BinarySearchFunc(l.known, addr, func(m driver.Memory, addr uint64) int {
		switch {
		case m.Base+m.Size <= addr:
			return -1
		case m.Base > addr:
			return 1
		}
		return 0
	})
	if known {
		return l.known[i], true, nil
	}
	m, err = driver.Locate(addr)
	return m, false, err
}

// keep keeps mappings, which follow each other, for all once: regions may come in any order. What lies over another is not kept: the
// engine maps memory just now.
func (l *Locator) keep(found []driver.Memory) {
	for n := len(l.known); len(found) > 0 && (n == 0 || l.known[n-1].Base+l.known[n-1].Size <= found[0].Base); n++ {
		l.known, found = append(l.known, found[0]), found[1:] // regions mostly come in the order of their addresses
	}
	if len(found) == 0 {
		return
	}
	all := make([]driver.Memory, 0, len(l.known)+len(found))
	for known := l.known; len(known)+len(found) > 0; {
		from := &known
		if len(known) == 0 || len(found) > 0 && found[0].Base < known[0].Base {
			from = &found
		}
		if m := (*from)[0]; len(all) == 0 || all[len(all)-1].Base+all[len(all)-1].Size <= m.Base {
			all = append(all, m)
		}
		*from = (*from)[1:]
	}
	l.known = all
}

// mostMappings bounds the mappings of a region. If they are of the smallest size, 2 MiB, a region may so have 256 GiB.
const mostMappings = 1 << 17

// mappings are the pieces that lie under a region. Only memory that was mapped by handles may have
// several: one allocation does not follow another by design.
func (l *Locator) mappings(addr uintptr, bytes uint64) ([]driver.Memory, error) {
	from, end := uint64(addr), uint64(addr)+bytes
	if bytes == 0 || end < from {
		return nil, fmt.Errorf("%d bytes at %#x: want at least 1 byte, and an end within the address space", bytes, addr)
	}
	var all, found []driver.Memory
	defer func() { l.keep(found) }()
	for at := from; at < end; {
		m, known, err := l.at(at)
		if err != nil {
			return nil, err
		}
		first := m
		if len(all) > 0 {
			first = all[0]
		}
		switch {
		case refusals[m.Kind] != "":
			if len(all) > 0 {
				return nil, fmt.Errorf("%d bytes at %#x: only the first %d are there: %w", bytes, addr, at-from, &KindError{uintptr(at), m.Kind})
			}
			return nil, &KindError{uintptr(at), m.Kind}
		case m.Base > at || m.Base+m.Size <= at:
			return nil, fmt.Errorf("the driver says that %#x lies in an allocation of %d bytes at %#x, but that allocation does not contain it", at, m.Size, m.Base)
		case m.Device != first.Device:
			return nil, fmt.Errorf("%d bytes at %#x begin on CUDA device %d, but from %#x they lie on device %d: a region lies on one device", bytes, addr, first.Device, at, m.Device)
		case len(all) > 0 && (m.Kind != driver.VMM || first.Kind != driver.VMM):
			return nil, fmt.Errorf("%d bytes at %#x reach beyond their allocation, which ends at %#x: a region lies in one allocation", bytes, addr, at)
		case len(all) == mostMappings:
			return nil, fmt.Errorf("%d bytes at %#x have more than %d mappings", bytes, addr, mostMappings)
		}
		all = append(all, m)
		if !known {
			found = append(found, m)
		}
		at = m.Base + m.Size
	}
	return all, nil
}
