package rdma_test

import (
	"strings"
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/devices"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rdma"
	"github.com/kvconn/kvconn/rig/testdouble/engine"
)

// sleeper is an agent whose engine sleeps and wakes.
type sleeper struct {
	*gpuSide
	*engine.Mapping
	devices *devices.Devices
}

func newSleeper(t *testing.T, e *engine.Engine, b *signalBus, id core.AgentID, bytes int) *sleeper {
	t.Helper()
	s := &sleeper{Mapping: e.Map(bytes)}
	var err error
	s.gpuSide, err = newGPUSide(t, b, id, "cache", s.At, bytes, true, func(c *rdma.Config) { s.devices = c.GPUs.(*devices.Devices) })
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// renew takes the new memory, when nothing of before is left.
func (s *sleeper) renew() {
	s.t.Helper()
	remapping, err := s.devices.Look()
	if err != nil || !remapping.Take() {
		s.t.Fatal(err)
	}
	s.tr.Renew()
}

// TestGPULookBeforeTheEnd: a decode engine sleeps and wakes while a transfer waits for its second half, and nobody tells D's transport. The
// bytes land in the memory of before, of which D's engine sees nothing. So D looks before it tells the end, and the end has the
// region's name.
func TestGPULookBeforeTheEnd(t *testing.T) {
	e := needsGPU(t)
	const bytes, says = 2 << 20, "region cache: its memory at"
	b := newSignalBus()
	p, d := newSleeper(t, e, b, "prefill", bytes), newSleeper(t, e, b, "decode", bytes)
	d.connect(p.agent)
	e.Fill(p.At, bytes, 7)
	if err := move(p.gpuSide, d.gpuSide, "before"); err != nil {
		t.Fatal(err)
	}
	blocks := p.blocks()
	grant, err := d.tr.Expect("t", p.id, d.layout.Segments([][]kv.BlockID{blocks}))
	if err != nil {
		t.Fatal(err)
	}
	pairs, err := p.layout.Plan([][]kv.BlockID{blocks}, d.layout.Shapes(), [][]kv.BlockID{blocks})
	if err != nil {
		t.Fatal(err)
	}
	var all []kv.Pair // a block each, of which the first half is given
	for i := range pairs {
		for off := uint64(0); off < pairs[i].Length; off += gpuBlock {
			all = append(all, kv.Pair{SrcRegion: pairs[i].SrcRegion, DstRegion: pairs[i].DstRegion, SrcOffset: pairs[i].SrcOffset + off,
				DstOffset: pairs[i].DstOffset + off, Length: min(gpuBlock, pairs[i].Length-off)})
		}
	}
	half := len(all) / 2
	op := core.WriteOp{ID: "t", Peer: d.id, Grant: grant, Bytes: bytes, Pairs: all[:half]}
	began := sent(t)
	p.tr.Write(op)
	soon(t, "packets are under way", func() bool { return sent(t)-began > 20 })
	d.Sleep()
	d.Wake()
	e.Fill(d.At, bytes, 5)
	op.Pairs, op.At = all[half:], []kv.Extent{{Position: uint64(half) * gpuBlock, Pairs: len(all) - half}}
	p.tr.Extend(op)
	if err := d.sink.Wait("received", "t", 1).Err; err == nil || !strings.Contains(err.Error(), says) {
		t.Errorf("the load ended with %v, want %q", err, says)
	}
	p.sink.Wait("written", "t", 1)
	e.Must("cuFlushGPUDirectRDMAWrites", 0, 100)
	if n := e.Wrong(d.At, bytes, 5); n > 0 {
		t.Errorf("%d bytes of the new memory are not the engine's", n)
	}
}

// TestGPURenewed: a decode engine sleeps and wakes in the middle of a transfer. The transfer ends with the region's name, and no
// byte of it comes into the new memory, however late. Nothing begins until the cards have registered the new memory. Then
// lanes are tried anew, and transfers carry its bytes. The same again when both engines have slept.
func TestGPURenewed(t *testing.T) { gpuRenewed(t, false) }

// TestGPURenewedAtP: the same when the prefill engine sleeps.
func TestGPURenewedAtP(t *testing.T) { gpuRenewed(t, true) }

func gpuRenewed(t *testing.T, atP bool) {
	e := needsGPU(t)
	latePCIe(t, e)
	const bytes = 2 << 20
	b := newSignalBus()
	p, d := newSleeper(t, e, b, "prefill", bytes), newSleeper(t, e, b, "decode", bytes)
	d.connect(p.agent)
	us, pattern := d, uint64(10)
	if atP {
		us = p
	}
	goesOn := func(id core.TransferID) {
		t.Helper()
		pattern++
		e.Fill(p.At, bytes, pattern)
		if err := move(p.gpuSide, d.gpuSide, id); err != nil {
			t.Fatal(err)
		}
		if n := e.Wrong(d.At, bytes, pattern); n > 0 {
			t.Fatalf("%q: %d bytes were wrong", id, n)
		}
	}
	goesOn("first")
	registered := us.tr.Registrations()
	blocks := p.blocks()
	grant, err := d.tr.Expect("during", p.id, d.layout.Segments([][]kv.BlockID{blocks}))
	if err != nil {
		t.Fatal(err)
	}
	pairs, err := p.layout.Plan([][]kv.BlockID{blocks}, d.layout.Shapes(), [][]kv.BlockID{blocks})
	if err != nil {
		t.Fatal(err)
	}
	began := sent(t)
	p.tr.Write(core.WriteOp{ID: "during", Peer: d.id, Grant: grant, Pairs: pairs})
	soon(t, "packets are under way", func() bool { return sent(t)-began > 20 })
	us.Sleep()
	us.Wake()
	e.Fill(us.At, bytes, 5)
	const says = "region cache: its memory at"
	changed := us.devices.Check()
	if changed == nil || !strings.Contains(changed.Error(), says) {
		t.Fatalf("%v, want %q", changed, says)
	}
	us.tr.Forget(changed)
	us.tr.Forget(changed)
	if atP {
		err = p.sink.Wait("written", "during", 1).Err
		d.tr.Revoke("during")
	} else {
		err = d.sink.Wait("received", "during", 1).Err
		p.sink.Wait("written", "during", 1)
	}
	if err != nil && !strings.Contains(err.Error(), says) { // else it had all bytes of before
		t.Errorf("it ended with %v, want %q", err, says)
	}
	if !atP {
		if err := d.usable(p.agent); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("usable: %v, want %q", err, says)
		}
		if _, err := d.tr.Expect("asleep", p.id, d.layout.Segments([][]kv.BlockID{blocks})); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("a transfer without memory: %v, want %q", err, says)
		}
	}
	soon(t, "the cards forget the memory", func() bool { return us.tr.Registrations() < registered })
	us.renew()
	d.again(p.agent)
	e.Must("cuFlushGPUDirectRDMAWrites", 0, 100)
	if n := e.Wrong(us.At, bytes, 5); n > 0 {
		t.Errorf("%d bytes of the new memory are not the engine's", n)
	}
	goesOn("after")
	if n := us.tr.Registrations(); n != registered {
		t.Errorf("%d registrations, %d before", n, registered)
	}
	p.Sleep() // both, when nothing is under way
	p.Wake()
	d.Sleep()
	d.Wake()
	for _, s := range []*sleeper{p, d} {
		s.tr.Forget(s.devices.Check())
		s.renew()
	}
	soon(t, "P has lanes again", func() bool { return d.usable(p.agent) == nil })
	goesOn("last")
}
