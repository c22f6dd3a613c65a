package tcp

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/rig/timed"
)

// TestStopOfAStuckFrame: a peer that takes no bytes does not keep the blocks of a write
// that was stopped. The peer's other write is not lost.
func TestStopOfAStuckFrame(t *testing.T) {
	leaktest.Check(t)
	timed.Within(t, stopSoon, "the end of a frame that is stuck", func() time.Duration { return stopOfAStuckFrame(t) })
}

// stopSoon is stopBound, and what a busy machine adds.
const stopSoon = stopBound + 2*time.Second

// stopOfAStuckFrame returns how long the stop took.
func stopOfAStuckFrame(t *testing.T) (took time.Duration) {
	t.Helper()
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
	stops := time.Now()
	p.Stop("stopped")
	if o := p.sink.Wait("written", "stopped", 1); o.Err == nil || errors.Is(o.Err, core.ErrConnectionLost) {
		t.Errorf("written: %+v", o)
	}
	took = time.Since(stops)
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
	return took
}

// TestStopOfASlowFrame: a peer that takes a few bytes now and then does not keep the blocks either.
func TestStopOfASlowFrame(t *testing.T) {
	for what, mover := range map[string]func() Mover{
		"of host memory": func() Mover { return nil },
		"of slots":       func() Mover { return newFewSlots(8, 64<<10) },
	} {
		t.Run(what, func(t *testing.T) {
			leaktest.Check(t)
			timed.Within(t, stopSoon, "the end of a frame that is slow", func() time.Duration { return stopOfASlowFrame(t, mover()) })
		})
	}
}

// stopOfASlowFrame returns how long the stop took.
func stopOfASlowFrame(t *testing.T, mover Mover) time.Duration {
	t.Helper()
	p := newAgent(t, Config{FrameBytes: testBlocks * testBlock, StallTimeout: time.Hour, Mover: mover})
	slow := dial(t, p)
	_ = slow.Conn.(*net.TCPConn).SetReadBuffer(64 << 10)
	slow.say(p.hello(t, "d", 0, 1, 0))
	_ = p.stream(t, "d").conn.SetWriteBuffer(64 << 10) // each few bytes make room then
	grant := newRandom()
	p.Write(core.WriteOp{ID: "t", Peer: "d", Grant: grant[:], Pairs: p.pairs(t, allBlocks(testBlocks))})
	slow.next()
	p.Stop("t")
	taken, stops := 0, time.Now()
	for b := make([]byte, 16<<10); len(p.sink.All("written", "t")) == 0; time.Sleep(10 * time.Millisecond) {
		if time.Since(stops) > bound/2 {
			t.Fatal("the write is not told")
		}
		_ = slow.SetReadDeadline(time.Now().Add(time.Millisecond))
		n, _ := slow.Read(b)
		if taken += n; taken >= (testBlocks-4)*testBlock {
			t.Fatal("the peer gets the whole frame")
		}
	}
	took := time.Since(stops)
	if o := p.sink.Wait("written", "t", 1); o.Err == nil {
		t.Error("it ended well")
	}
	return took
}

// TestStopWithinAFrame: a frame of which a part is written has no slot for the next part, and waits for one. A stop of its transfer ends
// that wait too.
func TestStopWithinAFrame(t *testing.T) {
	leaktest.Check(t)
	timed.Within(t, stopSoon, "the end of a frame that waits for a slot", func() time.Duration {
		slots := &lastSlots{fewSlots: newFewSlots(1, 64<<10), waits: make(chan struct{}, 1)}
		slots.left.Store(3)
		p := newAgent(t, Config{StallTimeout: time.Hour, Mover: slots})
		c := dial(t, p)
		c.say(p.hello(t, "d", 0, 1, 0))
		go func() { _, _ = io.Copy(io.Discard, c) }()
		grant := newRandom()
		p.Write(core.WriteOp{ID: "t", Peer: "d", Grant: grant[:], Pairs: p.pairs(t, allBlocks(1))})
		select {
		case <-slots.waits:
		case <-time.After(bound):
			t.Fatal("no frame waits for a slot")
		}
		stops := time.Now()
		p.Stop("t")
		o := p.sink.Wait("written", "t", 1)
		took := time.Since(stops)
		if o.Err == nil {
			t.Error("it ended well")
		}
		return took
	})
}

// lastSlots is a Mover that has no slots any more when so many were taken.
type lastSlots struct {
	*fewSlots
	left  atomic.Int64
	waits chan struct{} // somebody waits for a slot
}

func (m *lastSlots) Slot(ctx context.Context, device int, to Direction, peer core.AgentID) (Slot, error) {
	if m.left.Add(-1) >= 0 {
		return m.fewSlots.Slot(ctx, device, to, peer)
	}
	if ctx.Err() == nil {
		select {
		case m.waits <- struct{}{}:
		default:
		}
	}
	<-ctx.Done()
	return nil, ctx.Err()
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
