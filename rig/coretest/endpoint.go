// An agent of the suite, and the steps that most cases are made of.

package coretest

import (
	"fmt"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
)

// endpoint is an agent of the suite: memory, and a transport over it.
type endpoint struct {
	*arena
	t      *testing.T
	id     core.AgentID
	tr     core.Transport
	sink   *Recorder
	wrote  map[core.TransferID]int // calls of Write
	closed bool
	hub    *signalHub
	rest   func() // gives what midTransfer has held back of its write; nil: nothing
}

func open(t *testing.T, f Fixture, id core.AgentID, specs []regionSpec) *endpoint {
	t.Helper()
	var file *os.File
	device := f.deviceOf(id)
	if device != nil && len(device.Memories) == 0 {
		file = newMemory(t)
	}
	return openOn(t, f, id, newArena(t, specs, file, device), func(a *arena, sink *Recorder) core.Transport {
		return f.Open(t, id, a.layout, sink, f.hub.from(id))
	})
}

func openOn(t *testing.T, f Fixture, id core.AgentID, a *arena, start func(a *arena, sink *Recorder) core.Transport) *endpoint {
	t.Helper()
	e := &endpoint{arena: a, t: t, id: id, sink: NewRecorder(t, string(id)), wrote: map[core.TransferID]int{}, hub: f.hub}
	e.tr = start(a, e.sink)
	e.hub.enter(id, e.tr)
	t.Cleanup(e.close)
	return e
}

// close closes the transport and checks all that its sink was told.
func (e *endpoint) close() {
	if e.closed {
		return
	}
	e.closed = true
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := e.tr.Close(); err != nil {
			e.t.Errorf("%s: Close: %v", e.id, err)
		}
		e.hub.leave(e.id, e.tr)
		e.sink.Shut()
	}()
	select {
	case <-done:
	case <-time.After(patience):
		e.t.Errorf("%s: Close has not returned within %v\n%s", e.id, patience, goroutines())
	}
	for _, o := range e.sink.All("written", "") {
		if e.wrote[o.ID] == 0 {
			e.t.Errorf("%s: an outcome of %q, which was not written", e.id, o.ID)
		}
	}
	for id, wrote := range e.wrote {
		if n := len(e.sink.All("written", id)); n != wrote {
			e.t.Errorf("%s: %d outcomes of %d writes of %q", e.id, n, wrote, id)
		}
	}
}

// connect makes the way from sender to receiver, as D does when it has found P.
func connect(t *testing.T, receiver, sender *endpoint) {
	t.Helper()
	connectWith(t, receiver, sender, sender.admit(receiver.id))
}

func connectWith(t *testing.T, receiver, sender *endpoint, ticket []byte) {
	t.Helper()
	if err := receiver.tr.Connect(sender.id, sender.tr.Endpoint(), ticket); err != nil {
		t.Fatalf("%s: Connect(%s, %q): %v", receiver.id, sender.id, sender.tr.Endpoint(), err)
	}
}

func (e *endpoint) admit(peer core.AgentID) []byte {
	e.t.Helper()
	ticket, err := e.tr.Admit(peer)
	if err != nil || len(ticket) < 16 || len(ticket) > 64 {
		e.t.Fatalf("%s: Admit(%s): a ticket of %d bytes, %v; want 16 to 64", e.id, peer, len(ticket), err)
	}
	return ticket
}

// revoke wants a revoke to be sure that nothing can land any more.
func (e *endpoint) revoke(id core.TransferID) {
	if err := e.tr.Revoke(id); err != nil {
		e.t.Errorf("%s: Revoke(%q): %v", e.id, id, err)
	}
}

// down waits for the n-th word (from 1) that the way to a peer broke.
func (e *endpoint) down(peer core.AgentID, n int) Outcome {
	e.t.Helper()
	o := e.sink.waitFor(fmt.Sprintf("PeerDown %d of %s", n, peer), func() (Outcome, bool) {
		k := 0
		for _, o := range e.sink.list {
			if o.Kind == "down" && o.Peer == peer {
				if k++; k == n {
					return o, true
				}
			}
		}
		return Outcome{}, false
	})
	if o.Err == nil {
		e.t.Errorf("%s: PeerDown(%s) without a cause", e.id, peer)
	}
	return o
}

// moves checks that a small transfer ends well between two agents.
func moves(t *testing.T, p, d *endpoint, id core.TransferID, blocks [][]kv.BlockID) {
	t.Helper()
	p.write(id, d, d.expect(id, p, blocks), blocks, blocks)
	well(t, id, p, d, d.layout.Bytes(blocks))
}

func pair(t *testing.T, f Fixture, src, dst []regionSpec) (sender, receiver *endpoint) {
	t.Helper()
	sender, receiver = open(t, f, "sender", src), open(t, f, "receiver", dst)
	connect(t, receiver, sender)
	return sender, receiver
}

func (e *endpoint) expect(id core.TransferID, from *endpoint, dst [][]kv.BlockID) []byte {
	e.t.Helper()
	grant, err := e.tr.Expect(id, from.id, e.layout.Segments(dst))
	if err != nil {
		e.t.Fatalf("%s: Expect(%q): %v", e.id, id, err)
	}
	return grant
}

func (e *endpoint) write(id core.TransferID, to *endpoint, grant []byte, src, dst [][]kv.BlockID) {
	e.t.Helper()
	pairs, err := e.layout.Plan(src, to.layout.Shapes(), dst)
	if err != nil {
		e.t.Fatal(err)
	}
	e.wrote[id]++
	e.tr.Write(core.WriteOp{ID: id, Peer: to.id, Grant: grant, Pairs: pairs})
}

// well checks that a transfer ended well on both sides with so many bytes.
func well(t *testing.T, id core.TransferID, sender, receiver *endpoint, want uint64) {
	t.Helper()
	for _, o := range []Outcome{receiver.sink.Wait("received", id, 1), sender.sink.Wait("written", id, 1)} {
		if o.Err != nil || o.Stats.Bytes != want {
			t.Errorf("%s %q: %d bytes, %v; want %d bytes and no error", o.Kind, id, o.Stats.Bytes, o.Err, want)
		}
		if want > 0 && (o.Stats.Segments == 0 || o.Stats.Nanos < 0) {
			t.Errorf("%s %q: stats %+v", o.Kind, id, o.Stats)
		}
	}
}

// transferOnce moves one transfer and checks every byte on both sides.
func transferOnce(t *testing.T, f Fixture, srcSpec, dstSpec []regionSpec, src, dst [][]kv.BlockID) {
	t.Helper()
	p, d := pair(t, f, srcSpec, dstSpec)
	p.paint(7, src)
	grant := d.expect("t", p, dst)
	p.write("t", d, grant, src, dst)
	well(t, "t", p, d, d.layout.Bytes(dst))
	d.check(t, delivery{transfer: 7, blocks: dst})
	p.check(t, delivery{transfer: 7, blocks: src})
	if n := len(d.sink.All("received", "t")); n != 1 {
		t.Errorf("received was told %d times", n)
	}
}

func sequence(from, n int) []kv.BlockID {
	out := make([]kv.BlockID, n)
	for i := range out {
		out[i] = kv.BlockID(from + i)
	}
	return out
}

// shuffled gives n different ids below limit, the same in each run.
func shuffled(seed uint64, n, limit int) []kv.BlockID {
	out := make([]kv.BlockID, n)
	for i, p := range rand.New(rand.NewPCG(seed, 0)).Perm(limit)[:n] {
		out[i] = kv.BlockID(p)
	}
	return out
}

func dense(bytes uint64, blocks uint32) []regionSpec {
	return []regionSpec{{bytes: bytes, blocks: blocks}}
}

func noReceived(t *testing.T, d *endpoint, id core.TransferID, want int) {
	t.Helper()
	if all := d.sink.All("received", id); len(all) != want {
		t.Errorf("received of %q was told %d times, want %d: %+v", id, len(all), want, all)
	}
}
