package node

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/cuda"
	"github.com/kvconn/kvconn/devices"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/coretest"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/rig/testdouble/engine"
)

// closesLate is a transport whose Close waits.
type closesLate struct {
	reached
	waits chan struct{}
	ends  func() // called then
}

func (s *closesLate) Close() error {
	<-s.waits
	if s.ends != nil {
		s.ends()
	}
	return nil
}

// closeLate are transports on a device, with one that waits in its Close until end is called.
func closeLate(t *testing.T, e *engine.Engine, devicesFor time.Duration) (all *transports, s *closesLate, end func()) {
	t.Helper()
	all, _ = checkedTransportsFor(t, devicesFor, e.Alloc(numBlocks*blockBytes))
	s = &closesLate{waits: make(chan struct{})}
	all.list = []core.Transport{s}
	end = sync.OnceFunc(func() { close(s.waits) })
	t.Cleanup(end)
	return all, s, end
}

// TestCloseOfASlowTransport: a transport is not closed in the time of a close. The close waits on for the transport, and closes the
// devices after it: the transport uses them to its end.
func TestCloseOfASlowTransport(t *testing.T) {
	leaktest.Check(t)
	e := engine.New(t, 0)
	before := e.Count("pinned")
	all, s, end := closeLate(t, e, bound)
	pinned := e.Count("pinned")
	if pinned == before {
		t.Fatal("the devices have pinned nothing")
	}
	all.further = bound
	s.ends = func() {
		if n := e.Count("pinned"); n != pinned {
			t.Errorf("the devices are closed beside the transport: %d pieces are pinned, and there were %d", n, pinned)
		}
		if err := all.devices.Flush(0); errors.Is(err, cuda.ErrClosed) {
			t.Errorf("the transport cannot flush: %v", err)
		}
	}
	closed, at := closeAtOnce(t, all)
	end()
	if err := answer(t, closed); err != nil || !at.quiet || !at.whole {
		t.Errorf("the close ends with %v: %+v", err, at)
	}
	s.ends = nil // another close follows
	if n := e.Count("pinned"); n != before {
		t.Errorf("%d pieces are pinned, and there were %d", n, before)
	}
}

// TestCloseOfAStuckTransport: the close gives up a transport that is not closed in its time, nor in the time besides. It says which, and
// what that means.
func TestCloseOfAStuckTransport(t *testing.T) {
	for _, c := range []struct {
		name    string
		devices bool
	}{{"the driver stands too", true}, {"there is no device", false}} {
		t.Run(c.name, func(t *testing.T) {
			leaktest.Check(t)
			e := engine.New(t, 0)
			all, _, end := closeLate(t, e, 200*time.Millisecond)
			if c.devices {
				t.Cleanup(e.Unblock)
				e.Block("cuMemFreeHost")
			} else {
				if err := all.devices.Close(); err != nil {
					t.Log(err)
				}
				all.devices = nil
			}
			all.further = time.Millisecond
			closed, at := closeAtOnce(t, all)
			err := answer(t, closed)
			if at.quiet || at.whole || !errors.Is(err, devices.ErrDevice) || !errors.Is(err, core.ErrMayLand) ||
				!strings.Contains(err.Error(), "transport tcp is not closed: it may still read and write the registered memory") {
				t.Errorf("the close ends with %v: %+v", err, at)
			}
			end()
		})
	}
}

// panics is a transport whose Close does.
type panics struct{ reached }

func (*panics) Name() string { return viaRDMA }
func (*panics) Close() error { panic("a test") }

// lands is a transport whose Close cannot promise anything.
type lands struct{ reached }

func (*lands) Name() string { return viaRDMA }
func (*lands) Close() error {
	return fmt.Errorf("a test: %w", core.MayLandIn(map[string]bool{"layer.7": true}))
}

// TestCloseOfATransportThatPanics: the close of others ends. Nobody knows what the transport still does, and the error says why.
func TestCloseOfATransportThatPanics(t *testing.T) {
	contained()
	cfg := testConfig(RoleBoth)
	all := newTransports("self", &cfg, zap.NewNop(), nil, new(reached), nil)
	all.list = []core.Transport{new(reached), new(panics)}
	at, err := all.Close(t.Context())
	if at.quiet || !errors.Is(err, core.ErrMayLand) || !strings.Contains(err.Error(), "panic: a test") {
		t.Errorf("the close ends with %v: %+v", err, at)
	}
}

// TestCloseWhileACopyMayLand: a transport is closed, and says that a device may still write. Then the agent does not count as quiet.
func TestCloseWhileACopyMayLand(t *testing.T) {
	cfg := testConfig(RoleBoth)
	all := newTransports("self", &cfg, zap.NewNop(), nil, new(reached), nil)
	all.list = []core.Transport{new(reached), new(lands)}
	at, err := all.Close(t.Context())
	if at.quiet || !errors.Is(err, core.ErrMayLand) || !strings.Contains(err.Error(), "layer.7") {
		t.Errorf("the close ends with %v: %+v", err, at)
	}
}

// closeAtOnce closes transports that have no time.
func closeAtOnce(t *testing.T, all *transports) (closed chan error, at *closeResult) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	closed, at = make(chan error, 1), new(closeResult)
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
	*fakeAgent
	e   *engine.Engine
	end func()
}

func fenceLate(t *testing.T) *fencesLate {
	t.Helper()
	n, e := coretest.NewNetwork(), engine.New(t, 0)
	p := openFakeAgent(t, n, forced(RolePrefill, viaRDMA), nil)
	cfg := forced(RoleDecode, viaRDMA)
	cfg.CloseTimeout = Seconds(500 * time.Millisecond)
	d := fakeAgentOver(t, n, cfg, nil, nil)
	list, at := regions(p.cache), e.Alloc(layers*numBlocks*blockBytes)
	for i := range list {
		list[i].Base, list[i].Memory = uint64(at)+uint64(i*numBlocks*blockBytes), kv.DeviceMemory(0)
	}
	if err := d.RegisterKVCaches(list); err != nil {
		t.Fatal(err)
	}
	announce(t, p.side, "t")
	d.load("t", p.BootstrapAddress(), 1)
	until(t, "the load waits at prefill", func() bool { return d.Stats().LoadsWaiting == 1 })
	waits := make(chan struct{})
	d.fake.holds.Store(&waits)
	f := &fencesLate{fakeAgent: d, e: e, end: sync.OnceFunc(func() { close(waits) })}
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

// TestNoReportBeforeTheFence: a load's fence does not end before the transport's close has begun, and neither does that. The agent waits on, and
// the load is reported when nothing can land.
func TestNoReportBeforeTheFence(t *testing.T) {
	leaktest.Check(t)
	d := fenceLate(t)
	d.caches.Load().transports.further = bound
	closed := d.close()
	until(t, "the transport is being closed", d.fake.closing.Load)
	d.unreported(t)
	d.end()
	if err := answer(t, closed); errors.Is(err, core.ErrMayLand) { // another part of a close that has so little time may be late
		t.Error(err)
	}
	d.want("t", core.Closed)
}

// TestNoReportWithoutAFence: the same, and neither of the two ends in the time besides. The load has no report, not even when the transport has
// closed after all: nobody takes it then.
func TestNoReportWithoutAFence(t *testing.T) {
	leaktest.Check(t)
	d := fenceLate(t)
	d.caches.Load().transports.further = time.Millisecond
	t.Cleanup(d.e.Unblock)
	d.e.Block("cuMemFreeHost")
	if err := answer(t, d.close()); !errors.Is(err, devices.ErrDevice) || !errors.Is(err, core.ErrMayLand) ||
		!strings.Contains(err.Error(), "transport rdma is not closed") {
		t.Errorf("the close ends with %v", err)
	}
	d.end()
	d.e.Unblock()
	d.wg.Wait() // the fence has ended, and is told
	d.unreported(t)
}

// TestNoReportIfTheFenceFails: the transport says of a load that its bytes may land for ever, and so does its close. The load has no report.
func TestNoReportIfTheFenceFails(t *testing.T) {
	leaktest.Check(t)
	d := fenceLate(t)
	d.fake.fails.Store(true)
	d.end()
	if err := answer(t, d.close()); !errors.Is(err, core.ErrMayLand) {
		t.Errorf("the close ends with %v", err)
	}
	d.wg.Wait()
	d.unreported(t)
}

// TestNothingBeginsAfterClose: a load, a write and more of a write that come out of a check when the transports are closed do not reach one.
func TestNothingBeginsAfterClose(t *testing.T) {
	cfg, r := testConfig(RoleBoth), new(reached)
	all := newTransports("self", &cfg, zap.NewNop(), nil, r, nil)
	all.add(r)
	all.pair(aPeer).connected = map[string]bool{viaTCP: true}
	all.Write(writeOf("begun"), all.newMemoryCheck())
	r.took(t, "before", "write")
	if _, err := all.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := all.Expect("load", aPeer, new(receivePlan), all.newMemoryCheck()); !errors.Is(err, core.ErrTransportClosed) {
		t.Errorf("a load: %v", err)
	}
	if all.Write(writeOf("late"), all.newMemoryCheck()); !errors.Is(r.ended, core.ErrTransportClosed) {
		t.Errorf("a write: %v", r.ended)
	}
	all.Extend(writeOf("begun"), all.newMemoryCheck())
	r.took(t, "after")
}
