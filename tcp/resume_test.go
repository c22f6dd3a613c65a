package tcp

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/coretest"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/rig/nettest"
)

// TestStreamsThatOnlyDLost: a middlebox drops D's connections, and P learns of it by the
// new ones only. Transfers that were under way go on, wherever they were cut.
func TestStreamsThatOnlyDLost(t *testing.T) {
	leaktest.Check(t)
	const frame = 1 << 20
	for name, c := range map[string]struct{ streams, after int }{
		"in a header":      {1, frame + headerSize + 17},
		"between frames":   {1, 3 * (frame + headerSize)},
		"after a header":   {1, 2*(frame+headerSize) + headerSize},
		"in the first one": {1, 5000},
		"in the last one":  {1, testBlocks*(frame+headerSize) - 3},
		"two streams":      {2, 9*frame + 77},
		"eight streams":    {8, 20*frame + 77},
	} {
		t.Run(name, func(t *testing.T) {
			p, d := newAgent(t, Config{FrameBytes: frame, First: c.streams, StallTimeout: time.Hour}), newAgent(t, Config{Streams: c.streams, First: c.streams, StallTimeout: time.Hour})
			for i := range p.mem {
				p.mem[i] = byte(i*7 + i>>12)
			}
			f := nettest.Forward(t, p.Endpoint())
			if err := d.Connect("p", f.Addr(), p.admit(t, "d")); err != nil {
				t.Fatal(err)
			}
			until(t, "all streams are open", func() bool {
				p.sender.mu.Lock()
				defer p.sender.mu.Unlock()
				return f.Open() == c.streams && p.sender.streams == c.streams
			})
			f.Hold(c.after)
			grant := d.expect(t, "t", "p", allBlocks(testBlocks))
			p.Write(core.WriteOp{ID: "t", Peer: "d", Grant: grant[:], Pairs: p.pairs(t, allBlocks(testBlocks))})
			until(t, "it is under way", f.Holds)
			f.Lose()
			for _, o := range []coretest.Outcome{d.sink.Wait("received", "t", 1), p.sink.Wait("written", "t", 1)} {
				if o.Err != nil || o.Stats.Bytes != testBlocks*testBlock {
					t.Errorf("%s: %+v", o.Kind, o)
				}
			}
			if !bytes.Equal(p.mem, d.mem) {
				t.Error("wrong bytes")
			}
			if down := p.sink.All("down", ""); len(down) != 0 {
				t.Errorf("P was told %+v", down)
			}
		})
	}
}

// TestBrokenInTheMiddle: connections break in the middle of transfers, and both sides see it.
func TestBrokenInTheMiddle(t *testing.T) {
	leaktest.Check(t)
	patient := Config{DialTimeout: bound, StallTimeout: time.Hour} // a slow machine's D is as good
	p, d := newAgent(t, patient), newAgent(t, patient)
	p.sender.grace = bound
	for i := range p.mem {
		p.mem[i] = byte(i*7 + i>>12)
	}
	f := nettest.Forward(t, p.Endpoint())
	if err := d.Connect("p", f.Addr(), p.admit(t, "d")); err != nil {
		t.Fatal(err)
	}
	until(t, "both streams are open", func() bool { return f.Open() == 2 })
	f.Hold(9 * testBlock)
	grant := d.expect(t, "t", "p", allBlocks(testBlocks))
	p.Write(core.WriteOp{ID: "t", Peer: "d", Grant: grant[:], Pairs: p.pairs(t, allBlocks(testBlocks))})
	until(t, "it is under way", f.Holds)
	f.Cut()
	for _, o := range []coretest.Outcome{d.sink.Wait("received", "t", 1), p.sink.Wait("written", "t", 1)} {
		if o.Err != nil || o.Stats.Bytes != testBlocks*testBlock {
			t.Errorf("%s: %+v", o.Kind, o)
		}
	}
	if !bytes.Equal(p.mem, d.mem) {
		t.Error("wrong bytes")
	}
}

// TestLostFramesAreSentAgain cuts two frames after each byte, and has D say so. Exactly
// the bytes that it has not received come again.
func TestLostFramesAreSentAgain(t *testing.T) {
	leaktest.Check(t)
	const frame, total = headerSize + fuzzBlock, 2 * fuzzBlock
	p := newSizedAgent(t, Config{FrameBytes: fuzzBlock, StallTimeout: time.Hour}, fuzzBlocks, fuzzBlock)
	p.sender.grace = bound
	src := bytes.Join([][]byte{p.mem[2*fuzzBlock : 3*fuzzBlock], p.mem[fuzzBlock : 2*fuzzBlock]}, nil)
	for i := range src {
		src[i] = byte(i + 1)
	}
	copy(p.mem[2*fuzzBlock:], src[:fuzzBlock])
	copy(p.mem[fuzzBlock:], src[fuzzBlock:])
	attempt, received := uint64(0), uint64(1)<<40
	open := func() *rawConn {
		c := dial(t, p)
		attempt++
		c.say(p.hello(t, "d", 3, attempt, received))
		return c
	}
	for _, seen := range []bool{false, true} { // by P, before D comes again
		for k := range 2*frame + 1 {
			id, grant := core.TransferID(fmt.Sprint(seen, k)), newRandom()
			old := open()
			p.Write(core.WriteOp{ID: id, Peer: "d", Grant: grant[:], Pairs: p.pairs(t, fuzzDst)})
			if _, err := io.CopyN(io.Discard, old, 2*frame); err != nil {
				t.Fatal(err)
			}
			if seen {
				_ = old.Close()
				until(t, "P has seen it", func() bool {
					p.sender.mu.Lock()
					defer p.sender.mu.Unlock()
					return p.sender.peers["d"].open == 0
				})
			}
			received += uint64(k)
			c := open()
			have := min(max(k-headerSize, 0), fuzzBlock) + min(max(k-frame-headerSize, 0), fuzzBlock)
			if have == total {
				if h := c.next(); h.kind != frameData || h.key != grant || h.position != total || h.length != 0 {
					t.Fatalf("%d received: asks by %+v", k, h)
				}
				received += headerSize
			}
			for have < total {
				h := c.next()
				if h.kind != frameData || h.key != grant || h.position != uint64(have) || h.length == 0 || h.length > fuzzBlock {
					t.Fatalf("%d received, which are %d: goes on with %+v", k, have, h)
				}
				b := make([]byte, h.length)
				if _, err := io.ReadFull(c, b); err != nil || !bytes.Equal(b, src[have:have+len(b)]) {
					t.Fatalf("%d received, then %x from %d, %v", k, b, have, err)
				}
				have += len(b)
				received += headerSize + h.length
			}
			if told := p.sink.All("written", id); len(told) != 0 {
				t.Fatalf("told %+v before its acknowledgement", told)
			}
			c.say(frameBytes(header{kind: frameAck, key: grant, length: total}))
			if o := p.sink.Wait("written", id, 1); o.Err != nil || o.Stats.Bytes != total {
				t.Fatalf("%d received: %+v", k, o)
			}
			_ = c.Close()
		}
	}
}

// TestLateHello: only a newer stream replaces a stream, and only with the ticket.
func TestLateHello(t *testing.T) {
	leaktest.Check(t)
	p := newSizedAgent(t, Config{StallTimeout: time.Hour}, fuzzBlocks, fuzzBlock)
	old, now := dial(t, p), dial(t, p)
	old.say(p.hello(t, "d", 1, 5, 0))
	until(t, "the first is open", func() bool { return p.open("d") == 5 })
	now.say(p.hello(t, "d", 1, 7, 0))
	old.ends()
	for name, hello := range map[string][]byte{
		"older": p.hello(t, "d", 1, 6, 0), "the same": p.hello(t, "d", 1, 7, 0), "none": p.hello(t, "d", 1, 0, 0),
		"no ticket": hello(newRandom(), 1, 99, 0),
		// what a host on the path has seen of the stream that is open, with its attempt raised
		"no proof": append(frameBytes(header{kind: frameHello, key: random(p.admit(t, "d")).name(), length: 99<<numberBits | 1}), p.hello(t, "d", 1, 7, 0)[headerSize:]...),
	} {
		if n := p.refuses(t, "d", hello); (n == 0) == (name == "no ticket") {
			t.Errorf("%s: answered by %d bytes", name, n)
		}
	}
	grant := newRandom()
	p.Write(core.WriteOp{ID: "t", Peer: "d", Grant: grant[:], Pairs: p.pairs(t, fuzzDst)})
	if h := now.next(); h.key != grant {
		t.Errorf("begins with %+v", h)
	}
	if down := p.sink.All("down", ""); len(down) != 0 {
		t.Errorf("told %+v", down)
	}
	// Without a stream the transfer ends within the grace.
	_ = now.Close()
	if o := p.sink.Wait("written", "t", 1); !errors.Is(o.Err, core.ErrConnectionLost) {
		t.Errorf("written: %+v", o)
	}
}

// open is the newest attempt of the one stream that peer has open.
func (a *agent) open(peer core.AgentID) uint64 {
	a.sender.mu.Lock()
	defer a.sender.mu.Unlock()
	for _, slot := range a.sender.peers[peer].slots {
		if slot.stream != nil {
			return slot.attempt
		}
	}
	return 0
}

// TestBrokenFrameGoesOn: D says how far it has come and takes the rest once. If D is
// asked again, it confirms the transfer that has ended.
func TestBrokenFrameGoesOn(t *testing.T) {
	leaktest.Check(t)
	d := newAgent(t, Config{Streams: 1, StallTimeout: time.Hour})
	d.receiver.redial = time.Hour // of a stream that has brought nothing
	p := newFakeP(t, d, "p")
	grant := d.expect(t, "t", "p", allBlocks(2))
	ones := bytes.Repeat([]byte{1}, testBlock)
	c, first := p.stream()
	const part = 1000
	c.say(frameBytes(header{kind: frameData, key: grant, position: testBlock, length: testBlock}), ones[:part])
	until(t, "a part has landed", func() bool { return d.mem[testBlock+part-1] == 1 })
	_ = c.Close()
	c, again := p.stream()
	n, attempt := first.stream()
	m, next := again.stream()
	if n != 0 || m != 0 || next <= attempt || first.position != 0 || again.position != headerSize+part {
		t.Fatalf("said hello by %+v and then %+v", first, again)
	}
	c.say(frameBytes(header{kind: frameData, key: grant, position: testBlock + part, length: testBlock - part}), ones[part:])
	c.say(frameBytes(header{kind: frameData, key: grant, length: testBlock}), ones)
	if o := d.sink.Wait("received", "t", 1); o.Err != nil || o.Stats.Bytes != 2*testBlock {
		t.Fatalf("received: %+v", o)
	}
	if !bytes.Equal(d.mem[:2*testBlock], bytes.Repeat(ones, 2)) {
		t.Error("wrong bytes")
	}
	d.expect(t, "u", "p", allBlocks(1)) // so that it comes again
	_ = c.Close()
	c, again = p.stream()
	if want := uint64(3*headerSize + 2*testBlock); again.position != want {
		t.Errorf("%d bytes received, want %d", again.position, want)
	}
	c.say(frameBytes(header{kind: frameData, key: grant, position: 2 * testBlock}))
	if h := c.next(); h.kind != frameAck || h.key != grant || h.length != 2*testBlock {
		t.Errorf("answered by %+v", h)
	}
}

// TestBrokenFrameIsNotForgotten: bytes that D had of a broken frame do not come twice.
func TestBrokenFrameIsNotForgotten(t *testing.T) {
	leaktest.Check(t)
	d := newAgent(t, Config{Streams: 1, StallTimeout: time.Hour})
	p := newFakeP(t, d, "p")
	grant := d.expect(t, "t", "p", allBlocks(2))
	c, _ := p.stream()
	c.say(frameBytes(header{kind: frameData, key: grant, length: testBlock}), bytes.Repeat([]byte{1}, 100))
	until(t, "a part has landed", func() bool { return d.mem[99] == 1 })
	_ = c.Close()
	c, _ = p.stream()
	c.say(frameBytes(header{kind: frameData, key: grant, position: 99, length: 8}), bytes.Repeat([]byte{2}, 8))
	if o := d.sink.Wait("received", "t", 1); o.Err == nil || errors.Is(o.Err, core.ErrConnectionLost) {
		t.Errorf("received: %+v", o)
	}
	if d.mem[99] != 1 || d.mem[100] != 0 {
		t.Errorf("bytes 99 and 100 are %d", d.mem[99:101])
	}
}

// TestPThatOnlyAccepts: a transfer that has begun does not wait for ever for a P
// that takes each stream and brings nothing.
func TestPThatOnlyAccepts(t *testing.T) {
	leaktest.Check(t)
	d := newAgent(t, Config{StallTimeout: time.Hour})
	p := newFakeP(t, d, "p")
	grant := d.expect(t, "t", "p", allBlocks(2))
	c, _ := p.stream()
	other, _ := p.stream()
	c.say(frameBytes(header{kind: frameData, key: grant, length: testBlock}), make([]byte, testBlock))
	until(t, "a frame has landed", func() bool {
		d.receiver.mu.Lock()
		defer d.receiver.mu.Unlock()
		return d.receiver.byID["t"].got == testBlock
	})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = c.Close(), other.Close()
		for {
			conn, err := p.Accept()
			if err != nil {
				return
			}
			conn.Close()
		}
	}()
	if o := d.sink.Wait("received", "t", 1); !errors.Is(o.Err, core.ErrConnectionLost) {
		t.Errorf("received: %+v", o)
	}
	p.Close()
	<-ended
}

// FuzzResume: whatever D says that it has received, however wrong, no byte that it named
// is sent twice, and no other is lost.
func FuzzResume(f *testing.F) {
	f.Add(uint64(0), uint64(50), uint64(3), []byte{1, 0, 200})
	f.Add(^uint64(0)-60, uint64(20), uint64(1), []byte{9, 9})
	f.Fuzz(func(t *testing.T, base, received, limit uint64, lengths []byte) {
		limit, lengths = 1+limit%300, lengths[:min(len(lengths), 64)]
		out := &outbound{peer: &outPeer{}, total: ^uint64(0)}
		end := uint64(0)
		offset := base
		want := uint64(0)
		for i, n := range lengths {
			n := uint64(n)
			if i%3 == 2 { // the bytes between were not given
				end += 1 + limit/2
			}
			if err := out.give([]sendRange{{position: end, end: end + n, begins: end, runs: []run{{base: uintptr(1 + end), len: n}}}}); err != nil {
				t.Fatal(err)
			}
			out.sent = append(out.sent, sentFrame{7, offset, piece{end, n}}, sentFrame{8, offset, piece{end, n}})
			begin := offset - base + headerSize
			if lost := n - min(max(received, begin)-begin, n); base+begin >= base { // D's count does not wrap
				want += lost
			}
			offset += headerSize + n
			end += n
		}
		out.todo, out.left, out.total = nil, 0, out.ranges.bytes // as if all were
		wraps := offset < base || base+received < base
		out.lose(7, base+received)
		if out.sentOn(7) || len(out.sent) != len(lengths) {
			t.Fatalf("%d frames are kept of %d", len(out.sent), len(lengths))
		}
		if !wraps && out.left != want {
			t.Fatalf("%d bytes are sent again, want %d", out.left, want)
		}
		if out.due() != (len(lengths) > 0) || out.ask != (out.due() && out.left == 0) {
			t.Fatalf("due %v, asks %v, %d bytes left of %d frames", out.due(), out.ask, out.left, len(lengths))
		}
		next := uint64(0)
		for left := out.left; left > 0; left = out.left {
			v, position, n := out.cut(make([]iovec, 0, 4), limit)
			if n == 0 || n > limit || position < next || position+n > end || left-out.left != n {
				t.Fatalf("%d bytes from %d, after %d, of %d", n, position, next, end)
			}
			next = position
			for _, v := range v { // the runs lie where their positions say
				if v.base != uintptr(1+next) {
					t.Fatalf("position %d is read at %d", next, v.base-1)
				}
				next += uint64(v.len)
			}
			if next != position+n {
				t.Fatalf("a frame of %d bytes has %d", n, next-position)
			}
		}
	})
}

// TestEveryStreamComesBack: a stream that broke just before a transfer begins is opened
// too, so that P does not go on with the stream that it may still have.
func TestEveryStreamComesBack(t *testing.T) {
	leaktest.Check(t)
	d := newAgent(t, Config{StallTimeout: time.Hour})
	p := newFakeP(t, d, "p")
	c, first := p.stream()
	p.stream()
	_ = c.Close()
	until(t, "D has seen it", func() bool {
		d.receiver.mu.Lock()
		defer d.receiver.mu.Unlock()
		n, _ := first.stream()
		return !d.receiver.peers["p"].slots[n].busy
	})
	d.expect(t, "t", "p", allBlocks(1))
	_, again := p.stream()
	n, attempt := first.stream()
	if m, next := again.stream(); m != n || next <= attempt {
		t.Errorf("stream %d, attempt %d came, want a newer one of %d", m, next, n)
	}
}
