package local

import (
	"errors"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/cuda"
	"github.com/kvconn/kvconn/kv"
)

// TestDeviceRefused: what cannot be opened has the pair take another transport, with region, device and remedy.
func TestDeviceRefused(t *testing.T) {
	p, d := startGPU(t, "p", 0, Config{lookAfter: time.Hour}, cuda.Options{}), startGPU(t, "d", 1, Config{}, cuda.Options{})
	host := start(t, "host", Config{}, nil)
	host.tr.receiver.redial, d.tr.receiver.redial = time.Hour, time.Hour // else a question whether it is usable dials
	for name, c := range map[string]struct {
		mode string
		fail func()
		d    *agent
		says []string
	}{
		"apart":     {mode: "apart", d: d.agent, says: []string{`region "cache of p"`, "on GPU-", "topo -p2p"}},
		"a call":    {fail: func() { d.Fail("cuMemImportFromShareableHandle", 1, 801) }, d: d.agent, says: []string{`region "cache of p"`, "does not open it", "cuMemImportFromShareableHandle"}},
		"no device": {d: host, says: []string{"lies on a GPU", "starts no CUDA driver"}},
		"no file":   {fail: func() { p.Fail("cuMemExportToShareableHandle", 1, 801) }, d: d.agent, says: []string{"region cache of p", "cannot be shared", "cuMemExportToShareableHandle"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("KVGPU_IPC", c.mode)
			if c.fail != nil {
				c.fail()
			}
			before := len(c.d.sink.All("down", ""))
			c.d.tr.Dismiss(p.id)
			if err := c.d.tr.Connect(p.id, p.tr.Endpoint(), p.ticket(c.d.id)); err != nil {
				t.Fatal(err)
			}
			err := c.d.tr.Usable(t.Context(), p.id)
			wants(t, err, c.says...)
			if !errors.Is(err, core.ErrConnectionLost) {
				t.Errorf("%v is no lost connection", err)
			}
			comes(t, "it is told", func() bool { return len(c.d.sink.All("down", "")) > before })
		})
	}
	p.meets(d)
	p.goes("t", d, 1)
}

// TestDeviceUnshared: memory that no other process can open is refused at New.
func TestDeviceUnshared(t *testing.T) {
	a := &onGPU{agent: &agent{t: t, id: "p"}, gpu: newGPU(t, 0)}
	stream := a.Stream()
	a.at = a.Out("cuMemAllocAsync", deviceBytes, stream)
	defer a.Must("cuMemFreeAsync", a.at, stream)
	wants(t, a.open(Config{}, cuda.Options{}), "region cache of p", "cudaMallocAsync", "take rdma or tcp")
}

// TestUnwritableStaged: blocks of D's in host memory that are not there any more end a transfer from a device by the region's name.
func TestUnwritableStaged(t *testing.T) {
	mem, err := unix.Mmap(-1, 0, 1<<16, unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(mem) }()
	at := uint64(uintptr(unsafe.Pointer(&mem[0])))
	l, err := kv.NewLayout([]kv.Region{{Name: "k", Base: at, BlockStride: 1 << 16, BlockBytes: 1 << 16, NumBlocks: 1}})
	if err != nil {
		t.Fatal(err)
	}
	c := &copier{t: &Transport{layout: l}, into: []iovec{{uintptr(at) + 100, 50}}}
	wants(t, c.spread(make([]byte, 50)), `"k"`, "not writable")
}

// TestAllocations: what P tells of an allocation is what D reads; less of it is refused.
func TestAllocations(t *testing.T) {
	for _, kind := range []memoryKind{memoryDevice, memoryDeviceFile} {
		of := cuda.Allocation{ID: 1, Block: 2, Addr: 3, Bytes: 4, Device: "GPU-1", Region: strings.Repeat("k", 2*mostName)}
		if kind == memoryDevice {
			of.Handle = make([]byte, 64)
		}
		m := memory{kind: kind, base: 3, size: 4, handle: appendAllocation(nil, &of)}
		if len(m.handle) > mostHandle {
			t.Errorf("a handle has %d bytes", len(m.handle))
		}
		a, err := parseAllocation(&m)
		if err != nil || a.ID != 1 || a.Block != 2 || a.Addr != 3 || a.Bytes != 4 || a.Device != "GPU-1" || a.Region != of.Region[:mostName] || len(a.Handle) != len(of.Handle) || (a.Handle == nil) != (of.Handle == nil) {
			t.Errorf("%+v, %v", a, err)
		}
		whole := m.handle
		for n := range len(whole) - len(of.Handle) {
			m.handle = whole[:n]
			if a, err := parseAllocation(&m); err == nil {
				t.Errorf("%d of %d bytes are taken for %+v", n, len(whole), a)
			}
		}
		m.handle, m.kind = whole, memoryDevice+memoryDeviceFile-kind
		if _, err := parseAllocation(&m); err == nil {
			t.Errorf("a handle of kind %d is taken for one of kind %d", kind, m.kind)
		}
	}
}
