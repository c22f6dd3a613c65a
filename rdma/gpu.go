// Regions on GPUs are registered with cards, and what a card has written there is flushed before it counts.

package rdma

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	defect "github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/internal/safe"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rdma/internal/verbs"
)

// GPUs are the GPUs in whose memory some regions lie. A region's Memory has the GPU's number.
// In this package "device" means an RDMA card.
type GPUs interface {
	Count() int
	// Name is for people, PCI as in /sys/bus/pci/devices.
	Name(gpu int) string
	PCI(gpu int) string
	// Export gives memory of a GPU as a dma-buf in which its first byte lies at offset. The
	// caller closes the file. The name is for errors.
	Export(gpu int, name string, addr, bytes uint64) (file *os.File, offset uint64, err error)
	// Capable says why a card may not reach the memory, however it is registered.
	Capable(gpu int, name string, addr, bytes uint64) error
	// Flushable says why Flush cannot work. When Flush has returned, work that the GPU gets later
	// sees what cards wrote before. If the error of Flush wraps core.ErrMayLand, these bytes may yet land.
	Flushable(gpu int) error
	Flush(gpu int) error
	// Check names a region whose memory is not what was registered any more; nil: there is none.
	Check() error
	// Scratch gives memory of the GPU that belongs to no region.
	Scratch(gpu int, bytes uint64) (GPUScratch, error)
}

// GPUScratch is memory of a GPU that probes write and read. Put copies bytes to an offset and waits
// until they are there. Get copies bytes from an offset.
type GPUScratch interface {
	Addr() uint64
	Put(ctx context.Context, offset uint64, b []byte) error
	Get(ctx context.Context, offset uint64, b []byte) error
	Close() error
}

// gpuRange is memory of a GPU that is registered as a whole.
type gpuRange struct {
	memRange
	gpu  int
	name string // of the first region that lies in it
}

// gpuRanges returns the ranges that hold a layout's regions on GPUs. Regions that overlap have one
// range, since they lie in one allocation. Every other region has a range of its own, also if it
// touches another region, since neighbours may lie in two allocations.
func gpuRanges(l *kv.Layout) (out []gpuRange) {
	for i, r := range regionRanges(l) {
		if gpu, ok := l.Regions[i].Memory.Device(); ok {
			out = append(out, gpuRange{r, gpu, l.Regions[i].Name})
		}
	}
	slices.SortStableFunc(out, func(a, b gpuRange) int {
		if a.Base < b.Base {
			return -1
		}
		return 1
	})
	merged := out[:0]
	for _, r := range out {
		if n := len(merged); n > 0 && merged[n-1].gpu == r.gpu && r.Base-merged[n-1].Base < merged[n-1].Length {
			last := &merged[n-1]
			last.Length = max(last.Length, r.Base-last.Base+r.Length)
			continue
		}
		merged = append(merged, r)
	}
	return merged
}

// export is a range as a dma-buf. All cards import the same one, so that the GPU maps it once.
type export struct {
	gpuRange
	file   *os.File
	offset uint64
	err    error // why there is none
}

// exports makes those of all ranges. The caller closes them: cards that have registered them do
// not need the files.
func (r *agentMemory) exports() []*export {
	list := make([]*export, len(r.gpu))
	for i, g := range r.gpu {
		x := &export{gpuRange: g}
		x.file, x.offset, x.err = r.gpus.Export(g.gpu, g.name, g.Base, g.Length)
		list[i] = x
	}
	return list
}

func closeExports(list []*export) {
	for _, x := range list {
		if x.err == nil {
			_ = x.file.Close()
		}
	}
}

// gpuAccess has no relaxed ordering: whether a mark then still follows the bytes into a GPU's
// memory is not known.
const gpuAccess = verbs.LocalWrite | verbs.RemoteWrite

// registerExport registers a range as a dma-buf or, if that cannot be, by its address, which the
// module nvidia-peermem makes possible. by says which. With an error it also returns what it has
// registered.
func (d *device) registerExport(x *export, gpus GPUs) (mrs []*verbs.MR, by string, err error) {
	buffer := x.err
	if x.err == nil {
		mrs, buffer = d.registerRanges(splitRanges([]memRange{x.memRange}, d.maxMR(), uint64(os.Getpagesize())), func(r memRange) (*verbs.MR, error) {
			return d.pd.RegisterDMABuf(int(x.file.Fd()), x.offset+defect.Pick("rdma-mr-offset", r.Base-x.Base, 0), r.Length, r.Base, gpuAccess)
		})
		if buffer == nil {
			return mrs, "dma-buf", nil
		}
		if err := closeAll(mrs); err != nil {
			return mrs, "", err
		}
		mrs = nil
	}
	module, err := peermem()
	if err == nil {
		err = gpus.Capable(x.gpu, x.name, x.Base, x.Length)
	}
	if err == nil {
		mrs, err = d.registerRanges(splitRanges([]memRange{x.memRange}, d.maxMR(), uint64(os.Getpagesize())), func(r memRange) (*verbs.MR, error) {
			return d.pd.Register(uintptr(r.Base), r.Length, gpuAccess)
		})
		if err != nil {
			err = fmt.Errorf("by %s: %w", module, err)
		}
	}
	if err != nil {
		err = fmt.Errorf("region %q in memory of %s cannot be registered on %s: as a dma-buf: %w; %w", x.name, gpus.Name(x.gpu), d.name, buffer, err)
	}
	return mrs, module, err
}

// registerRanges registers ranges one after the other. With an error it also returns those
// before.
func (d *device) registerRanges(ranges []memRange, register func(memRange) (*verbs.MR, error)) (all []*verbs.MR, err error) {
	for _, r := range ranges {
		mrs, err := registerRange(r, register)
		all = append(all, mrs...)
		if err != nil {
			return all, err
		}
	}
	return all, nil
}

func closeAll(mrs []*verbs.MR) error {
	var errs []error
	for _, mr := range mrs {
		errs = append(errs, mr.Close())
	}
	return errors.Join(errs...)
}

// peermemModules are the kernel modules by which a card reaches a GPU's memory by its address.
var peermemModules = []string{"nvidia_peermem", "nv_peer_mem"}

// modulesFolder is /sys/module, unless a test has another one.
var modulesFolder = "/sys/module"

func peermem() (string, error) { return Peermem(os.DirFS(modulesFolder)) }

// Peermem names the loaded kernel module by which cards reach a GPU's memory without a dma-buf. The error says how to get one.
// modules is /sys/module.
func Peermem(modules fs.FS) (string, error) {
	for _, m := range peermemModules {
		if _, err := fs.Stat(modules, m); err == nil {
			return strings.ReplaceAll(m, "_", "-"), nil
		}
	}
	return "", errors.New("nvidia-peermem is not loaded either: use NVIDIA's open kernel modules, with which memory is exported as a dma-buf, or load it (modprobe nvidia-peermem)")
}

// checkGPUs says why cards must not write the GPUs' memory.
func (t *Transport) checkGPUs() error {
	if t.cfg.GPUs == nil || t.cfg.SendsOnly {
		return nil
	}
	for gpu := range t.cfg.GPUs.Count() {
		if err := t.cfg.GPUs.Flushable(gpu); err != nil {
			return fmt.Errorf("what a card writes there is not known to be seen: %w", err)
		}
	}
	return nil
}

// gpuSet has a bit for each GPU.
type gpuSet uint64

func (t *Transport) gpusOf(segments []kv.Segment) (s gpuSet) {
	if t.cfg.GPUs == nil {
		return 0
	}
	for i := range segments {
		if gpu, ok := t.layout.Regions[segments[i].Region].Memory.Device(); ok {
			s |= 1 << gpu
		}
	}
	return s
}

// allGPUs is gpusOf of a plan: nobody asks which of the regions it has.
func (t *Transport) allGPUs() (s gpuSet) {
	if t.cfg.GPUs == nil {
		return 0
	}
	for i := range t.layout.Regions {
		if gpu, ok := t.layout.Regions[i].Memory.Device(); ok {
			s |= 1 << gpu
		}
	}
	return s
}

// flush returns when what cards have written is in the GPUs' memory. It comes before an outcome is
// told and before a revoke returns: else bytes could yet appear in blocks that were given back.
func (t *Transport) flush(s gpuSet) error {
	var errs []error
	for gpu := 0; s>>gpu != 0; gpu++ {
		if s>>gpu&1 != 0 {
			errs = append(errs, t.cfg.GPUs.Flush(gpu))
		}
	}
	err := errors.Join(errs...)
	if err == nil {
		return nil
	}
	return fmt.Errorf("rdma: what was written to a GPU's memory cannot be flushed: %w", err)
}

// flushBlocks is flush of an engine's blocks: if bytes may yet land there, Close says so.
func (t *Transport) flushBlocks(s gpuSet) error {
	err := t.flush(s)
	if errors.Is(err, core.ErrMayLand) {
		t.mayLand(err)
	}
	return err
}

// flushWithin is flush for those who can wait no longer than ctx. The flush goes on.
func (t *Transport) flushWithin(ctx context.Context, s gpuSet) error {
	if s == 0 {
		return nil
	}
	done := make(chan error, 1)
	if !t.goRun("rdma flush", func() { done <- t.flush(s) }) {
		return errClosed
	}
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return errors.New("rdma: the driver does not answer a flush of what was written to a GPU's memory")
	}
}

// land has transfers told whose bytes have arrived in GPUs' memory, as soon as these GPUs are flushed. Each set of GPUs has a goroutine
// of its own, while transfers wait for it: so a GPU that does not answer holds up no transfer of another one.
func (r *receiver) land(list []*expect) {
	var begin []gpuSet
	r.mu.Lock()
	for _, e := range list {
		waiting, runs := r.arrived[e.gpus]
		if !runs {
			begin = append(begin, e.gpus)
		}
		r.arrived[e.gpus] = append(waiting, e)
	}
	r.awaiting += len(list)
	r.mu.Unlock()
	for _, gpus := range begin {
		if !r.t.goRun("rdma landed", func() { r.tellLanded(gpus) }) {
			r.tellLanded(gpus) // Close waits for the caller
		}
	}
}

// tellLanded tells of the transfers that wait for these GPUs. Those that arrive during a flush share the next one.
func (r *receiver) tellLanded(gpus gpuSet) {
	for {
		r.mu.Lock()
		list := r.arrived[gpus]
		if len(list) == 0 {
			delete(r.arrived, gpus)
			r.mu.Unlock()
			return
		}
		r.arrived[gpus] = nil
		r.mu.Unlock()
		err := r.t.landed(gpus)
		for _, e := range list {
			r.mu.Lock()
			r.awaiting--
			r.mu.Unlock()
			e.tell(err)
		}
	}
}

// byGPUs calls f with the transfers of each set of GPUs, all at once if there are several: a GPU that does not answer holds up no
// transfer of another one, nor of host memory. It returns when all calls have.
func byGPUs(list []*expect, f func(gpus gpuSet, list []*expect)) {
	sets := map[gpuSet][]*expect{}
	for _, e := range list {
		sets[e.gpus] = append(sets[e.gpus], e)
	}
	if len(sets) == 1 {
		f(list[0].gpus, list)
		return
	}
	var wg sync.WaitGroup
	var failed atomic.Pointer[error]
	for gpus, list := range sets {
		wg.Add(1)
		safe.Go("rdma ended", func() {
			defer wg.Done()
			if panicked, err := safe.Try("rdma ended", func() error { f(gpus, list); return nil }); panicked {
				failed.Store(&err)
			}
		})
	}
	wg.Wait()
	if err := failed.Load(); err != nil {
		panic(*err) // as it would be with one set
	}
}

// landed says whether bytes that have arrived in the GPUs' memory may be used.
func (t *Transport) landed(s gpuSet) error {
	if !defect.On("rdma-flush") {
		if err := t.flushBlocks(s); err != nil {
			return err
		}
	}
	if defect.On("rdma-end-unchecked") {
		return nil
	}
	return t.checkMemory()
}

// flushEnded is flush for transfers that have ended badly. It returns an error if what a card has written may yet land. Any other
// error is of a GPU that has failed.
func (t *Transport) flushEnded(s gpuSet) error {
	if defect.On("rdma-flush-revoked") {
		return nil
	}
	err := t.flushBlocks(s)
	if err != nil {
		t.log.Warn("rdma: a transfer that has failed is not flushed", zap.Error(err))
	}
	if !errors.Is(err, core.ErrMayLand) {
		return nil
	}
	return err
}

// checkMemory says which region's memory has changed under its registration. P's caller has asked
// that of the regions that a write reads.
func (t *Transport) checkMemory() error {
	if t.cfg.GPUs == nil {
		return nil
	}
	if err := t.forgotten(); err != nil {
		return err
	}
	if err := t.cfg.GPUs.Check(); err != nil {
		t.Forget(err)
		return t.forgotten()
	}
	return nil
}
