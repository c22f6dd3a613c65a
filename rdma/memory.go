package rdma

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/hostmem"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rdma/internal/verbs"
)

// memory is the agent's memory as one device has registered it. It does not change.
type memory struct {
	mrs     []*verbs.MR
	keys    []keyRange // remote keys, for peers
	local   *keyTable
	scratch *verbs.MR
	gpu     []*verbs.MR // of mrs, those in memory of GPUs
	by      string      // how the last of them was registered
	areas   []*verbs.MR // for trials, as the agent's memory has them
}

// scratchBytes is the size of the memory that probes read and write on either side: one
// packet of the largest MTU, or several of a smaller one. No region holds it.
const scratchBytes = 4096

// agentMemory is the agent's memory, whichever device registers it.
type agentMemory struct {
	regions []memRange
	host    []memRange // those in the host's memory
	whole   []memRange // the same, merged
	gpus    GPUs       // nil: no region lies on one
	gpu     []gpuRange
	gpuAt   []place
	number  []int // the number of each GPU among the host's GPUs
	touch   func() error
	scratch []byte

	areas  []*area
	seed   uint64 // of P's streams in them
	places areaSlots
}

func (r *agentMemory) init(l *kv.Layout, gpus GPUs) (err error) {
	r.regions = regionRanges(l)
	for i, at := range r.regions {
		if l.Regions[i].Memory == kv.HostMemory {
			r.host = append(r.host, at)
		}
	}
	r.gpus, r.gpu = gpus, gpuRanges(l)
	r.whole = mergeRanges(r.host, 0)
	if gpus != nil {
		for gpu := range gpus.Count() {
			at, number := gpuPlace(os.DirFS("/sys"), gpus.PCI(gpu))
			r.gpuAt, r.number = append(r.gpuAt, at), append(r.number, number)
		}
	}
	if len(r.gpu) > 0 && gpus == nil {
		return fmt.Errorf("region %q lies in device memory, and no device was given", r.gpu[0].name)
	}
	r.touch = sync.OnceValue(func() error {
		err := pretouch(r.whole, touching)
		var at *touchError
		if errors.As(err, &at) { // in whole pages: the layout knows which region has bytes there
			err = fmt.Errorf("rdma: %w", hostmem.Fault(l.Regions, regionsIn(l, at.memRange), true, at.cause))
		}
		return err
	})
	if r.scratch, err = unix.Mmap(-1, 0, scratchBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE); err != nil {
		err = fmt.Errorf("%d bytes for probes: %w", scratchBytes, err)
	}
	return err
}

// close gives back what is its own, once no card has it registered.
func (r *agentMemory) close() error {
	var errs []error
	if r.scratch != nil {
		errs = append(errs, unix.Munmap(r.scratch))
	}
	for _, a := range r.areas {
		errs = append(errs, a.close())
	}
	r.scratch, r.areas = nil, nil
	return errors.Join(errs...)
}

// check says whether so many more devices may lock the memory.
func (r *agentMemory) check(devices int) error {
	lock, err := readMemlock()
	if err != nil {
		return nil // registering will show it
	}
	return lock.check(rangeBytes(r.whole) * uint64(devices))
}

// register registers the agent's memory with all devices that have an active port.
// Without Fallback it fails if one of these devices cannot register the memory.
func (t *Transport) register() error {
	var list []*device
	var down []error
	for _, d := range t.devices {
		n := len(down)
		for _, p := range d.ports {
			if err := p.inactive(); err != nil {
				down = append(down, err)
			}
		}
		if len(down)-n < len(d.ports) {
			list = append(list, d)
		}
	}
	if len(list) == 0 && !t.cfg.Fallback {
		return allOf(down...)
	}
	for _, err := range down {
		t.log.Warn("rdma port is not used until it is active", zap.Error(err))
	}
	if len(list) == 0 {
		return nil
	}
	if !t.cfg.Fallback {
		if err := t.memory.check(len(list)); err != nil {
			return err
		}
	}
	began := time.Now()
	if err := t.memory.touch(); err != nil {
		return err
	}
	touched := time.Now()
	exports := t.memory.exports()
	defer closeExports(exports)
	errs := make([]error, len(list))
	var wg sync.WaitGroup
	for i, d := range list {
		if errs[i] = t.memory.check(i + 1); errs[i] == nil {
			wg.Go(func() { errs[i] = t.registerWith(d, exports) })
		}
	}
	wg.Wait()
	took := 0
	for i, err := range errs {
		if err == nil {
			took++
		} else if t.cfg.Fallback {
			t.log.Warn("rdma device is not used: it does not take the memory", zap.String("device", list[i].name), zap.Error(err))
		}
	}
	if took < len(list) && !t.cfg.Fallback || took == 0 {
		return allOf(errs...)
	}
	t.log.Info("rdma memory registered", zap.Uint64("bytes", rangeBytes(t.memory.whole)), zap.Int("gpu_ranges", len(t.memory.gpu)), zap.Int("devices", took),
		zap.Duration("touching", touched.Sub(began)), zap.Duration("registering", time.Since(touched)))
	return nil
}

// registerLate registers the memory with a device whose first port became active now.
func (t *Transport) registerLate(d *device) error {
	if d.memory.Load() != nil {
		return nil
	}
	t.remapping.turn.Lock()
	defer t.remapping.turn.Unlock()
	if d.memory.Load() != nil { // a remapping has registered it meanwhile
		return nil
	}
	err := t.memory.check(1)
	if err == nil {
		err = t.memory.touch()
	}
	if err == nil {
		err = t.checkMemory()
	}
	if err == nil {
		exports := t.memory.exports()
		defer closeExports(exports)
		err = t.registerWith(d, exports)
	}
	if err == nil {
		err = t.checkMemory() // else the device forgets it
	}
	return err
}

const (
	touching   = 8 // goroutines that have the kernel give pages their memory
	registrars = 4 // goroutines that register ranges with one device
)

// registerWith registers the memory with one device, whose ports can be used then.
func (t *Transport) registerWith(d *device, exports []*export) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return errClosed
	}
	t.place(d)
	m, err := d.register(t.ctx, &t.memory, exports, t.cfg.RelaxedOrdering)
	if err != nil {
		return errors.Join(err, m.close())
	}
	if m.by != "" {
		t.log.Info("rdma device reaches the GPUs' memory", zap.String("device", d.name), zap.String("by", m.by), zap.Int("registrations", len(m.gpu)))
	}
	d.memory.Store(m)
	return nil
}

// place sets how near a device's ports are to the memory. Most often all memory is of one
// NUMA node, so the largest range counts.
func (t *Transport) place(d *device) {
	near := farUnknown
	whole := t.memory.whole
	if at, err := devicePlace(os.DirFS("/sys"), d.name); err == nil && len(whole) > 0 {
		memory := memoryPlace(slices.MaxFunc(whole, func(a, b memRange) int { return cmp.Compare(a.Length, b.Length) }))
		near = at.distanceTo(memory)
		t.log.Info("rdma device and memory", zap.String("device", d.name), zap.Stringer("at", at), zap.Stringer("memory", memory), zap.Stringer("distance", near))
	}
	at, err := devicePlace(os.DirFS("/sys"), d.name)
	nearGPU := make([]distance, t.gpuCount())
	for gpu, where := range t.memory.gpuAt {
		nearGPU[gpu] = farUnknown
		if err == nil {
			nearGPU[gpu] = at.distanceTo(where)
		}
		t.log.Info("rdma device and GPU", zap.String("device", d.name), zap.Stringer("at", at), zap.String("gpu", t.cfg.GPUs.Name(gpu)),
			zap.Stringer("gpu_at", where), zap.Stringer("distance", nearGPU[gpu]))
	}
	for _, p := range d.ports {
		p.near, p.nearGPU = near, nearGPU
	}
}

// register registers all ranges. With an error it also returns what it has registered.
func (d *device) register(ctx context.Context, r *agentMemory, exports []*export, order string) (*memory, error) {
	m := &memory{}
	access := verbs.LocalWrite | verbs.RemoteWrite
	switch {
	case order == OrderRelaxed && !d.verbs.Attr().RelaxedOrdering:
		return m, fmt.Errorf("device %s has no relaxed ordering, which rdma_relaxed_ordering demands: set it to auto", d.name)
	case order != OrderStrict:
		access |= verbs.RelaxedOrdering
	}
	ranges := mergeRanges(r.host, d.maxMR())
	mrs, errs := make([][]*verbs.MR, len(ranges)), make([]error, len(ranges))
	var wg sync.WaitGroup
	var next atomic.Int64
	for range min(registrars, len(ranges)) {
		wg.Go(func() {
			for i := int(next.Add(1)) - 1; i < len(ranges); i = int(next.Add(1)) - 1 {
				if errs[i] = ctx.Err(); errs[i] == nil {
					mrs[i], errs[i] = registerRange(ranges[i], func(part memRange) (*verbs.MR, error) { return d.pd.Register(uintptr(part.Base), part.Length, access) })
				}
				if errs[i] != nil {
					next.Store(int64(len(ranges))) // the other ranges would fail too
				}
			}
		})
	}
	wg.Wait()
	m.mrs = slices.Concat(mrs...)
	err := allOf(errs...)
	if err == nil {
		err = d.registerExports(m, r, exports)
	}
	if err == nil {
		err = m.index(r)
	}
	if err == nil {
		m.scratch, err = d.pd.Register(uintptr(unsafe.Pointer(&r.scratch[0])), scratchBytes, access)
	}
	for _, a := range r.areas {
		if err == nil {
			err = d.registerArea(m, r, a, access)
		}
	}
	return m, err
}

// registerExports registers the GPUs' memory. With an error m also has what was registered before it.
func (d *device) registerExports(m *memory, r *agentMemory, exports []*export) error {
	for _, x := range exports {
		parts, by, err := d.registerExport(x, r.gpus)
		m.mrs, m.gpu, m.by = append(slices.Clip(m.mrs), parts...), append(m.gpu, parts...), by
		if err != nil {
			return err
		}
	}
	return nil
}

// index finds the keys of what was registered.
func (m *memory) index(r *agentMemory) (err error) {
	slices.SortFunc(m.mrs, func(a, b *verbs.MR) int { return cmp.Compare(a.Addr, b.Addr) })
	var local []keyRange
	m.keys = nil
	for _, mr := range m.mrs {
		at := memRange{mr.Addr, mr.Length}
		local, m.keys = append(local, keyRange{at, mr.LKey}), append(m.keys, keyRange{at, mr.RKey})
	}
	m.local, err = newKeyTable("here", r.regions, local)
	return err
}

// registerArea registers memory for trials in the way in which regions there are registered.
func (d *device) registerArea(m *memory, r *agentMemory, a *area, access verbs.Access) error {
	if a.gpu < 0 {
		mr, err := d.pd.Register(uintptr(a.Base), a.Length, access)
		if err == nil {
			m.areas = append(m.areas, mr)
		}
		return err
	}
	x := &export{gpuRange: gpuRange{a.memRange, a.gpu, "for probes"}}
	x.file, x.offset, x.err = r.gpus.Export(x.gpu, x.name, x.Base, x.Length)
	defer closeExports([]*export{x})
	mrs, _, err := d.registerExport(x, r.gpus)
	m.areas = append(m.areas, mrs...)
	return err
}

// leastSplit is the size below which a range that cannot be registered is not cut.
const leastSplit = 256 << 20

// registerRange registers a range. If the driver takes less at once than the device says,
// registerRange registers halves.
func registerRange(r memRange, register func(memRange) (*verbs.MR, error)) ([]*verbs.MR, error) {
	mr, err := register(r)
	if err == nil {
		return []*verbs.MR{mr}, nil
	}
	if r.Length < 2*leastSplit || !errors.Is(err, syscall.ENOMEM) && !errors.Is(err, syscall.E2BIG) {
		return nil, err
	}
	half := r.Length / 2 &^ (2<<20 - 1)
	mrs, err := registerRange(memRange{r.Base, half}, register)
	if err == nil {
		var rest []*verbs.MR
		rest, err = registerRange(memRange{r.Base + half, r.Length - half}, register)
		mrs = append(mrs, rest...)
	}
	return mrs, err // also with an error: the caller closes them
}

// close makes the device forget the memory.
func (m *memory) close() error {
	errs := []error{closeAll(m.mrs), closeAll(m.areas)}
	if m.scratch != nil {
		errs = append(errs, m.scratch.Close())
	}
	return errors.Join(errs...)
}
