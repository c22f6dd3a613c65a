package tcp

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/coretest"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// aheadOfD is a P on a device whose copies end when the test lets them. The test plays D, or an agent does.
type aheadOfD struct {
	*agent
	t     *testing.T
	slots *heldSlots
	slot  int      // bytes of a slot, and of a block
	c     *rawConn // the only stream of a D that the test plays
	free  func()   // ends all copies
}

const (
	aheadSlot   = 16 << 10      // bytes of a slot
	aheadFrame  = 2 * aheadSlot // bytes of a frame
	aheadBlocks = 16
)

// newAheadOf is one without a stream.
func newAheadOf(t *testing.T, cfg Config, slot int) *aheadOfD {
	t.Helper()
	leaktest.Check(t)
	a := &aheadOfD{t: t, slots: newHeldSlots(8, slot), slot: slot}
	a.free = sync.OnceFunc(func() { close(a.slots.ends) })
	cfg.Streams, cfg.FrameBytes = cmp.Or(cfg.Streams, 1), cmp.Or(cfg.FrameBytes, 2*uint64(slot))
	cfg.StallTimeout, cfg.CloseGrace, cfg.Mover = time.Hour, time.Hour, a.slots
	a.agent = newSizedAgent(t, cfg, aheadBlocks, uint64(slot))
	a.sender.grace, a.sender.stop = bound, bound
	t.Cleanup(a.free)
	a.paintWords()
	return a
}

func newAheadOfD(t *testing.T) *aheadOfD {
	t.Helper()
	a := newAheadOf(t, Config{}, aheadSlot)
	a.stream(1, 0)
	return a
}

// newSealedAhead is one whose stream is encrypted, and its D. The transfer "t" of eight blocks is under way.
func newSealedAhead(t *testing.T, fails map[int64]error) (a *aheadOfD, d *agent) {
	t.Helper()
	a = newAheadOf(t, Config{Encrypt: EncryptMust}, aheadSlot)
	a.slots.fails = fails
	d = newSizedAgent(t, Config{Encrypt: EncryptMust, Streams: 1, StallTimeout: time.Hour}, aheadBlocks, aheadSlot)
	start(t, a.agent, d, a.Endpoint(), "t", allBlocks(8))
	a.begins(4)
	return a, d
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

// frames is how many frames of a transfer are cut and not written.
func (a *aheadOfD) frames(id core.TransferID) int {
	a.sender.mu.Lock()
	defer a.sender.mu.Unlock()
	return a.sender.byID[id].frames
}

// reads reads a frame, and looks at its bytes.
func (a *aheadOfD) reads() header {
	a.t.Helper()
	_ = a.c.SetReadDeadline(time.Now().Add(bound))
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

// readsAll reads the rest of a transfer, in order, and acknowledges it. The write ends well.
func (a *aheadOfD) readsAll(id core.TransferID, grant random, from, total uint64) {
	a.t.Helper()
	for from < total {
		h := a.reads()
		if h.key != grant || h.position != from {
			a.t.Fatalf("a frame of %x from byte %d on, want %x from byte %d on", h.key[:4], h.position, grant[:4], from)
		}
		from += h.length
	}
	a.c.say(frameBytes(header{kind: frameAck, key: grant, length: total}))
	if o := a.sink.Wait("written", id, 1); o.Err != nil {
		a.t.Error(o.Err)
	}
	a.given()
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

// untold looks that nobody was told of an end of the write "t".
func (a *aheadOfD) untold() {
	a.t.Helper()
	if told := a.sink.All("written", "t"); len(told) > 0 {
		a.t.Errorf("told %+v, and copies go on", told)
	}
}

// fails ends all copies. The write "t" was not told before, and fails.
func (a *aheadOfD) fails() error {
	a.t.Helper()
	a.untold()
	a.free()
	o := a.sink.Wait("written", "t", 1)
	if o.Err == nil {
		a.t.Error("it ended well")
	}
	a.given()
	return o.Err
}

// goesOn has another transfer go by the same stream, of which so many bytes were written before.
func (a *aheadOfD) goesOn(d *agent, before uint64) {
	a.t.Helper()
	blocks := [][]kv.BlockID{{8, 9, 10, 11}}
	grant := d.expect(a.t, "other", "p", blocks)
	a.Write(core.WriteOp{ID: "other", Peer: "d", Grant: grant[:], Pairs: a.pairs(a.t, blocks)})
	for _, o := range []coretest.Outcome{d.sink.Wait("received", "other", 1), a.sink.Wait("written", "other", 1)} {
		if o.Err != nil {
			a.t.Errorf("the other transfer: %+v", o)
		}
	}
	if from, to := 8*aheadSlot, 12*aheadSlot; !bytes.Equal(d.mem[from:to], a.mem[from:to]) {
		a.t.Error("the other transfer has wrong bytes")
	}
	st := a.agent.stream(a.t, "d")
	a.sender.mu.Lock()
	defer a.sender.mu.Unlock()
	if want := before + 2*(headerSize+aheadFrame); st.offset != want || len(a.sink.All("down", "")) > 0 {
		a.t.Errorf("P counts %d bytes on the stream, want %d; streams that ended: %+v", st.offset, want, a.sink.All("down", ""))
	}
}

// TestNextFrameIsCopied: the copies of the next frame begin while those of the frame before go on.
func TestNextFrameIsCopied(t *testing.T) {
	a := newAheadOfD(t)
	grant := a.write("t", 8)
	a.begins(4)
	a.free()
	a.readsAll("t", grant, 0, 4*aheadFrame)
}

// TestNextFrameHasASlot: a frame is cut ahead only when the stream may have a slot for it. Else another transfer that comes meanwhile would
// wait for it in vain.
func TestNextFrameHasASlot(t *testing.T) {
	a := newAheadOf(t, Config{FrameBytes: window * aheadSlot}, aheadSlot)
	a.stream(1, 0)
	grant := a.write("t", 2*window)
	a.slots.awaits(t, 1)
	a.slots.end(t)
	a.slots.awaits(t, 2) // the first slot is written
	if n := a.frames("t"); n != 1 {
		t.Errorf("%d frames are cut, and the first has all slots", n)
	}
	a.slots.end(t)
	a.slots.awaits(t, 3)
	if n := a.frames("t"); n != 2 {
		t.Errorf("%d frames are cut, and there is a slot", n)
	}
	a.begins(window + 1)
	a.free()
	a.readsAll("t", grant, 0, 2*window*aheadSlot)
}

// TestNextFrameOfAPartialOffer: the next frame has what was given when it was cut. What is given later comes behind it.
func TestNextFrameOfAPartialOffer(t *testing.T) {
	a := newAheadOfD(t)
	grant := newRandom()
	a.Write(a.part("t", grant, 8, [2]int{0, 3}))
	a.begins(3)
	a.Extend(a.part("t", grant, 8, [2]int{3, 5}))
	a.free()
	a.readsAll("t", grant, 0, 4*aheadFrame)
}

// TestStopGivesTheNextFrameBack: a write is stopped while copies of its next frame go on. This frame is not sent, and the write is told when
// the copies have ended. What follows on the stream lies where D expects it.
func TestStopGivesTheNextFrameBack(t *testing.T) {
	a := newAheadOfD(t)
	a.write("t", 8)
	a.begins(4)
	a.Stop("t")
	for range 2 {
		a.slots.end(t)
	}
	if h := a.reads(); h.position != 0 || h.length != aheadFrame {
		t.Errorf("the first frame is %+v", h)
	}
	a.slots.awaits(t, 3)
	_ = a.fails()
	other := a.write("other", 2)
	if h := a.reads(); h.key != other || h.length != aheadFrame {
		t.Fatalf("the next frame is %+v", h)
	}
	_ = a.c.Close() // D has lost the last bytes
	a.stream(2, headerSize+aheadFrame+headerSize+aheadFrame/2)
	a.readsAll("other", other, aheadFrame/2, aheadFrame)
}

// TestStopBeginsNoCopies: a write is stopped when a part of its next frame is copied ahead. Slots become free then, and no further part is
// copied: nobody will have it, and the end of the write would wait for it.
func TestStopBeginsNoCopies(t *testing.T) {
	a := newAheadOf(t, Config{FrameBytes: window * aheadSlot}, aheadSlot)
	a.stream(1, 0)
	a.write("t", 2*window)
	for range 2 {
		a.slots.end(t)
	}
	a.slots.awaits(t, 3)
	a.begins(window + 1) // one slot was free
	a.Stop("t")
	a.slots.end(t)
	a.slots.awaits(t, 4) // one more is free
	a.begins(window + 1)
	_ = a.fails()
}

// TestBreakWithTheNextFrameCopied: the stream breaks, and all bytes go by the next one, each once.
func TestBreakWithTheNextFrameCopied(t *testing.T) {
	a := newAheadOfD(t)
	grant := a.write("t", 8)
	a.begins(4)
	_ = a.c.Close()
	a.free()
	a.stream(2, 0)
	a.readsAll("t", grant, 0, 4*aheadFrame)
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

// TestWhoCutsAhead: a stream cuts a frame ahead only of a transfer that goes on, if nobody else would have it, and if nothing else is to be said
// first. What is given back is as it was.
func TestWhoCutsAhead(t *testing.T) {
	const frames = 4
	for what, c := range map[string]struct {
		frames int
		call   func(a *aheadOfD)
		set    func(st, other *outStream) // sender.mu is held
	}{
		"nobody else would have it":       {frames: frames},
		"the other stream takes the rest": {frames: 2},
		"another transfer waits":          {frames: frames, call: func(a *aheadOfD) { a.write("other", 2) }},
		"the write was stopped":           {frames: frames, call: func(a *aheadOfD) { a.Stop("t") }},
		"D is to open a further stream":   {frames: frames, set: func(st, _ *outStream) { st.peer.asks = true }},
		"D is to open the other anew":     {frames: frames, set: func(st, other *outStream) { st.peer.stuck = other }},
		"a transfer rests":                {frames: frames, set: func(st, _ *outStream) { st.rested = []random{{1}} }},
		"the stream is stalled":           {frames: frames, set: func(st, _ *outStream) { st.stalled = true }},
		"the stream takes no more frames": {frames: frames, set: func(st, _ *outStream) { st.shut = true }},
		"the stream has ended":            {frames: frames, set: func(st, _ *outStream) { st.dead = true }},
	} {
		t.Run(what, func(t *testing.T) {
			a := newAheadOf(t, Config{Streams: 2, First: 2}, aheadSlot)
			st, _ := a.halfStreamOf(t, 0)
			other, _ := a.halfStreamOf(t, 1)
			a.write("t", 2*c.frames)
			out, n := a.sender.take(st)
			if out == nil || n != headerSize+aheadFrame {
				t.Fatalf("the first frame has %d bytes", n)
			}
			if c.call != nil {
				c.call(a)
			}
			if c.set != nil {
				a.sender.mu.Lock()
				c.set(st, other)
				a.sender.mu.Unlock()
			}
			counts := func() (frames int, bytes uint64) {
				a.sender.mu.Lock()
				defer a.sender.mu.Unlock()
				return out.frames, st.offset
			}
			_, before := counts()
			if got, want := a.sender.takeAhead(st, out), c.frames == frames && c.call == nil && c.set == nil; got != want || got != (st.next.out == out) {
				t.Fatalf("cut ahead: %t", got)
			}
			if n, bytes := counts(); st.next.out != nil && (n != 2 || bytes != 2*(headerSize+aheadFrame)) {
				t.Errorf("%d frames are cut, and the stream has %d bytes", n, bytes)
			}
			a.sender.giveBack(st)
			if n, bytes := counts(); n != 1 || bytes != before {
				t.Errorf("given back: %d frames are cut, and the stream has %d bytes, not %d", n, bytes, before)
			}
		})
	}
}

// TestStreamThatCutsNoneAhead has no memory for it.
func TestStreamThatCutsNoneAhead(t *testing.T) {
	leaktest.Check(t)
	p, d := newAgent(t, Config{}), newAgent(t, Config{Streams: 1})
	move(t, p, d, "t")
	st := p.stream(t, "d")
	p.sender.mu.Lock()
	defer p.sender.mu.Unlock()
	if n := cap(st.next.vec); n > 0 {
		t.Errorf("room for %d pieces", n)
	}
}

// TestFailedCopyBeforeTheNextFrame: a copy of a frame fails before any of its bytes is in the stream. The write is told when the copies of the
// next frame have ended too, and neither frame counts on the stream.
func TestFailedCopyBeforeTheNextFrame(t *testing.T) {
	bad := errors.New("a test: a bad copy")
	a, d := newSealedAhead(t, map[int64]error{2: bad})
	for range 2 {
		a.slots.end(t)
	}
	a.slots.awaits(t, 3)
	if err := a.fails(); !errors.Is(err, bad) {
		t.Error(err)
	}
	a.goesOn(d, 0)
}

// TestFailedCopyWithinAFrame: a copy of a frame fails when a part of the frame is in the stream. The stream ends there, and the write is told
// when the copies of the next frame have ended too.
func TestFailedCopyWithinAFrame(t *testing.T) {
	bad := errors.New("a test: a bad copy")
	a := newAheadOf(t, Config{}, aheadSlot)
	a.slots.fails[2] = bad
	a.stream(1, 0)
	a.write("t", 8)
	a.begins(4)
	for range 2 {
		a.slots.end(t)
	}
	a.slots.awaits(t, 3)
	if err := a.fails(); !errors.Is(err, bad) {
		t.Error(err)
	}
	a.c.next()
	if b, err := io.ReadAll(a.c); err != nil || len(b) != aheadSlot {
		t.Errorf("%d bytes of the frame are in the stream, want %d: %v", len(b), aheadSlot, err)
	}
}

// TestNoRecordBufferForTheNextFrame: a frame that was copied ahead has no memory for its records. The write fails when the copies have ended.
// What follows on the stream has none of the frame's bytes.
func TestNoRecordBufferForTheNextFrame(t *testing.T) {
	bad := errors.New("a test: no memory")
	a, d := newSealedAhead(t, nil)
	create := func(keeps bool, f func() (*recordBuffer, error)) {
		a.buffers.mu.Lock()
		defer a.buffers.mu.Unlock()
		a.buffers.create, a.buffers.closed = f, !keeps
	}
	create(false, func() (*recordBuffer, error) { return nil, bad })
	for range 2 {
		a.slots.end(t)
	}
	a.slots.awaits(t, 3)
	if err := a.fails(); !errors.Is(err, bad) {
		t.Error(err)
	}
	create(true, newRecordBuffer)
	a.goesOn(d, headerSize+aheadFrame)
}

// TestNextFrameMayCopyForEver: nobody knows whether a copy of the next frame has ended. The stream ends for that reason, and nobody is told that
// the write has, though the frame before has ended.
func TestNextFrameMayCopyForEver(t *testing.T) {
	fails := map[int64]error{3: fmt.Errorf("a test: %w", ErrMayCopy)}
	ends := func(t *testing.T, a *aheadOfD) {
		t.Helper()
		a.free()
		if o := a.sink.Wait("down", "", 1); !errors.Is(o.Err, ErrMayCopy) || strings.Contains(o.Err.Error(), "%!") {
			t.Error(o.Err)
		}
		a.untold()
	}
	t.Run("a copy of the frame before fails", func(t *testing.T) {
		fails := map[int64]error{2: errors.New("a test: a bad copy"), 3: fails[3]}
		a, _ := newSealedAhead(t, fails)
		ends(t, a)
	})
	t.Run("the peer is slow", func(t *testing.T) {
		a := newSlowAhead(t, fails)
		ends(t, a)
	})
}

// newSlowAhead is one whose D takes no bytes. The transfer "t" is under way.
func newSlowAhead(t *testing.T, fails map[int64]error) *aheadOfD {
	t.Helper()
	a := newAheadOf(t, Config{}, 512<<10)
	a.slots.fails = fails
	a.slowStream()
	a.write("t", 8)
	a.begins(4)
	return a
}

// slowStream opens the stream of a D that takes less than a slot without a read.
func (a *aheadOfD) slowStream() {
	a.t.Helper()
	a.stream(1, 0)
	_ = a.c.Conn.(*net.TCPConn).SetReadBuffer(64 << 10)
	_ = a.agent.stream(a.t, "d").conn.SetWriteBuffer(64 << 10)
}

// TestSlowPeerWithTheNextFrameCopied: the slots of the next frame are given back with those of the frame that the peer does not take. When the
// peer takes bytes again, both are copied again, and each byte is right.
func TestSlowPeerWithTheNextFrameCopied(t *testing.T) {
	a := newSlowAhead(t, nil)
	a.free()
	until(t, "nobody holds a slot", func() bool { return len(a.slots.fewSlots.free) == cap(a.slots.fewSlots.free) })
	a.sender.mu.Lock()
	grant := a.sender.byID["t"].grant
	a.sender.mu.Unlock()
	if n := a.frames("t"); n != 2 {
		t.Errorf("%d frames are cut, want 2", n)
	}
	a.readsAll("t", grant, 0, 8*uint64(a.slot))
}

// TestSlowFrameOfHostMemory: the peer does not take a frame of host memory while slots of the next frame are held. They are given back. But the
// next frame does not begin as a slow peer's: the peer was offered no slot.
func TestSlowFrameOfHostMemory(t *testing.T) {
	a := newAheadOf(t, Config{}, 512<<10)
	size := 2 * uint64(a.slot)
	a.devices.ranges[0].from += uintptr(size)
	a.slowStream()
	grant := a.write("t", 8)
	a.begins(2)
	a.slots.awaits(t, 1) // by whoever gives it back
	for range 2 {
		a.slots.end(t)
	}
	if h := a.reads(); h.position != 0 || h.length != size {
		t.Errorf("the first frame is %+v", h)
	}
	a.slots.awaits(t, 3)
	if n := a.slots.begun.Load(); n != 2+window {
		t.Errorf("%d copies have begun, want %d: those of the next frame again, and two of the one behind it", n, 2+window)
	}
	a.free()
	a.readsAll("t", grant, size, 4*size)
}

// TestEndWithTheNextFrameCopied: the write is told when the copies of both frames have ended, whatever ends it.
func TestEndWithTheNextFrameCopied(t *testing.T) {
	for what, end := range map[string]func(a *aheadOfD){
		"Close":   func(a *aheadOfD) { _ = a.Close() },
		"Dismiss": func(a *aheadOfD) { a.Dismiss("d") },
	} {
		t.Run(what, func(t *testing.T) {
			a := newAheadOfD(t)
			a.write("t", 8)
			a.begins(4)
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				end(a)
			}()
			until(t, "it has begun", func() bool {
				a.sender.mu.Lock()
				defer a.sender.mu.Unlock()
				return a.sender.closed || a.sender.peers["d"] == nil
			})
			a.slots.end(t)
			a.slots.awaits(t, 2)
			_ = a.fails()
			select {
			case <-ended:
			case <-time.After(bound):
				t.Fatal("it does not return")
			}
		})
	}
}

// TestNextFrameIsGivenBackFirst: a stream breaks, and P waits for whoever knows why. Meanwhile it holds no slot for the next frame, and no frame
// counts as under way.
func TestNextFrameIsGivenBackFirst(t *testing.T) {
	a := newAheadOf(t, Config{}, aheadSlot)
	a.sender.late = time.Hour
	st, far := a.halfStream(t)
	ran := make(chan struct{})
	go func() {
		defer close(ran)
		a.sender.run(st)
	}()
	defer func() {
		a.free()
		a.sender.mu.Lock()
		st.shutDown()
		a.sender.mu.Unlock()
		<-ran
	}()
	a.write("t", 8)
	a.begins(4)
	a.slots.awaits(t, 1) // the header is written
	_ = far.SetLinger(0)
	_ = far.Close() // at once, by a reset
	until(t, "the kernel has closed the connection", st.closed)
	if err := st.raw.Control(func(fd uintptr) { _, _ = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR) }); err != nil { // the cause is told nobody else
		t.Fatal(err)
	}
	a.free()
	until(t, "no frame is under way", func() bool { return a.frames("t") == 0 })
	a.given()
}
