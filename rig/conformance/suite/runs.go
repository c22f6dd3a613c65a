// In which ways the transport suite is run on this machine's GPUs.

package main

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/cuda"
	"github.com/kvconn/kvconn/devices"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/local"
	"github.com/kvconn/kvconn/rdma"
	"github.com/kvconn/kvconn/rig/coretest"
	"github.com/kvconn/kvconn/rig/testdouble"
	"github.com/kvconn/kvconn/rig/testdouble/engine"
	"github.com/kvconn/kvconn/tcp"
)

// doubleDelay is the double's longest delay of an operation, in microseconds: with more, the larger cases take minutes.
const doubleDelay = 20

// patience is what a copy may take on a machine where all runs are at once.
const patience = time.Minute

// gpus are the engine's side of the first two GPUs. A context stays until the process ends: to make one takes longer than most cases.
var gpus = []func() *engine.Engine{of(0), of(1)}

func of(device int) func() *engine.Engine {
	return sync.OnceValue(func() *engine.Engine {
		e := engine.New(testdouble.Program{}, device)
		if e.Double() {
			e.Delay(doubleDelay)
		}
		return e
	})
}

// bigBytes is Fixture.BigBytes: a GPU's bytes move faster than the double's.
func bigBytes() int {
	if gpus[0]().Double() {
		return 8 << 20
	}
	return 64 << 20
}

// kind is a way in which the suite is run.
type kind struct {
	transport, memory string
	gpus              int // that it needs
	device            coretest.Device
	second            *coretest.Device // of receivers, if it is another
	on                func(id core.AgentID) bool
	encrypt           tcp.Encryption
}

func (k kind) name() string { return k.transport + ", " + k.memory }

// receives: the suite calls the others senders, or names that are neither.
func receives(id core.AgentID) bool { return strings.HasPrefix(string(id), "receiver") }
func sends(id core.AgentID) bool    { return !receives(id) }

func deviceMemory(device int) func(*testing.T, int) coretest.DeviceMemory {
	return func(t *testing.T, size int) coretest.DeviceMemory {
		gpus[device]()
		return engine.New(t, device).NewDeviceMemory(size)
	}
}

func mapped(device int) func(*testing.T, int) coretest.DeviceMemory {
	return func(t *testing.T, size int) coretest.DeviceMemory {
		gpus[device]()
		return engine.New(t, device).NewMappedMemory(size)
	}
}

func kinds() []kind {
	first, second := deviceMemory(0), deviceMemory(1)
	on := func(list ...func(*testing.T, int) coretest.DeviceMemory) coretest.Device {
		return coretest.Device{Memories: list}
	}
	mixed := on(first)
	mixed.Holds = func(region int) bool { return region%2 == 0 }
	other := on(second, first)
	all := []kind{
		{memory: "device to device", device: on(first)},
		{memory: "host to device", device: on(first), on: receives},
		{memory: "device to host", device: on(first), on: sends},
		{memory: "mapped by handles", device: on(mapped(0)), encrypt: tcp.EncryptMust},
		{memory: "device and host memory in each agent", device: mixed},
		{memory: "two devices", gpus: 2, device: on(first, second), second: &other},
	}
	var out []kind
	for _, transport := range []string{"tcp", "rdma"} {
		for _, k := range all {
			k.transport = transport
			out = append(out, k)
		}
	}
	return append(out, localKinds()...)
}

// localKinds are with memory that was mapped by handles: a process does not open its own memory by CUDA's other handles, which transfers.py
// has between two processes. An agent with host memory alone has no device that could reach another's.
func localKinds() []kind {
	first, second := mapped(0), mapped(1)
	on := func(list ...func(*testing.T, int) coretest.DeviceMemory) coretest.Device {
		return coretest.Device{Memories: list}
	}
	mixed := on(first)
	mixed.Holds = func(region int) bool { return region%2 == 0 }
	other := on(second)
	return []kind{
		{transport: "local", memory: "mapped by handles", device: on(first)},
		{transport: "local", memory: "host to mapped", device: on(first), on: receives},
		{transport: "local", memory: "mapped and host memory in each agent", device: mixed},
		{transport: "local", memory: "two devices", gpus: 2, device: on(first), second: &other},
	}
}

// deviceOf is where the regions of an agent lie.
func (k kind) deviceOf(id core.AgentID) *coretest.Device {
	switch {
	case k.on != nil && !k.on(id):
		return nil
	case k.second != nil && receives(id):
		return k.second
	}
	return &k.device
}

func (k kind) fixture() coretest.Fixture {
	return coretest.Fixture{BigBytes: bigBytes(), DeviceOf: k.deviceOf, Open: func(t *testing.T, id core.AgentID, l *kv.Layout, sink core.Sink, signal core.Signal) core.Transport {
		tr, err := k.open(id, l, sink, signal)
		if err != nil {
			t.Fatalf("%s: %v", id, err)
		}
		return tr
	}}
}

// onDevices is a transport and the devices of its memory.
type onDevices struct {
	core.Transport
	devices *devices.Devices
}

func (o onDevices) Close() error { return errors.Join(o.Transport.Close(), o.devices.Close()) }

// signalling is the same of a transport that takes signals.
type signalling struct {
	core.Signaller
	devices *devices.Devices
}

func (s signalling) Close() error { return errors.Join(s.Signaller.Close(), s.devices.Close()) }

// open opens a transport with a small ring, so that slots are scarce.
func (k kind) open(id core.AgentID, l *kv.Layout, sink core.Sink, signal core.Signal) (core.Transport, error) {
	where := k.deviceOf(id)
	for i := range l.Regions {
		if where != nil && (where.Holds == nil || where.Holds(i)) {
			l.Regions[i].Memory = kv.DeviceMemory(0) // devices.Open finds which
		}
	}
	d, err := devices.Open(l.Regions, cuda.Options{RingBytes: 1 << 20, SlotBytes: 64 << 10})
	if err != nil {
		return nil, err
	}
	switch k.transport {
	case "tcp":
		tr, err := tcp.New(tcp.Config{Listen: true, ListenHost: "127.0.0.1", AdvertiseHost: "127.0.0.1", Streams: 3, First: 3, Mover: d, Encrypt: k.encrypt}, l, sink)
		if err != nil {
			return nil, errors.Join(err, d.Close())
		}
		return onDevices{tr, d}, nil
	case "local":
		cfg := local.Config{Listen: true, Workers: 3, BatchBytes: 50_000, StopGrace: patience, CloseGrace: patience}
		if d != nil {
			cfg.Devices = d
		}
		tr, err := local.New(cfg, l, sink)
		if err != nil {
			return nil, errors.Join(err, d.Close())
		}
		return onDevices{tr, d}, nil
	}
	cfg := rdma.DefaultConfig()
	cfg.MaxTransfers = 256
	if d != nil {
		cfg.GPUs = d
	}
	tr, err := rdma.New(cfg, id, l, sink, signal)
	if err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return signalling{tr, d}, nil
}

// missing is why a run cannot be had here.
func (k kind) missing() error {
	if n := devicesOf(gpus[0]()); n < k.gpus {
		return fmt.Errorf("%d GPUs are needed, and there is %d", k.gpus, n)
	}
	if k.transport != "rdma" {
		return nil
	}
	if r := rdma.Inspect(rdma.DefaultConfig()); !r.Available {
		return errors.New(r.Problem)
	}
	return cardReaches()
}
