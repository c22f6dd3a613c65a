package tcp

import (
	"context"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/rig/nettest"
)

// stream is P's stream of number 0 to a peer, once it is there.
func (a *agent) stream(t *testing.T, peer core.AgentID) *outStream {
	t.Helper()
	var st *outStream
	until(t, "the stream is open", func() bool {
		a.sender.mu.Lock()
		defer a.sender.mu.Unlock()
		st = a.sender.peers[peer].slots[0].stream
		return st != nil
	})
	return st
}

// TestDrippingPeerStarvesNobody: a peer that takes some bytes now and then, as many as count for progress, keeps no slot for that.
func TestDrippingPeerStarvesNobody(t *testing.T) {
	leaktest.Check(t)
	slots := newFewSlots(4, 8<<20)
	p := newAgent(t, Config{StallTimeout: time.Hour, FrameBytes: testBlocks * testBlock, Mover: slots})
	c := dial(t, p)
	_ = c.Conn.(*net.TCPConn).SetReadBuffer(64 << 10)
	c.say(p.hello(t, "drips", 0, 1, 0))
	_ = p.stream(t, "drips").conn.SetWriteBuffer(64 << 10) // each few bytes make room then
	grant := newRandom()
	p.Write(core.WriteOp{ID: "drips", Peer: "drips", Grant: grant[:], Pairs: p.pairs(t, allBlocks(testBlocks))})
	var had atomic.Int64
	go func() {
		b := make([]byte, 16<<10)
		for {
			n, err := c.Read(b)
			had.Add(int64(n))
			if err != nil {
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
	}()
	until(t, "slots were taken", func() bool { return slots.taken.Load() >= 4 })
	until(t, "nobody holds a slot", func() bool { return len(slots.free) == cap(slots.free) })
	n := had.Load()
	d := newAgent(t, Config{})
	move(t, p, d, "t") // for as long as a slow machine takes the peer goes on
	if n >= testBlocks*testBlock {
		t.Errorf("the slots were free when the peer had taken all its %d bytes", n)
	}
}

// countedSlots counts the waits for a slot that have begun.
type countedSlots struct {
	*fewSlots
	waits atomic.Int64
}

func (m *countedSlots) Slot(ctx context.Context, device int, to Direction, peer core.AgentID) (Slot, error) {
	if ctx.Err() == nil {
		m.waits.Add(1)
	}
	return m.fewSlots.Slot(ctx, device, to, peer)
}

// noSlots is an agent whose slots the test holds, and a way to give them back.
func noSlots(t *testing.T, cfg Config) (p *agent, m *countedSlots, back func()) {
	t.Helper()
	m = &countedSlots{fewSlots: newFewSlots(2, 64<<10)}
	held := [][]byte{<-m.free, <-m.free}
	cfg.Mover = m
	return newAgent(t, cfg), m, func() {
		for _, b := range held {
			m.free <- b
		}
	}
}

// TestWaitForASlot: a frame that has not begun waits for as long as its transfer lives, in one place of the queue.
func TestWaitForASlot(t *testing.T) {
	leaktest.Check(t)
	const stall = 2 * time.Second // also what its bytes may take then
	p, m, back := noSlots(t, Config{StallTimeout: stall})
	d := newAgent(t, Config{Streams: 1})
	start(t, p, d, p.Endpoint(), "t", allBlocks(1))
	until(t, "the frame waits", func() bool { return m.waits.Load() > 0 })
	time.Sleep(2 * stall)
	if n := m.waits.Load(); n != 1 {
		t.Errorf("%d waits for one frame: its place in the queue is lost", n)
	}
	back()
	if o := d.sink.Wait("received", "t", 1); o.Err != nil {
		t.Error(o.Err)
	}
	if o := p.sink.Wait("written", "t", 1); o.Err != nil {
		t.Error(o.Err)
	}
}

// TestStopEndsTheWaitForASlot: a frame that waits for a slot ends when its transfer is stopped, though no slot comes; the stream
// goes on if nothing of the frame is written.
func TestStopEndsTheWaitForASlot(t *testing.T) {
	leaktest.Check(t)
	p, m, back := noSlots(t, Config{StallTimeout: time.Hour})
	d := newAgent(t, Config{Streams: 1})
	start(t, p, d, p.Endpoint(), "t", allBlocks(1))
	until(t, "the frame waits", func() bool { return m.waits.Load() > 0 })
	st := p.stream(t, "d")
	p.Stop("t")
	if o := p.sink.Wait("written", "t", 1); o.Err == nil {
		t.Error("a write that was stopped ended well")
	}
	back()
	move(t, p, d, "u")
	if p.stream(t, "d") != st {
		t.Error("the stream was opened anew")
	}
}

// TestStreamEndsTheWaitForASlot: a frame that waits for a slot leaves the queue when its stream ends. Its bytes go by the stream that
// D opens anew.
func TestStreamEndsTheWaitForASlot(t *testing.T) {
	leaktest.Check(t)
	p, m, back := noSlots(t, Config{DialTimeout: bound, StallTimeout: time.Hour})
	d := newAgent(t, Config{Streams: 1, DialTimeout: bound, StallTimeout: time.Hour})
	p.sender.grace = bound
	forwarder := nettest.Forward(t, p.Endpoint())
	start(t, p, d, forwarder.Addr(), "t", allBlocks(1))
	until(t, "the frame waits", func() bool { return m.waits.Load() == 1 })
	forwarder.Cut()
	until(t, "the frame waits on another stream, and on none before", func() bool {
		p.sender.mu.Lock()
		defer p.sender.mu.Unlock()
		return m.waits.Load() >= 2 && p.sender.byID["t"].frames == 1
	})
	back()
	if o := d.sink.Wait("received", "t", 1); o.Err != nil {
		t.Error(o.Err)
	}
	if o := p.sink.Wait("written", "t", 1); o.Err != nil {
		t.Error(o.Err)
	}
}
