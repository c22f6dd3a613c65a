package tcp

import (
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// slotsOf are how many streams D opens to a peer, and how many it has or dials in all.
func (a *agent) slotsOf(peer core.AgentID) (opens, busy int) {
	a.receiver.mu.Lock()
	defer a.receiver.mu.Unlock()
	return a.receiver.peers[peer].opens, a.receiver.busy
}

// received waits until D has read all that P has said on a stream.
func (c *rawConn) received() {
	c.t.Helper()
	c.say(frameBytes(header{kind: frameData}))
	if h := c.next(); h.kind != frameNack {
		c.t.Fatalf("answered by %+v", h)
	}
}

// TestAskedForMore: D opens the streams that P asks for, one after the other, no more than it may, and none that it has.
func TestAskedForMore(t *testing.T) {
	leaktest.Check(t)
	d := newAgent(t, Config{Streams: 3, First: 1, StallTimeout: time.Hour})
	before := d.attempts() // with newFakeP D dials
	p := newFakeP(t, d, "p")
	c, h := p.stream()
	if n, _ := h.stream(); n != 0 {
		t.Fatalf("stream %d comes first", n)
	}
	says := func(numbers ...int) {
		t.Helper()
		for _, n := range numbers {
			h := again(n, 0)
			c.say(frameBytes(h))
		}
		c.received()
	}
	says(0, 2, 3, maxPeerStreams-1)
	if opens, busy := d.slotsOf("p"); opens != 1 || busy != 1 {
		t.Errorf("%d streams are opened, %d in all", opens, busy)
	}
	for want := 1; want <= 2; want++ {
		says(want, want, 0, maxPeerStreams-1)
		_, h := p.stream()
		if n, _ := h.stream(); n != want {
			t.Errorf("stream %d comes, want %d", n, want)
		}
	}
	says(3, 0, 1, 2)
	if opens, busy := d.slotsOf("p"); opens != 3 || busy != 3 || d.attempts() != before+3 {
		t.Errorf("%d streams are opened, %d in all, by %d attempts", opens, busy, d.attempts()-before)
	}
}

// TestDescriptorsOfD: D opens no further stream when half of its places are taken, by whichever peers.
func TestDescriptorsOfD(t *testing.T) {
	leaktest.Check(t)
	d := newAgent(t, Config{First: 1, MaxStreams: 6, StallTimeout: time.Hour})
	p, q := newFakeP(t, d, "p"), newFakeP(t, d, "q")
	c, _ := p.stream()
	_, _ = q.stream()
	asks := func(number, want int) {
		t.Helper()
		h := again(number, 0)
		c.say(frameBytes(h))
		c.received()
		if opens, _ := d.slotsOf("p"); opens != want {
			t.Errorf("asked for stream %d: %d streams are opened, want %d", number, opens, want)
		}
	}
	asks(1, 2)
	asks(2, 2)
	d.Dismiss("q")
	until(t, "q's stream has ended", func() bool { _, busy := d.slotsOf("p"); return busy == 2 })
	asks(2, 3)
}

// TestFurtherStreamRefused: when P refuses a stream that it has asked for, D opens it no more, until P asks again.
func TestFurtherStreamRefused(t *testing.T) {
	leaktest.Check(t)
	d := newAgent(t, Config{First: 1, StallTimeout: time.Hour})
	d.receiver.redial = 0
	p := newFakeP(t, d, "p")
	c, _ := p.stream()
	d.expect(t, "t", "p", allBlocks(1))
	for range 3 {
		h := again(1, 0)
		c.say(frameBytes(h))
		further, h := p.stream()
		if n, _ := h.stream(); n != 1 {
			t.Fatalf("stream %d comes", n)
		}
		further.say(frameBytes(header{kind: frameLeave}))
		further.ends()
		until(t, "D has given it up", func() bool { opens, busy := d.slotsOf("p"); return opens == 1 && busy == 1 })
	}
	if all := d.sink.All("received", "t"); len(all) != 0 {
		t.Errorf("told %v", all)
	}
}
