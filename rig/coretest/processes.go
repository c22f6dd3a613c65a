package coretest

import (
	"errors"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
)

// ProcessSuite is the part of the contract that needs an agent in a process of
// its own: one that is stopped or killed while bytes move. Every Transport that
// crosses processes passes it; Fixture.Remote says how.
func ProcessSuite(t *testing.T, f Fixture) {
	runCases(t, f.withDefaults(), []suiteCase{
		{"between processes", betweenProcesses},
		{"sender stopped, revoked, continued", senderStopped},
		{"sender stopped, receiver closed, continued", senderStoppedClose},
		{"sender killed", senderKilled},
		{"receiver killed", receiverKilled},
		{"receiver stopped beside another", receiverStopped},
		{"receiver stopped, one of two writes stopped", oneOfTwoStopped},
		{"receiver stopped, sender closed, continued", receiverStoppedClose},
	})
}

func (e *endpoint) freeze() { e.t.Helper(); e.tr.(*remote).freeze() }
func (e *endpoint) thaw()   { e.t.Helper(); e.tr.(*remote).thaw() }

// kill ends a remote as the kernel ends a process: it says no goodbye.
func (e *endpoint) kill() {
	e.tr.(*remote).kill()
	e.hub.leave(e.id, e.tr)
	e.closed = true
}

// within fails the test if f does not return; f's goroutine is then left behind.
func within(t *testing.T, what string, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	select {
	case <-done:
	case <-time.After(patience):
		t.Fatalf("%s has not returned within %v\n%s", what, patience, goroutines())
	}
}

// goroutines is where all of them are: what waits for what.
func goroutines() string {
	b := make([]byte, 1<<20)
	return string(b[:runtime.Stack(b, true)])
}

func betweenProcesses(t *testing.T, f Fixture) {
	spec := dense(4100, 300)
	p, d := openRemote(t, f, "sender", spec), openRemote(t, f, "receiver", spec)
	connect(t, d, p)
	src, dst := [][]kv.BlockID{shuffled(1, 200, 300)}, [][]kv.BlockID{shuffled(2, 200, 300)}
	p.paint(1, src)
	p.write("t", d, d.expect("t", p, dst), src, dst)
	well(t, "t", p, d, d.layout.Bytes(dst))
	d.check(t, delivery{transfer: 1, blocks: dst})
	p.check(t, delivery{transfer: 1, blocks: src})
}

// refused checks how a sender hears of a transfer that its receiver gave up.
func refused(t *testing.T, f Fixture, o Outcome) {
	t.Helper()
	if f.OneSided && o.Err == nil {
		return
	}
	if !errors.Is(o.Err, core.ErrNotExpected) && !errors.Is(o.Err, core.ErrConnectionLost) {
		t.Errorf("the sender of a transfer that was given up learns %v; want that it is not expected, or that the connection is lost", o.Err)
	}
}

// unchanged checks that every byte is as it was.
func (e *endpoint) unchanged(frozen []byte, since string) {
	e.t.Helper()
	if i := e.changed(frozen); i >= 0 {
		place, _ := e.place(i)
		e.t.Errorf("%s: a byte changed after %s: %d, %s", e.id, since, i, place)
	}
}

// senderStopped is the fence: a sender that is stopped anywhere in a transfer
// changes no byte after Revoke, whatever it still does when it runs on.
func senderStopped(t *testing.T, f Fixture) {
	const rounds = 5 // each round stops the sender further on
	for round := range rounds {
		var frozen []byte
		told := 0
		midTransferOf(t, f, openRemote, open,
			func(p, d *endpoint) {
				n := int(d.layout.Groups[0].NumBlocks)
				d.landed([][]kv.BlockID{shuffled(1, n, n)[n*round/(2*rounds):][:1]})
				p.freeze()
				within(d.t, "Revoke of a stopped sender's transfer", func() { d.revoke("t") })
				told = len(d.sink.All("received", "t"))
				d.paint(9, [][]kv.BlockID{sequence(0, n)}) // the blocks are the engine's again
				frozen = d.snapshot()
				p.thaw()
			},
			func(p, d *endpoint, dst [][]kv.BlockID) {
				p.giveRest()
				if o := p.sink.Wait("written", "t", 1); told == 0 {
					refused(d.t, f, o)
				}
				p.close()
				d.down(p.id, 1) // what was on its way is over
				d.unchanged(frozen, "Revoke had returned")
				noReceived(d.t, d, "t", told)
			})
	}
}

func senderStoppedClose(t *testing.T, f Fixture) {
	midTransferOf(t, f, openRemote, open,
		func(p, d *endpoint) { p.freeze() },
		func(p, d *endpoint, dst [][]kv.BlockID) {
			d.close()
			ended := arrived(d)
			d.paint(9, dst)
			frozen := d.snapshot()
			p.thaw()
			p.giveRest()
			if o := p.sink.Wait("written", "t", 1); !ended {
				refused(d.t, f, o)
			}
			p.down(d.id, 1)
			p.close()
			d.unchanged(frozen, "Close had returned")
		})
}

// senderKilled: the loss of a sender is told once, when no byte of it lands any more, and nothing of its memory is mapped.
func senderKilled(t *testing.T, f Fixture) {
	before := 0
	midTransferOf(t, f, openRemote, func(t *testing.T, f Fixture, id core.AgentID, specs []regionSpec) *endpoint {
		d := open(t, f, id, specs)
		if f.Opened == nil {
			return d
		}
		before = f.Opened()
		d.sink.looks = func(o Outcome) {
			if n := f.Opened() - before; o.Err != nil && n != 0 {
				t.Errorf("%d mappings of a killed sender's memory are there when %+v is told", n, o)
			}
		}
		return d
	},
		func(p, d *endpoint) {
			if f.Opened != nil && f.Opened() == before {
				d.t.Error("nothing of the sender's memory is mapped: Fixture.Opened shows nothing")
			}
			p.kill()
		},
		func(p, d *endpoint, dst [][]kv.BlockID) {
			o := d.sink.Wait("received", "t", 1)
			if o.Err != nil && !errors.Is(o.Err, core.ErrConnectionLost) {
				d.t.Errorf("received from a killed sender: %v, want that the connection is lost", o.Err)
			}
			d.check(d.t, delivery{transfer: 1, blocks: dst, part: o.Err != nil})
			d.paint(9, dst)
			frozen := d.snapshot()
			d.down(p.id, 1)
			d.unchanged(frozen, "the end was told")
		})
}

func receiverKilled(t *testing.T, f Fixture) {
	midTransferOf(t, f, open, openRemote,
		func(p, d *endpoint) { d.kill() },
		func(p, d *endpoint, dst [][]kv.BlockID) {
			p.giveRest()
			o := p.sink.Wait("written", "t", 1)
			if o.Err != nil && !errors.Is(o.Err, core.ErrConnectionLost) {
				d.t.Errorf("written to a killed receiver: %v, want that the connection is lost", o.Err)
			}
			d.check(d.t, delivery{transfer: 1, blocks: dst, part: o.Err != nil})
			if o.Err != nil || !f.OneSided { // else nothing was under way when the receiver died
				p.down(d.id, 1)
			}
		})
}

// receiverStopped: a receiver that takes no bytes holds up no other receiver, and the write
// to it can be stopped. The write gets a half of its blocks when its receiver has stopped, so it cannot have ended before.
func receiverStopped(t *testing.T, f Fixture) {
	const blockBytes = 256<<10 + 4
	n := f.BigBytes / blockBytes
	spec := dense(blockBytes, uint32(n))
	p, d := open(t, f, "sender", spec), openRemote(t, f, "receiver", spec)
	connect(t, d, p)
	src, dst := [][]kv.BlockID{sequence(0, n)}, [][]kv.BlockID{shuffled(1, n, n)}
	p.paint(1, src)
	w := beginPartial(p, d, "t", src, dst)
	w.upTo(w.each(uint32(n / 2)))
	d.landed(dst)
	d.freeze()
	w.upTo(nil)
	opens := open
	if f.Apart {
		opens = openRemote
	}
	fast := opens(t, f, "fast", dense(blockBytes, 8))
	connect(t, fast, p)
	few := [][]kv.BlockID{sequence(0, 8)}
	for i := range 8 {
		moves(t, p, fast, core.TransferID(fmt.Sprint("fast", i)), few)
	}
	fast.check(t, delivery{transfer: 1, blocks: few})
	if ended := p.sink.All("written", "t"); len(ended) != 0 && !f.OneSided {
		t.Errorf("the write to a receiver that takes no bytes has ended: %+v", ended)
	}
	p.tr.Stop("t")
	o := p.sink.Wait("written", "t", 1)
	if o.Err == nil {
		d.check(t, delivery{transfer: 1, blocks: dst})
	}
	p.paint(2, src) // the blocks are the engine's again
	d.thaw()
	p.close()
	d.down(p.id, 1)
	d.check(t, delivery{transfer: 1, blocks: dst, part: o.Err != nil, later: f.late(2)})
}

// oneOfTwoStopped: a stopped write to a peer that takes no bytes gives its blocks back.
// The other write to the peer ends well, or as with a broken connection. The tries are midTransfer's.
func oneOfTwoStopped(t *testing.T, f Fixture) {
	const tries = 4
	size := f.BigBytes
	for try := range tries + 1 {
		caught, held := false, try == tries
		t.Run(fmt.Sprintf("try%d", try), func(t *testing.T) {
			if caught = stopOneOfTwo(t, f, size, held); held && !caught {
				t.Error("a write has ended well whose last block was not given")
			}
		})
		if caught || f.OneSided || t.Failed() {
			return
		}
		if size = min(2*size, 512<<20); try+1 == tries { // all was there before the receiver stopped
			size = f.BigBytes
		}
	}
}

// stopOneOfTwo is one try. It says whether the write that was stopped was under way. If it is held, its blocks are given as those of
// midTransfer's last try.
func stopOneOfTwo(t *testing.T, f Fixture, size int, held bool) bool {
	const blockBytes = 256 << 10
	n := size / blockBytes / 2
	spec := dense(blockBytes, uint32(2*n))
	p, d := open(t, f, "sender", spec), openRemote(t, f, "receiver", spec)
	connect(t, d, p)
	one, two := [][]kv.BlockID{sequence(0, n)}, [][]kv.BlockID{sequence(n, n)}
	p.paint(1, one)
	p.paint(2, two)
	rest := func() {}
	if held {
		w := beginPartial(p, d, "stopped", one, one)
		w.upTo(w.each(1))
		rest = func() { w.upTo(w.each(uint32(n - 1))) }
	} else {
		p.write("stopped", d, d.expect("stopped", p, one), one, one)
	}
	p.write("other", d, d.expect("other", p, two), two, two)
	d.landed(one)
	rest()
	d.freeze()
	p.tr.Stop("stopped")
	first := p.sink.Wait("written", "stopped", 1)
	p.paint(3, one) // the blocks are the engine's again
	d.thaw()
	o := p.sink.Wait("written", "other", 1)
	switch {
	case o.Err == nil:
		well(t, "other", p, d, d.layout.Bytes(two))
	case !errors.Is(o.Err, core.ErrConnectionLost):
		t.Errorf("the other write ended with %v", o.Err)
	}
	p.close()
	d.down(p.id, 1)
	d.check(t, delivery{transfer: 1, blocks: one, part: first.Err != nil, later: f.late(3)}, delivery{transfer: 2, blocks: two, part: o.Err != nil})
	return first.Err != nil
}

func receiverStoppedClose(t *testing.T, f Fixture) {
	midTransferOf(t, f, open, openRemote,
		func(p, d *endpoint) { d.freeze() },
		func(p, d *endpoint, dst [][]kv.BlockID) {
			p.close() // says what came of the write
			ended := p.sink.All("written", "t")[0].Err == nil
			p.paint(2, [][]kv.BlockID{sequence(0, len(dst[0]))})
			d.thaw()
			d.down(p.id, 1)
			d.check(d.t, delivery{transfer: 1, blocks: dst, part: !ended, later: f.late(2)})
		})
}
