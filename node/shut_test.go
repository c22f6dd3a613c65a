package node

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/devices"
	"github.com/kvconn/kvconn/rig/coretest"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/rig/testdouble/engine"
)

// closesLate is a transport whose Close waits.
type closesLate struct {
	reached
	waits chan struct{}
}

func (s *closesLate) Close() error {
	<-s.waits
	return nil
}

// inTime runs f again if it says that this machine was too busy for the driver to take back in its time what the devices have.
func inTime(t *testing.T, f func() bool) {
	t.Helper()
	for late := time.Now().Add(bound); !f(); {
		if time.Now().After(late) {
			t.Fatal("the driver never answers in its time")
		}
	}
}

// TestCloseOfASlowTransport: a transport is not closed in the time of a close. The driver takes back what the devices have: so
// the close waits on for the transport.
func TestCloseOfASlowTransport(t *testing.T) {
	leaktest.Check(t)
	inTime(t, func() bool {
		e := engine.New(t, 0)
		pinned := e.Count("pinned")
		all, _ := lookedAt(t, e.Alloc(numBlocks*blockBytes))
		s := &closesLate{waits: make(chan struct{})}
		all.list = []core.Transport{s}
		end := sync.OnceFunc(func() { close(s.waits) })
		t.Cleanup(end)
		closed, at := closeAtOnce(t, all)
		until(t, "the devices are being closed", func() bool { return e.Count("pinned") == pinned })
		late := all.devices.Close() // the first one has ended
		end()
		err := answer(t, closed)
		if late == nil && (err != nil || !at.quiet || !at.answers) {
			t.Errorf("the close ends with %v: %+v", err, at)
		}
		return late == nil
	})
}

// TestCloseOfAStuckTransport: if the driver does not answer, the close gives up a transport that is not closed in time. It says
// which, and what that means.
func TestCloseOfAStuckTransport(t *testing.T) {
	leaktest.Check(t)
	e := engine.New(t, 0)
	all, _ := lookedAt(t, e.Alloc(numBlocks*blockBytes))
	s := &closesLate{waits: make(chan struct{})}
	all.list = []core.Transport{s}
	end := sync.OnceFunc(func() { close(s.waits) })
	t.Cleanup(end)
	t.Cleanup(e.Unblock)
	e.Block("cuMemFreeHost")
	closed, at := closeAtOnce(t, all)
	err := answer(t, closed)
	if at.quiet || at.answers || !errors.Is(err, devices.ErrDevice) ||
		!strings.Contains(err.Error(), "transport tcp is not closed: it may still read and write the registered memory") {
		t.Errorf("the close ends with %v: %+v", err, at)
	}
}

// closeAtOnce closes transports that have no time.
func closeAtOnce(t *testing.T, all *transports) (closed chan error, at *shut) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	closed, at = make(chan error, 1), new(shut)
	go func() {
		now, err := all.Close(ctx)
		*at = now
		closed <- err
	}()
	return closed, at
}

// answer waits for an error that comes.
func answer(t *testing.T, c <-chan error) error {
	t.Helper()
	select {
	case err := <-c:
		return err
	case <-time.After(bound):
		t.Fatalf("no answer within %v", bound)
		return nil
	}
}

// fencesLate is a decode agent on a device. Bytes of its load "t" may land: its transport neither fences the load nor closes
// until end is called.
type fencesLate struct {
	*twinned
	e      *engine.Engine
	pinned uint64 // before
	end    func()
}

func fenceLate(t *testing.T) *fencesLate {
	t.Helper()
	n, e := coretest.NewNetwork(), engine.New(t, 0)
	pinned := e.Count("pinned")
	p := openTwinned(t, n, forced(RolePrefill, viaRDMA), nil)
	cfg := forced(RoleDecode, viaRDMA)
	cfg.CloseTimeout = Seconds(2 * time.Second)
	d := twinnedOver(t, n, cfg, nil, nil)
	list, at := regions(p.cache), e.Alloc(layers*numBlocks*blockBytes)
	for i := range list {
		list[i].Base, list[i].Memory = uint64(at)+uint64(i*numBlocks*blockBytes), core.DeviceMemory(0)
	}
	if err := d.RegisterKVCaches(list); err != nil {
		t.Fatal(err)
	}
	announce(t, p.side, "t")
	d.load("t", p.BootstrapAddress(), 1)
	until(t, "the load waits at prefill", func() bool { return d.Stats().LoadsWaiting == 1 })
	waits := make(chan struct{})
	d.twin.holds.Store(&waits)
	f := &fencesLate{twinned: d, e: e, pinned: pinned, end: sync.OnceFunc(func() { close(waits) })}
	t.Cleanup(f.end)
	return f
}

func (f *fencesLate) close() <-chan error {
	closed := make(chan error, 1)
	go func() { closed <- f.Close() }()
	return closed
}

func (f *fencesLate) unreported(t *testing.T) {
	t.Helper()
	if list := f.GetFinished(); len(list) > 0 {
		t.Errorf("bytes may land, and %+v", list)
	}
}

// TestNoReportBeforeTheFence: neither a load's fence nor the transport's close ends in the time of the agent's. The driver answers: so the
// agent waits on, and the load is reported when nothing can land.
func TestNoReportBeforeTheFence(t *testing.T) {
	leaktest.Check(t)
	inTime(t, func() bool {
		d := fenceLate(t)
		closed := d.close()
		until(t, "the devices are being closed", func() bool { return d.e.Count("pinned") == d.pinned })
		late := d.caches.Load().transports.devices.Close() // the first one has ended
		d.unreported(t)
		d.end()
		err := answer(t, closed)
		if late != nil {
			return false
		}
		if err != nil {
			t.Error(err)
		}
		d.want("t", core.Closed)
		return true
	})
}

// TestNoReportWithoutAFence: the same, and the driver does not answer. The load has no report, not even when the transport has closed after
// all: nobody takes it then.
func TestNoReportWithoutAFence(t *testing.T) {
	leaktest.Check(t)
	d := fenceLate(t)
	t.Cleanup(d.e.Unblock)
	d.e.Block("cuMemFreeHost")
	if err := answer(t, d.close()); !errors.Is(err, devices.ErrDevice) || !strings.Contains(err.Error(), "transport rdma is not closed") {
		t.Errorf("the close ends with %v", err)
	}
	d.end()
	d.e.Unblock()
	d.wg.Wait() // the fence has ended, and is told
	d.unreported(t)
}

// TestNothingBeginsAfterClose: a load, a write and more of a write that come out of a look when the transports are closed do not reach one.
func TestNothingBeginsAfterClose(t *testing.T) {
	cfg, r := testConfig(RoleBoth), new(reached)
	all := newTransports("self", &cfg, zap.NewNop(), nil, r, nil)
	all.add(r)
	all.pair(aPeer).connected = map[string]bool{viaTCP: true}
	all.Write(writeOf("begun"), all.look())
	r.took(t, "before", "write")
	if _, err := all.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := all.Expect("load", aPeer, new(landing), all.look()); !errors.Is(err, core.ErrTransportClosed) {
		t.Errorf("a load: %v", err)
	}
	if all.Write(writeOf("late"), all.look()); !errors.Is(r.ended, core.ErrTransportClosed) {
		t.Errorf("a write: %v", r.ended)
	}
	all.Extend(writeOf("begun"), all.look())
	r.took(t, "after")
}
