package local

import (
	"errors"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/cuda"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/coretest"
	"github.com/kvconn/kvconn/rig/testdouble"
	"github.com/kvconn/kvconn/rig/testdouble/engine"
)

// suiteDelay is the double's longest delay of an operation, in microseconds.
const suiteDelay = 20

// gpu is an engine of the driver double.
type gpu struct{ *engine.Engine }

func newGPU(tb testdouble.Test, device int) gpu {
	g := gpu{engine.New(tb, device)}
	g.Delay(suiteDelay)
	return g
}

func (g gpu) expose(file *os.File, size int) (uint64, error) {
	return uint64(g.Expose(file, size)), nil
}

func (g gpu) hide(address uint64) { g.Hide(uintptr(address)) }

// devices are the devices of a layout's regions: the least that an agent's are.
type devices struct {
	list []*cuda.Device
	on   []int // by region
}

func (d *devices) Of(region uint32) int { return d.on[region] }
func (d *devices) All() []*cuda.Device  { return d.list }

// openDevices registers the regions that lie in device memory. An agent that has none gets a device all the
// same, if it wants one.
func openDevices(l *kv.Layout, spare bool, o cuda.Options) (*devices, error) {
	d := &devices{}
	var ordinals []int
	open := func(ordinal int) (int, error) {
		if i := slices.Index(ordinals, ordinal); i >= 0 {
			return i, nil
		}
		dev, err := cuda.Open(ordinal, o)
		if err != nil {
			return 0, err
		}
		d.list, ordinals = append(d.list, dev), append(ordinals, ordinal)
		return len(d.list) - 1, nil
	}
	for i := range l.Regions {
		r := &l.Regions[i]
		d.on = append(d.on, -1)
		if r.Memory == kv.HostMemory {
			continue
		}
		at, err := cuda.Locate(uintptr(r.Base), r.Extent())
		if err == nil {
			d.on[i], err = open(at.Device)
		}
		if err == nil {
			_, err = d.list[d.on[i]].Register(r.Name, uintptr(r.Base), r.Extent())
		}
		if err != nil {
			return nil, errors.Join(err, d.close())
		}
	}
	if spare && len(d.list) == 0 {
		if _, err := open(0); err != nil {
			return nil, err
		}
	}
	return d, nil
}

func (d *devices) close() (err error) {
	for _, dev := range d.list {
		dev.Closing()
	}
	for _, dev := range d.list {
		err = errors.Join(err, dev.Close())
	}
	return err
}

// onDevices is a transport and the devices of its memory.
type onDevices struct {
	*Transport
	devices *devices
}

func (o onDevices) Close() error { return errors.Join(o.Transport.Close(), o.devices.close()) }

// openOnDevice opens transports of which some regions lie in device memory, with a small ring.
func openOnDevice(cfg Config, holds func(agent core.AgentID, region int) bool) coretest.RemoteOpener {
	cfg.Listen = true
	return func(id core.AgentID, l *kv.Layout, sink core.Sink, _ core.Signal) (core.Transport, error) {
		for i := range l.Regions {
			if holds == nil || holds(id, i) {
				l.Regions[i].Memory = kv.DeviceMemory(0)
			}
		}
		d, err := openDevices(l, true, cuda.Options{RingBytes: 1 << 20, SlotBytes: 64 << 10})
		if err != nil {
			return nil, err
		}
		cfg := cfg
		cfg.Devices = d
		tr, err := New(cfg, l, sink)
		if err != nil {
			return nil, errors.Join(err, d.close())
		}
		return onDevices{tr, d}, nil
	}
}

// remoteGPU is the double's device in a process of ProcessSuite, in which no test runs.
var remoteGPU = sync.OnceValue(func() gpu { return newGPU(testdouble.Program{}, 0) })

// onDevice is the RemoteKind of device memory, which CUDA's IPC handles name.
var onDevice = coretest.RemoteKind{Open: openOnDevice(Config{}, nil), Device: &coretest.Device{
	Expose: func(file *os.File, size int) (uint64, error) { return remoteGPU().expose(file, size) },
}}

func mappedOn(device int) func(t *testing.T, size int) ([]byte, uint64) {
	return func(t *testing.T, size int) ([]byte, uint64) {
		e := engine.New(t, device)
		at := e.Map(size).At
		return e.Alias(at, size), uint64(at)
	}
}

func sends(id core.AgentID) bool { return !strings.HasPrefix(string(id), "receiver") }

// kinds say which regions of which agents lie in device memory. Of those that are crossed, every second one goes from a
// device to host memory, and the others from host memory to a device: the first one, which most cases have alone, goes
// from the device, or to it.
var kinds = map[string]func(id core.AgentID, region int) bool{
	"device to device":     func(core.AgentID, int) bool { return true },
	"crossed, from device": func(id core.AgentID, region int) bool { return sends(id) == (region%2 == 0) },
	"crossed, from host":   func(id core.AgentID, region int) bool { return sends(id) == (region%2 == 1) },
}

// suiteEnv names the kind of which a process is to run the suite.
const suiteEnv = "KVCONN_TEST_LOCAL_DEVICES"

// TestDeviceMemory holds local to what every Transport promises, with device memory that was mapped by handles on either side,
// on two devices and beside host memory. CUDA's other handles are of no use within a process: see TestProcesses. Each kind is
// a process of its own, since the suite mostly waits.
func TestDeviceMemory(t *testing.T) {
	engine.Library(t) // is made once
	var all sync.WaitGroup
	for name := range kinds {
		all.Go(func() {
			c := exec.CommandContext(t.Context(), os.Args[0], "-test.run", "^TestDevicesOfOneKind$", "-test.timeout", "120s")
			c.Env = append(os.Environ(), suiteEnv+"="+name, "GORACE="+os.Getenv("GORACE")+" atexit_sleep_ms=0")
			if out, err := c.CombinedOutput(); err != nil || !strings.Contains(string(out), "PASS") {
				t.Errorf("%s: %v\n%s", name, err, out)
			}
		})
	}
	all.Wait()
}

// TestDevicesOfOneKind is the suite in a process of its own.
func TestDevicesOfOneKind(t *testing.T) {
	holds := kinds[os.Getenv(suiteEnv)]
	if holds == nil {
		return
	}
	newGPU(t, 0)
	newGPU(t, 1)
	f := fixture(openOnDevice(suiteConfig, holds))
	f.BigBytes = 8 << 20
	f.DeviceOf = func(id core.AgentID) *coretest.Device {
		device := 0
		if !sends(id) {
			device = 1
		}
		return &coretest.Device{Alloc: mappedOn(device), Holds: func(region int) bool { return holds(id, region) }}
	}
	coretest.TransportSuite(t, f)
	if n := engine.New(t, 0).Count("violations"); n > 0 {
		t.Errorf("%d violations", n)
	}
}

// TestDeviceThatHalts holds local to its promises while the device that copies makes no copy. That is the decode engine's, also where only
// the prefill engine's memory lies on a device.
func TestDeviceThatHalts(t *testing.T) {
	g := newGPU(t, 0)
	halt := &coretest.Halt{On: g.Halt, Waiting: func() uint64 { return g.Count("stuck") }}
	for name, on := range map[string]func(core.AgentID) bool{
		"device to host": sends,
		"host to device": func(id core.AgentID) bool { return !sends(id) },
	} {
		t.Run(name, func(t *testing.T) {
			f := fixture(openOnDevice(suiteConfig, func(id core.AgentID, _ int) bool { return on(id) }))
			f.Device, f.OnDevice = &coretest.Device{Alloc: mappedOn(0), Halt: halt}, on
			coretest.HaltedSuite(t, f)
		})
	}
}
