package tcp

import (
	"encoding/binary"
	"io"
	"sync"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// aheadOfD is a P on a device whose copies end when the test lets them, and the only stream of a D that the test plays.
type aheadOfD struct {
	*agent
	t     *testing.T
	slots *heldSlots
	c     *rawConn
	free  func() // ends all copies
}

const (
	aheadSlot  = 16 << 10      // bytes of a slot
	aheadFrame = 2 * aheadSlot // bytes of a frame
)

func newAheadOfD(t *testing.T) *aheadOfD {
	t.Helper()
	leaktest.Check(t)
	a := &aheadOfD{t: t, slots: &heldSlots{fewSlots: newFewSlots(8, aheadSlot), ends: make(chan struct{})}}
	a.free = sync.OnceFunc(func() { close(a.slots.ends) })
	a.agent = newSizedAgent(t, Config{Streams: 1, FrameBytes: aheadFrame, StallTimeout: time.Hour, Mover: a.slots}, 64, aheadSlot)
	t.Cleanup(a.free)
	a.paintWords()
	a.stream(1, 0)
	return a
}

// stream opens D's stream, and says how much of those before has come.
func (a *aheadOfD) stream(attempt, received uint64) {
	a.t.Helper()
	a.c = dial(a.t, a.agent)
	a.c.say(a.hello(a.t, "d", 0, attempt, received))
}

// write has P write so many of its first blocks, of a slot each.
func (a *aheadOfD) write(id core.TransferID, blocks int) (grant random) {
	a.t.Helper()
	grant = newRandom()
	a.Write(core.WriteOp{ID: id, Peer: "d", Grant: grant[:], Pairs: a.pairs(a.t, allBlocks(blocks))})
	return grant
}

// begins waits until so many copies have begun.
func (a *aheadOfD) begins(n int64) {
	a.t.Helper()
	until(a.t, "the copies of the frame that follows begin", func() bool { return a.slots.begun.Load() >= n })
	if got := a.slots.begun.Load(); got != n {
		a.t.Errorf("%d copies have begun, want %d", got, n)
	}
}

// reads reads a frame, and looks at its bytes.
func (a *aheadOfD) reads() header {
	a.t.Helper()
	h := a.c.next()
	b := make([]byte, h.length)
	if _, err := io.ReadFull(a.c, b); err != nil {
		a.t.Fatal(err)
	}
	for i := 0; i < len(b); i += 8 {
		if got, want := binary.LittleEndian.Uint64(b[i:]), (h.position+uint64(i))*0x9E3779B97F4A7C15; got != want {
			a.t.Fatalf("byte %d is %#x, want %#x", h.position+uint64(i), got, want)
		}
	}
	return h
}

// readsAll reads the rest of a transfer, in order, and acknowledges it.
func (a *aheadOfD) readsAll(grant random, from, total uint64) {
	a.t.Helper()
	for from < total {
		h := a.reads()
		if h.key != grant || h.position != from {
			a.t.Fatalf("a frame of %x from byte %d on, want %x from byte %d on", h.key[:4], h.position, grant[:4], from)
		}
		from += h.length
	}
	a.c.say(frameBytes(header{kind: frameAck, key: grant, length: total}))
}

// given looks that all slots were given back, each after its copy.
func (a *aheadOfD) given() {
	a.t.Helper()
	if n := a.slots.early.Load(); n > 0 {
		a.t.Errorf("%d slots were given back while a copy used them", n)
	}
	if n := cap(a.slots.fewSlots.free) - len(a.slots.fewSlots.free); n > 0 {
		a.t.Errorf("the write was told while %d slots were held", n)
	}
}

// TestNextFrameIsCopied: the copies of the next frame begin while those of the frame before go on.
func TestNextFrameIsCopied(t *testing.T) {
	a := newAheadOfD(t)
	grant := a.write("t", 8)
	a.begins(4)
	a.free()
	a.readsAll(grant, 0, 4*aheadFrame)
	if o := a.sink.Wait("written", "t", 1); o.Err != nil {
		t.Error(o.Err)
	}
	a.given()
}

// TestStopGivesTheNextFrameBack: a write is stopped while copies of its next frame go on. This frame is not sent, and the write is told when
// the copies have ended. What follows on the stream lies where D expects it.
func TestStopGivesTheNextFrameBack(t *testing.T) {
	a := newAheadOfD(t)
	a.write("t", 8)
	a.begins(4)
	a.Stop("t")
	for range 2 {
		a.slots.ends <- struct{}{}
	}
	if h := a.reads(); h.position != 0 || h.length != aheadFrame {
		t.Errorf("the first frame is %+v", h)
	}
	time.Sleep(20 * time.Millisecond) // who tells it at once does so now
	if told := a.sink.All("written", "t"); len(told) > 0 {
		t.Errorf("told %+v, and copies go on", told)
	}
	a.free()
	if o := a.sink.Wait("written", "t", 1); o.Err == nil {
		t.Error("it ended well")
	}
	a.given()
	other := a.write("other", 2)
	if h := a.reads(); h.key != other || h.length != aheadFrame {
		t.Fatalf("the next frame is %+v", h)
	}
	_ = a.c.Close() // D has lost the last bytes
	a.stream(2, headerSize+aheadFrame+headerSize+aheadFrame/2)
	a.readsAll(other, aheadFrame/2, aheadFrame)
	if o := a.sink.Wait("written", "other", 1); o.Err != nil {
		t.Error(o.Err)
	}
}

// TestBreakWithTheNextFrameCopied: the stream breaks, and all bytes go by the next one, each once.
func TestBreakWithTheNextFrameCopied(t *testing.T) {
	a := newAheadOfD(t)
	grant := a.write("t", 8)
	a.begins(4)
	_ = a.c.Close()
	a.free()
	a.stream(2, 0)
	a.readsAll(grant, 0, 4*aheadFrame)
	if o := a.sink.Wait("written", "t", 1); o.Err != nil {
		t.Error(o.Err)
	}
	a.given()
}

// TestNextFrameIsOfWhoWaits: if another transfer waits for its turn, no frame is copied ahead, and they take turns.
func TestNextFrameIsOfWhoWaits(t *testing.T) {
	a := newAheadOfD(t)
	const frames = 8
	one := a.write("one", 2*frames)
	a.begins(4)
	two := a.write("two", 2*frames)
	a.free()
	left := map[random]int{one: frames, two: frames}
	var before random
	for n := 0; left[one]+left[two] > 0; n++ {
		h := a.reads()
		if left[h.key]--; n > 2 && h.key == before && left[one] > 0 && left[two] > 0 { // two frames of the first were taken before there was another
			t.Errorf("frame %d is of the same transfer as the one before", n)
		}
		before = h.key
	}
	for id, grant := range map[core.TransferID]random{"one": one, "two": two} {
		a.c.say(frameBytes(header{kind: frameAck, key: grant, length: frames * aheadFrame}))
		if o := a.sink.Wait("written", id, 1); o.Err != nil {
			t.Error(o.Err)
		}
	}
	a.given()
}
