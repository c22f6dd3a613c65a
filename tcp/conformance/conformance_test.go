// Package conformance holds tcp to what every Transport promises. It is no part of package tcp, so that its tests, which take as
// long as all others of tcp together, run beside them.
package conformance

import (
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/coretest"
	"github.com/kvconn/kvconn/tcp"
)

// opener opens transports with so many streams to a peer, and frames of at most so
// many bytes.
func opener(streams int, frame uint64, stall time.Duration) coretest.RemoteOpener {
	return encrypting(streams, frame, stall, tcp.EncryptMay)
}

// encrypting is the same with streams that are encrypted or not.
func encrypting(streams int, frame uint64, stall time.Duration, encrypt tcp.Encryption) coretest.RemoteOpener {
	return func(_ core.AgentID, l *kv.Layout, sink core.Sink, _ core.Signal) (core.Transport, error) {
		return tcp.New(tcp.Config{Listen: true, ListenHost: "127.0.0.1", AdvertiseHost: "127.0.0.1", Streams: streams, First: streams,
			FrameBytes: frame, StallTimeout: stall, Encrypt: encrypt}, l, sink)
	}
}

func fixture(open coretest.RemoteOpener) coretest.Fixture {
	return coretest.Fixture{Open: func(t *testing.T, id core.AgentID, l *kv.Layout, sink core.Sink, signal core.Signal) core.Transport {
		tr, err := open(id, l, sink, signal)
		if err != nil {
			t.Fatal(err)
		}
		return tr
	}}
}

// stall is longer than any test: none may wait for it.
const stall = time.Hour

// largeFrame is more than a connection's buffers hold: if its receiver is stopped, it
// stays in the middle.
const largeFrame = 512 << 20

// processes are the openers of TestProcesses.
var processes = map[string]coretest.RemoteKind{"1 stream": {Open: opener(1, largeFrame, stall)}, "3 streams": {Open: opener(3, 0, stall)},
	"device": onDevice, "encrypted": {Open: encrypting(3, 0, stall, tcp.EncryptMust)}}

func TestMain(m *testing.M) {
	coretest.ServeRemote(processes)
	os.Exit(m.Run())
}

// TestConformance holds tcp to what every Transport promises.
func TestConformance(t *testing.T) {
	for _, streams := range []int{1, 3} {
		t.Run(fmt.Sprint(streams, " streams"), func(t *testing.T) {
			coretest.TransportSuite(t, fixture(opener(streams, 0, 0)))
		})
	}
	t.Run("plans", func(t *testing.T) {
		coretest.TransportSuite(t, fixture(coretest.Planning(opener(3, 0, 0))))
	})
	t.Run("encrypted plans", func(t *testing.T) {
		coretest.TransportSuite(t, fixture(coretest.Planning(encrypting(3, 0, 0, tcp.EncryptMust))))
	})
	t.Run("encrypted", func(t *testing.T) {
		coretest.TransportSuite(t, fixture(encrypting(3, 0, 0, tcp.EncryptMust)))
	})
}

// TestProcesses holds tcp to the promises between processes.
func TestProcesses(t *testing.T) {
	for name, kind := range processes {
		t.Run(name, func(t *testing.T) {
			f := fixture(kind.Open)
			f.Remote = name
			if f.Device = kind.Device; f.Device != nil {
				g := newGPU(t, 0)
				f.Device = &coretest.Device{Expose: g.expose, Hide: g.hide}
			}
			coretest.ProcessSuite(t, f)
		})
	}
}
