package tcp

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// TestNoSlateForAFrameAhead: there is no memory for the records of a frame whose first copy was begun ahead. The transfer's end waits for
// that copy, and the next transfer's bytes are its own.
func TestNoSlateForAFrameAhead(t *testing.T) {
	leaktest.Check(t)
	m := newGates(4, gateBytes)
	cfg := patient
	cfg.Encrypt = EncryptMust
	p := onGates(t, cfg, m)
	p.sender.tenure = time.Hour
	d := newSizedAgent(t, Config{Encrypt: EncryptMust, Streams: 1, StallTimeout: time.Hour}, 4, gateBytes)
	for range 8 {
		s, err := newSlate()
		mustBe(t, err)
		d.slates.give(s)
	}
	mustBe(t, d.Connect("p", p.Endpoint(), p.admit(t, "d")))
	p.stream(t, "d")
	write := func(id core.TransferID, n int) {
		grant := d.expect(t, id, "p", oneBlock(n))
		pairs := []kv.Pair{{SrcOffset: uint64(n) * gateBytes, Length: gateBytes}}
		p.Write(core.WriteOp{ID: id, Peer: "d", Grant: grant[:], Pairs: pairs})
	}
	write("t0", 0)
	write("t1", 1)
	m.begins(t, 0, 2)
	p.slates.mu.Lock()
	p.slates.closed = true // it keeps no spare one
	p.slates.mu.Unlock()
	var was unix.Rlimit
	mustBe(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &was))
	few := was
	few.Cur = 3
	mustBe(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &few))
	restore := func() { mustBe(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &was)) }
	defer restore()
	m.allow(0, 1)
	told := func() bool { return len(p.sink.All("written", "t1")) > 0 }
	until(t, "the copy is waited for", func() bool { return told() || m.sees(func() bool { return m.waited[0] == 2 }) })
	if told() {
		t.Error("the end was told while a copy may read")
	}
	m.allow(0, all)
	wantNamed(t, p.sink.Wait("written", "t1", 1).Err, "memory for encrypted records")
	restore()
	write("t2", 2)
	if o := d.sink.Wait("received", "t2", 1); o.Err != nil {
		t.Error(o.Err)
	}
	if !bytes.Equal(d.mem[2*gateBytes:3*gateBytes], p.mem[2*gateBytes:3*gateBytes]) {
		t.Error("another transfer's bytes came")
	}
}

// aheadAtItsTurn is a stream that has written a frame of "t0", and has a frame of "t1" ahead. It goes on when the gate keeps no copy.
func aheadAtItsTurn(t *testing.T, m *gates) (p *agent, d *rawConn, grants [2]random) {
	t.Helper()
	m.keep(1)
	p, d, grants = ahead(t, patient, m, time.Hour)
	d.takes(grants[0], gateBlock(0, 0))
	until(t, "the frame is written", func() bool { return m.sees(func() bool { return m.keeping }) })
	return p, d, grants
}

// TestStreamOfBeforeGoesOnWithNothing: D has opened the stream anew when the turn of the frame comes that the former stream has ahead. The
// new one sends it.
func TestStreamOfBeforeGoesOnWithNothing(t *testing.T) {
	m := newGates(4, gateBytes)
	p, d, grants := aheadAtItsTurn(t, m)
	d.say(frameBytes(header{kind: frameAck, key: grants[0], length: gateBytes})) // else D is asked
	until(t, "D's answer is there", func() bool {
		p.sender.mu.Lock()
		defer p.sender.mu.Unlock()
		return p.sender.byID["t0"].acked
	})
	next := dial(t, p)
	next.say(p.hello(t, "d", 1, 2, headerSize+gateBytes))
	until(t, "the stream is opened anew", func() bool {
		p.sender.mu.Lock()
		defer p.sender.mu.Unlock()
		return p.sender.peers["d"].slots[1].attempt == 2
	})
	m.allow(0, all)
	m.keep(0)
	next.takes(grants[1], gateBlock(0, 1))
	next.acks(p, "t1", grants[1], gateBytes)
	if o := p.sink.Wait("written", "t0", 1); o.Err != nil {
		t.Error(o.Err)
	}
}

// TestStopAtTheTurnOfAFrameAhead: no byte of a frame is sent that was ahead when its transfer was stopped.
func TestStopAtTheTurnOfAFrameAhead(t *testing.T) {
	m := newGates(4, gateBytes)
	p, d, _ := aheadAtItsTurn(t, m)
	p.Stop("t1")
	m.allow(0, all)
	m.keep(0)
	d.takes(p.writes("t2", gateBlock(0, 2)), gateBlock(0, 2))
	if o := p.sink.Wait("written", "t1", 1); o.Err == nil {
		t.Error("a write that was stopped ended well")
	}
}

// TestIdleStreamGetsTheFrameAhead: a stream has nothing to send, and another one has a frame ahead, whose peer does not take the frame
// before it. The stream that is idle sends it.
func TestIdleStreamGetsTheFrameAhead(t *testing.T) {
	m := newGates(4, gateBytes)
	p, d, grants := ahead(t, patient, m, time.Hour)
	m.allow(0, all)
	idle := dial(t, p)
	idle.say(p.hello(t, "d", 0, 2, 0))
	until(t, "the frame goes by the stream that is idle", func() bool {
		p.sender.mu.Lock()
		defer p.sender.mu.Unlock()
		sent := p.sender.byID["t1"].sent
		return len(sent) > 0 && sent[0].number == 0
	})
	idle.takes(grants[1], gateBlock(0, 1))
	idle.acks(p, "t1", grants[1], gateBytes)
	d.takes(grants[0], gateBlock(0, 0))
	d.acks(p, "t0", grants[0], gateBytes)
}

// TestHostMemoryBeforeAFrameAhead: the peer does not take a part in host memory. The frame ahead is given back, and copied again at its
// turn, but not as for a slow peer: its slots were not held up by a part of its own.
func TestHostMemoryBeforeAFrameAhead(t *testing.T) {
	leaktest.Check(t)
	const half = gateBytes / 2
	m := newGates(4, gateBytes)
	m.host = 1
	m.allow(0, all)
	cfg := patient
	cfg.FrameBytes = 3 * half
	p := onGates(t, cfg, m)
	d := deafTo(t, p)
	hello := p.hello(t, "d", 0, 1, 0)
	mixed := []gatePart{{0, 0, 8}, {1, 0, 3*half - 8}}
	first, second := p.writes("t0", mixed...), p.writes("t1", gateBlock(0, 1))
	d.say(hello)
	m.begins(t, 0, 2)
	until(t, "the frame ahead is given back", func() bool {
		p.sender.mu.Lock()
		defer p.sender.mu.Unlock()
		return p.sender.byID["t1"].frames == 0
	})
	d.takes(first, mixed...)
	d.takes(second, gateBlock(0, 1))
	var n int
	m.sees(func() bool { n = m.sizes[0][2]; return true })
	if n != gateBytes {
		t.Errorf("the copy at its turn has %d bytes", n)
	}
}

// TestStreamEndsWithAFrameAhead: the stream breaks. Both frames come by the next one.
func TestStreamEndsWithAFrameAhead(t *testing.T) {
	m := newGates(4, gateBytes)
	p, d, grants := ahead(t, patient, m, time.Hour)
	_ = d.Close()
	until(t, "the stream gives the frame back", func() bool { return m.sees(func() bool { return m.waited[0] == 2 }) })
	m.allow(0, all)
	c := dial(t, p)
	c.say(p.hello(t, "d", 1, 2, 0))
	h := c.next()
	first := 0
	if h.key == grants[1] {
		first = 1
	}
	c.rest(h, gateBlock(0, first))
	c.takes(grants[1-first], gateBlock(0, 1-first))
	for i, grant := range grants {
		c.acks(p, core.TransferID(fmt.Sprint("t", i)), grant, gateBytes)
	}
}

// TestUnusedStreamHasNothingAhead: a stream that is not used any more does not go on with the frame that it has ahead.
func TestUnusedStreamHasNothingAhead(t *testing.T) {
	cfg := patient
	cfg.First = 1
	m := newGates(4, gateBytes)
	p, d, grants := ahead(t, cfg, m, time.Hour)
	other := p.writes("t2", gateBlock(0, 2)) // the used one has a frame of its own
	used := deafTo(t, p)
	used.say(p.hello(t, "d", 0, 2, 0))
	m.begins(t, 0, 3)
	m.allow(0, all)
	d.takes(grants[0], gateBlock(0, 0))
	begun := false
	until(t, "the frame is not ahead any more", func() bool {
		p.sender.mu.Lock()
		defer p.sender.mu.Unlock()
		out := p.sender.byID["t1"]
		begun = len(out.sent) > 0
		return out.ahead == 0
	})
	if begun {
		t.Fatal("the frame that was ahead goes by a stream that is not used")
	}
	used.takes(other, gateBlock(0, 2))
	used.takes(grants[1], gateBlock(0, 1))
	for i, grant := range append(grants[:], other) {
		used.acks(p, core.TransferID(fmt.Sprint("t", i)), grant, gateBytes)
	}
}
