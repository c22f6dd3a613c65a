package tcp

import (
	"fmt"
	"io"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// curveOf has an agent measure what so many streams are said to carry, in seconds that pass with each reading.
func (a *agent) curveOf(peer core.AgentID, rate func(use int) uint64) {
	s, now, acked := &a.sender, time.Unix(0, 0), uint64(0)
	s.meter = func([]*outStream) reading {
		s.mu.Lock()
		defer s.mu.Unlock()
		now = now.Add(time.Second)
		if p := s.peers[peer]; p != nil {
			acked += rate(p.tuner.use)
		}
		return reading{now, acked}
	}
}

// TestStreamsAreFound: P has D open streams for as long as they pay and both sides have places for them, and uses no others.
func TestStreamsAreFound(t *testing.T) {
	const blocks, block, frame, best = 256, 16 << 10, 4 << 10, 4
	for name, c := range map[string]struct {
		p, d        Config
		open, found int
	}{
		"as many as pay":      {d: Config{Streams: 6}, open: best + 1, found: best},
		"P's most":            {p: Config{Streams: 3}, open: 3, found: 3},
		"D's most":            {d: Config{Streams: 3}, open: 3, found: 3},
		"half of P's places":  {p: Config{MaxStreams: 6}, open: 3, found: 3},
		"half of D's places":  {d: Config{MaxStreams: 6}, open: 3, found: 3},
		"P uses no more":      {p: Config{Streams: 2}, d: Config{First: 4}, open: 4, found: 2},
		"fewer than at first": {p: Config{First: 3}, d: Config{Streams: 1}, open: 1, found: 1},
	} {
		t.Run(name, func(t *testing.T) {
			leaktest.Check(t)
			c.p.FrameBytes, c.p.StallTimeout, c.d.StallTimeout = frame, time.Hour, time.Hour
			p, d := newSizedAgent(t, c.p, blocks, block), newSizedAgent(t, c.d, blocks, block)
			p.paint()
			p.curveOf("d", func(use int) uint64 { return uint64(1000 * min(use, best)) })
			peer := func() *outPeer { return p.sender.peers["d"] }
			transfers := 0
			seeks := func() {
				t.Helper()
				for until := time.Now().Add(10 * bound); ; transfers++ {
					p.sender.mu.Lock()
					open, b := peer().open, peer().tuner
					p.sender.mu.Unlock()
					if open > c.open || b.found > max(c.found, p.cfg.First) {
						t.Fatalf("%d streams are open, want %d; %d are found, want %d", open, c.open, b.found, c.found)
					}
					if open == c.open && b.found == c.found && b.pause >= 8*shortestPause {
						return // three trials have changed nothing
					}
					if time.Now().After(until) {
						t.Fatalf("%d streams are open, want %d: %+v", open, c.open, b)
					}
					id := core.TransferID(fmt.Sprint(transfers))
					clear(d.mem)
					grant := d.expect(t, id, "p", allBlocks(blocks))
					p.Write(core.WriteOp{ID: id, Peer: "d", Grant: grant[:], Pairs: p.pairs(t, allBlocks(blocks))})
					endsWell(t, id, p, d)
				}
			}
			connect := func() {
				t.Helper()
				if err := d.Connect("p", p.Endpoint(), p.admit(t, "d")); err != nil {
					t.Fatal(err)
				}
			}
			connect()
			seeks()
			d.Dismiss("p") // D forgets how many streams P has asked for
			before := d.attempts()
			connect()
			until(t, "D has come back", func() bool { return p.hasNewer("d", before) })
			seeks()
		})
	}
}

// hasNewer says whether an agent has a stream of a peer's that was opened after so many attempts, and none before.
func (a *agent) hasNewer(peer core.AgentID, attempts uint64) bool {
	a.sender.mu.Lock()
	defer a.sender.mu.Unlock()
	p := a.sender.peers[peer]
	return p.open > 0 && !slices.ContainsFunc(p.slots[:], func(s outSlot) bool { return s.stream != nil && s.attempt <= attempts })
}

// asksThrough has P ask for a stream, and checks that it does so by the stream of a connection, which gets nothing before.
func (a *agent) asksThrough(c *rawConn, peer core.AgentID, number int) {
	c.t.Helper()
	a.sender.mu.Lock()
	p := a.sender.peers[peer]
	p.asks = true
	p.wake.Broadcast()
	a.sender.mu.Unlock()
	h := c.next()
	if n, attempt := h.stream(); h.kind != frameAgain || n != number || attempt != 0 {
		c.t.Fatalf("told %+v, want that stream %d is to be opened", h, number)
	}
}

// TestIdleStreams: a stream that is not in use takes no frame, until one that is has ended.
func TestIdleStreams(t *testing.T) {
	leaktest.Check(t)
	const half = testBlocks * testBlock / 2 // more than a connection's buffers hold
	p := newAgent(t, Config{First: 1, FrameBytes: half, StallTimeout: time.Hour, DialTimeout: time.Hour})
	used, rests := dial(t, p), dial(t, p)
	used.say(p.hello(t, "d", 0, 1, 0))
	rests.say(p.hello(t, "d", 1, 2, 0))
	until(t, "both streams are open", func() bool { return p.streams() == 2 })
	grant := newRandom()
	p.Write(core.WriteOp{ID: "t", Peer: "d", Grant: grant[:], Pairs: p.pairs(t, allBlocks(testBlocks))})
	if h := used.next(); h.kind != frameData || h.length != half {
		t.Fatalf("told %+v", h)
	}
	for range 20 { // the other half waits meanwhile
		p.asksThrough(rests, "d", 2)
	}
	used.Close()
	if h := rests.next(); h.kind != frameData || h.position != half {
		t.Fatalf("told %+v", h)
	}
}

// TestShutStreamIsNotUsed: when P cannot end a frame, and has shut its stream, another one is used in its place, whatever D does.
func TestShutStreamIsNotUsed(t *testing.T) {
	leaktest.Check(t)
	const half = testBlocks / 2
	p := newAgent(t, Config{First: 1, FrameBytes: half * testBlock, StallTimeout: time.Hour, DialTimeout: time.Hour})
	mustBe(t, unix.Mprotect(p.mem[(half-1)*testBlock:half*testBlock], unix.PROT_NONE))
	shut, rests := dial(t, p), dial(t, p)
	shut.say(p.hello(t, "d", 0, 1, 0))
	until(t, "the first stream is open", func() bool { return p.streams() == 1 })
	bad, good, behind := newRandom(), newRandom(), [][]kv.BlockID{allBlocks(testBlocks)[0][half:]}
	p.Write(core.WriteOp{ID: "bad", Peer: "d", Grant: bad[:], Pairs: p.pairs(t, allBlocks(half))})
	if h := shut.next(); h.key != bad || h.length != half*testBlock {
		t.Fatalf("told %+v", h)
	}
	rests.say(p.hello(t, "d", 1, 2, 0))
	until(t, "both streams are open", func() bool { return p.streams() == 2 })
	p.Write(core.WriteOp{ID: "good", Peer: "d", Grant: good[:], Pairs: p.pairs(t, behind)})
	p.asksThrough(rests, "d", 2) // it has seen the write, and waits
	p.sender.mu.Lock()
	round := p.sender.peers["d"].tuner.round
	p.sender.mu.Unlock()
	if n, err := io.Copy(io.Discard, shut); err != nil || n >= half*testBlock {
		t.Fatalf("%d bytes, %v", n, err)
	}
	if h := rests.next(); h.kind != frameData || h.key != good {
		t.Fatalf("told %+v", h)
	}
	p.sender.mu.Lock()
	if now := p.sender.peers["d"].tuner.round; now <= round {
		t.Errorf("what was written before counts")
	}
	p.sender.mu.Unlock()
	wantNamed(t, p.sink.Wait("written", "bad", 1).Err, `region "r" cannot be read`)
}

// TestSearchBeginsAnew: when a decode agent has no stream any more, it may have forgotten P, and P its streams.
func TestSearchBeginsAnew(t *testing.T) {
	leaktest.Check(t)
	const streams = 4
	p := newAgent(t, Config{First: streams, FrameBytes: testBlocks * testBlock / streams, StallTimeout: time.Hour, DialTimeout: time.Hour})
	var conns []*rawConn
	for i := range streams {
		conns = append(conns, dial(t, p))
		conns[i].say(p.hello(t, "d", i, uint64(1+i), 0))
	}
	grant := newRandom()
	p.Write(core.WriteOp{ID: "t", Peer: "d", Grant: grant[:], Pairs: p.pairs(t, allBlocks(testBlocks))})
	until(t, "each has a frame, of more bytes than its buffers hold", func() bool {
		p.sender.mu.Lock()
		defer p.sender.mu.Unlock()
		return p.sender.byID["t"].frames == streams
	})
	state := func() (found, unopened, round int) {
		p.sender.mu.Lock()
		defer p.sender.mu.Unlock()
		d := p.sender.peers["d"]
		return d.tuner.found, d.unopened(), d.tuner.round
	}
	_, _, before := state()
	conns[2].Close()
	until(t, "one has ended", func() bool { return p.streams() == streams-1 })
	found, unopened, round := state()
	if found != streams || unopened != 2 || round <= before {
		t.Errorf("%d streams are found, the first that is not open is %d, round %d, before %d", found, unopened, round, before)
	}
	conns = append(conns, dial(t, p))
	conns[4].say(p.hello(t, "d", 2, 5, 0))
	until(t, "it is open again", func() bool { return p.streams() == streams })
	if _, unopened, last := state(); unopened != 4 || last <= round {
		t.Errorf("the first stream that is not open is %d, round %d, before %d", unopened, last, round)
	}
	p.sender.mu.Lock()
	p.sender.peers["d"].tuner.setFound(6)
	p.sender.mu.Unlock()
	for _, c := range conns {
		c.Close()
	}
	until(t, "all have ended", func() bool { return p.streams() == 0 })
	if found, unopened, _ := state(); found != streams || unopened != 0 {
		t.Errorf("%d streams are found, the first that is not open is %d", found, unopened)
	}
	p.sender.mu.Lock()
	p.sender.peers["d"].asks = true // D has one stream, of number 1: its first one is D's own affair
	p.sender.mu.Unlock()
	c := dial(t, p)
	c.say(p.hello(t, "d", 1, 9, 0))
	more := newRandom()
	p.Write(core.WriteOp{ID: "u", Peer: "d", Grant: more[:], Pairs: p.pairs(t, oneBlock(0))})
	if h := c.next(); h.kind != frameData {
		t.Errorf("told %+v", h)
	}
}

// TestRestDoesNotCount: when a stream has nothing to send, what was written since the last reading counts no more, and buffers are
// filled anew before anything counts.
func TestRestDoesNotCount(t *testing.T) {
	leaktest.Check(t)
	const blocks, block, frame = 256, 16 << 10, 4 << 10
	p, d := newSizedAgent(t, Config{First: 1, FrameBytes: frame}, blocks, block), newSizedAgent(t, Config{Streams: 1}, blocks, block)
	read := false
	p.sender.meter = func([]*outStream) reading {
		p.sender.mu.Lock()
		defer p.sender.mu.Unlock()
		read = true
		return reading{}
	}
	p.paint()
	start(t, p, d, p.Endpoint(), "t", allBlocks(blocks))
	endsWell(t, "t", p, d)
	until(t, "the stream waits", func() bool {
		p.sender.mu.Lock()
		defer p.sender.mu.Unlock()
		b := &p.sender.peers["d"].tuner
		return read && !b.settled && b.written == 0
	})
}

// TestMeter: a reading has what D's kernel has acknowledged on all streams.
func TestMeter(t *testing.T) {
	leaktest.Check(t)
	p := newAgent(t, Config{First: 1})
	for i := range 2 {
		dial(t, p).say(p.hello(t, "d", i, uint64(1+i), 0))
	}
	until(t, "both streams are open", func() bool { return p.streams() == 2 })
	p.sender.mu.Lock()
	streams := p.sender.peers["d"].usable()
	p.sender.mu.Unlock()
	before := meter(streams)
	for i, st := range streams {
		if _, err := st.conn.Write(make([]byte, 1000*(i+1))); err != nil {
			t.Fatal(err)
		}
	}
	until(t, "3000 bytes are acknowledged", func() bool { return meter(streams).acked == before.acked+3000 })
	if now := meter(streams); !now.at.After(before.at) {
		t.Errorf("read at %v and at %v", before.at, now.at)
	}
}
