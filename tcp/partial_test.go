package tcp

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/coretest"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/rig/nettest"
)

// part is a write of some blocks, from one on, of a transfer of so many in all. Its blocks
// lie in their order on both sides.
func (a *agent) part(id core.TransferID, grant random, total int, extents ...[2]int) core.WriteOp {
	size := a.layout.Regions[0].BlockBytes
	op := core.WriteOp{ID: id, Peer: "d", Grant: grant[:], Bytes: uint64(total) * size, At: []kv.Extent{}}
	for _, e := range extents {
		at := uint64(e[0]) * size
		op.Pairs = append(op.Pairs, kv.Pair{SrcOffset: at, DstOffset: at, Length: uint64(e[1]) * size})
		op.At = append(op.At, kv.Extent{Position: at, Pairs: 1})
	}
	return op
}

func (a *agent) paint() {
	for i := range a.mem {
		a.mem[i] = byte(i*7 + i>>12 + i>>20)
	}
}

// got is the number of a transfer's bytes that have landed.
func (a *agent) got(id core.TransferID) uint64 {
	a.receiver.mu.Lock()
	defer a.receiver.mu.Unlock()
	if in := a.receiver.byID[id]; in != nil {
		return in.got
	}
	return 0
}

// heard says whether P has said something since all streams were broken, and whether
// each was opened again after so many attempts.
func (a *agent) heard(peer core.AgentID, attempts uint64) bool {
	a.receiver.mu.Lock()
	defer a.receiver.mu.Unlock()
	l := a.receiver.peers[peer]
	return l.moved && !slices.ContainsFunc(l.slots[:l.opens], func(s inSlot) bool { return s.conn == nil || s.attempt <= attempts })
}

func (a *agent) attempts() uint64 {
	a.receiver.mu.Lock()
	defer a.receiver.mu.Unlock()
	return a.receiver.attempts
}

func (a *agent) streams() int {
	a.sender.mu.Lock()
	defer a.sender.mu.Unlock()
	return a.sender.streams
}

// endsWell checks that a transfer of all of p's memory ended well.
func endsWell(t *testing.T, id core.TransferID, p, d *agent) {
	t.Helper()
	for _, o := range []coretest.Outcome{d.sink.Wait("received", id, 1), p.sink.Wait("written", id, 1)} {
		if o.Err != nil || o.Stats.Bytes != uint64(len(p.mem)) {
			t.Errorf("%s: %+v", o.Kind, o)
		}
	}
	if !bytes.Equal(p.mem, d.mem) {
		t.Error("wrong bytes")
	}
}

// TestBreaksAtRest: streams may break as often as they like while a write rests,
// seen by both sides or by D only.
func TestBreaksAtRest(t *testing.T) {
	leaktest.Check(t)
	const blocks = 64
	for _, streams := range []int{1, 2, 8} {
		for name, cut := range map[string]func(*nettest.Forwarder){"cut": (*nettest.Forwarder).Cut, "lost": (*nettest.Forwarder).Lose} {
			t.Run(fmt.Sprint(name, " ", streams), func(t *testing.T) {
				patient := Config{DialTimeout: bound, StallTimeout: time.Hour, Streams: streams, First: streams}
				p, d := newSizedAgent(t, patient, blocks, 4096), newSizedAgent(t, patient, blocks, 4096)
				p.sender.grace = bound
				d.receiver.redial = redialSoon
				if streams == 1 {
					d.receiver.redial = time.Hour // of a stream that has brought nothing
				}
				p.paint()
				f := nettest.Forward(t, p.Endpoint())
				if err := d.Connect("p", f.Addr(), p.admit(t, "d")); err != nil {
					t.Fatal(err)
				}
				ready := func() bool { return f.Open() == streams && p.streams() == streams }
				until(t, "all streams are open", ready)
				grant := d.expect(t, "t", "p", allBlocks(blocks))
				p.Write(p.part("t", grant, blocks, [2]int{40, 8}, [2]int{9, 3}))
				until(t, "the first part has landed", func() bool { return d.got("t") == 11*4096 })
				for range 5 {
					before := d.attempts()
					cut(f)
					until(t, "all streams are open again, and P has said that it lives", func() bool { return ready() && d.heard("p", before) })
				}
				p.Extend(p.part("t", grant, blocks, [2]int{0, 9}))
				until(t, "more has landed", func() bool { return d.got("t") == 20*4096 })
				cut(f)
				p.Extend(p.part("t", grant, blocks, [2]int{12, 28}, [2]int{48, 16})) // whether D is there or not
				endsWell(t, "t", p, d)
			})
		}
	}
}

// TestRestIsTold: each stream that D opens hears of the transfers that rest, and of no
// others. Bytes that D has lost come again all the same.
func TestRestIsTold(t *testing.T) {
	leaktest.Check(t)
	p := newSizedAgent(t, Config{StallTimeout: time.Hour, DialTimeout: bound}, 16, 64)
	p.sender.grace = bound
	rests, begins, ended := newRandom(), newRandom(), newRandom()
	c := dial(t, p)
	c.say(p.hello(t, "d", 3, 1, 0))
	p.Write(p.part("begins", begins, 4))
	for id, grant := range map[core.TransferID]random{"rests": rests, "ended": ended} {
		p.Write(p.part(id, grant, 4, [2]int{1, 2}))
		if h := c.next(); h.key != grant || h.position != 64 || h.length != 128 {
			t.Fatalf("begins with %+v", h)
		}
		if _, err := io.CopyN(io.Discard, c, 128); err != nil {
			t.Fatal(err)
		}
	}
	p.Stop("ended")
	p.sink.Wait("written", "ended", 1)
	other, anew := dial(t, p), dial(t, p)
	other.say(p.hello(t, "d", 5, 2, 0))
	anew.say(p.hello(t, "d", 3, 3, 2*(headerSize+128)))
	for _, c := range []*rawConn{other, anew} {
		if h := c.next(); h.kind != frameData || h.key != rests || h.length != 0 {
			t.Errorf("a new stream begins with %+v", h)
		}
	}
	_ = other.Close() // so that later frames can come by the third only
	until(t, "P has seen it", func() bool { return p.streams() == 1 })
	p.Extend(p.part("rests", rests, 4, [2]int{3, 1}))
	if h := anew.next(); h.key != rests || h.position != 3*64 || h.length != 64 {
		t.Errorf("goes on with %+v", h)
	}
	last := dial(t, p)
	last.say(p.hello(t, "d", 3, 4, 3*headerSize+2*128))
	if h := last.next(); h.key != rests || h.position != 3*64 || h.length != 64 {
		t.Errorf("the next stream begins with %+v", h)
	}
	last.say(frameBytes(header{kind: frameNack, key: rests}))
	if o := p.sink.Wait("written", "rests", 1); !errors.Is(o.Err, core.ErrNotExpected) {
		t.Errorf("written: %+v", o)
	}
	if told := p.sink.All("written", "begins"); len(told) != 0 {
		t.Errorf("told %+v", told)
	}
}

// TestNobodyComesBackAtRest: a D that is gone does not keep the blocks, and a D that
// refuses the transfer ends it at once.
func TestNobodyComesBackAtRest(t *testing.T) {
	leaktest.Check(t)
	p := newSizedAgent(t, Config{StallTimeout: time.Hour, DialTimeout: time.Hour}, 16, 64)
	c := dial(t, p)
	c.say(p.hello(t, "d", 0, 1, 0))
	gone, refused := newRandom(), newRandom()
	for id, grant := range map[core.TransferID]random{"gone": gone, "refused": refused} {
		p.Write(p.part(id, grant, 4, [2]int{0, 1}))
		if h := c.next(); h.key != grant {
			t.Fatalf("begins with %+v", h)
		}
		if _, err := io.CopyN(io.Discard, c, 64); err != nil {
			t.Fatal(err)
		}
	}
	c.say(frameBytes(header{kind: frameNack, key: refused}))
	if o := p.sink.Wait("written", "refused", 1); !errors.Is(o.Err, core.ErrNotExpected) {
		t.Errorf("written: %+v", o)
	}
	_ = c.Close()
	if o := p.sink.Wait("written", "gone", 1); !errors.Is(o.Err, core.ErrConnectionLost) {
		t.Errorf("written: %+v", o)
	}
}

// TestBrokenBeforeAnythingWasGiven: D has no bytes that would make it hurry, and P does
// not expect D to hurry.
func TestBrokenBeforeAnythingWasGiven(t *testing.T) {
	leaktest.Check(t)
	patient := Config{DialTimeout: bound, StallTimeout: time.Hour}
	p, d := newSizedAgent(t, patient, 8, 4096), newSizedAgent(t, patient, 8, 4096)
	p.sender.grace = time.Millisecond
	p.paint()
	f := nettest.Forward(t, p.Endpoint())
	if err := d.Connect("p", f.Addr(), p.admit(t, "d")); err != nil {
		t.Fatal(err)
	}
	grant := d.expect(t, "t", "p", allBlocks(8))
	p.Write(p.part("t", grant, 8))
	for range 2 {
		until(t, "both streams are open", func() bool { return f.Open() == 2 && p.streams() == 2 })
		f.Cut()
	}
	until(t, "both streams are open again", func() bool { return f.Open() == 2 && p.streams() == 2 })
	p.Extend(p.part("t", grant, 8, [2]int{0, 8}))
	endsWell(t, "t", p, d)
}

// TestLostWithinAPartialOffer: bytes that were lost with a stream are sent again at
// their position, whichever part they were of, between parts that are given later.
func TestLostWithinAPartialOffer(t *testing.T) {
	leaktest.Check(t)
	const fronts, steps, size = 4, 16, 48 << 10
	for name, c := range map[string]struct{ streams, after int }{
		"in a header":        {1, 7*(size+headerSize) + 17},
		"in a frame":         {1, 9*(size+headerSize) + 5000},
		"two streams":        {2, 11*size + 77},
		"eight streams":      {8, 33*size + 77},
		"in the last frames": {3, (fronts*steps-1)*(size+headerSize) - 99},
	} {
		t.Run(name, func(t *testing.T) {
			patient := Config{Streams: c.streams, First: c.streams, FrameBytes: size, DialTimeout: bound, StallTimeout: time.Hour}
			p, d := newSizedAgent(t, patient, fronts*steps, size), newSizedAgent(t, patient, fronts*steps, size)
			p.sender.grace = bound
			p.paint()
			f := nettest.Forward(t, p.Endpoint())
			if err := d.Connect("p", f.Addr(), p.admit(t, "d")); err != nil {
				t.Fatal(err)
			}
			until(t, "all streams are open", func() bool { return f.Open() == c.streams && p.streams() == c.streams })
			f.Hold(c.after)
			grant := d.expect(t, "t", "p", allBlocks(fronts*steps))
			give := p.Write
			for step := range steps {
				var at [][2]int
				for front := range fronts {
					at = append(at, [2]int{front*steps + step, 1})
				}
				give(p.part("t", grant, fronts*steps, at...))
				give = p.Extend
				if step == steps/2 && c.after < fronts*steps/2*size {
					until(t, "it is under way", f.Holds)
					f.Lose()
				}
			}
			if c.after >= fronts*steps/2*size {
				until(t, "it is under way", f.Holds)
				f.Lose()
			}
			endsWell(t, "t", p, d)
		})
	}
}

// FuzzPartial: parts that are given, cut into frames and lost in any order send each
// byte until it is not lost, from where it lies.
func FuzzPartial(f *testing.F) {
	f.Add([]byte{0, 10, 20, 1, 5, 0, 0, 30, 4, 2, 60, 1, 1, 200, 1, 0, 14, 30})
	f.Add([]byte{0, 0, 255, 1, 63, 0, 1, 63, 1, 2, 70, 1, 0, 8, 8})
	f.Fuzz(func(t *testing.T, steps []byte) {
		const total, base = 512, 1000
		out := &outbound{peer: &outPeer{}, total: total}
		var given, sent [total]bool
		var offset [2]uint64
		for ; len(steps) >= 3; steps = steps[3:] {
			a, b := int(steps[1]), int(steps[2])
			switch steps[0] % 3 {
			case 0:
				from, to := 2*a, 2*a+b
				fits := to <= total && !slices.Contains(given[from:min(to, total)], true)
				var runs []run
				for at := from; at < to; at += 7 {
					runs = append(runs, run{base: uintptr(base + at), len: uint64(min(7, to-at))})
				}
				err := out.give([]sendRange{{position: uint64(from), end: uint64(to), begins: uint64(from), runs: runs}})
				if (err == nil) != fits {
					t.Fatalf("bytes %d to %d are given: %v", from, to, err)
				}
				if fits {
					for i := from; i < to; i++ {
						given[i] = true
					}
				}
			case 1:
				if !out.due() {
					continue
				}
				number, asks := b%2, out.left == 0
				v, position, n := out.cut(make([]iovec, 0, 1+b%9), uint64(1+a%64))
				out.ask = false
				out.sent = append(out.sent, sentFrame{number, offset[number], piece{position, n}})
				offset[number] += headerSize + n
				at := int(position)
				for _, v := range v {
					for k := range int(v.len) {
						if v.base+uintptr(k) != uintptr(base+at) || !given[at] || sent[at] {
							t.Fatalf("byte %d is read at %d; given %v, sent %v", at, v.base, given[at], sent[at])
						}
						sent[at] = true
						at++
					}
				}
				if asks != (n == 0) || at != int(position+n) {
					t.Fatalf("%d bytes from %d on, of which there are %d", n, position, at-int(position))
				}
			case 2:
				number := b % 2
				received := offset[number] * uint64(a) / 255
				for _, f := range out.sent {
					for i := range f.length {
						if f.number == number && f.offset+headerSize+i >= received {
							sent[f.position+i] = false
						}
					}
				}
				out.lose(number, received)
				offset[number] = received
			}
			var left uint64
			for i := range given {
				if given[i] && !sent[i] {
					left++
				}
			}
			if out.left != left || out.ask && (left > 0 || slices.Contains(given[:], false)) {
				t.Fatalf("%d bytes are left, want %d; asks %v", out.left, left, out.ask)
			}
		}
	})
}

// BenchmarkWrite is transfers of small blocks between two agents of one process, at
// once and bit by bit.
func BenchmarkWrite(b *testing.B) {
	const n, size = 4096, 4096
	for _, parts := range []int{1, 64} {
		b.Run(fmt.Sprint(parts, " parts"), func(b *testing.B) {
			p, d := newSizedAgent(b, Config{}, n, size), newSizedAgent(b, Config{}, n, size)
			if err := d.Connect("p", p.Endpoint(), p.admit(b, "d")); err != nil {
				b.Fatal(err)
			}
			until(b, "both streams are open", func() bool { return p.streams() == 2 })
			var each [][2]int // no two of them adjacent in memory
			for i := range n {
				each = append(each, [2]int{i, 1})
			}
			pairs := p.part("", random{}, n, each...).Pairs
			slices.Reverse(pairs)
			b.SetBytes(n * size)
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				id := core.TransferID(fmt.Sprint(i))
				grant := d.expect(b, id, "p", allBlocks(n))
				op := core.WriteOp{ID: id, Peer: "d", Grant: grant[:], Bytes: n * size}
				give := p.Write
				for k := range parts {
					op.Pairs, op.At = pairs[k*n/parts:(k+1)*n/parts], []kv.Extent{{Position: uint64(k) * n * size / uint64(parts), Pairs: n / parts}}
					give(op)
					give = p.Extend
				}
				p.sink.Wait("written", id, 1)
			}
		})
	}
}
