package tcp

import (
	"bytes"
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
)

// TestAgainBehindCopies: headers that ask for streams follow each other. They do not put off the end of a copy before them.
func TestAgainBehindCopies(t *testing.T) {
	m := newGates(4, small)
	d, p := lands(t, m, 1)
	opens := func() int {
		d.receiver.mu.Lock()
		defer d.receiver.mu.Unlock()
		return d.receiver.peers["p"].opens
	}
	nothing, more := again(0, 1), again(1, 0)
	p[0].say(smallFrame(d.lands(t, "t", [2]int{0, 0}), 0), frameBytes(nothing), frameBytes(more))
	m.isWaitedFor(t, 0, 1)
	if n := opens(); n != 1 {
		t.Errorf("D opens %d streams, and waits for a copy only then", n)
	}
	m.allow(0, all)
	until(t, "D opens another stream", func() bool { return opens() == 2 })
}

// TestLongFrameBehindCopies: a long frame that takes no slot does not put off the end of a copy before it.
func TestLongFrameBehindCopies(t *testing.T) {
	const pieces, piece = 2 * maxVector, 8 // that are read by two calls
	m := newGates(4, small)
	m.host = 1
	d, p := lands(t, m, 1)
	before := d.lands(t, "before", [2]int{0, 0})
	var to []kv.Segment
	for i := range uint64(pieces) {
		to = append(to, kv.Segment{Region: 1, Offset: 2 * piece * i, Length: piece})
	}
	long, err := d.Expect("long", "p", to)
	mustBe(t, err)
	bytes := bytes.Repeat([]byte{7}, pieces*piece)
	p[0].say(smallFrame(before, 0), frameBytes(header{kind: frameData, key: random(long), length: pieces * piece}), bytes)
	m.isWaitedFor(t, 0, 1)
	if b := d.mem[4*gateBytes+2*piece*(pieces-1)]; b != 0 {
		t.Error("the frame is read whole before the copy is waited for")
	}
	m.allow(0, all)
	for _, id := range []core.TransferID{"before", "long"} {
		if o := d.sink.Wait("received", id, 1); o.Err != nil {
			t.Error(o.Err)
		}
	}
}

// TestNothingLandsBehindAStuckCopy: a copy of a frame may land for ever. Nothing more of the frame is copied.
func TestNothingLandsBehindAStuckCopy(t *testing.T) {
	m := newGates(4, small)
	m.lost = 1
	d, p := lands(t, m, 1)
	m.allow(0, all)
	grant, next := d.lands(t, "t", [2]int{0, 0}, [2]int{0, 1}), d.lands(t, "next", [2]int{0, 2})
	rest := make([]byte, small)
	p[0].say(frameBytes(header{kind: frameData, key: grant, length: 2 * small}), rest)
	if h := p[0].next(); h.kind != frameFault {
		t.Fatalf("answered by %+v", h)
	}
	p[0].say(rest, smallFrame(next, 0))
	if o := d.sink.Wait("received", "next", 1); o.Err != nil {
		t.Error(o.Err)
	}
	if n := m.copies(0); n != 2 {
		t.Errorf("%d copies have begun, want the one that is stuck, and the next frame's", n)
	}
}

// TestSlotOfARevokedTransfer: a transfer is revoked while its stream waits for a slot. The slot is not used for the next frame, which
// lies on another device.
func TestSlotOfARevokedTransfer(t *testing.T) {
	m := newGates(1, small)
	m.free[0] = 0
	m.allow(1, all)
	d, p := lands(t, m, 1)
	revoked, next := d.lands(t, "revoked", [2]int{0, 0}), d.lands(t, "next", [2]int{1, 0})
	p[0].say(smallFrame(revoked, 0), smallFrame(next, 0))
	until(t, "the stream waits for a slot", func() bool { return m.sees(func() bool { return m.waiting == 1 }) })
	mustBe(t, d.Revoke("revoked"))
	m.mu.Lock()
	m.free[0] = 1
	m.changed.Broadcast()
	m.mu.Unlock()
	until(t, "a copy has begun", func() bool { return m.copies(0)+m.copies(1) > 0 })
	if m.copies(0) > 0 {
		t.Fatal("bytes for a device are copied by a slot of another one")
	}
	if o := d.sink.Wait("received", "next", 1); o.Err != nil {
		t.Error(o.Err)
	}
}

// TestCutWithCopiesUnderWay: a stream is cut in the middle of a frame, with copies of it and of the frame before under way. Both count,
// and the rest comes by another stream.
func TestCutWithCopiesUnderWay(t *testing.T) {
	m := newGates(4, small)
	d, p, from := landsFrom(t, m, 2)
	grant := d.lands(t, "t", [2]int{0, 0}, [2]int{0, 1})
	second := smallFrame(grant, 1)
	const part = small / 4
	p[0].say(smallFrame(grant, 0), second[:headerSize+part])
	m.begins(t, 0, 2)
	p[0].Close()
	m.allow(0, all)
	_, h := from.stream()
	if n, _ := h.stream(); n != 0 || h.position != 2*headerSize+small+part {
		t.Fatalf("stream %d is opened, and had %d bytes", n, h.position)
	}
	p[1].say(frameBytes(header{kind: frameData, key: grant, position: small + part, length: small - part}), second[headerSize+part:])
	if o := d.sink.Wait("received", "t", 1); o.Err != nil || o.Stats.Bytes != 2*small {
		t.Errorf("%+v", o)
	}
	for i := range 2 {
		if !bytes.Equal(d.mem[i*gateBytes:][:small], smallFrame(grant, i)[headerSize:]) {
			t.Errorf("wrong bytes of frame %d", i)
		}
	}
}

// TestHostAndDeviceInAFrame: a frame goes on in host memory while its copies pass, and the next frame begins there.
func TestHostAndDeviceInAFrame(t *testing.T) {
	m := newGates(4, small)
	m.host = 1
	d, p := lands(t, m, 1)
	first, second := d.lands(t, "first", [2]int{0, 0}, [2]int{1, 0}), d.lands(t, "second", [2]int{1, 1}, [2]int{0, 1})
	frame := func(grant random) []byte {
		both := append(smallFrame(grant, 0)[headerSize:], smallFrame(grant, 1)[headerSize:]...)
		return append(frameBytes(header{kind: frameData, key: grant, length: 2 * small}), both...)
	}
	p[0].say(frame(first), frame(second))
	m.isWaitedFor(t, 0, 1)
	host := d.mem[4*gateBytes:]
	if host[small-1] != 2 || host[gateBytes] != 1 {
		t.Errorf("the host's bytes are %d and %d when a copy is waited for", host[small-1], host[gateBytes])
	}
	if n := m.copies(0); n != 1 {
		t.Errorf("%d copies have begun", n)
	}
	for i, id := range []core.TransferID{"first", "second"} {
		if len(d.sink.All("received", id)) > 0 {
			t.Errorf("%q has ended before its copy", id)
		}
		m.allow(0, i+1)
		if o := d.sink.Wait("received", id, 1); o.Err != nil {
			t.Error(o.Err)
		}
	}
	if d.mem[small-1] != 1 || d.mem[gateBytes+small-1] != 2 {
		t.Error("wrong bytes")
	}
}

// TestPartOfAFrameIsTheLast: a stream broke within a frame, and another one has brought the rest before the part counts. The part ends the
// transfer.
func TestPartOfAFrameIsTheLast(t *testing.T) {
	d, _ := lands(t, newGates(4, small), 1)
	grant := d.lands(t, "t", [2]int{0, 0})
	in := d.inbound("t")
	s := &inStream{r: &d.receiver, peer: in.peer}
	const part = small / 4
	if replies := s.landed(&arrival{in: in, position: part, length: small - part, got: small - part}, nil); len(replies) > 0 {
		t.Errorf("the rest is answered: %+v", replies)
	}
	replies := s.landed(&arrival{in: in, length: small, got: part}, nil)
	if len(replies) != 1 || replies[0].header != (header{kind: frameAck, key: grant, length: small}) {
		t.Fatalf("the part is answered: %+v", replies)
	}
	if o := d.sink.Wait("received", "t", 1); o.Err != nil || o.Stats.Bytes != small {
		t.Errorf("%+v", o)
	}
}
