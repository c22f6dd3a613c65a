package tcp

import (
	"fmt"
	"io"
	"slices"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// framesOf writes a transfer of all blocks to a D with so many streams, and returns the lengths of its frames, in their order on each
// stream.
func framesOf(t *testing.T, mover Mover, streams int) (all [][]uint64) {
	t.Helper()
	p := newAgent(t, Config{Streams: streams, First: streams, StallTimeout: time.Hour, DialTimeout: time.Hour, Mover: mover})
	grant, lengths := newRandom(), make(chan []uint64, streams)
	conns := make([]*rawConn, streams)
	for i := range conns {
		conns[i] = dial(t, p)
		conns[i].say(p.hello(t, "d", i, 1, 0))
	}
	until(t, "P has all streams", func() bool {
		p.sender.mu.Lock()
		defer p.sender.mu.Unlock()
		return p.sender.peers["d"].open == streams
	})
	p.Write(core.WriteOp{ID: "t", Peer: "d", Grant: grant[:], Pairs: p.pairs(t, allBlocks(testBlocks))})
	for _, c := range conns {
		go func() {
			var list []uint64
			defer func() { lengths <- list }()
			for {
				var b [headerSize]byte
				var h header
				if _, err := io.ReadFull(c, b[:]); err != nil || h.decode(&b) != nil {
					return
				}
				if h.kind == frameData {
					list = append(list, h.length)
				}
				if _, err := io.CopyN(io.Discard, c, int64(h.length)); err != nil {
					return
				}
			}
		}()
	}
	until(t, "all bytes are written", func() bool {
		p.sender.mu.Lock()
		defer p.sender.mu.Unlock()
		out := p.sender.byID["t"]
		return out.left == 0 && out.frames == 0
	})
	p.Stop("t")
	p.sink.Wait("written", "t", 1)
	_ = p.Close()
	for range conns {
		all = append(all, <-lengths)
	}
	return all
}

// TestFramesOfDevices: at each end of a frame the copies to and from devices stand still. So one stream carries 64 MiB of a device's memory in
// four frames. Several streams get frames that all end together. Frames of host memory are short.
func TestFramesOfDevices(t *testing.T) {
	leaktest.Check(t)
	const total = testBlocks * testBlock
	for _, c := range []struct {
		mover         Mover
		streams       int
		fewest, most  int
		shortest, top uint64
	}{
		{newFewSlots(8, 1<<20), 1, 4, 4, deviceFrame, deviceFrame},
		{newFewSlots(16, 1<<20), 4, 14, 24, 2 << 20, total / 7},
		{newFewSlots(64, 1<<20), 32, 32, 32, 2 << 20, 2 << 20},
		{nil, 1, 32, 32, 2 << 20, 2 << 20},
	} {
		t.Run(fmt.Sprintf("devices %v, %d streams", c.mover != nil, c.streams), func(t *testing.T) {
			list := slices.Concat(framesOf(t, c.mover, c.streams)...)
			if sum := func() (n uint64) {
				for _, l := range list {
					n += l
				}
				return n
			}(); sum != total {
				t.Errorf("%d bytes, want %d", sum, total)
			}
			if len(list) < c.fewest || len(list) > c.most || slices.Max(list) != c.top {
				t.Errorf("%d frames, want %d to %d; the longest has %d bytes, want %d", len(list), c.fewest, c.most, slices.Max(list), c.top)
			}
			if slices.Sort(list); len(list) > 1 && list[1] < c.shortest { // the last one has what is left
				t.Errorf("a frame of %d bytes, want %d or more", list[1], c.shortest)
			}
		})
	}
}

// TestFramesInTurn: while two transfers of device memory to one D are sent, their frames are short: neither waits long for its turn.
func TestFramesInTurn(t *testing.T) {
	leaktest.Check(t)
	p := newAgent(t, Config{Streams: 1, First: 1, StallTimeout: time.Hour, DialTimeout: time.Hour, Mover: newFewSlots(8, 1<<20)})
	a, b := newRandom(), newRandom()
	p.admit(t, "d")
	p.Write(core.WriteOp{ID: "a", Peer: "d", Grant: a[:], Pairs: p.pairs(t, allBlocks(testBlocks))})
	p.Write(core.WriteOp{ID: "b", Peer: "d", Grant: b[:], Pairs: p.pairs(t, allBlocks(testBlocks))})
	c := dial(t, p)
	c.say(p.hello(t, "d", 0, 1, 0))
	var last random
	for left := map[random]uint64{a: testBlocks * testBlock, b: testBlocks * testBlock}; left[a] > 0 && left[b] > 0; {
		h := c.next()
		if h.key == last || h.length != 2<<20 {
			t.Fatalf("%d bytes of a frame, both transfers have bytes to send; the same one's turn: %v", h.length, h.key == last)
		}
		if _, err := io.CopyN(io.Discard, c, int64(h.length)); err != nil {
			t.Fatal(err)
		}
		last, left[h.key] = h.key, left[h.key]-h.length
	}
}
