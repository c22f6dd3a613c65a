// The devices of this machine: which there are, what each can do, and how one is opened.

package verbs

/*
#include <errno.h>
#include <stdlib.h>
#include "shim.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"
)

// Transport is what carries the verbs of a device: enum ibv_transport_type.
type Transport int

// The transports. Queue pairs of other than TransportIB, which RoCE is too,
// cannot be connected by exchanging numbers.
const (
	TransportUnknown Transport = -1
	TransportIB      Transport = 0
	TransportIWARP   Transport = 1
)

func (t Transport) String() string {
	switch t {
	case TransportIB:
		return "IB"
	case TransportIWARP:
		return "iWARP"
	case 2, 3:
		return "usNIC"
	}
	return "unknown"
}

// DeviceInfo describes a device that may not be open.
type DeviceInfo struct {
	Name      string // mlx5_0
	Transport Transport
	SysPath   string // /sys/class/infiniband/mlx5_0
	File      string // /dev/infiniband/uverbs0; empty where nothing drives the device
	Problem   error  // why it cannot be opened, as far as can be seen from outside; it names the file and the remedy
}

const sysClass = "/sys/class/infiniband"

// Devices lists the devices of this machine, also those with a Problem. A machine
// without devices is no error; an *UnavailableError says that the kernel has no verbs.
func (l *Library) Devices() ([]DeviceInfo, error) {
	var list *C.struct_vb_device
	var n C.int
	rc := C.vb_devices(&list, &n)
	if rc == C.ENOSYS {
		return nil, &UnavailableError{Reason: "the kernel has no RDMA devices (no " + sysClass + "_verbs)", Remedy: "load the NIC's driver and ib_uverbs: modprobe ib_uverbs"}
	}
	if err := errno(rc); err != nil {
		return nil, fmt.Errorf("list RDMA devices: %w", err)
	}
	defer C.free(unsafe.Pointer(list))
	known := map[string]bool{}
	all := make([]DeviceInfo, 0, n)
	for _, d := range unsafe.Slice(list, int(n)) {
		i := DeviceInfo{
			Name:      C.GoString(&d.name[0]),
			Transport: Transport(d.transport),
			SysPath:   C.GoString(&d.sys_path[0]),
			File:      "/dev/infiniband/" + C.GoString(&d.file[0]),
		}
		const readWrite = 4 | 2
		if err := syscall.Access(i.File, readWrite); err != nil {
			i.Problem = fileProblem(i.File, err)
		}
		known[i.Name] = true
		all = append(all, i)
	}
	entries, _ := os.ReadDir(sysClass) // not there: no device
	for _, e := range entries {
		if !known[e.Name()] {
			all = append(all, DeviceInfo{Name: e.Name(), SysPath: sysClass + "/" + e.Name(), Transport: TransportUnknown,
				Problem: fmt.Errorf("libibverbs does not know the device %s: install ibverbs-providers (in RHEL: libibverbs) and load ib_uverbs", e.Name())})
		}
	}
	return all, nil
}

func fileProblem(file string, err error) error {
	switch {
	case errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EPERM):
		return fmt.Errorf("no permission to open %s: %w; give this user read and write access (a udev rule, the group rdma), in a container --device=%s", file, err, file)
	case errors.Is(err, syscall.ENOENT), errors.Is(err, syscall.ENXIO):
		return fmt.Errorf("no device file %s: %w; load ib_uverbs (modprobe ib_uverbs), in a container --device=%s", file, err, file)
	}
	return fmt.Errorf("open %s: %w", file, err)
}

// Counts says how many objects of a device are open.
type Counts struct{ PDs, MRs, CQs, QPs int }

// Device is an open device. NextEvent must be called again and again for as
// long as its events matter; nothing else waits for it.
type Device struct {
	info  DeviceInfo
	attr  Attr
	async *os.File // a duplicate of the context's descriptor, in the netpoller
	ctx   *C.struct_kv_ibv_context

	mu     sync.RWMutex // held for writing by Close
	closed bool

	pds, mrs, cqs, qps atomic.Int64
}

// Attr is what a device can do. Sizes are in bytes.
type Attr struct {
	MaxMRSize       uint64
	MaxMR           int
	MaxPD           int
	MaxQP           int
	MaxQPWR         int // work requests in each queue of a queue pair
	MaxSGE          int // pieces of a work request
	MaxCQ           int
	MaxCQE          int // completions in a queue
	Ports           int // numbered from 1
	Vectors         int // completion vectors (interrupts)
	Firmware        string
	RelaxedOrdering bool // Register may ask for it; a kernel or device without it ignores the wish
}

// Open opens a device by name. The error names the device file and the remedy,
// or the names that there are.
func (l *Library) Open(name string) (*Device, error) {
	all, err := l.Devices()
	if err != nil {
		return nil, err
	}
	var info *DeviceInfo
	names := make([]string, len(all))
	for i := range all {
		names[i] = all[i].Name
		if all[i].Name == name {
			info = &all[i]
		}
	}
	switch {
	case info == nil && len(all) == 0:
		return nil, fmt.Errorf("no RDMA device %q: this machine has none: %w", name, syscall.ENODEV)
	case info == nil:
		return nil, fmt.Errorf("no RDMA device %q: there is %s: %w", name, strings.Join(names, ", "), syscall.ENODEV)
	case info.File == "":
		return nil, info.Problem
	}
	c := C.CString(name)
	defer C.free(unsafe.Pointer(c))
	ctx, err := C.vb_open(c)
	if ctx == nil {
		// The library looks for the file elsewhere too, and then says that there is none.
		why := info.Problem
		if why == nil {
			why = fileProblem(info.File, cause(err))
		}
		return nil, fmt.Errorf("open RDMA device %s: %w", name, why)
	}
	d := &Device{info: *info, ctx: ctx}
	if err := d.start(); err != nil {
		C.vb_close(ctx)
		return nil, fmt.Errorf("open RDMA device %s: %w", name, err)
	}
	return d, nil
}

func (d *Device) start() error {
	var a C.struct_vb_attr
	if err := errno(C.vb_query_device(d.ctx, &a)); err != nil {
		return fmt.Errorf("query its attributes: %w", err)
	}
	d.attr = Attr{
		MaxMRSize: uint64(a.max_mr_size), MaxMR: int(a.max_mr), MaxPD: int(a.max_pd),
		MaxQP: int(a.max_qp), MaxQPWR: int(a.max_qp_wr), MaxSGE: int(a.max_sge),
		MaxCQ: int(a.max_cq), MaxCQE: int(a.max_cqe), Ports: int(a.ports), Vectors: int(a.vectors),
		Firmware: C.GoString(&a.firmware[0]), RelaxedOrdering: C.vb_has_relaxed_ordering() != 0,
	}
	var err error
	d.async, err = pollable(C.vb_async_fd(d.ctx), d.info.Name+" events")
	return err
}

// pollable gives the netpoller a duplicate of the library's descriptor, since both the
// os.File and the library close their own.
func pollable(fd C.int, name string) (*os.File, error) {
	dup, _, e := syscall.Syscall(syscall.SYS_FCNTL, uintptr(fd), syscall.F_DUPFD_CLOEXEC, 0)
	if e != 0 {
		return nil, fmt.Errorf("duplicate the descriptor of %s: %w", name, e)
	}
	return os.NewFile(dup, name), nil
}

// Info is what the list said of the device.
func (d *Device) Info() DeviceInfo { return d.info }

// Attr says what the device could do when it was opened.
func (d *Device) Attr() Attr { return d.attr }

// Counts says what is open; all must be 0 before Close.
func (d *Device) Counts() Counts {
	return Counts{PDs: int(d.pds.Load()), MRs: int(d.mrs.Load()), CQs: int(d.cqs.Load()), QPs: int(d.qps.Load())}
}

// Close ends NextEvent and gives the device back. While objects of the device are open,
// Close refuses, with their counts, and nothing changes. A second call does nothing.
func (d *Device) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil
	}
	if c := d.Counts(); c != (Counts{}) {
		return fmt.Errorf("close RDMA device %s: still open: %d queue pairs, %d completion queues, %d memory regions, %d protection domains: %w",
			d.info.Name, c.QPs, c.CQs, c.MRs, c.PDs, syscall.EBUSY)
	}
	d.closed = true
	_ = d.async.Close() // returns when nobody is in NextEvent
	if err := errno(C.vb_close(d.ctx)); err != nil {
		return fmt.Errorf("close RDMA device %s: %w", d.info.Name, err)
	}
	return nil
}

// use runs f while the device stays open.
func (d *Device) use(f func() error) error {
	d.mu.RLock()
	defer d.mu.RUnlock()
	if d.closed {
		return fmt.Errorf("RDMA device %s: %w", d.info.Name, ErrClosed)
	}
	return f()
}
