package tcp_test

import (
	"os"
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/core/coretest"
	"github.com/kvconn/kvconn/cuda"
	"github.com/kvconn/kvconn/cuda/testdouble/engine"
	"github.com/kvconn/kvconn/internal/devices"
	"github.com/kvconn/kvconn/tcp"
)

// gpu is an engine of the driver double whose memory a transport finds as a device's.
type gpu struct{ *engine.Engine }

func (g gpu) expose(file *os.File, size int) (uint64, error) {
	return uint64(g.Expose(file, size)), nil
}

// open opens transports over layouts in device memory, with a small ring, so that slots are
// scarce.
func (g gpu) open(t *testing.T, holds func(region int) bool) coretest.RemoteOpener {
	return func(_ core.AgentID, l *core.Layout, sink core.Sink, _ core.Signal) (core.Transport, error) {
		for i := range l.Regions {
			if holds == nil || holds(i) {
				l.Regions[i].Memory = core.DeviceMemory(0)
			}
		}
		d, err := devices.Open(l.Regions, cuda.Options{RingBytes: 1 << 20, SlotBytes: 64 << 10})
		if err != nil {
			return nil, err
		}
		t.Cleanup(func() {
			if err := d.Close(); err != nil {
				t.Error(err)
			}
		})
		return tcp.New(tcp.Config{Listen: true, ListenHost: "127.0.0.1", AdvertiseHost: "127.0.0.1", Streams: 3, Mover: d}, l, sink)
	}
}

// TestDeviceMemory holds tcp to what every Transport promises, with all regions in device
// memory, and with some.
func TestDeviceMemory(t *testing.T) {
	g := gpu{engine.New(t, 0)}
	g.Delay(20) // of each operation, or the larger cases take minutes
	for name, holds := range map[string]func(int) bool{"device": nil, "mixed": func(i int) bool { return i%2 == 0 }} {
		t.Run(name, func(t *testing.T) {
			f := coretest.Fixture{Device: &coretest.Device{Expose: g.expose, Holds: holds}}
			f.Open = func(t *testing.T, id core.AgentID, l *core.Layout, sink core.Sink, signal core.Signal) core.Transport {
				tr, err := g.open(t, holds)(id, l, sink, signal)
				if err != nil {
					t.Fatal(err)
				}
				return tr
			}
			coretest.TransportSuite(t, f)
		})
	}
}
