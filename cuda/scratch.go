package cuda

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
)

// Scratch is memory of the device that is no engine's, for trials of what can reach the device.
type Scratch struct {
	d      *Device
	at     uint64 // of the allocation
	region *Region
	copies atomic.Int32 // under way; some of them are not waited for
}

// Scratch allocates such memory, from the begin of a host page on. It is given back before the
// device is closed.
func (d *Device) Scratch(bytes uint64) (*Scratch, error) {
	page := uint64(os.Getpagesize())
	bytes = (bytes + page - 1) / page * page
	if !d.enter() {
		return nil, d.over()
	}
	at, err := d.drv.Alloc(bytes + page)
	d.leave()
	if err != nil {
		d.suspect(err)
		return nil, err
	}
	s := &Scratch{d: d, at: at}
	if s.region, err = d.Register("for probes", uintptr((at+page-1)/page*page), bytes); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// Addr is the first byte.
func (s *Scratch) Addr() uint64 { return s.region.addr }

// Export is Region.Export.
func (s *Scratch) Export() (*os.File, uint64, error) { return s.region.Export() }

// Put copies bytes to offset and waits. Get copies from there.
func (s *Scratch) Put(ctx context.Context, offset uint64, b []byte) error {
	return s.move(ctx, ToDevice, offset, b)
}

// Get is described at Put.
func (s *Scratch) Get(ctx context.Context, offset uint64, b []byte) error {
	return s.move(ctx, FromDevice, offset, b)
}

func (s *Scratch) move(ctx context.Context, dir Direction, offset uint64, b []byte) error {
	for len(b) > 0 {
		n := min(len(b), s.d.SlotBytes())
		if err := s.moveSome(ctx, dir, offset, b[:n]); err != nil {
			return err
		}
		b, offset = b[n:], offset+uint64(n)
	}
	return nil
}

func (s *Scratch) moveSome(ctx context.Context, dir Direction, offset uint64, b []byte) error {
	slot, err := s.d.Slot(ctx, dir, "probe")
	if err != nil {
		return fmt.Errorf("a slot of pinned memory: %w", err)
	}
	defer slot.Release()
	if dir == ToDevice {
		copy(slot.Bytes(), b)
	}
	if err := context.Cause(ctx); err != nil {
		return err
	}
	s.copies.Add(1)
	done := make(chan error, 1)
	s.d.Transfer("a probe", dir).Start(Copy{Slot: slot, Runs: []Run{{Addr: uintptr(s.region.addr + offset), Len: uint64(len(b))}}, Done: func(err error) {
		s.copies.Add(-1)
		done <- err
	}})
	select {
	case err = <-done: // a device that does not answer counts as failed in the end
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	if err == nil && dir == FromDevice {
		copy(b, slot.Bytes())
	}
	return err
}

// Close gives the memory back. The caller makes sure that no card reaches it any more.
func (s *Scratch) Close() error {
	if s.region != nil {
		s.region.Close()
	}
	if s.copies.Load() > 0 || !s.d.enter() {
		return nil // the context's end gives it back: Free would wait for a copy that may never end
	}
	defer s.d.leave()
	return s.d.drv.Free(s.at)
}

// ExportRange exports memory of the device as Region.Export does. The name is for errors.
func (d *Device) ExportRange(name string, addr, bytes uint64) (file *os.File, offset uint64, err error) {
	r, err := d.Register(name, uintptr(addr), bytes)
	if err != nil {
		return nil, 0, err
	}
	defer r.Close()
	return r.Export()
}
