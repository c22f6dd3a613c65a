package rdma_test

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/cuda"
	"github.com/kvconn/kvconn/devices"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rdma"
	"github.com/kvconn/kvconn/rig/coretest"
	"github.com/kvconn/kvconn/rig/testdouble/engine"
)

// needsGPU skips what needs the stage gpu of scripts/rdma-test.sh: an RDMA device, the driver double,
// and a libibverbs that registers its dma-bufs.
func needsGPU(t *testing.T) *engine.Engine {
	t.Helper()
	needsDevice(t)
	if os.Getenv("KVGPU_DOUBLES") == "" {
		t.Skip("make rdma-test STAGES=gpu runs this")
	}
	e := engine.New(t, 0)
	e.Delay(20) // of all devices
	return e
}

// onGPU opens transports over layouts whose regions lie on the device where holds says so.
func onGPU(t *testing.T, l *kv.Layout, holds func(region int) bool, open func(cfg rdma.Config) (core.Transport, error)) (core.Transport, error) {
	t.Helper()
	for i := range l.Regions {
		if holds(i) {
			l.Regions[i].Memory = kv.DeviceMemory(0)
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
	cfg := rdma.DefaultConfig()
	cfg.MaxTransfers = 256
	if d != nil {
		cfg.GPUs = d
	}
	return open(cfg)
}

func even(i int) bool { return i%2 == 0 }

// TestGPUSuite holds rdma to what every Transport promises, between GPUs, from and to host memory,
// with both kinds of regions in one agent, from one GPU to another one, and with regions on two GPUs in each agent.
func TestGPUSuite(t *testing.T) {
	e := needsGPU(t)
	second := engine.New(t, 1)
	on := func(e *engine.Engine) func(*os.File, int) (uint64, error) {
		return func(file *os.File, size int) (uint64, error) { return uint64(e.Expose(file, size)), nil }
	}
	receives := func(id core.AgentID) bool { return strings.HasPrefix(string(id), "receiver") }
	of := func(device coretest.Device) func(core.AgentID) *coretest.Device {
		return func(core.AgentID) *coretest.Device { return &device }
	}
	for _, c := range []struct {
		name   string
		device func(core.AgentID) *coretest.Device
	}{
		{"device to device", of(coretest.Device{Expose: on(e)})},
		{"host to device", func(id core.AgentID) *coretest.Device {
			if !receives(id) {
				return nil
			}
			return &coretest.Device{Expose: on(e)}
		}},
		{"device to host", func(id core.AgentID) *coretest.Device {
			if receives(id) {
				return nil
			}
			return &coretest.Device{Expose: on(e)}
		}},
		{"mixed", of(coretest.Device{Expose: on(e), Holds: even})},
		{"first device to second", func(id core.AgentID) *coretest.Device {
			if receives(id) {
				return &coretest.Device{Expose: on(second)}
			}
			return &coretest.Device{Expose: on(e)}
		}},
		{"two devices in each", func(id core.AgentID) *coretest.Device { // a region's two sides lie on different ones
			if receives(id) {
				return &coretest.Device{Expose: on(second), Second: on(e)}
			}
			return &coretest.Device{Expose: on(e), Second: on(second)}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := coretest.Fixture{BigBytes: 8 << 20, DeviceOf: c.device}
			f.Open = func(t *testing.T, id core.AgentID, l *kv.Layout, sink core.Sink, signal core.Signal) core.Transport {
				device := c.device(id)
				holds := func(i int) bool { return device != nil && (device.Holds == nil || device.Holds(i)) }
				tr, err := onGPU(t, l, holds, func(cfg rdma.Config) (core.Transport, error) { return rdma.New(cfg, id, l, sink, signal) })
				if err != nil {
					t.Fatal(fmt.Errorf("%s: %w", id, err))
				}
				return tr
			}
			coretest.TransportSuite(t, f)
		})
	}
}

// gpuSide is an agent of which one region lies in a GPU's memory, or in the host's.
type gpuSide struct {
	*agent
	bytes int
}

const gpuBlock = 16 << 10

// newGPUSide opens an agent over memory at an address.
func newGPUSide(t *testing.T, b *signalBus, id core.AgentID, name string, addr uintptr, bytes int, device bool, change func(*rdma.Config)) (*gpuSide, error) {
	t.Helper()
	l, err := kv.NewLayout([]kv.Region{{Name: name, Base: uint64(addr), BlockStride: gpuBlock, BlockBytes: gpuBlock, NumBlocks: uint32(bytes / gpuBlock)}})
	if err != nil {
		t.Fatal(err)
	}
	a := &agent{t: t, id: id, signalBus: b, layout: l, sink: coretest.NewRecorder(t, string(id))}
	s := &gpuSide{agent: a, bytes: bytes}
	tr, err := onGPU(t, l, func(int) bool { return device }, func(cfg rdma.Config) (core.Transport, error) {
		if change != nil {
			change(&cfg)
		}
		if os.Getenv("KVCONN_TEST_LOG") != "" {
			cfg.Logger, _ = zap.NewDevelopment()
			cfg.Logger = cfg.Logger.Named(string(id))
		}
		tr, err := rdma.New(cfg, id, l, a.sink, b.signal(id))
		if err != nil {
			return nil, err
		}
		return tr, nil
	})
	if err != nil {
		return nil, err
	}
	a.tr = tr.(*rdma.Transport)
	b.mu.Lock()
	b.agents[id] = a.tr
	b.mu.Unlock()
	t.Cleanup(a.close)
	return s, nil
}

func (s *gpuSide) blocks() (all []kv.BlockID) {
	for i := range s.bytes / gpuBlock {
		all = append(all, kv.BlockID(i))
	}
	return all
}

// gpuPair is P and D, both on the GPU.
func gpuPair(t *testing.T, bytes int, from, to uintptr) (p, d *gpuSide) {
	t.Helper()
	b := newSignalBus()
	p, err := newGPUSide(t, b, "prefill", "cache", from, bytes, true, nil)
	if err == nil {
		d, err = newGPUSide(t, b, "decode", "cache", to, bytes, true, nil)
	}
	if err != nil {
		t.Fatal(err)
	}
	d.connect(p.agent)
	return p, d
}

// move carries all of P's blocks, and gives D's outcome.
func move(p, d *gpuSide, id core.TransferID) error {
	p.t.Helper()
	blocks := p.blocks()
	grant, err := d.tr.Expect(id, p.id, d.layout.Segments([][]kv.BlockID{blocks}))
	if err != nil {
		return err
	}
	pairs, err := p.layout.Plan([][]kv.BlockID{blocks}, d.layout.Shapes(), [][]kv.BlockID{blocks})
	if err != nil {
		p.t.Fatal(err)
	}
	p.tr.Write(core.WriteOp{ID: id, Peer: d.id, Grant: grant, Pairs: pairs})
	return errors.Join(d.sink.Wait("received", id, 1).Err, p.sink.Wait("written", id, 1).Err)
}

func soon(t *testing.T, what string, is func() bool) {
	t.Helper()
	for range 10000 {
		if is() {
			return
		}
		pause(time.Millisecond)
	}
	t.Errorf("%s: not within 10 s", what)
}
