// A network card reaches the device's memory by a dma-buf, and what the card has written is flushed.

package cuda

import (
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/internal/safe"
)

const noMemory = 2 // CUDA_ERROR_OUT_OF_MEMORY

// Export gives the region as a dma-buf: whole pages, the region's first byte at offset. The
// caller closes the file; a card that has registered the memory does not need the file any more.
func (r *Region) Export() (file *os.File, offset uint64, err error) {
	if !r.d.enter() {
		return nil, 0, r.d.over()
	}
	defer r.d.leave()
	pieces, _ := r.now()
	page := uint64(os.Getpagesize())
	from, end := r.addr/page*page, (r.addr+r.bytes+page-1)/page*page
	switch {
	case !r.d.info.DMABuf:
		err = fmt.Errorf("%s (%s) cannot export memory as a dma-buf: that needs NVIDIA's open kernel modules", r.d.info.Name, r.d.info.UUID)
	case !r.RDMA():
		err = fmt.Errorf("its memory was not allocated for GPUDirect RDMA: an allocator that maps handles must ask for it (gpuDirectRDMACapable)")
	case from < pieces[0].Base || end > pieces[len(pieces)-1].Base+pieces[len(pieces)-1].Size:
		err = fmt.Errorf("%d bytes at %#x are in pages of %d bytes that are not all of the same allocation", r.bytes, r.addr, page)
	}
	if err != nil {
		return nil, 0, fmt.Errorf("region %s: %w", r.name, err)
	}
	fd, err := r.d.drv.Export(from, end-from)
	if err != nil {
		r.d.suspect(err)
		var e *Error
		if errors.As(err, &e) && e.Code == noMemory {
			err = fmt.Errorf("%w; is the GPU's BAR1 large enough (nvidia-smi -q -d MEMORY)?", e.Brief())
		}
		return nil, 0, fmt.Errorf("region %s: %d bytes as a dma-buf: %w", r.name, end-from, err)
	}
	return os.NewFile(uintptr(fd), "dma-buf of "+r.name), r.addr - from, nil
}

// Flushable says whether Flush works here. If not, a card must not write the device's memory.
func (d *Device) Flushable() error {
	if d.info.WritesOrdered || d.info.FlushOnHost {
		return nil
	}
	return fmt.Errorf("%s (%s) neither orders the writes of network cards nor can be told to flush them", d.info.Name, d.info.UUID)
}

// When Flush has returned, all that a card had written to the device's memory before the call is seen
// by work that is launched later. A device that orders such writes by itself needs nothing. Flush also works on a device that does
// not end a copy: a card's bytes may be on their way to blocks that are given back. Flush takes at most StallTimeout, or CloseTimeout on
// such a device. Once half of the time of a close is over, Flush takes CloseTimeout at most from then on. If the error wraps
// core.ErrMayLand, nothing was flushed, and the device may still answer.
func (d *Device) Flush() error {
	if err := d.Flushable(); err != nil {
		return err
	}
	if d.info.WritesOrdered || fault.On("gpu-flush") {
		return d.Err()
	}
	if !d.enterStuck() {
		err := d.over()
		if d.isStuck() || errors.Is(err, ErrClosed) {
			return fmt.Errorf("%w: %w", err, core.ErrMayLand)
		}
		return err // of a device that has failed
	}
	w := d.waitForFlush()
	defer w.step.Stop()
	if !w.until(d.flushes) { // a flush that is not answered keeps a thread
		d.leave()
		return d.unflushed(w.began)
	}
	var err error
	done := make(chan struct{})
	safe.Go("cuda flush", func() {
		defer d.leave()
		_, err = safe.Try("cuda flush", d.flush)
		d.flushes <- struct{}{}
		close(done)
	})
	if !w.until(done) {
		return d.unflushed(w.began)
	}
	return err
}

// flushSteps is in how many steps the bound of a flush passes. If this process was stopped meanwhile, it loses one step, and not the bound.
const flushSteps = 8

// flushWait is the time that one flush has.
type flushWait struct {
	d     *Device
	began time.Time
	step  *time.Ticker
	left  int             // steps
	hurry <-chan struct{} // nil: the time is CloseTimeout
}

func (d *Device) waitForFlush() *flushWait {
	w := &flushWait{d: d, began: time.Now(), left: flushSteps, hurry: d.halfway}
	bound := d.flushBound
	if d.isStuck() || d.isHalfway() {
		bound, w.hurry = d.o.CloseTimeout, nil
	}
	w.step = time.NewTicker(fault.Pick("gpu-flush-unbound", bound, 24*time.Hour) / flushSteps)
	return w
}

// until waits for c. It returns false if the flush's time is over.
func (w *flushWait) until(c <-chan struct{}) bool {
	for {
		select {
		case <-c:
			return true
		case <-w.hurry:
			w.hurry, w.left = nil, flushSteps
			w.step.Reset(fault.Pick("gpu-flush-unbound", w.d.o.CloseTimeout, 24*time.Hour) / flushSteps)
		case <-w.step.C:
			w.left--
		}
		if w.left > 0 {
			continue
		}
		select {
		case <-c: // both were there
			return true
		default:
			return false
		}
	}
}

func (d *Device) unflushed(began time.Time) error {
	err := fmt.Errorf("CUDA device %d has not ended a flush within %s: %w", d.info.Ordinal, time.Since(began).Round(time.Millisecond), core.ErrMayLand)
	if failed := d.Err(); failed != nil {
		err = fmt.Errorf("%w: %w", err, failed)
	}
	return err
}

func (d *Device) isHalfway() bool {
	select {
	case <-d.halfway:
		return true
	default:
		return false
	}
}

func (d *Device) flush() error {
	err := d.drv.Flush()
	if err != nil {
		d.suspect(err)
	}
	return err
}
