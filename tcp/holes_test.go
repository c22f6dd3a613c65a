package tcp

import (
	"bytes"
	"io"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// TestSmallPiecesGoTogether: waiting bytes go in frames as large as if they had been given
// at once, in whatever order they were given. No frame crosses a gap.
func TestSmallPiecesGoTogether(t *testing.T) {
	leaktest.Check(t)
	const n, size, gap = 200, 1024, 150
	p := newSizedAgent(t, Config{FrameBytes: 64 << 10, DialTimeout: bound, StallTimeout: time.Hour}, n, size)
	p.paint()
	p.admit(t, "d")
	grant := newRandom()
	p.Write(p.part("t", grant, n))
	for _, i := range rand.New(rand.NewPCG(3, 0)).Perm(n) { // D is still to come
		if i != gap {
			p.Extend(p.part("t", grant, n, [2]int{i, 1}))
		}
	}
	c := dial(t, p)
	c.say(p.hello(t, "d", 0, 1, 0))
	const frame = 64
	for _, want := range [][2]int{{0, frame}, {frame, frame}, {2 * frame, gap - 2*frame}, {gap + 1, n - gap - 1}, {gap, 1}} {
		if want[0] == gap {
			p.Extend(p.part("t", grant, n, [2]int{gap, 1}))
		}
		h := c.next()
		if h.key != grant || h.position != uint64(want[0]*size) || h.length != uint64(want[1]*size) {
			t.Fatalf("a frame of blocks %d to %d, want %d to %d", h.position/size, (h.position+h.length)/size, want[0], want[0]+want[1])
		}
		b := make([]byte, h.length)
		if _, err := io.ReadFull(c, b); err != nil || !bytes.Equal(b, p.mem[h.position:h.position+h.length]) {
			t.Fatalf("wrong bytes, %v", err)
		}
	}
	c.say(frameBytes(header{kind: frameAck, key: grant, length: n * size}))
	if o := p.sink.Wait("written", "t", 1); o.Err != nil || o.Stats.Bytes != n*size || o.Stats.Segments != n {
		t.Errorf("written: %+v", o)
	}
}

// skip reads a header after so many bytes.
func (c *rawConn) skip(n int64) header {
	c.t.Helper()
	if _, err := io.CopyN(io.Discard, c, n); err != nil {
		c.t.Fatal(err)
	}
	return c.next()
}

// TestAcknowledgedBeforeAllWasGiven: D cannot have bytes that P has not been given.
func TestAcknowledgedBeforeAllWasGiven(t *testing.T) {
	leaktest.Check(t)
	p := newSizedAgent(t, Config{StallTimeout: time.Hour}, 16, 64)
	c := dial(t, p)
	c.say(p.hello(t, "d", 0, 1, 0))
	grant, mark := newRandom(), newRandom()
	p.Write(p.part("t", grant, 16, [2]int{0, 8}))
	if h := c.next(); h.key != grant || h.length != 8*64 {
		t.Fatalf("begins with %+v", h)
	}
	p.Write(p.part("mark", mark, 1, [2]int{0, 1}))
	if h := c.skip(8 * 64); h.key != mark {
		t.Fatalf("goes on with %+v", h)
	}
	for _, length := range []uint64{8 * 64, 16 * 64} {
		c.say(frameBytes(header{kind: frameAck, key: grant, length: length}))
	}
	c.say(frameBytes(header{kind: frameNack, key: mark})) // the end of this transfer says that the other frames were read
	p.sink.Wait("written", "mark", 1)
	if told := p.sink.All("written", "t"); len(told) != 0 {
		t.Fatalf("told %+v", told)
	}
	p.Extend(p.part("t", newRandom(), 16, [2]int{8, 8})) // of an earlier write with this id
	p.Extend(p.part("t", grant, 16, [2]int{12, 4}))
	if h := c.skip(64); h.key != grant || h.position != 12*64 || h.length != 4*64 {
		t.Fatalf("goes on with %+v", h)
	}
	p.Extend(p.part("t", grant, 16, [2]int{11, 2}))
	if o := p.sink.Wait("written", "t", 1); o.Err == nil {
		t.Errorf("bytes that were given twice: %+v", o)
	}
}

// TestManyHoles: small frames may come in any order; the number of ranges that D keeps
// of them is bounded all the same.
func TestManyHoles(t *testing.T) {
	leaktest.Check(t)
	const piece, n = 4096, 4096
	d := newSizedAgent(t, Config{Streams: 1, StallTimeout: time.Hour}, n, piece)
	c := fakeSender(t, d, "p")
	grant := d.expect(t, "t", "p", allBlocks(n))
	for odd := range 2 {
		for i := 1 - odd; i < n; i += 2 {
			c.say(frameBytes(header{kind: frameData, key: grant, position: uint64(i) * piece, length: piece}), bytes.Repeat([]byte{byte(i)}, piece))
		}
	}
	if o := d.sink.Wait("received", "t", 1); o.Err != nil {
		t.Fatalf("received: %+v", o)
	}
	for i := range n {
		if b := d.mem[i*piece : (i+1)*piece]; b[0] != byte(i) || b[piece-1] != byte(i) {
			t.Fatalf("piece %d begins with %d", i, b[0])
		}
	}
	grant = d.expect(t, "u", "p", allBlocks(n))
	in := d.receiver.byID["u"]
	most := in.mostIntervals()
	for i := range most + 1 {
		c.say(frameBytes(header{kind: frameData, key: grant, position: uint64(2 * i), length: 1}), []byte{1})
	}
	if o := d.sink.Wait("received", "u", 1); o.Err == nil || most > maxIntervals || most*16 > n*piece/256 {
		t.Errorf("%d ranges and one more: %+v", most, o)
	}
}

// TestHolesOfManyRegions: a transfer of many small regions is given bit by bit in each of
// them.
func TestHolesOfManyRegions(t *testing.T) {
	leaktest.Check(t)
	const piece, n = 64, 4 * minIntervals
	d := newSizedAgent(t, Config{Streams: 1, StallTimeout: time.Hour}, n, piece)
	c := fakeSender(t, d, "p")
	var apart []kv.BlockID
	for i := 0; i < n; i += 2 {
		apart = append(apart, kv.BlockID(i))
	}
	grant := d.expect(t, "t", "p", [][]kv.BlockID{apart})
	for half := range 2 {
		for i := range apart {
			at := uint64(i*piece + half*piece/2)
			c.say(frameBytes(header{kind: frameData, key: grant, position: at, length: piece / 2}), bytes.Repeat([]byte{1}, piece/2))
		}
	}
	if o := d.sink.Wait("received", "t", 1); o.Err != nil {
		t.Errorf("received: %+v", o)
	}
}

// TestEmptyFrameBehindTheLast: an empty frame was under way on another stream when the
// last bytes landed. D must not take it for a frame of a revoked transfer.
func TestEmptyFrameBehindTheLast(t *testing.T) {
	leaktest.Check(t)
	const n = 4
	for _, revoked := range []bool{false, true} {
		d := newSizedAgent(t, Config{Streams: 1}, n, 64)
		c := fakeSender(t, d, "p")
		grant := d.expect(t, "t", "p", allBlocks(n))
		d.receiver.mu.Lock()
		in := d.receiver.byID["t"]
		d.receiver.mu.Unlock()
		want := header{kind: frameNack, key: grant}
		if revoked {
			d.Revoke("t")
		} else {
			c.say(frameBytes(header{kind: frameData, key: grant, length: n * 64}), make([]byte, n*64))
			d.sink.Wait("received", "t", 1)
			want = header{kind: frameAck, key: grant, length: n * 64}
		}
		here, p := tcpPair(t)
		_ = p.SetReadDeadline(time.Now().Add(bound))
		if err := (&inStream{r: &d.receiver, conn: here}).landed(in, 0); err != nil {
			t.Fatal(err)
		}
		if got := (&rawConn{p, t}).next(); got != want {
			t.Errorf("revoked %v: answered by %+v, want %+v", revoked, got, want)
		}
	}
}

// TestHolesHoldUpNobody: while it is looked at which bytes of a transfer have come, others begin and end. A hostile
// P's frames can make that slow.
func TestHolesHoldUpNobody(t *testing.T) {
	leaktest.Check(t)
	p, d := newAgent(t, Config{}), newAgent(t, Config{Streams: 1})
	slow := fakeSender(t, d, "slow")
	grant := d.expect(t, "slow", "slow", allBlocks(1))
	d.receiver.mu.Lock()
	in := d.receiver.byID["slow"]
	d.receiver.mu.Unlock()
	in.covered.mu.Lock()
	slow.say(frameBytes(header{kind: frameData, key: grant, length: testBlock}), make([]byte, testBlock))
	until(t, "its frame is looked at", func() bool {
		d.receiver.mu.Lock()
		defer d.receiver.mu.Unlock()
		return in.peer.reading == 1
	})
	move(t, p, d, "other")
	in.covered.mu.Unlock()
	if o := d.sink.Wait("received", "slow", 1); o.Err != nil {
		t.Error(o.Err)
	}
}
