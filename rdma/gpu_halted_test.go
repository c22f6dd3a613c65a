package rdma_test

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/cuda"
	"github.com/kvconn/kvconn/devices"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rdma"
	"github.com/kvconn/kvconn/rig/coretest"
	"github.com/kvconn/kvconn/rig/testdouble/engine"
)

// Cards move the bytes. So rdma gives a device nothing to do but D's flushes, and the copies of trials: a device that halts may hold up these alone.

const flushCall = "cuFlushGPUDirectRDMAWrites"

// tooSoon is how long a test waits for what must not happen meanwhile.
const tooSoon = 200 * time.Millisecond

// TestGPUThatHalts holds rdma to its promises while D's driver does not answer a flush: before that, what cards have written is not known to be there.
func TestGPUThatHalts(t *testing.T) {
	e := needsGPU(t)
	receives := func(id core.AgentID) bool { return strings.HasPrefix(string(id), "receiver") }
	halt := &coretest.Halt{Waiting: func() uint64 { return e.Count("blocked") }, On: func(on bool) {
		if on {
			e.Block(flushCall)
		} else {
			e.Unblock()
		}
	}}
	f := coretest.Fixture{BigBytes: 8 << 20, OnDevice: receives,
		Device: &coretest.Device{Halt: halt, Expose: func(file *os.File, size int) (uint64, error) { return uint64(e.Expose(file, size)), nil }}}
	f.Open = func(t *testing.T, id core.AgentID, l *kv.Layout, sink core.Sink, signal core.Signal) core.Transport {
		holds := func(int) bool { return receives(id) }
		tr, err := onGPU(t, l, holds, func(cfg rdma.Config) (core.Transport, error) { return rdma.New(cfg, id, l, sink, signal) })
		if err != nil {
			t.Fatalf("%s: %v", id, err)
		}
		return tr
	}
	coretest.HaltedSuite(t, f)
}

// half begins a transfer of which it gives the first half of the blocks, and waits until bytes of it have come.
func half(p, d *gpuSide, id core.TransferID, landed func() bool) {
	p.t.Helper()
	blocks := p.blocks()
	grant, err := d.tr.Expect(id, p.id, d.layout.Segments([][]kv.BlockID{blocks}))
	if err != nil {
		p.t.Fatal(err)
	}
	first := [][]kv.BlockID{blocks[:len(blocks)/2]}
	pairs, err := p.layout.Plan(first, d.layout.Shapes(), first)
	if err != nil {
		p.t.Fatal(err)
	}
	p.tr.Write(core.WriteOp{ID: id, Peer: d.id, Grant: grant, Bytes: uint64(p.bytes), Pairs: pairs})
	soon(p.t, "bytes have come", landed)
}

// TestGPURevokeWaits: a half of a transfer has come, and D's driver does not answer. Revoke waits for the flush: else bytes could appear in blocks that
// were given back.
func TestGPURevokeWaits(t *testing.T) {
	e := needsGPU(t)
	const bytes = 1 << 20
	from, to := e.Alloc(bytes), e.Alloc(bytes)
	e.Fill(from, bytes, 7)
	e.Fill(to, bytes, 8)
	p, d := gpuPair(t, bytes, from, to)
	half(p, d, "t", func() bool { return e.Wrong(to, bytes, 8) > 0 })
	t.Cleanup(e.Unblock) // before the agents are closed
	e.Block(flushCall)
	revoked := make(chan error, 1)
	go func() { revoked <- d.tr.Revoke("t") }()
	soon(t, "D flushes", func() bool { return e.Count("blocked") > 0 || len(revoked) > 0 })
	pause(tooSoon)
	if len(revoked) > 0 {
		t.Error("Revoke returned before the flush")
	}
	e.Unblock()
	select {
	case err := <-revoked:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(patience):
		t.Fatal("the flush has ended, and Revoke does not return")
	}
	if p.sink.Wait("written", "t", 1).Err == nil {
		t.Error("a write of which a half was given ended well")
	}
}

// TestGPUStreamsThatStand: the devices of both sides make no copy, for nobody. Transfers between agents that have met go well, a revoke and a stop
// return, and agents can be closed. A D that meets P meanwhile is told why it does not get bytes by rdma, and does when the devices go on.
func TestGPUStreamsThatStand(t *testing.T) {
	e := needsGPU(t)
	const bytes = 1 << 20
	b := newSignalBus()
	var sides []*gpuSide
	var at []uintptr
	for _, id := range []core.AgentID{"prefill", "decode", "late"} {
		at = append(at, e.Alloc(bytes))
		s, err := newGPUSide(t, b, id, "cache", at[len(at)-1], bytes, true, nil)
		if err != nil {
			t.Fatal(err)
		}
		sides = append(sides, s)
	}
	p, d, late := sides[0], sides[1], sides[2]
	d.connect(p.agent)
	goesOn := func(d *gpuSide, to uintptr, id core.TransferID, pattern uint64) {
		t.Helper()
		e.Fill(at[0], bytes, pattern)
		if err := move(p, d, id); err != nil {
			t.Fatalf("%s: %v", id, err)
		}
		if n := e.Wrong(to, bytes, pattern); n > 0 {
			t.Errorf("%s: %d bytes were wrong", id, n)
		}
	}
	goesOn(d, at[1], "before", 1)
	e.Halt(true)
	t.Cleanup(func() { e.Halt(false) })
	goesOn(d, at[1], "meanwhile", 2)
	e.Fill(at[1], bytes, 3)
	half(p, d, "revoked", func() bool { return e.Wrong(at[1], bytes, 3) > 0 })
	if err := d.tr.Revoke("revoked"); err != nil {
		t.Error(err)
	}
	p.sink.Wait("written", "revoked", 1)
	e.Fill(at[1], bytes, 3)
	half(p, d, "stopped", func() bool { return e.Wrong(at[1], bytes, 3) > 0 })
	p.tr.Stop("stopped")
	p.sink.Wait("written", "stopped", 1)
	if err := d.tr.Revoke("stopped"); err != nil {
		t.Error(err)
	}
	ticket, err := p.tr.Admit(late.id)
	if err == nil {
		err = late.tr.Connect(p.id, p.tr.Endpoint(), ticket)
	}
	if err != nil {
		t.Fatal(err)
	}
	const says = "cannot be read: the GPU has not copied it in time"
	if err := late.usable(p.agent); err == nil || !strings.Contains(err.Error(), says) {
		t.Errorf("a D that meets P: %v, want %q", err, says)
	}
	goesOn(d, at[1], "beside one that meets P", 4)
	e.Halt(false)
	late.again(p.agent)
	goesOn(late, at[2], "afterwards", 5)
	e.Halt(true)
	for _, s := range []*gpuSide{d, p, late} {
		s.close()
	}
}

// groups is an agent with a region in each group, on GPUs and in the host's memory.
type groups struct {
	*agent
	devices *devices.Devices
}

func openGroups(t *testing.T, b *signalBus, id core.AgentID, flush time.Duration, at ...uintptr) *groups {
	t.Helper()
	var regions []kv.Region
	for i, addr := range at {
		r := kv.Region{Name: fmt.Sprint("layer ", i), Group: uint32(i), BlockStride: gpuBlock, BlockBytes: gpuBlock, NumBlocks: groupBlocks}
		if addr == 0 {
			mem, err := unix.Mmap(-1, 0, groupBlocks*gpuBlock, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = unix.Munmap(mem) })
			r.Base = uint64(uintptr(unsafe.Pointer(&mem[0])))
		} else {
			r.Base, r.Memory = uint64(addr), kv.DeviceMemory(0)
		}
		regions = append(regions, r)
	}
	l, err := kv.NewLayout(regions)
	if err != nil {
		t.Fatal(err)
	}
	g := &groups{agent: &agent{t: t, id: id, signalBus: b, layout: l, sink: coretest.NewRecorder(t, string(id))}}
	g.devices, err = devices.Open(l.Regions, cuda.Options{RingBytes: 1 << 20, SlotBytes: 64 << 10, StallTimeout: flush})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := g.devices.Close(); err != nil {
			t.Error(err)
		}
	})
	cfg := rdma.DefaultConfig()
	if g.devices != nil {
		cfg.GPUs = g.devices
	}
	if g.tr, err = rdma.New(cfg, id, l, g.sink, b.signal(id)); err != nil {
		t.Fatal(err)
	}
	b.mu.Lock()
	b.agents[id] = g.tr
	b.mu.Unlock()
	t.Cleanup(g.close)
	return g
}

const groupBlocks = 16

// write begins a transfer of the blocks of one group.
func (g *groups) write(d *groups, id core.TransferID, group int) {
	g.t.Helper()
	blocks := make([][]kv.BlockID, len(g.layout.Regions))
	for i := range groupBlocks {
		blocks[group] = append(blocks[group], kv.BlockID(i))
	}
	grant, err := d.tr.Expect(id, g.id, d.layout.Segments(blocks))
	if err != nil {
		g.t.Fatal(err)
	}
	pairs, err := g.layout.Plan(blocks, d.layout.Shapes(), blocks)
	if err != nil {
		g.t.Fatal(err)
	}
	g.tr.Write(core.WriteOp{ID: id, Peer: d.id, Grant: grant, Pairs: pairs})
}

func (g *groups) moves(d *groups, id core.TransferID, group int) {
	g.t.Helper()
	g.write(d, id, group)
	if err := errors.Join(d.sink.Wait("received", id, 1).Err, g.sink.Wait("written", id, 1).Err); err != nil {
		g.t.Errorf("%q: %v", string(id), err)
	}
}

// flushed has D's cache on two GPUs and in host memory, a region in each group, and two Ps. The first GPU needs no flush, and the driver does not answer one of the second: the transfer "waits".
func flushed(t *testing.T, bound time.Duration) (second *engine.Engine, d *groups, from []*groups) {
	t.Helper()
	first, second := needsGPU(t), engine.New(t, 1)
	const ordering = 118 // GPU_DIRECT_RDMA_WRITES_ORDERING
	first.Bare("kvgpu_attribute", 0, ordering, 100)
	t.Cleanup(func() { first.Bare("kvgpu_attribute", 0, ordering, 0) })
	const bytes = groupBlocks * gpuBlock
	b := newSignalBus()
	d = openGroups(t, b, "decode", bound, first.Alloc(bytes), second.Alloc(bytes), 0)
	from = []*groups{openGroups(t, b, "prefill", 0, 0, first.Alloc(bytes), 0), openGroups(t, b, "other", 0, 0, 0, 0)}
	for _, p := range from {
		d.connect(p.agent)
		for group := range 3 {
			p.moves(d, core.TransferID(fmt.Sprint("before ", p.id, group)), group)
		}
	}
	t.Cleanup(second.Unblock)
	second.Block(flushCall)
	from[0].write(d, "waits", 1)
	soon(t, "D flushes", func() bool { return second.Count("blocked") > 0 })
	return second, d, from
}

// TestGPUFlushWaitsAlone: the driver does not answer a flush of D's second GPU. Transfers of other memory go on, from each P, and can be revoked. The one that
// waits ends well when the driver answers.
func TestGPUFlushWaitsAlone(t *testing.T) {
	second, d, from := flushed(t, time.Hour)
	for _, p := range from {
		for _, group := range []int{0, 2} {
			p.moves(d, core.TransferID(fmt.Sprint("beside ", p.id, group)), group)
			id := core.TransferID(fmt.Sprint("revoked ", p.id, group))
			p.write(d, id, group)
			if err := d.tr.Revoke(id); err != nil {
				t.Error(err)
			}
			p.sink.Wait("written", id, 1)
		}
	}
	if n := len(d.sink.All("received", "waits")); n > 0 {
		t.Error("the end was told before the flush")
	}
	second.Unblock()
	if err := d.sink.Wait("received", "waits", 1).Err; err != nil {
		t.Error(err)
	}
}

// TestGPUFlushUnanswered: the driver does not answer a flush of D's second GPU for longer than stall_timeout_s. A revoke says that bytes may land, and nobody is
// told an end. Transfers to this GPU go well when its driver answers again. Close says what was not fenced.
func TestGPUFlushUnanswered(t *testing.T) {
	second, d, from := flushed(t, 5*time.Second)
	revoked := make(chan error, 1)
	go func() { revoked <- d.tr.Revoke("waits") }()
	select {
	case err := <-revoked:
		if !errors.Is(err, core.ErrMayLand) || !strings.Contains(err.Error(), "has not ended a flush") {
			t.Errorf("the revoke: %v", err)
		}
	case <-time.After(patience):
		t.Fatal("the revoke does not return")
	}
	second.Unblock()
	from[0].moves(d, "afterwards", 1)
	if n := len(d.sink.All("received", "waits")); n > 0 {
		t.Error("an end was told of a transfer of which bytes may land")
	}
	d.closed = true
	if err := d.tr.Close(); !errors.Is(err, core.ErrMayLand) {
		t.Errorf("the close: %v", err)
	}
	d.sink.Shut()
}
