package tcp

import (
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// TestStopOfAStuckFrame: a peer that takes no bytes does not keep the blocks of a write
// that was stopped. The peer's other write is not lost.
func TestStopOfAStuckFrame(t *testing.T) {
	leaktest.Check(t)
	p := newAgent(t, Config{FrameBytes: 16 << 20, StallTimeout: time.Hour, DialTimeout: bound})
	for i := range p.mem {
		p.mem[i] = 1
	}
	stalled := dial(t, p)
	stalled.say(p.hello(t, "d", 0, 1, 0))
	stopped, other := newRandom(), newRandom()
	p.Write(core.WriteOp{ID: "stopped", Peer: "d", Grant: stopped[:], Pairs: p.pairs(t, allBlocks(testBlocks))})
	if h := stalled.next(); h.key != stopped {
		t.Fatalf("begins with %+v", h)
	}
	p.Write(core.WriteOp{ID: "other", Peer: "d", Grant: other[:], Pairs: p.pairs(t, allBlocks(1))})
	p.Stop("stopped")
	if o := p.sink.Wait("written", "stopped", 1); o.Err == nil || errors.Is(o.Err, core.ErrConnectionLost) {
		t.Errorf("written: %+v", o)
	}
	clear(p.mem[testBlock:]) // the blocks are the engine's again, but for the other's
	for b := make([]byte, 1<<20); ; {
		n, err := stalled.Read(b)
		for _, v := range b[:n] {
			if v != 1 {
				t.Fatal("bytes were read after the end was told")
			}
		}
		if err != nil {
			break
		}
	}
	c := dial(t, p)
	c.say(p.hello(t, "d", 0, 2, headerSize+100))
	if h := c.next(); h.key != other || h.position != 0 || h.length != testBlock {
		t.Fatalf("goes on with %+v", h)
	}
	c.say(frameBytes(header{kind: frameAck, key: other, length: testBlock}))
	if _, err := io.CopyN(io.Discard, c, testBlock); err != nil {
		t.Fatal(err)
	}
	if o := p.sink.Wait("written", "other", 1); o.Err != nil {
		t.Errorf("the other: %+v", o)
	}
}

// TestStopOfASlowFrame: a peer that takes a few bytes now and then does not keep the blocks either.
func TestStopOfASlowFrame(t *testing.T) {
	t.Run("of host memory", func(t *testing.T) { stopOfASlowFrame(t, nil) })
	t.Run("of slots", func(t *testing.T) { stopOfASlowFrame(t, newFewSlots(8, 64<<10)) })
}

func stopOfASlowFrame(t *testing.T, mover Mover) {
	leaktest.Check(t)
	p := newAgent(t, Config{FrameBytes: testBlocks * testBlock, StallTimeout: time.Hour, Mover: mover})
	slow := dial(t, p)
	_ = slow.Conn.(*net.TCPConn).SetReadBuffer(64 << 10)
	slow.say(p.hello(t, "d", 0, 1, 0))
	_ = p.stream(t, "d").conn.SetWriteBuffer(64 << 10) // each few bytes make room then
	grant := newRandom()
	p.Write(core.WriteOp{ID: "t", Peer: "d", Grant: grant[:], Pairs: p.pairs(t, allBlocks(testBlocks))})
	slow.next()
	p.Stop("t")
	taken := 0
	for b, began := make([]byte, 16<<10), time.Now(); len(p.sink.All("written", "t")) == 0; time.Sleep(10 * time.Millisecond) {
		if time.Since(began) > bound/2 {
			t.Fatal("the write is not told")
		}
		_ = slow.SetReadDeadline(time.Now().Add(time.Millisecond))
		n, _ := slow.Read(b)
		if taken += n; taken >= (testBlocks-4)*testBlock {
			t.Fatal("the peer gets the whole frame")
		}
	}
	if o := p.sink.Wait("written", "t", 1); o.Err == nil {
		t.Error("it ended well")
	}
}

// TestOwnStopIsOneStep: a deadline that has long passed counts for no more than its step.
func TestOwnStopIsOneStep(t *testing.T) {
	s := stall{bound: 10*step - 1}
	for i := range 9 {
		if left := time.Until(s.deadline()); left > step {
			t.Fatalf("step %d: the deadline is in %v", i, left)
		}
		if !s.goesOn(os.ErrDeadlineExceeded) {
			t.Fatalf("ends after %d steps", i)
		}
	}
	if s.goesOn(os.ErrDeadlineExceeded) {
		t.Errorf("goes on after %v, want %v at most", s.since, s.bound)
	}
	if s := (stall{bound: time.Hour}); s.goesOn(io.EOF) {
		t.Error("goes on after an end")
	}
}
