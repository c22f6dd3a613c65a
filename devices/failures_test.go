package devices_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/cuda"
	"github.com/kvconn/kvconn/devices"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/node"
	"github.com/kvconn/kvconn/rig/testdouble"
	"github.com/kvconn/kvconn/rig/testdouble/engine"
	"github.com/kvconn/kvconn/tcp"
)

// failed wants a transfer's bad end, and words in its reason.
func (s *side) failed(id core.TransferID, says ...string) {
	s.t.Helper()
	r := s.ended(id)
	if r.Code == core.OK {
		s.t.Errorf("%s %q ended well", r.Side, id)
	}
	for _, w := range says {
		if !strings.Contains(r.Reason, w) {
			s.t.Errorf("%s %q: reason %q does not have %q", r.Side, id, r.Reason, w)
		}
	}
	s.t.Logf("%s: %v: %s", r.Side, r.Code, r.Reason)
}

// began starts a transfer of all blocks, and waits until its first bytes have landed.
func began(p, d *side, id core.TransferID) {
	p.t.Helper()
	p.Fill(p.at(0), blocks*blockBytes, 1)
	d.Fill(d.at(0), blocks*blockBytes, 2)
	p.Delay(10000)
	p.offer(id, 0, blocks, 0)
	d.load(id, p, 0, blocks, 0)
	for end := time.Now().Add(patience); d.Wrong(d.at(0), blocks*blockBytes, 2) == 0; time.Sleep(50 * time.Microsecond) {
		if time.Now().After(end) {
			p.t.Fatal("no byte has landed")
		}
	}
}

// TestDeviceLost: if a side's device fails in the middle, each half ends with that reason, moments
// are refused with it, new transfers end with it, and the process lives.
func TestDeviceLost(t *testing.T) {
	for _, ours := range []string{"prefill", "decode"} {
		t.Run(ours, func(t *testing.T) {
			p, d := pair(t)
			lost, other := p, d
			if ours == "decode" {
				lost, other = d, p
			}
			began(p, d, "t")
			lost.Stick(719)
			defer lost.Stick(0)
			lost.failed("t", "CUDA_ERROR_LAUNCH_FAILED", "restart the engine")
			other.failed("t")
			if _, err := lost.Moment(0, lost.stream); !errors.Is(err, devices.ErrDevice) || !strings.Contains(err.Error(), "CUDA_ERROR_LAUNCH_FAILED") {
				t.Errorf("a moment: %v", err)
			}
			p.offer("next", 0, 1, 0)
			d.load("next", p, 0, 1, 0)
			lost.failed("next", "CUDA_ERROR_LAUNCH_FAILED")
			other.failed("next")
			hostTransfer(t)
		})
	}
}

// TestCloseWhileCopying: either side is closed in the middle. Each half is reported, and nothing
// of the agent is left in the driver.
func TestCloseWhileCopying(t *testing.T) {
	for _, ours := range []string{"prefill", "decode"} {
		t.Run(ours, func(t *testing.T) {
			e := engine.New(t, 0)
			pinned := e.Count("pinned")
			p, d := pair(t)
			began(p, d, "t")
			first, second := p, d
			if ours == "decode" {
				first, second = d, p
			}
			for _, s := range []*side{first, second} {
				if err := s.Agent.Close(); err != nil {
					t.Error(err)
				}
			}
			first.ended("t")
			second.ended("t")
			p.settled()
			if n := e.Count("pinned"); n != pinned {
				t.Errorf("%d pieces of pinned memory, and there were %d before", n, pinned)
			}
		})
	}
}

func closing(s *side) <-chan error {
	ended := make(chan error, 1)
	go func() { ended <- s.Agent.Close() }()
	return ended
}

// ends waits for a Close.
func ends(t *testing.T, closing <-chan error) error {
	t.Helper()
	select {
	case err := <-closing:
		return err
	case <-time.After(patience):
		t.Fatal("Close has not returned")
		return nil
	}
}

// TestCloseOfAStuckDevice: a side's device does nothing any more. Its Close does not wait for the
// time after which the device counts as failed, and says why its memory stays. Each half is reported, but a load in whose blocks the device's
// copy may land: of that, Close names the region.
func TestCloseOfAStuckDevice(t *testing.T) {
	for _, ours := range []string{"prefill", "decode"} {
		t.Run(ours, func(t *testing.T) {
			var sides [2]*side
			for i, role := range []string{node.RolePrefill, node.RoleDecode} {
				c := config(role)
				c.StallTimeout = node.Seconds(time.Hour) // nothing else ends the wait
				sides[i] = open(t, c, i, 0)
			}
			p, d := sides[0], sides[1]
			stuck, other := p, d
			if ours == "decode" {
				stuck, other = d, p
			}
			stuck.Halt(true)
			t.Cleanup(func() { stuck.Halt(false) }) // else a failure here would hang in the double's end
			p.offer("t", 0, blocks, 0)
			d.load("t", p, 0, blocks, 0)
			eventually(t, "a copy is queued on the stuck device", func() bool { return stuck.Count("stuck") > 0 })
			others := closing(other)
			err := ends(t, closing(stuck))
			if err == nil || !strings.Contains(err.Error(), "its pinned memory stays") {
				t.Errorf("the side of the stuck device closed with %v", err)
			}
			if lands := errors.Is(err, core.ErrMayLand); lands != (stuck == d) || lands && !strings.Contains(err.Error(), "layer.0") {
				t.Errorf("a copy may land: %v", err)
			}
			if err := ends(t, others); err != nil {
				t.Errorf("the other side closed with %v", err)
			}
			p.ended("t")
			if stuck != d {
				d.ended("t")
			} else if list := d.GetFinished(); len(list) > 0 {
				t.Errorf("bytes may land, and %+v", list)
			}
			stuck.Halt(false)
			p.settled()
		})
	}
}

// two gives memory on two devices, and the regions in it.
func two(t *testing.T) (engines [2]*engine.Engine, both []kv.Region) {
	t.Helper()
	for i := range engines {
		engines[i] = engine.New(t, i)
		r := regions(engines[i].Alloc(blocks*blockBytes), kv.DeviceMemory(0))[0]
		r.Name = fmt.Sprint("layer.", i)
		both = append(both, r)
	}
	return engines, both
}

// TestCloseOfTwoStuckDevices: an agent's caches lie on two devices, and neither does anything any more. Close
// names both. TestDevicesCloseSideBySide shows that one close_timeout_s is for both.
func TestCloseOfTwoStuckDevices(t *testing.T) {
	engines, ours := two(t)
	c := config(node.RolePrefill)
	c.StallTimeout, c.CloseTimeout = node.Seconds(time.Hour), node.Seconds(4*time.Second)
	a, err := node.Open(c, node.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = a.Close() })
	if err := a.RegisterKVCaches(ours); err != nil {
		t.Fatal(err)
	}
	p := &side{Engine: engines[0], Agent: a, t: t, seen: map[core.TransferID]core.Report{}}
	dc := config(node.RoleDecode)
	dc.StallTimeout, dc.CloseTimeout = c.StallTimeout, c.CloseTimeout
	d, err := node.Open(dc, node.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	_, theirs := two(t)
	if err := d.RegisterKVCaches(theirs); err != nil {
		t.Fatal(err)
	}
	to := &side{Engine: engines[1], Agent: d, t: t, seen: map[core.TransferID]core.Report{}}
	for _, e := range engines {
		e.Halt(true)
		t.Cleanup(func() { e.Halt(false) })
	}
	for region, id := range []core.TransferID{"t", "u"} { // each has one device copy
		part := core.PartialOffer{ID: id, Blocks: sequence(region*4, 4).Blocks, Ready: []uint32{4}, Regions: []uint32{uint32(region)}}
		if _, err := a.OfferPartial([]core.PartialOffer{part}); err != nil {
			t.Fatal(err)
		}
		to.load(id, p, region*4, 4, 0)
	}
	const both = 4 * 2 // copies and events behind them that a stream has on one device: it has four slots
	eventually(t, "copies are queued on both devices", func() bool { return p.Count("stuck") > both })
	others := closing(to)
	err = ends(t, closing(p))
	for _, of := range []string{"CUDA device 0", "CUDA device 1"} {
		if err == nil || !strings.Contains(err.Error(), of) {
			t.Errorf("closed with %v, which does not name %s", err, of)
		}
	}
	_ = ends(t, others)
	for _, id := range []core.TransferID{"t", "u"} {
		to.ended(id)
	}
	for _, e := range engines {
		e.Halt(false)
	}
	p.settled()
}

// TestDevicesCloseSideBySide: while one device's Close waits for a copy, whichever of the two it is, the other is closed.
func TestDevicesCloseSideBySide(t *testing.T) {
	for stuck := range 2 {
		t.Run(fmt.Sprint(stuck), func(t *testing.T) {
			engines, both := two(t)
			before := engines[0].Count("pinned")
			all, err := devices.Open(both, cuda.Options{StallTimeout: time.Hour, CloseTimeout: time.Hour})
			if err != nil {
				t.Fatal(err)
			}
			engines[stuck].Halt(true)
			t.Cleanup(func() { engines[stuck].Halt(false) })
			slot, err := all.Slot(t.Context(), stuck, tcp.FromDevice, "d")
			if err != nil {
				t.Fatal(err)
			}
			slot.Copy([]tcp.Run{{Addr: uintptr(both[stuck].Base), Len: uint64(len(slot.Memory()))}})
			go func() {
				_ = slot.Wait()
				slot.Release()
			}()
			all.Closing()
			closed := make(chan error, 1)
			go func() { closed <- all.Close() }()
			eventually(t, "the other device is closed", func() bool { return engines[0].Count("pinned") == before+1 })
			engines[stuck].Halt(false)
			if err := ends(t, closed); err != nil {
				t.Error(err)
			}
			if n := engines[0].Count("pinned"); n != before {
				t.Errorf("%d pieces of pinned memory, and there were %d before", n, before)
			}
		})
	}
}

// inside names what a process of the test's own is to show.
const inside = "KVCONN_TEST_INSIDE"

// TestNoDeviceNoDriver: agents whose caches lie in host memory have no driver opened, though there is one.
func TestNoDeviceNoDriver(t *testing.T) {
	if os.Getenv(inside) == "" { // another test may have opened it in this process
		run := exec.Command(os.Args[0], "-test.run", "^TestNoDeviceNoDriver$", "-test.timeout", "120s")
		run.Env = append(os.Environ(), "KVCONN_LIBCUDA="+testdouble.Library(t, testdouble.Newest), inside+"=host memory")
		if out, err := run.CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
		return
	}
	hostTransfer(t)
	if cuda.InProcess() {
		t.Error("the driver was opened, and no cache lies in device memory")
	}
}

// TestDrivers: a driver without the batch call carries all the same. A driver without a call that
// is needed refuses the registration by the call's name, and host memory works beside it.
func TestDrivers(t *testing.T) {
	if want := os.Getenv(inside); want != "" {
		e := engine.New(t, 0)
		a, err := node.Open(config(node.RoleDecode), node.Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer a.Close()
		err = a.RegisterKVCaches(regions(e.Alloc(blocks*blockBytes), kv.DeviceMemory(0)))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("registered: %v, want %q", err, want)
		}
		hostTransfer(t)
		return
	}
	old, newest := testdouble.Library(t, testdouble.Old), testdouble.Library(t, testdouble.Newest)
	for _, c := range []struct {
		test string
		env  []string
	}{
		{"TestReportAfterCopy", []string{"KVCONN_LIBCUDA=" + old}},
		{"TestReportAfterCopy", []string{"KVCONN_LIBCUDA=" + newest, "KVGPU_HIDE=cuMemcpyBatchAsync"}},
		{"TestDrivers", []string{"KVCONN_LIBCUDA=" + newest, "KVGPU_FAIL=cuMemHostAlloc:1:2", inside + "=pinning"}},
		{"TestDrivers", []string{"KVCONN_LIBCUDA=" + newest, "KVGPU_DRIVER=11040", inside + "=CUDA 12.2 or newer is needed"}},
	} {
		run := exec.Command(os.Args[0], "-test.run", "^"+c.test+"$", "-test.timeout", "120s")
		run.Env = append(os.Environ(), c.env...)
		if out, err := run.CombinedOutput(); err != nil {
			t.Errorf("%s: %v\n%s", fmt.Sprint(c.env), err, out)
		}
	}
}
