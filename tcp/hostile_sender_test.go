package tcp

import (
	"bytes"
	"net"
	"testing"
	"time"

	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// TestHostileSender: a stream with frames that no sender sends ends, with the transfers
// that waited for it, and no byte of it lands.
func TestHostileSender(t *testing.T) {
	leaktest.Check(t)
	for name, words := range map[string]func(grant random) []byte{
		"garbage":                     func(random) []byte { return bytes.Repeat([]byte{0xff}, 400) },
		"half a header":               func(g random) []byte { return frameBytes(header{kind: frameData, key: g, length: 8})[:30] },
		"hello":                       func(g random) []byte { return frameBytes(header{kind: frameHello, key: g}) },
		"acknowledgement":             func(g random) []byte { return frameBytes(header{kind: frameAck, key: g}) },
		"leave":                       func(g random) []byte { return frameBytes(header{kind: frameLeave}) },
		"enormous":                    func(g random) []byte { return frameBytes(header{kind: frameData, key: g, length: 1 << 62}) },
		"enormous, of an unknown one": func(g random) []byte { return frameBytes(header{kind: frameData, length: 1 << 62}) },
		"length as large as a position": func(g random) []byte {
			return frameBytes(header{kind: frameData, key: g, position: 1 << 63, length: 1 << 63})
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := newAgent(t, Config{Streams: 1, StallTimeout: time.Hour})
			c := fakeSender(t, d, "p")
			grant := d.expect(t, "t", "p", allBlocks(2))
			c.say(words(grant))
			if name == "half a header" { // for D the connection just broke: D dials again
				_ = c.Conn.(*net.TCPConn).CloseWrite()
			} else if o := d.sink.Wait("received", "t", 1); o.Err == nil {
				t.Error("it ended well")
			}
			until(t, "the loss is told", func() bool { return len(d.sink.All("down", "")) == 1 })
			d.full(t, 0)
		})
	}
}

// TestGrantOfAnotherPeer: a frame with another peer's grant lands nowhere and ends
// nothing.
func TestGrantOfAnotherPeer(t *testing.T) {
	leaktest.Check(t)
	d := newAgent(t, Config{Streams: 1})
	p, attacker := fakeSender(t, d, "p"), fakeSender(t, d, "attacker")
	grant := d.expect(t, "t", "p", allBlocks(1))
	d.expect(t, "u", "attacker", [][]kv.BlockID{{1}})
	ones := bytes.Repeat([]byte{1}, testBlock)
	attacker.say(frameBytes(header{kind: frameData, key: grant, length: testBlock}), ones)
	if h := attacker.next(); h.kind != frameNack || h.key != grant {
		t.Fatalf("answered by %+v", h)
	}
	// Its end would need the whole frame read; the next nack says that it was.
	attacker.say(frameBytes(header{kind: frameData, key: random{}}))
	attacker.next()
	d.full(t, 0)
	p.say(frameBytes(header{kind: frameData, key: grant, length: testBlock}), ones)
	if h := p.next(); h.kind != frameAck || h.key != grant || h.length != testBlock {
		t.Fatalf("answered by %+v", h)
	}
	if o := d.sink.Wait("received", "t", 1); o.Err != nil || !bytes.Equal(d.mem[:testBlock], ones) {
		t.Fatalf("received: %+v", o)
	}
	if told := d.sink.All("received", "u"); len(told) != 0 {
		t.Fatalf("told %+v", told)
	}
}

// TestFramesAfterRevoke: after a revoke come the rest of a frame that had begun, and whole frames.
func TestFramesAfterRevoke(t *testing.T) {
	leaktest.Check(t)
	d := newAgent(t, Config{Streams: 1})
	p := fakeSender(t, d, "p")
	grant := d.expect(t, "t", "p", allBlocks(2))
	ones := bytes.Repeat([]byte{1}, testBlock)
	p.say(frameBytes(header{kind: frameData, key: grant, length: testBlock}), ones[:testBlock/2])
	until(t, "half of a frame has landed", func() bool { return d.mem[testBlock/2-1] == 1 })
	d.Revoke("t")
	for i := range d.mem {
		d.mem[i] = 9
	}
	p.say(ones[testBlock/2:])
	p.say(frameBytes(header{kind: frameData, key: grant, position: testBlock, length: testBlock}), ones)
	p.say(frameBytes(header{kind: frameData, key: grant, length: 1 << 20}), ones) // was there before
	p.say(frameBytes(header{kind: frameData, key: random{}}))                     // its nack says that all was read
	for i := range 4 {
		if h := p.next(); h.kind != frameNack || (h.key != grant) != (i == 3) {
			t.Fatalf("answer %d is %+v", i, h)
		}
	}
	d.full(t, 9)
	if told := d.sink.All("received", "t"); len(told) != 0 {
		t.Fatalf("told %+v", told)
	}
}
