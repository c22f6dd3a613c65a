package rdma_test

import (
	"errors"
	"os"
	"sync"
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/cuda"
	"github.com/kvconn/kvconn/devices"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rdma"
	"github.com/kvconn/kvconn/rig/coretest"
	"github.com/kvconn/kvconn/rig/testdouble"
	"github.com/kvconn/kvconn/rig/testdouble/engine"
)

// onDevices is a transport and the devices of its memory.
type onDevices struct {
	*rdma.Transport
	devices *devices.Devices
}

func (o onDevices) Close() error { return errors.Join(o.Transport.Close(), o.devices.Close()) }

// openOnGPU opens transports over layouts in device memory. A process that is stopped has much left to post.
func openOnGPU(id core.AgentID, l *kv.Layout, sink core.Sink, signal core.Signal) (core.Transport, error) {
	for i := range l.Regions {
		l.Regions[i].Memory = kv.DeviceMemory(0)
	}
	d, err := devices.Open(l.Regions, cuda.Options{RingBytes: 1 << 20, SlotBytes: 64 << 10})
	if err != nil {
		return nil, err
	}
	cfg := config(2, 16)
	cfg.GPUs = d
	tr, err := rdma.New(cfg, id, l, sink, signal)
	if err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return onDevices{tr, d}, nil
}

// remoteGPU is the double's device in a process of ProcessSuite, in which no test runs.
var remoteGPU = sync.OnceValue(func() *engine.Engine { return engine.New(testdouble.Program{}, 0) })

// onGPUs is the RemoteKind of device memory.
var onGPUs = coretest.RemoteKind{Open: openOnGPU, Device: exposed(remoteGPU)}

func exposed(gpu func() *engine.Engine) *coretest.Device {
	return &coretest.Device{Expose: func(file *os.File, size int) (uint64, error) { return uint64(gpu().Expose(file, size)), nil }}
}

// TestGPUProcesses holds rdma to the promises between processes, when both have their memory on a GPU.
func TestGPUProcesses(t *testing.T) {
	e := needsGPU(t)
	f := fixture(openOnGPU)
	f.Device, f.Remote, f.OneSided = exposed(func() *engine.Engine { return e }), "device", true
	f.Device.Hide = func(address uint64) { e.Hide(uintptr(address)) }
	coretest.ProcessSuite(t, f)
}
