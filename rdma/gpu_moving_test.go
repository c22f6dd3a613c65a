package rdma_test

import (
	"fmt"
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rdma"
	"github.com/kvconn/kvconn/rig/testdouble/engine"
)

// TestGPUParts: a region that is registered in several parts, also if it begins within a page.
func TestGPUParts(t *testing.T) {
	e := needsGPU(t)
	t.Cleanup(rdma.LimitMR(1 << 20))
	const bytes = 4<<20 + 3*gpuBlock
	for i, offset := range []uintptr{0, 100} {
		from, to := e.Alloc(bytes+4096)+offset, e.Alloc(bytes+4096)+6*offset
		p, d := gpuPair(t, bytes, from, to)
		e.Fill(from, bytes, 7)
		e.Fill(to, bytes, 8)
		if err := move(p, d, core.TransferID(fmt.Sprint("parts ", i))); err != nil {
			t.Fatal(err)
		}
		if n := e.Wrong(to, bytes, 7); n != 0 {
			t.Errorf("from byte %d of a page on: %d of %d bytes were wrong", offset, n, bytes)
		}
		p.close()
		d.close()
	}
}

// TestGPUFlush: what a card has written is in the GPU's memory when D is told.
func TestGPUFlush(t *testing.T) {
	e := needsGPU(t)
	latePCIe(t, e)
	const bytes = 1 << 20
	from, to := e.Alloc(bytes), e.Alloc(bytes)
	e.Fill(from, bytes, 7)
	e.Fill(to, bytes, 8)
	p, d := gpuPair(t, bytes, from, to)
	for i := range 20 {
		if err := move(p, d, core.TransferID(fmt.Sprint("flush ", i))); err != nil {
			t.Fatal(err)
		}
		if n := e.Wrong(to, bytes, 7); n != 0 {
			t.Fatalf("%d of %d bytes were wrong when D was told", n, bytes)
		}
		e.Fill(to, bytes, 8)
	}
}

// TestGPURevoke: after a revoke nothing appears in the GPU's memory any more.
func TestGPURevoke(t *testing.T) {
	e := needsGPU(t)
	latePCIe(t, e)
	const bytes = 4 << 20
	from, to := e.Alloc(bytes), e.Alloc(bytes)
	e.Fill(from, bytes, 7)
	p, d := gpuPair(t, bytes, from, to)
	blocks := p.blocks()
	for i := range 5 {
		e.Fill(to, bytes, 8)
		id := core.TransferID(fmt.Sprint("revoked ", i))
		grant, err := d.tr.Expect(id, p.id, d.layout.Segments([][]kv.BlockID{blocks}))
		if err != nil {
			t.Fatal(err)
		}
		pairs, err := p.layout.Plan([][]kv.BlockID{blocks}, d.layout.Shapes(), [][]kv.BlockID{blocks})
		if err != nil {
			t.Fatal(err)
		}
		began := sent(t)
		p.tr.Write(core.WriteOp{ID: id, Peer: d.id, Grant: grant, Pairs: pairs})
		soon(t, "packets are under way", func() bool { return sent(t)-began > 100 })
		d.tr.Revoke(id)
		before := e.Wrong(to, bytes, 8)
		e.Must("cuFlushGPUDirectRDMAWrites", 0, 100)
		if n := e.Wrong(to, bytes, 8); n != before {
			t.Fatalf("%d of %d bytes appeared after the revoke", n-before, bytes)
		}
		p.sink.Wait("written", id, 1)
	}
}

func sent(t *testing.T) (n uint64) {
	for i := range paths() {
		n += packets(t, i)
	}
	return n
}

func latePCIe(t *testing.T, e *engine.Engine) {
	e.Bare("kvgpu_late_pcie", 1)
	t.Cleanup(func() { e.Bare("kvgpu_late_pcie", 0) })
}
