package tcp

import (
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// patient is for tests in which no time may end a wait.
var patient = Config{StallTimeout: time.Hour, DialTimeout: bound}

// TestCopiesGoOnBeyondAFrame: while the first copies of a frame have not ended, those of the next one begin, as many as a stream has
// slots for. The next frame is of the same transfer or of another one, and parts of it may lie in host memory or on another device.
func TestCopiesGoOnBeyondAFrame(t *testing.T) {
	const half = gateBytes / 2
	on := func(device int, at ...int) (parts []gatePart) {
		for _, at := range at {
			parts = append(parts, gatePart{device, at * half, half})
		}
		return parts
	}
	for name, c := range map[string]struct {
		first, second []gatePart // a frame each
		one           bool       // transfer
		slot          int        // bytes
		begun         [2]int     // copies
	}{
		"one transfer":                {on(0, 0, 2), on(0, 4, 6), true, half, [2]int{4}},
		"two transfers":               {on(0, 0, 2), on(0, 4, 6), false, half, [2]int{4}},
		"more than a stream's slots":  {on(0, 0), on(0, 4, 6), false, half / 2, [2]int{window}},
		"host memory first":           {on(0, 0, 2), append(on(1, 0), on(0, 6)...), true, half, [2]int{2}},
		"host memory last":            {append(on(0, 0), on(1, 0)...), append(on(0, 6), on(1, 2)...), true, half, [2]int{2}},
		"the next is in host memory":  {on(0, 0, 2), on(1, 0, 2), false, half, [2]int{2}},
		"the first is in host memory": {on(1, 0, 2), on(0, 0, 2), false, half, [2]int{}},
	} {
		t.Run(name, func(t *testing.T) {
			leaktest.Check(t)
			m := newGates(8, c.slot)
			m.host = 1
			p := onGates(t, patient, m)
			d := dial(t, p)
			hello := p.hello(t, "d", 0, 1, 0)
			var grants []random
			if c.one {
				grants = append(grants, p.writes("t0", append(c.first, c.second...)...))
				grants = append(grants, grants[0])
			} else {
				grants = append(grants, p.writes("t0", c.first...), p.writes("t1", c.second...))
			}
			d.say(hello)
			if c.begun[0] > 0 {
				m.isWaitedFor(t, 0, 1)
			}
			until(t, "the copies have begun", func() bool { return m.sees(func() bool { return m.begun[0] >= c.begun[0] }) })
			if begun := [2]int{m.copies(0), m.copies(1)}; begun != c.begun {
				t.Errorf("%d copies have begun, want %d", begun, c.begun)
			}
			m.allow(0, all)
			d.takes(grants[0], c.first...)
			d.takes(grants[1], c.second...)
			if c.one {
				d.acks(p, "t0", grants[0], 2*gateBytes)
			} else {
				d.acks(p, "t0", grants[0], uint64(len(c.first)*half))
				d.acks(p, "t1", grants[1], gateBytes)
			}
		})
	}
}

// ahead is a stream that writes a frame of "t0", of which the peer takes little, and has a frame of "t1" ahead, whose copy has begun.
func ahead(t *testing.T, cfg Config, m *gates, tenure time.Duration) (p *agent, d *rawConn, grants [2]random) {
	t.Helper()
	leaktest.Check(t)
	m.allow(0, 1)
	p = onGates(t, cfg, m)
	p.sender.tenure, p.sender.grace = tenure, bound
	d = deafTo(t, p)
	hello := p.hello(t, "d", 1, 1, 0)
	for i := range grants {
		grants[i] = p.writes(core.TransferID(fmt.Sprint("t", i)), gateBlock(0, i))
	}
	d.say(hello)
	until(t, "a copy of the next frame has begun", func() bool { return m.sees(func() bool { return m.begun[0] == 2 }) })
	return p, d, grants
}

// TestStopOfAFrameAhead: when a transfer is stopped whose frame was taken ahead, its end waits for the copy, and not for the peer, which
// takes nothing of the present frame. The present frame goes on.
func TestStopOfAFrameAhead(t *testing.T) {
	m := newGates(4, gateBytes)
	p, d, grants := ahead(t, patient, m, time.Hour)
	p.Stop("t1")
	told := func() bool { return len(p.sink.All("written", "t1")) > 0 }
	until(t, "the stream gives the frame back", func() bool { return told() || m.sees(func() bool { return m.waited[0] == 2 }) })
	if told() {
		t.Error("the end was told while a copy may read")
	}
	m.allow(0, all)
	if o := p.sink.Wait("written", "t1", 1); o.Err == nil {
		t.Error("a write that was stopped ended well")
	}
	d.takes(grants[0], gateBlock(0, 0))
	d.acks(p, "t0", grants[0], gateBytes)
	d.takes(p.writes("t2", gateBlock(0, 2)), gateBlock(0, 2))
}

// TestAheadMayCopyForEver: if the device does not end a copy that was begun ahead, nobody hears of an end of that transfer. The other
// one ends well.
func TestAheadMayCopyForEver(t *testing.T) {
	for name, tenure := range map[string]time.Duration{"the transfer is stopped": time.Hour, "the peer is slow": tenure} {
		t.Run(name, func(t *testing.T) {
			m := newGates(4, gateBytes)
			m.lost = 2
			p, d, grants := ahead(t, patient, m, tenure)
			m.allow(0, all)
			if tenure == time.Hour {
				p.Stop("t1")
			}
			until(t, "nothing more of the transfer is sent", func() bool {
				p.sender.mu.Lock()
				defer p.sender.mu.Unlock()
				out := p.sender.byID["t1"]
				return out == nil || out.ahead == 0 && out.err != nil
			})
			d.takes(grants[0], gateBlock(0, 0))
			d.acks(p, "t0", grants[0], gateBytes)
			_ = p.Close()
			if told := p.sink.All("written", "t1"); len(told) > 0 {
				t.Errorf("its blocks may be read for ever, and %+v", told)
			}
		})
	}
}

// TestSlowPeerHasNothingAhead: when the peer is slow, the frame ahead is given back whole, and no other one is taken. Another stream
// sends it.
func TestSlowPeerHasNothingAhead(t *testing.T) {
	m := newGates(4, gateBytes)
	p, d, grants := ahead(t, patient, m, tenure)
	m.allow(0, all)
	var left uint64
	until(t, "the frame that was ahead is given back", func() bool {
		p.sender.mu.Lock()
		defer p.sender.mu.Unlock()
		out := p.sender.byID["t1"]
		if out == nil || out.frames > 0 || out.ahead > 0 {
			return false
		}
		left = out.left
		return true
	})
	if left != gateBytes {
		t.Fatalf("%d bytes are left of the frame that was ahead", left)
	}
	other := dial(t, p)
	other.say(p.hello(t, "d", 0, 2, 0))
	other.takes(grants[1], gateBlock(0, 1))
	other.acks(p, "t1", grants[1], gateBytes)
	p.writes("t2", gateBlock(0, 2))
	d.takes(grants[0], gateBlock(0, 0))
	d.acks(p, "t0", grants[0], gateBytes)
}

// TestSlowPeerGetsOneSlot: while a peer is slow, it has one slot at a time, and nothing is copied ahead for it.
func TestSlowPeerGetsOneSlot(t *testing.T) {
	leaktest.Check(t)
	m := newGates(8, slowPart)
	m.allow(0, all)
	cfg := patient
	cfg.FrameBytes = slowPart
	p := onGates(t, cfg, m)
	d := deafTo(t, p)
	d.say(p.hello(t, "d", 0, 1, 0))
	p.writes("t", gateBlock(0, 0), gateBlock(0, 1), gateBlock(0, 2), gateBlock(0, 3))
	begun := 0
	until(t, "the peer is slow, and nobody holds a slot", func() bool {
		return m.sees(func() bool {
			if m.held > 0 || m.begun[0] == 0 {
				return false
			}
			begun = m.begun[0]
			m.allowed[0] = begun
			return true
		})
	})
	go func() { _, _ = io.Copy(io.Discard, d) }()
	until(t, "a copy is waited for", func() bool { return m.sees(func() bool { return m.waited[0] > begun }) })
	if m.sees(func() bool { return m.begun[0] > begun+1 }) {
		t.Error("several copies have begun for a slow peer")
	}
	m.allow(0, all)
	until(t, "all is sent", func() bool {
		p.sender.mu.Lock()
		defer p.sender.mu.Unlock()
		out := p.sender.byID["t"]
		return out.left == 0 && out.frames == 0
	})
}

// TestAckOfAFrameAhead: D cannot have the bytes of a frame that was taken ahead, and an acknowledgement that says so frees no block.
func TestAckOfAFrameAhead(t *testing.T) {
	leaktest.Check(t)
	m := newGates(4, gateBytes)
	m.allow(0, 1)
	p := onGates(t, patient, m)
	p.sender.tenure = time.Hour
	d := deafTo(t, p)
	d.say(p.hello(t, "d", 0, 1, 0))
	grant := p.writes("t", gateBlock(0, 0), gateBlock(0, 1))
	until(t, "a copy of the next frame has begun", func() bool { return m.sees(func() bool { return m.begun[0] == 2 }) })
	mark := p.writes("mark", gateBlock(0, 2))
	d.say(frameBytes(header{kind: frameAck, key: grant, length: 2 * gateBytes}), frameBytes(header{kind: frameNack, key: mark}))
	p.sink.Wait("written", "mark", 1)
	m.allow(0, all)
	d.takes(grant, gateBlock(0, 0))
	d.takes(grant, gateBlock(0, 1))
	d.takes(p.writes("after", gateBlock(0, 3)), gateBlock(0, 3)) // the stream has counted both frames
	if len(p.sink.All("written", "t")) > 0 {
		t.Error("a write has ended by an acknowledgement that came too early")
	}
	d.acks(p, "t", grant, 2*gateBytes)
}

// TestNothingAheadElsewhere: nothing is copied ahead on another device than the present frame's. So a device that does not
// answer does not hold up the end of a transfer that lies on another one.
func TestNothingAheadElsewhere(t *testing.T) {
	leaktest.Check(t)
	m := newGates(4, gateBytes)
	m.allow(0, all)
	p := onGates(t, patient, m)
	d := deafTo(t, p)
	hello := p.hello(t, "d", 0, 1, 0)
	p.writes("t0", gateBlock(0, 0))
	p.writes("t1", gateBlock(1, 0))
	d.say(hello)
	until(t, "the first copy is waited for", func() bool { return m.sees(func() bool { return m.waited[0] > 0 }) })
	if m.sees(func() bool { return m.begun != [2]int{1, 0} }) {
		t.Fatal("bytes of another device were copied ahead")
	}
	p.Stop("t0")
	p.sink.Wait("written", "t0", 1)
}

// TestNothingAheadOfSeveralDevices: while a frame's parts lie on several devices, nothing is copied ahead: the next frame would wait for
// the device that is the slowest of them.
func TestNothingAheadOfSeveralDevices(t *testing.T) {
	leaktest.Check(t)
	const half = gateBytes / 2
	m := newGates(4, half)
	m.allow(1, all)
	p := onGates(t, patient, m)
	d := deafTo(t, p)
	hello := p.hello(t, "d", 0, 1, 0)
	p.writes("t0", gatePart{0, 0, half}, gatePart{1, 0, half})
	p.writes("t1", gateBlock(1, 1))
	d.say(hello)
	until(t, "the first copy is waited for", func() bool { return m.sees(func() bool { return m.waited[0] > 0 }) })
	if m.sees(func() bool { return m.begun[1] > 1 }) {
		t.Fatal("bytes were copied ahead of a frame that lies on two devices")
	}
	p.Stop("t1")
	p.sink.Wait("written", "t1", 1)
}

// TestNoWaitWithASlot: a stream waits for a slot only while it has none, whatever frames and devices its slots are of.
func TestNoWaitWithASlot(t *testing.T) {
	leaktest.Check(t)
	const quarter = gateBytes / 4
	m := newGates(1, quarter)
	m.free[0] = 2 // the second is for a frame ahead
	p := onGates(t, patient, m)
	d := dial(t, p)
	hello := p.hello(t, "d", 0, 1, 0)
	frames := [][]gatePart{{{0, 0, quarter}}, {{0, 0, gateBytes / 2}, {1, 0, gateBytes / 2}}}
	var grants []random
	for i := range 6 {
		grants = append(grants, p.writes(core.TransferID(fmt.Sprint("t", i)), frames[i%2]...))
	}
	d.say(hello)
	m.begins(t, 0, 2) // one of them is ahead
	for device := range m.allowed {
		m.allow(device, all)
	}
	for i, grant := range grants {
		d.takes(grant, frames[i%2]...)
		d.acks(p, core.TransferID(fmt.Sprint("t", i)), grant, []uint64{quarter, gateBytes}[i%2])
	}
}

// TestAheadAfterSeveralDevices: a frame whose parts lie on several devices is no reason to copy nothing ahead of those behind it.
func TestAheadAfterSeveralDevices(t *testing.T) {
	leaktest.Check(t)
	const half = gateBytes / 2
	m := newGates(8, half)
	m.allow(0, 1)
	m.allow(1, all)
	p := onGates(t, patient, m)
	d := dial(t, p)
	hello := p.hello(t, "d", 0, 1, 0)
	mixed := []gatePart{{0, 0, half}, {1, 0, half}}
	grant := p.writes("t0", mixed...)
	for i := range 2 {
		p.writes(core.TransferID(fmt.Sprint("t", i+1)), gateBlock(0, i+1))
	}
	d.say(hello)
	d.takes(grant, mixed...)
	m.isWaitedFor(t, 0, 2)
	if n := m.copies(0); n != 5 {
		t.Errorf("%d copies have begun, want those of two frames, and one", n)
	}
}

// TestWhatIsTakenAhead: a stream takes no frame ahead if another stream waits for one, if P has a word of its own for D, or if the
// stream takes no frames.
func TestWhatIsTakenAhead(t *testing.T) {
	leaktest.Check(t)
	p := onGates(t, patient, newGates(4, gateBytes))
	d := dial(t, p)
	d.say(p.hello(t, "d", 0, 1, 0))
	st := p.stream(t, "d")
	peer, s := st.peer, &p.sender
	until(t, "the stream waits for a frame", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return peer.waits == 1
	})
	s.mu.Lock()
	defer s.mu.Unlock()
	out := &outbound{peer: peer, total: 8, given: given{layout: p.layout}}
	base := uintptr(p.layout.Regions[1].Base)
	if err := out.give([]stretch{{end: 8, runs: []run{{base: base, len: 8}}}}); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		change func()
		taken  bool
	}{
		"a frame":                                {func() {}, true},
		"a frame that asks":                      {func() { out.left, out.ask = 0, true }, false},
		"a transfer that was given up":           {func() { out.left = 0 }, false},
		"no frame":                               {func() { peer.queue = nil }, false},
		"another stream waits":                   {func() { peer.waits = 1 }, false},
		"D is to open a stream":                  {func() { peer.asks = true }, false},
		"D is to open a stream anew":             {func() { peer.stuck = &outStream{} }, false},
		"D is to open this one anew":             {func() { peer.stuck = st }, true},
		"D is to hear that a transfer lives":     {func() { st.rested = make([]random, 1) }, false},
		"a stream from which nothing comes back": {func() { st.deaf = true }, false},
		"a stream that has ended":                {func() { st.dead = true }, false},
		"a sender that is closed":                {func() { s.closed = true }, false},
	} {
		peer.queue, peer.waits, out.left = []*outbound{out}, 0, 8
		c.change()
		if taken := s.mayTakeAhead(st, 1); taken != c.taken {
			t.Errorf("%s: it is taken: %t", name, taken)
		}
		if s.mayTakeAhead(st, 0) {
			t.Errorf("%s: a frame on another device is taken", name)
		}
		peer.asks, peer.stuck, st.rested, st.deaf, st.dead, s.closed, out.ask = false, nil, nil, false, false, false, false
	}
	peer.queue, peer.waits = nil, 1
}
