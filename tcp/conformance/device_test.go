package conformance

import (
	"errors"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/cuda"
	"github.com/kvconn/kvconn/devices"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/coretest"
	"github.com/kvconn/kvconn/rig/testdouble"
	"github.com/kvconn/kvconn/rig/testdouble/engine"
	"github.com/kvconn/kvconn/tcp"
)

// suiteDelay is the double's longest delay of an operation, in microseconds: with more, the
// larger cases take minutes.
const suiteDelay = 20

// gpu is an engine of the driver double whose memory a transport finds as a device's.
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

// onDevices is a transport and the devices of its memory.
type onDevices struct {
	*tcp.Transport
	devices *devices.Devices
}

func (o onDevices) Close() error { return errors.Join(o.Transport.Close(), o.devices.Close()) }

// openOnDevice opens transports over layouts in device memory, with a small ring, so that slots
// are scarce: 3 streams may hold all that P may have.
func openOnDevice(holds func(agent core.AgentID, region int) bool, stall time.Duration, encrypt tcp.Encryption) coretest.RemoteOpener {
	return func(id core.AgentID, l *kv.Layout, sink core.Sink, _ core.Signal) (core.Transport, error) {
		for i := range l.Regions {
			if holds == nil || holds(id, i) {
				l.Regions[i].Memory = kv.DeviceMemory(0) // Open finds which
			}
		}
		d, err := devices.Open(l.Regions, cuda.Options{RingBytes: 1 << 20, SlotBytes: 64 << 10})
		if err != nil {
			return nil, err
		}
		tr, err := tcp.New(tcp.Config{Listen: true, ListenHost: "127.0.0.1", AdvertiseHost: "127.0.0.1", Streams: 3, First: 3, StallTimeout: stall, Mover: d, Encrypt: encrypt}, l, sink)
		if err != nil {
			return nil, errors.Join(err, d.Close())
		}
		return onDevices{tr, d}, nil
	}
}

// remoteGPU is the double's device in a process of ProcessSuite, in which no test runs.
var remoteGPU = sync.OnceValue(func() gpu { return newGPU(testdouble.Program{}, 0) })

// onDevice is the RemoteKind of device memory.
var onDevice = coretest.RemoteKind{Open: openOnDevice(nil, stall, tcp.EncryptMay), Device: &coretest.Device{
	Expose: func(file *os.File, size int) (uint64, error) { return remoteGPU().expose(file, size) },
}}

// TestDeviceMemory holds tcp to what every Transport promises, with device memory on one side, with
// some regions on two devices and some in host memory, and with memory that was mapped by handles,
// over encrypted streams.
func TestDeviceMemory(t *testing.T) {
	first, second := newGPU(t, 0), newGPU(t, 1)
	sends := func(id core.AgentID) bool { return !strings.HasPrefix(string(id), "receiver") }
	receives := func(id core.AgentID) bool { return !sends(id) }
	for _, c := range []struct {
		name    string
		device  coretest.Device
		on      func(core.AgentID) bool
		encrypt tcp.Encryption
	}{
		{"device to host", coretest.Device{}, sends, tcp.EncryptMay},
		{"host to device", coretest.Device{}, receives, tcp.EncryptMay},
		{"mixed", coretest.Device{Second: second.expose, Holds: func(region int) bool { return region%3 < 2 }}, nil, tcp.EncryptMay},
		{"mapped", coretest.Device{Alloc: func(t *testing.T, size int) ([]byte, uint64) {
			e := engine.New(t, 0)
			at := e.Map(size).At
			return e.Alias(at, size), uint64(at)
		}}, nil, tcp.EncryptMust},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.device.Expose, c.device.Hide = first.expose, first.hide
			f := fixture(openOnDevice(func(id core.AgentID, region int) bool {
				return (c.on == nil || c.on(id)) && (c.device.Holds == nil || c.device.Holds(region))
			}, 0, c.encrypt))
			f.Device, f.OnDevice = &c.device, c.on
			coretest.TransportSuite(t, f)
		})
	}
}

// TestDeviceThatHalts holds tcp to its promises while the device on either side makes no copy. devices runs it without each of
// tcp's waits for copies.
func TestDeviceThatHalts(t *testing.T) {
	g := newGPU(t, 0)
	halt := &coretest.Halt{On: g.Halt, Waiting: func() uint64 { return g.Count("stuck") }}
	sends := func(id core.AgentID) bool { return !strings.HasPrefix(string(id), "receiver") }
	for name, on := range map[string]func(core.AgentID) bool{
		"device to host": sends,
		"host to device": func(id core.AgentID) bool { return !sends(id) },
	} {
		t.Run(name, func(t *testing.T) {
			f := fixture(openOnDevice(func(id core.AgentID, _ int) bool { return on(id) }, 0, tcp.EncryptMay))
			f.Device, f.OnDevice = &coretest.Device{Expose: g.expose, Hide: g.hide, Halt: halt}, on
			coretest.HaltedSuite(t, f)
		})
	}
}
