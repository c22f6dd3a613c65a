// Cases in which a write gets its blocks bit by bit.

package coretest

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
)

// partialWrite is a write whose blocks become ready bit by bit.
type partialWrite struct {
	p, d     *endpoint
	id       core.TransferID
	op       core.WriteOp // without pairs
	match    *kv.Match
	src, dst [][]kv.BlockID
	ready    []uint32 // per region of P, blocks
	begun    bool
}

func beginPartial(p, d *endpoint, id core.TransferID, src, dst [][]kv.BlockID) *partialWrite {
	p.t.Helper()
	m, err := kv.NewMatch(p.layout.Shapes(), d.layout.Shapes())
	if err != nil {
		p.t.Fatal(err)
	}
	w := &partialWrite{p: p, d: d, id: id, match: m, src: src, dst: dst, ready: make([]uint32, len(p.layout.Regions))}
	w.op = core.WriteOp{ID: id, Peer: d.id, Grant: d.expect(id, p, dst), Bytes: m.Bytes(kv.Selection{Blocks: dst})}
	return w
}

// upTo gives the blocks that are new when so many of each region are ready; nil: all.
func (w *partialWrite) upTo(ready []uint32) {
	w.p.t.Helper()
	pairs, at, err := w.match.PairsBetween(kv.Selection{Blocks: w.src}, kv.Selection{Blocks: w.dst}, w.ready, ready)
	if err != nil {
		w.p.t.Fatal(err)
	}
	op := w.op
	op.Pairs, op.At = pairs, at
	if op.At == nil {
		op.At = []kv.Extent{}
	}
	if w.ready = ready; w.begun {
		w.p.tr.Extend(op)
		return
	}
	w.begun = true
	w.p.wrote[w.id]++
	w.p.tr.Write(op)
}

// each is the same number for all regions.
func (w *partialWrite) each(n uint32) []uint32 {
	return slices.Repeat([]uint32{n}, len(w.p.layout.Regions))
}

// bitByBit: each step lands before the next is given, whatever the step's place in the
// linear order.
func bitByBit(t *testing.T, f Fixture) {
	const n = 60
	src := []regionSpec{{bytes: 4100, blocks: n}, {bytes: 512, stride: 1024, blocks: n}, {bytes: 96 << 10, blocks: n}}
	dst := []regionSpec{{bytes: 4100, stride: 8192, blocks: n}, {bytes: 512, blocks: n}, {bytes: 96 << 10, blocks: n}}
	p, d := pair(t, f, src, dst)
	from, to := [][]kv.BlockID{shuffled(1, n, n)}, [][]kv.BlockID{shuffled(2, n, n)}
	w := beginPartial(p, d, "t", from, to)
	const steps = 7
	for k := range steps {
		// The engine writes what becomes ready just then.
		begin, end := k*n/steps, (k+1)*n/steps
		p.paintFrom(1, from, begin, end)
		ready := w.each(uint32(end))
		if k < steps-1 {
			ready[2] = uint32(begin) // one layer is late by a step
		}
		w.upTo(ready)
		if k < steps-1 {
			d.landed([][]kv.BlockID{to[0][end-1 : end]})
			noReceived(t, d, "t", 0)
		}
	}
	well(t, "t", p, d, d.layout.Bytes(to))
	d.check(t, delivery{transfer: 1, blocks: to})
	noReceived(t, d, "t", 1)
}

// TimeAtRest tests that the time of a transfer, as an outcome of that kind tells it, leaves out that in which there was nothing to move.
// On a slow machine the rest has to be longer until it is more than all else. A side that counts it never gets there.
func TimeAtRest(t *testing.T, f Fixture, kind string) {
	f = f.withDefaults()
	const n, tries = 8, 3
	spec := []regionSpec{{bytes: 4096, blocks: n * tries}}
	p, d := pair(t, f, spec, spec)
	src := [][]kv.BlockID{sequence(0, n)}
	p.paint(1, src)
	of := map[string]*endpoint{"received": d, "written": p}[kind]
	rest := 200 * time.Millisecond
	for try := range tries {
		id := core.TransferID(fmt.Sprint("t", try))
		dst := [][]kv.BlockID{sequence(try*n, n)}
		w := beginPartial(p, d, id, src, dst)
		w.upTo(w.each(n / 2))
		d.landed([][]kv.BlockID{dst[0][n/2-1 : n/2]})
		time.Sleep(rest)
		w.upTo(nil)
		well(t, id, p, d, d.layout.Bytes(dst))
		took := time.Duration(of.sink.All(kind, id)[0].Stats.Nanos)
		if took > 0 && took < rest {
			return
		}
		t.Logf("%s: a transfer that rested for %v took %v", kind, rest, took)
		rest *= 5
	}
	t.Error("the time at rest counts")
}

// partialAtOnce has many partial writes under way, in random steps, beside whole writes.
// Half of the partial writes begin with nothing.
func partialAtOnce(t *testing.T, f Fixture) {
	const n, each = 40, 30
	spec := []regionSpec{{bytes: 4100, blocks: n * each}, {bytes: 20 << 10, blocks: n * each}}
	p, d := pair(t, f, spec, spec)
	src, dst := shuffled(1, n*each, n*each), shuffled(2, n*each, n*each)
	var all []*partialWrite
	var want []delivery
	rnd := rand.New(rand.NewPCG(5, 0))
	for i := range n {
		part := func(ids []kv.BlockID) [][]kv.BlockID { return [][]kv.BlockID{ids[i*each : (i+1)*each]} }
		p.paint(i, part(src))
		w := beginPartial(p, d, core.TransferID(fmt.Sprint("t", i)), part(src), part(dst))
		w.upTo([]uint32{uint32(i % 2 * 3), 0})
		all = append(all, w)
		want = append(want, delivery{transfer: i, blocks: part(dst)})
	}
	for len(all) > 0 {
		i := rnd.IntN(len(all))
		w := all[i]
		ready := []uint32{w.ready[0] + uint32(rnd.IntN(12)), w.ready[1] + uint32(rnd.IntN(12))}
		w.upTo(ready)
		if min(ready[0], ready[1]) >= each {
			all = slices.Delete(all, i, i+1)
		}
	}
	for i := range n {
		well(t, core.TransferID(fmt.Sprint("t", i)), p, d, d.layout.Bytes(want[i].blocks))
	}
	d.check(t, want...)
}

// atRest lets a write rest when its first half has landed. It calls cut, and then after.
func atRest(t *testing.T, f Fixture, cut func(w *partialWrite), after func(w *partialWrite)) {
	spec := dense(32<<10, 40)
	p, d := pair(t, f, spec, spec)
	src, dst := [][]kv.BlockID{sequence(0, 40)}, [][]kv.BlockID{shuffled(1, 40, 40)}
	p.paint(1, src)
	w := beginPartial(p, d, "t", src, dst)
	w.upTo(w.each(20))
	for i := range 20 {
		d.landed([][]kv.BlockID{dst[0][i : i+1]})
	}
	cut(w)
	after(w)
}

func (w *partialWrite) half() delivery {
	return delivery{transfer: 1, blocks: w.dst, part: true}
}

func partialStopped(t *testing.T, f Fixture) {
	atRest(t, f, func(w *partialWrite) { w.p.tr.Stop("t") }, func(w *partialWrite) {
		if o := w.p.sink.Wait("written", "t", 1); o.Err == nil {
			t.Errorf("a write of which a half was given ended well: %+v", o)
		}
		w.upTo(nil) // is too late, and no error
		w.d.revoke("t")
		w.d.check(t, w.half())
		noReceived(t, w.d, "t", len(w.d.sink.All("received", "t")))
		// The id is free again.
		blocks := [][]kv.BlockID{sequence(0, 40)}
		w.p.paint(2, blocks)
		w.p.write("t", w.d, w.d.expect("t", w.p, blocks), blocks, blocks)
		if o := w.p.sink.Wait("written", "t", 2); o.Err != nil {
			t.Errorf("the id is not free after a write was stopped: %v", o.Err)
		}
		w.d.sink.Wait("received", "t", 1)
		w.d.check(t, delivery{transfer: 2, blocks: blocks})
	})
}

func partialRevoked(t *testing.T, f Fixture) {
	var frozen []byte
	atRest(t, f, func(w *partialWrite) {
		w.d.revoke("t")
		frozen = w.d.snapshot()
	}, func(w *partialWrite) {
		w.upTo(nil)
		if o := w.p.sink.Wait("written", "t", 1); o.Err == nil && !f.OneSided {
			t.Errorf("a write to a revoked grant ended well: %+v", o)
		}
		if i := w.d.changed(frozen); i >= 0 {
			t.Errorf("byte %d changed after Revoke had returned", i)
		}
		noReceived(t, w.d, "t", 0)
	})
}

func partialTooMuch(t *testing.T, f Fixture) {
	atRest(t, f, func(w *partialWrite) {
		again := w.op
		var err error
		if again.Pairs, again.At, err = w.match.PairsBetween(kv.Selection{Blocks: w.src}, kv.Selection{Blocks: w.dst}, nil, nil); err != nil {
			t.Fatal(err)
		}
		w.p.tr.Extend(again)
	}, func(w *partialWrite) {
		if o := w.p.sink.Wait("written", "t", 1); o.Err == nil {
			t.Errorf("a write was given more than it has, and ended well: %+v", o)
		}
		w.d.revoke("t")
		w.d.check(t, w.half())
	})
}

func partialSenderGone(t *testing.T, f Fixture) {
	atRest(t, f, func(w *partialWrite) { w.p.close() }, func(w *partialWrite) {
		w.d.sink.waitFor("word that the sender is gone", func() (Outcome, bool) {
			for _, o := range w.d.sink.list {
				if o.Kind == "down" && o.Peer == w.p.id && o.Err != nil || o.Kind == "received" {
					return o, true
				}
			}
			return Outcome{}, false
		})
		w.d.revoke("t")
		w.d.check(t, w.half())
	})
}

func partialReceiverGone(t *testing.T, f Fixture) {
	var frozen []byte
	atRest(t, f, func(w *partialWrite) {
		w.d.close()
		frozen = w.d.snapshot()
	}, func(w *partialWrite) {
		w.upTo(nil)
		if o := w.p.sink.Wait("written", "t", 1); o.Err == nil {
			t.Errorf("written without an error, but the receiver was closed before the end")
		}
		if i := w.d.changed(frozen); i >= 0 {
			t.Errorf("byte %d changed after Close had returned", i)
		}
	})
}

func partialUnknown(t *testing.T, f Fixture) {
	p, d := pair(t, f, dense(4096, 4), dense(4096, 4))
	p.tr.Extend(core.WriteOp{ID: "nobody's", Peer: d.id, Grant: make([]byte, 16), Bytes: 4096, Pairs: []kv.Pair{{Length: 4096}}, At: []kv.Extent{{Pairs: 1}}})
	blocks := [][]kv.BlockID{sequence(0, 4)}
	p.paint(1, blocks)
	moves(t, p, d, "t", blocks)
	d.check(t, delivery{transfer: 1, blocks: blocks})
}
