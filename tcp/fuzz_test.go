package tcp

import (
	"bytes"
	"net"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
)

// grantMark stands for the transfer's grant in an input.
var grantMark = bytes.Repeat([]byte{'g'}, len(random{}))

const (
	fuzzBlock  = 64
	fuzzBlocks = 4
)

// fuzzDst are the blocks of the transfer; block 0 and 3 are beside it.
var fuzzDst = [][]kv.BlockID{{2, 1}}

func marked(h header) []byte { h.key = random(grantMark); return frameBytes(h) }

func FuzzHeader(f *testing.F) {
	f.Add(frameBytes(header{kind: frameData, key: newRandom(), position: 7, length: 1 << 40}))
	f.Add(make([]byte, headerSize))
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) < headerSize {
			return
		}
		var h header
		b := [headerSize]byte(in)
		if h.decode(&b) == nil && !bytes.Equal(frameBytes(h), in[:headerSize]) {
			t.Fatalf("%x is read as %+v", in, h)
		}
	})
}

// FuzzReceiver: whatever P says, D's other memory stays as it is, the transfer ends once,
// and it ends well only when each byte has come.
func FuzzReceiver(f *testing.F) {
	half := make([]byte, fuzzBlock)
	first, second := marked(header{kind: frameData, length: fuzzBlock}), marked(header{kind: frameData, position: fuzzBlock, length: fuzzBlock})
	f.Add(bytes.Join([][]byte{second, half, first, half}, nil))
	f.Add(bytes.Join([][]byte{first, half, first, half}, nil))
	f.Add(bytes.Join([][]byte{marked(header{kind: frameData}), first, half[:9]}, nil))
	f.Add(marked(header{kind: frameData, position: ^uint64(0), length: 2}))
	f.Add(frameBytes(header{kind: frameLeave}))
	f.Add(frameBytes(again(0, 1)))
	f.Add(bytes.Join([][]byte{frameBytes(again(1, 0)), frameBytes(again(2, 0)), first, half, frameBytes(again(3, 0)), second, half}, nil))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, in []byte) {
		d := newSizedAgent(t, Config{Streams: 3, First: 1, StallTimeout: time.Hour}, fuzzBlocks, fuzzBlock)
		d.receiver.redial = time.Millisecond
		p := fakeSender(t, d, "p")
		grant := d.expect(t, "t", "p", fuzzDst)
		p.say(bytes.ReplaceAll(in, grantMark, grant[:]))
		_ = p.Conn.(*net.TCPConn).CloseWrite()
		until(t, "the loss is told", func() bool { return len(d.sink.All("down", "")) == 1 })
		d.Dismiss("p") // else D would wait for a P that is still to begin
		o := d.sink.Wait("received", "t", 1)
		if o.Err == nil && o.Stats.Bytes != 2*fuzzBlock {
			t.Errorf("ended well: %+v", o)
		}
		if n := len(d.sink.All("received", "")); n != 1 {
			t.Errorf("told %d times", n)
		}
		beside := append(bytes.Clone(d.mem[:fuzzBlock]), d.mem[3*fuzzBlock:]...)
		if !bytes.Equal(beside, make([]byte, len(beside))) {
			t.Errorf("memory beside the transfer was changed")
		}
	})
}

// FuzzSender: whatever D says, before its ticket (met false) or after, P's write ends
// once, and it ends well only when each byte was sent.
func FuzzSender(f *testing.F) {
	f.Add(true, marked(header{kind: frameAck, length: 2 * fuzzBlock}))
	f.Add(true, bytes.Join([][]byte{marked(header{kind: frameNack}), marked(header{kind: frameAck, length: 2 * fuzzBlock})}, nil))
	f.Add(true, marked(header{kind: frameAck, length: 1})[:headerSize-1])
	f.Add(false, frameBytes(header{kind: frameHello, key: newRandom()}))
	f.Add(false, []byte("GET / HTTP/1.1\r\n\r\n"))
	f.Fuzz(func(t *testing.T, helloed bool, in []byte) {
		p := newSizedAgent(t, Config{StallTimeout: time.Hour}, fuzzBlocks, fuzzBlock)
		p.sender.grace = time.Millisecond
		d := dial(t, p)
		if !helloed {
			d.say(in)
			_ = d.Conn.(*net.TCPConn).CloseWrite()
			d.ends()
			if down := p.sink.All("down", ""); len(down) != 0 {
				t.Errorf("told %+v", down)
			}
			return
		}
		grant := newRandom()
		d.say(p.hello(t, "d", 0, 1, 0))
		p.Write(core.WriteOp{ID: "t", Peer: "d", Grant: grant[:], Pairs: p.pairs(t, fuzzDst)})
		if h := d.next(); h.key != grant {
			t.Fatalf("begins with %+v", h)
		}
		d.say(bytes.ReplaceAll(in, grantMark, grant[:]))
		_ = d.Conn.(*net.TCPConn).CloseWrite()
		o := p.sink.Wait("written", "t", 1)
		d.ends()
		until(t, "the loss is told", func() bool { return len(p.sink.All("down", "")) == 1 })
		if o.Err == nil && o.Stats.Bytes != 2*fuzzBlock {
			t.Errorf("ended well: %+v", o)
		}
		if n := len(p.sink.All("written", "")); n != 1 {
			t.Errorf("told %d times", n)
		}
	})
}
