// Memory that a device may reach: protection domains, and what is registered in them.

package verbs

/*
#include "shim.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"strconv"
	"sync"
	"syscall"
)

// PD is a protection domain: queue pairs reach only the memory of their own.
type PD struct {
	dev *Device
	mu  sync.RWMutex
	c   *C.struct_kv_ibv_pd
}

// NewPD makes a protection domain.
func (d *Device) NewPD() (*PD, error) {
	pd := &PD{dev: d}
	err := d.use(func() error {
		var err error
		if pd.c, err = C.vb_alloc_pd(d.ctx); pd.c == nil {
			return fmt.Errorf("make a protection domain on RDMA device %s, which has at most %d: %w", d.info.Name, d.attr.MaxPD, cause(err))
		}
		d.pds.Add(1)
		return nil
	})
	if err != nil {
		return nil, err
	}
	return pd, nil
}

// Close gives the domain back; it fails with EBUSY while memory or queue pairs
// of it are open. A second call does nothing.
func (p *PD) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.c == nil {
		return nil
	}
	if err := errno(C.vb_dealloc_pd(p.c)); err != nil {
		return fmt.Errorf("close a protection domain of RDMA device %s: %w", p.dev.info.Name, err)
	}
	p.c = nil
	p.dev.pds.Add(-1)
	return nil
}

// use runs f while the domain stays open.
func (p *PD) use(f func() error) error {
	p.mu.RLock()
	defer p.mu.RUnlock()
	if p.c == nil {
		return fmt.Errorf("protection domain of RDMA device %s: %w", p.dev.info.Name, ErrClosed)
	}
	return f()
}

// Access says what may be done with registered memory: enum ibv_access_flags.
// Local reads always may.
type Access uint32

// The flags of an Access.
const (
	LocalWrite      Access = 1 << 0 // needed with RemoteWrite
	RemoteWrite     Access = 1 << 1
	RelaxedOrdering Access = 1 << 20 // ignored where the library, the kernel or the device has none
)

// MR is registered memory. Its pages stay where they are until Close. Its owner must not
// unmap them before.
type MR struct {
	Addr   uint64
	Length uint64
	LKey   uint32 // for an SGE
	RKey   uint32 // for the peer's Write.RemoteKey

	dev *Device
	mu  sync.Mutex
	c   *C.struct_kv_ibv_mr
}

// RegisterError says why memory could not be registered.
type RegisterError struct {
	Device  string
	Addr    uint64
	Length  uint64 // bytes
	MaxSize uint64 // bytes of one region of the device
	MaxMR   int    // regions of the device
	Open    int    // regions that are open by this process, through this Device
	Memlock uint64 // RLIMIT_MEMLOCK in bytes; NoMemlockLimit: unlimited
	DMABuf  bool   // the memory is a dma-buf's
	Err     error  // an errno
}

// NoMemlockLimit is a RegisterError.Memlock without limit.
const NoMemlockLimit = ^uint64(0)

func (e *RegisterError) Unwrap() error { return e.Err }

func (e *RegisterError) Error() string {
	s := fmt.Sprintf("register %d bytes at %#x on RDMA device %s: %v%s", e.Length, e.Addr, e.Device, e.Err, number(e.Err))
	switch {
	case e.Length > e.MaxSize:
		return s + fmt.Sprintf(": a region of this device has at most %d bytes; split it", e.MaxSize)
	case e.DMABuf && errors.Is(e.Err, syscall.ENOSYS):
		return s + ": libibverbs is older than 34 and knows no dma-buf; install a newer rdma-core"
	case e.DMABuf && NoDMABuf(e.Err):
		return s + ": this card's driver, or this kernel, registers no dma-buf (mlx5 does from Linux 5.12 on)"
	case e.DMABuf && (errors.Is(e.Err, syscall.EINVAL) || errors.Is(e.Err, syscall.EBADF)):
		return s
	case e.DMABuf:
		return s + ": it is a dma-buf of a GPU's memory; is the GPU's BAR1 large enough (nvidia-smi -q -d MEMORY)?"
	case errors.Is(e.Err, syscall.ENOMEM) && e.Memlock != NoMemlockLimit:
		return s + fmt.Sprintf(": this needs %d bytes more of locked memory and RLIMIT_MEMLOCK is %d in all; raise it (ulimit -l unlimited; "+
			"docker run --ulimit memlock=-1; LimitMEMLOCK=infinity in a systemd unit; /etc/security/limits.conf) or give the process CAP_IPC_LOCK", e.Length, e.Memlock)
	case errors.Is(e.Err, syscall.ENOMEM), errors.Is(e.Err, syscall.ENOSPC):
		return s + fmt.Sprintf(": the device has room for %d regions, this process has %d, and RLIMIT_MEMLOCK is %s; register fewer or free memory", e.MaxMR, e.Open, memlockText(e.Memlock))
	case errors.Is(e.Err, syscall.EFAULT):
		return s + ": not all of it is mapped, or it is mapped read-only; map it before it is registered"
	case errors.Is(e.Err, syscall.EOPNOTSUPP):
		return s + ": memory of this kind (a file system's, a device's) cannot be registered on it"
	}
	return s
}

func memlockText(n uint64) string {
	if n == NoMemlockLimit {
		return "unlimited"
	}
	return strconv.FormatUint(n, 10)
}

// Register registers memory of the process that stays mapped until the region's
// Close; it takes time in proportion to the pages, and several may run at once.
// The error is a *RegisterError.
func (p *PD) Register(addr uintptr, length uint64, access Access) (*MR, error) {
	return p.register(uint64(addr), length, false, func() (*C.struct_kv_ibv_mr, error) {
		if !p.dev.attr.RelaxedOrdering {
			access &^= RelaxedOrdering
		}
		mr, err := C.vb_register(p.c, C.uintptr_t(addr), C.uint64_t(length), C.uint32_t(access))
		return mr, err
	})
}

// RegisterDMABuf registers length bytes of a dma-buf from offset on. Requests name these bytes by
// iova, which must have the same offset within a page as offset. The file may be closed afterwards.
// Writes are ordered strictly. The error is a *RegisterError.
func (p *PD) RegisterDMABuf(fd int, offset, length, iova uint64, access Access) (*MR, error) {
	return p.register(iova, length, true, func() (*C.struct_kv_ibv_mr, error) {
		mr, err := C.vb_register_dmabuf(p.c, C.int(fd), C.uint64_t(offset), C.uint64_t(length), C.uint64_t(iova), C.uint32_t(access))
		return mr, err
	})
}

// NoDMABuf says whether an error of RegisterDMABuf would come for any dma-buf, and not for this one only.
func NoDMABuf(err error) bool {
	return errors.Is(err, syscall.EOPNOTSUPP) || errors.Is(err, syscall.EPROTONOSUPPORT) || errors.Is(err, syscall.ENOSYS)
}

// TakesDMABufs says why the device cannot register dma-bufs; nil: it can. It tries a dma-buf that does
// not exist, since the kernel first looks whether the driver has the function.
func (p *PD) TakesDMABufs() error {
	mr, err := p.RegisterDMABuf(-1, 0, 4096, 0, LocalWrite|RemoteWrite)
	if err == nil {
		return mr.Close()
	}
	if NoDMABuf(err) {
		return err
	}
	return nil
}

func (p *PD) register(addr, length uint64, dmabuf bool, do func() (*C.struct_kv_ibv_mr, error)) (*MR, error) {
	d := p.dev
	fail := func(err error) error {
		e := &RegisterError{Device: d.info.Name, Addr: addr, Length: length, MaxSize: d.attr.MaxMRSize, DMABuf: dmabuf,
			MaxMR: d.attr.MaxMR, Open: int(d.mrs.Load()), Memlock: NoMemlockLimit, Err: err}
		const rlimitMemlock = 8
		var r syscall.Rlimit
		if syscall.Getrlimit(rlimitMemlock, &r) == nil {
			e.Memlock = r.Cur
		}
		return e
	}
	if addr == 0 && !dmabuf || length == 0 || length > d.attr.MaxMRSize || addr+length < length {
		return nil, fail(syscall.EINVAL)
	}
	mr := &MR{Addr: addr, Length: length, dev: d}
	err := p.use(func() error {
		var err error
		if mr.c, err = do(); mr.c == nil {
			return fail(cause(err))
		}
		d.mrs.Add(1)
		var l, r C.uint32_t
		C.vb_keys(mr.c, &l, &r)
		mr.LKey, mr.RKey = uint32(l), uint32(r)
		return nil
	})
	if err != nil {
		return nil, err
	}
	return mr, nil
}

// Close deregisters the memory: when it returns the device does not touch it
// any more, and writes to it fail. A second call does nothing.
func (m *MR) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.c == nil {
		return nil
	}
	if err := errno(C.vb_deregister(m.c)); err != nil {
		return fmt.Errorf("deregister %d bytes at %#x on RDMA device %s: %w", m.Length, m.Addr, m.dev.info.Name, err)
	}
	m.c = nil
	m.dev.mrs.Add(-1)
	return nil
}
