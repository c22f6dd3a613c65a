package coretest

import (
	"testing"
	"time"

	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/kv"
)

// Halt is a device that can be made to begin nothing for a time.
type Halt struct {
	On      func(bool)
	Waiting func() uint64 // what it has been given to do meanwhile
}

// tooSoon is how long a case waits for what must not happen while a device is halted. If a defect is planted it does happen, if late.
var tooSoon = func() time.Duration {
	if fault.Planted() {
		return 5 * time.Second
	}
	return 100 * time.Millisecond
}()

// tooEarly says whether something comes while a device is halted. It waits no longer than that.
func tooEarly(comes func() bool) bool {
	for end := time.Now().Add(tooSoon); !comes(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			return false
		}
	}
	return true
}

// HaltedSuite is what a transport promises of copies that a device has been given and has not made, or of a flush that makes a card's bytes count.
// Of the two sides one has its memory on a device, and that has a Halt.
func HaltedSuite(t *testing.T, f Fixture) {
	sends := f.deviceOf("sender") != nil
	if sends == (f.deviceOf("receiver") != nil) {
		t.Fatal("one side's memory must lie on a device")
	}
	cases := []suiteCase{
		{"no report before the copies", haltedReport},
		{"revoke waits for the copies", haltedRevoke},
	}
	if sends {
		cases = []suiteCase{
			{"nothing is sent before the copies", haltedSend},
			{"stop waits for the copies", haltedStop},
		}
	}
	runCases(t, f.withDefaults(), cases)
}

// haltedWrite begins a transfer between agents that have moved one before. It returns when copies wait for the device, or when the
// transfer was reported without, which a case then finds.
func haltedWrite(t *testing.T, f Fixture, halt *Halt) (p, d *endpoint, src, dst [][]kv.BlockID) {
	t.Helper()
	p, d = pair(t, f, dense(4096, 8), dense(4096, 8))
	src, dst = [][]kv.BlockID{sequence(0, 4)}, [][]kv.BlockID{sequence(2, 4)}
	p.paint(1, src)
	moves(t, p, d, "before", src)
	d.wipe()
	halt.On(true)
	t.Cleanup(func() { halt.On(false) }) // before the agents are closed
	p.write("t", d, d.expect("t", p, dst), src, dst)
	for end := time.Now().Add(patience); halt.Waiting() == 0 && len(d.sink.All("received", "t")) == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("the device has nothing to do within %v", patience)
		}
	}
	return p, d, src, dst
}

// haltedReport: D reports a transfer when its bytes are in its memory.
func haltedReport(t *testing.T, f Fixture) {
	halt := f.deviceOf("receiver").Halt
	p, d, src, dst := haltedWrite(t, f, halt)
	if tooEarly(func() bool { return len(d.sink.All("received", "t")) > 0 }) {
		t.Error("the transfer was reported before its bytes were copied")
	}
	halt.On(false)
	well(t, "t", p, d, p.layout.Bytes(src))
	d.check(t, delivery{transfer: 1, blocks: dst})
}

// haltedRevoke: nothing lands when Revoke has returned.
func haltedRevoke(t *testing.T, f Fixture) {
	halt := f.deviceOf("receiver").Halt
	p, d, _, _ := haltedWrite(t, f, halt)
	revoked := make(chan error, 1)
	go func() { revoked <- d.tr.Revoke("t") }()
	select {
	case err := <-revoked:
		revoked <- err
		t.Error("Revoke returned while bytes are copied to the blocks")
	case <-time.After(tooSoon):
	}
	halt.On(false)
	select {
	case err := <-revoked:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(patience):
		t.Fatal("the copies have ended, and Revoke does not return")
	}
	frozen := d.snapshot()
	p.sink.Wait("written", "t", 1)
	if i := d.changed(frozen); i >= 0 {
		t.Errorf("byte %d changed after Revoke had returned", i)
	}
}

// haltedSend: P sends bytes when they are copied.
func haltedSend(t *testing.T, f Fixture) {
	halt := f.deviceOf("sender").Halt
	p, d, src, dst := haltedWrite(t, f, halt)
	if tooEarly(func() bool { return d.touched(dst) || len(d.sink.All("received", "t")) > 0 }) {
		t.Error("bytes were sent before they were copied")
	}
	halt.On(false)
	well(t, "t", p, d, p.layout.Bytes(src))
	d.check(t, delivery{transfer: 1, blocks: dst})
}

// haltedStop: P's blocks are the engine's again when the end of a write is told.
func haltedStop(t *testing.T, f Fixture) {
	halt := f.deviceOf("sender").Halt
	p, d, src, dst := haltedWrite(t, f, halt)
	p.tr.Stop("t")
	if tooEarly(func() bool { return len(p.sink.All("written", "t")) > 0 }) {
		t.Error("the end was told while the blocks are copied from")
		p.paint(2, src)
	}
	halt.On(false)
	p.sink.Wait("written", "t", 1)
	p.paint(2, src)
	d.revoke("t")
	d.check(t, delivery{transfer: 1, blocks: dst, part: len(d.sink.All("received", "t")) == 0})
}
