package cuda

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"unsafe"

	"github.com/kvconn/kvconn/cuda/internal/driver"
	"github.com/kvconn/kvconn/rig/testdouble/engine"
)

const grain = 2 << 20

// TestLocate: what lies at an address, and why what is not a device's is refused.
func TestLocate(t *testing.T) {
	e, d := open(t, Options{})
	plain := e.Alloc(grain)
	pooled := e.Out("cuMemAllocAsync", grain, e.Stream())
	t.Cleanup(func() { e.Must("cuMemFreeAsync", pooled, 2) })
	mapped := reserve(t, e, 2*grain)
	mapAt(t, e, mapped, 1)
	mapAt(t, e, mapped+grain, 0)
	for _, c := range []struct {
		at, bytes uintptr
		want      Location
	}{
		{plain, grain, Location{Kind: driver.Allocated, Mappings: 1, RDMA: true}},
		{plain + 4096, grain - 4096, Location{Kind: driver.Allocated, Mappings: 1, RDMA: true}},
		{pooled, grain, Location{Kind: driver.Pool, Mappings: 1, RDMA: true}},
		{mapped, grain, Location{Kind: driver.VMM, Mappings: 1, RDMA: true}},
		{mapped + 100, 2*grain - 100, Location{Kind: driver.VMM, Mappings: 2}}, // the second was not made for RDMA
	} {
		got, err := Locate(c.at, uint64(c.bytes))
		if err != nil || got != c.want {
			t.Errorf("%d bytes at %#x: %+v, %v, want %+v", c.bytes, c.at, got, err, c.want)
		}
	}

	host := make([]byte, 4096)
	pinned := e.Out("cuMemHostAlloc", 4096, 0)
	t.Cleanup(func() { e.Must("cuMemFreeHost", pinned) })
	managed := e.Out("cuMemAllocManaged", 4096, 1)
	t.Cleanup(func() { e.Must("cuMemFree_v2", managed) })
	freed := e.Out("cuMemAlloc_v2", grain)
	e.Must("cuMemFree_v2", freed)
	for _, c := range []struct {
		at, bytes uintptr
		kind      Kind
		says      string
	}{
		{uintptr(unsafe.Pointer(&host[0])), 100, driver.Pageable, "declare host memory as such"},
		{freed, 100, driver.Pageable, "freed memory"},
		{pinned, 100, driver.Host, "pinned host memory"},
		{managed, 100, driver.Managed, "managed memory"},
		{mapped, 3 * grain, driver.Pageable, "only the first 4194304 are there"},
	} {
		_, err := Locate(c.at, uint64(c.bytes))
		var kind *KindError
		if !errors.As(err, &kind) || kind.Kind != c.kind || !strings.Contains(strings.ToLower(err.Error()), c.says) {
			t.Errorf("%#x: %v, want kind %d and %q", c.at, err, c.kind, c.says)
		}
		if _, err := d.Register("k.7", c.at, uint64(c.bytes)); err == nil || !strings.Contains(err.Error(), "k.7") {
			t.Errorf("%#x was registered: %v", c.at, err)
		}
	}
	runtime.KeepAlive(host)
}

// TestOtherContext: memory of a context that is not the primary one is refused by name.
func TestOtherContext(t *testing.T) {
	e, _ := open(t, Options{})
	context := e.Out("cuCtxCreate_v2", 0, 0)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer func() { e.Bare("cuCtxDestroy_v2", context) }()
	if rc := e.Bare("cuCtxSetCurrent", context); rc != 0 {
		t.Fatal(rc)
	}
	defer e.Bare("cuCtxSetCurrent", 0)
	var p uintptr
	pinned := new(runtime.Pinner)
	pinned.Pin(&p)
	defer pinned.Unpin()
	if rc := e.Bare("cuMemAlloc_v2", uintptr(unsafe.Pointer(&p)), grain); rc != 0 {
		t.Fatal(rc)
	}
	defer e.Bare("cuMemFree_v2", p)
	if _, err := Locate(p, grain); err == nil || !strings.Contains(err.Error(), "another context") {
		t.Error(err)
	}
}

// TestCheck: memory that was freed, mapped anew, or allocated again at the same address is noticed, by
// the region's name.
func TestCheck(t *testing.T) {
	e, d := open(t, Options{})
	changed := func(r *Region, what string) {
		t.Helper()
		err := r.Check()
		if err == nil || !strings.Contains(err.Error(), "region "+what) {
			t.Errorf("%s was not noticed: %v", what, err)
		}
	}
	register := func(name string, at, bytes uintptr) *Region {
		t.Helper()
		r, err := d.Register(name, at, uint64(bytes))
		if err == nil {
			err = r.Check()
		}
		if err != nil {
			t.Fatal(err)
		}
		return r
	}

	e.Bare("kvgpu_reuse_addresses", 1)
	t.Cleanup(func() { e.Bare("kvgpu_reuse_addresses", 0) })
	p := e.Out("cuMemAlloc_v2", grain)
	r := register("freed", p, grain)
	e.Must("cuMemFree_v2", p)
	changed(r, "freed")
	if again := e.Alloc(grain); again != p {
		t.Fatalf("%#x was allocated again as %#x", p, again)
	}
	changed(r, "freed")
	if _, err := d.Register("new", p, grain); err == nil || !strings.Contains(err.Error(), "mapped anew") {
		t.Errorf("two allocations at one address were registered: %v", err)
	}
	r.Close()
	fresh := register("new", p, grain)
	fresh.Close()

	// An engine that sleeps and wakes: the same addresses with other memory.
	at := reserve(t, e, 2*grain)
	mapAt(t, e, at, 1)
	second := mapAt(t, e, at+grain, 1)
	slept := register("slept", at, 2*grain)
	second.unmap()
	changed(slept, "slept")
	mapAt(t, e, at+grain, 1)
	changed(slept, "slept")
	slept.Close()
	// Either id tells.
	m, err := driver.Locate(uint64(at))
	if err != nil || m.ID == 0 || m.Block == 0 {
		t.Fatalf("%+v, %v", m, err)
	}
	right := driver.Piece{Addr: uint64(at), ID: m.ID, Block: m.Block}
	for want, p := range []driver.Piece{{Addr: uint64(at), ID: m.ID, Block: m.Block + 1}, {Addr: uint64(at), ID: m.ID + 1, Block: m.Block}} {
		if same, err := d.drv.Same([]driver.Piece{right, p, right}); same != 1 || err != nil {
			t.Errorf("wrong id %d: the first %d are the same, %v", want, same, err)
		}
	}
	awake := register("awake", at, 2*grain)
	awake.Close()
}

// TestCheckOfAll: regions that share mappings have them asked for once, and the error names a
// region that has lost its memory.
func TestCheckOfAll(t *testing.T) {
	e, d := open(t, Options{})
	at := reserve(t, e, 2*grain)
	mapAt(t, e, at, 1)
	second := mapAt(t, e, at+grain, 1)
	var regions []*Region
	for i := range 16 {
		r, err := d.Register(fmt.Sprint("layer", i), at+uintptr(i)*grain/8, grain/8)
		if err != nil {
			t.Fatal(err)
		}
		regions = append(regions, r)
	}
	before := e.Count("cuPointerGetAttribute")
	if err := d.Check(); err != nil {
		t.Error(err)
	}
	if n := e.Count("cuPointerGetAttribute") - before; n > 4 { // two ids of two mappings
		t.Errorf("%d questions about two mappings", n)
	}
	second.unmap()
	if err := d.Check(); err == nil || !strings.Contains(err.Error(), "region layer8") {
		t.Errorf("the memory of layers 8 to 15 is gone: %v", err)
	}
	for _, r := range regions[8:] {
		r.Close()
	}
	if err := d.Check(); err != nil {
		t.Errorf("their regions were closed: %v", err)
	}
	for _, r := range regions[:8] {
		r.Close()
	}
}

// TestCapture: while an engine captures a graph, what we do on other threads does not break it; a
// capturing stream has no moments.
func TestCapture(t *testing.T) {
	e, d := open(t, Options{})
	const n = 64 << 10
	p, stream := memory(t, e, d, n), e.Stream()
	tr, s := d.Transfer("a", FromDevice), slot(t, d, FromDevice)
	before, other := moment(t, d, stream), e.Stream()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	e.Must("cuStreamBeginCapture_v2", stream, 0) // global: as PyTorch
	awaited := make(chan error, 1)
	if _, err := d.Moment(stream); !errors.Is(err, ErrCapturing) {
		t.Errorf("a moment on a capturing stream: %v", err)
	}
	go d.Await(before, func(err error) { awaited <- err })
	if err := answer(t, awaited); err != nil {
		t.Errorf("a wait beside the engine's capture: %v", err)
	}
	hasPassed(t, d, moment(t, d, other))
	if err := run(t, tr, Copy{Slot: s, Runs: []Run{{Addr: p, Len: n}}}); err != nil {
		t.Errorf("a copy beside the engine's capture: %v", err)
	}
	graph := new(uintptr)
	pinned := new(runtime.Pinner)
	pinned.Pin(graph)
	defer pinned.Unpin()
	if rc := e.Call("cuStreamEndCapture", stream, uintptr(unsafe.Pointer(graph))); rc != 0 {
		t.Errorf("the engine's capture was broken: %d", rc)
	}
	e.Bare("cuGraphDestroy", *graph)
	moment(t, d, stream)
}

// reserve gives addresses.
func reserve(t *testing.T, e *engine.Engine, bytes uintptr) uintptr {
	t.Helper()
	at := e.Out("cuMemAddressReserve", bytes, 0, 0, 0)
	t.Cleanup(func() { e.Must("cuMemAddressFree", at, bytes) })
	return at
}

type mapped struct {
	t      *testing.T
	e      *engine.Engine
	at     uintptr
	handle uintptr
	gone   bool
}

// mapAt maps new memory of one grain, which can be given away as a file descriptor.
func mapAt(t *testing.T, e *engine.Engine, at uintptr, rdma byte) *mapped {
	t.Helper()
	return mapWith(t, e, at, rdma, 1)
}

func mapWith(t *testing.T, e *engine.Engine, at uintptr, rdma, files byte) *mapped {
	t.Helper()
	var prop [32]byte // CUmemAllocationProp: pinned, on device 0
	prop[0], prop[4], prop[8] = 1, files, 1
	prop[25] = rdma
	var access [12]byte // CUmemAccessDesc: device 0, read and write
	access[0], access[8] = 1, 3
	pinned := new(runtime.Pinner)
	pinned.Pin(&prop)
	pinned.Pin(&access)
	defer pinned.Unpin()
	m := &mapped{t: t, e: e, at: at}
	m.handle = e.Out("cuMemCreate", grain, uintptr(unsafe.Pointer(&prop)), 0)
	e.Must("cuMemMap", at, grain, 0, m.handle, 0)
	e.Must("cuMemSetAccess", at, grain, uintptr(unsafe.Pointer(&access)), 1)
	t.Cleanup(m.unmap)
	return m
}

func (m *mapped) unmap() {
	if !m.gone {
		m.gone = true
		m.e.Must("cuMemUnmap", m.at, grain)
		m.e.Must("cuMemRelease", m.handle)
	}
}
