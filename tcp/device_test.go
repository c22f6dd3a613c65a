package tcp_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/core/coretest"
	"github.com/kvconn/kvconn/tcp"
)

// latecomer is a Mover whose device memory nobody can touch, and whose copies happen late
// and in any order.
type latecomer struct {
	mu     sync.Mutex
	ranges []twin
	free   chan *lateSlot
}

// twin is memory at two addresses; a touch of the device's is a fault.
type twin struct {
	device, host uintptr
	size         int
}

func newLatecomer(slots, bytes int) *latecomer {
	m := &latecomer{free: make(chan *lateSlot, slots)}
	for range slots {
		m.free <- &lateSlot{m: m, mem: make([]byte, bytes)}
	}
	return m
}

func (m *latecomer) expose(file *os.File, size int) (uint64, error) {
	host, err := unix.MmapPtr(int(file.Fd()), 0, nil, uintptr(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return 0, err
	}
	device, err := unix.MmapPtr(int(file.Fd()), 0, nil, uintptr(size), unix.PROT_NONE, unix.MAP_SHARED)
	if err != nil {
		return 0, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.ranges = append(m.ranges, twin{uintptr(device), uintptr(host), size})
	return uint64(uintptr(device)), nil
}

func (m *latecomer) find(a uintptr) *twin {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range m.ranges {
		if r := &m.ranges[i]; a >= r.device && a < r.device+uintptr(r.size) {
			return r
		}
	}
	return nil
}

func (m *latecomer) Where(a uint64) int {
	if m.find(uintptr(a)) == nil {
		return -1
	}
	return 0
}

func (m *latecomer) Slot(ctx context.Context, _ int, _ tcp.Direction) (tcp.Slot, error) {
	select {
	case s := <-m.free:
		return s, nil
	default:
	}
	select {
	case s := <-m.free:
		return s, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

type lateSlot struct {
	m    *latecomer
	mem  []byte
	done chan struct{}
}

func (s *lateSlot) Memory() []byte { return s.mem }

func (s *lateSlot) Fill(runs []tcp.Run) error {
	return s.copy(runs, func(slot, device []byte) { copy(slot, device) })
}

func (s *lateSlot) Drain(runs []tcp.Run) error {
	return s.copy(runs, func(slot, device []byte) { copy(device, slot) })
}

func (s *lateSlot) copy(runs []tcp.Run, move func(slot, device []byte)) error {
	if s.done != nil {
		return errors.New("the slot is in use")
	}
	type job struct{ slot, device []byte }
	var jobs []job
	at := 0
	for _, r := range runs {
		t := s.m.find(uintptr(r.Address))
		if t == nil {
			return fmt.Errorf("%#x is no device memory", r.Address)
		}
		p := t.host + uintptr(r.Address) - t.device
		jobs = append(jobs, job{s.mem[at : at+int(r.Bytes)], unsafe.Slice(*(**byte)(unsafe.Pointer(&p)), r.Bytes)})
		at += int(r.Bytes)
	}
	done := make(chan struct{})
	s.done = done
	go func() {
		defer close(done)
		for _, i := range rand.Perm(len(jobs)) {
			time.Sleep(time.Duration(rand.IntN(20)) * time.Microsecond)
			move(jobs[i].slot, jobs[i].device)
		}
	}()
	return nil
}

func (s *lateSlot) Wait() error {
	<-s.done
	return nil
}

func (s *lateSlot) Release() {
	if s.done != nil {
		<-s.done
		s.done = nil
	}
	s.m.free <- s
}

// TestDeviceConformance holds tcp to what every Transport promises, with device memory on
// both sides, and with both kinds of memory.
func TestDeviceConformance(t *testing.T) {
	for name, holds := range map[string]func(int) bool{"device": nil, "mixed": func(i int) bool { return i%2 == 0 }} {
		t.Run(name, func(t *testing.T) {
			m := newLatecomer(16, 64<<10)
			f := fixture(func(_ core.AgentID, l *core.Layout, sink core.Sink, _ core.Signal) (core.Transport, error) {
				return tcp.New(tcp.Config{Listen: true, ListenHost: "127.0.0.1", AdvertiseHost: "127.0.0.1", Streams: 3, Mover: m}, l, sink)
			})
			f.Device = &coretest.Device{Expose: m.expose, Holds: holds}
			coretest.TransportSuite(t, f)
		})
	}
}
