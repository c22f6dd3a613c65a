package tcp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// heldSlots is a Mover whose copies are made when they are waited for, each when the test lets it. They are numbered from 1 on.
type heldSlots struct {
	*fewSlots
	begun   atomic.Int64    // copies
	held    atomic.Int64    // those that go on
	awaited atomic.Int64    // the copy whose end was waited for last, before the test let it end
	ends    chan struct{}   // a value for each copy; closed: for all
	fails   map[int64]error // what the ends of copies say
}

func newHeldSlots(slots, bytes int) *heldSlots {
	return &heldSlots{fewSlots: newFewSlots(slots, bytes), ends: make(chan struct{}), fails: map[int64]error{}}
}

type heldSlot struct {
	*fewSlot
	m      *heldSlots
	number int64
	runs   []Run
	over   bool
}

func (m *heldSlots) Slot(ctx context.Context, device int, to Direction, peer core.AgentID) (Slot, error) {
	s, err := m.fewSlots.Slot(ctx, device, to, peer)
	if err != nil {
		return nil, err
	}
	return &heldSlot{fewSlot: s.(*fewSlot), m: m}, nil
}

func (s *heldSlot) Copy(runs []Run) {
	s.copying, s.runs = true, append([]Run(nil), runs...)
	s.m.held.Add(1)
	s.number = s.m.begun.Add(1)
}

func (s *heldSlot) Wait() error {
	if !s.over {
		s.m.awaited.Store(s.number)
		<-s.m.ends
		s.fewSlot.Copy(s.runs)
		s.over = true
		s.m.held.Add(-1)
	}
	if err := s.m.fails[s.number]; errors.Is(err, ErrMayCopy) {
		return err
	} else if err != nil {
		s.copying = false
		return err
	}
	return s.fewSlot.Wait()
}

// end lets a copy end that is waited for, or will be.
func (m *heldSlots) end(t *testing.T) {
	t.Helper()
	select {
	case m.ends <- struct{}{}:
	case <-time.After(bound):
		t.Fatal("no copy is waited for")
	}
}

// awaits waits until somebody waits for the end of a copy. He does so until the test lets it end.
func (m *heldSlots) awaits(t *testing.T, copy int64) {
	t.Helper()
	until(t, fmt.Sprint("the end of copy ", copy, " is waited for"), func() bool { return m.awaited.Load() == copy })
}

// aheadOf is a D on a device, and its P. All words that P has said lie in D's socket when D has begun to read them.
type aheadOf struct {
	*agent
	t     *testing.T
	slots *heldSlots
	p     *fakeP
	c     *rawConn
	grant random // of the transfer "t" of two blocks
	first random // of the transfer "before" of one block, a frame of which has come
	free  func() // ends all copies
}

const (
	small      = 4 << 10   // bytes of a frame
	smallBlock = 4 * small // few, so that a test that looks at all of them is no matter of time
)

// ahead has D copy for another transfer, until P has said what it has to say and D's kernel has it.
func ahead(t *testing.T, says func(a *aheadOf) [][]byte) *aheadOf {
	t.Helper()
	leaktest.Check(t)
	a := &aheadOf{t: t, slots: newHeldSlots(8, 64<<10)}
	a.free = sync.OnceFunc(func() { close(a.slots.ends) })
	a.agent = newSizedAgent(t, Config{Streams: 1, StallTimeout: time.Hour, Mover: a.slots}, 4, smallBlock)
	t.Cleanup(a.free)
	a.receiver.redial = time.Hour // of a stream that has brought nothing
	a.p = newFakeP(t, a.agent, "p")
	a.grant = a.expect(t, "t", "p", allBlocks(2))
	a.first = a.expect(t, "before", "p", [][]kv.BlockID{{3}}) // its copy is number 1
	a.c, _ = a.p.stream()
	a.c.say(frame(a.first, 0, small, 1))
	until(t, "D copies", func() bool { return a.slots.begun.Load() == 1 })
	a.c.say(says(a)...)
	until(t, "D's kernel has all", func() bool {
		raw, err := a.c.Conn.(*net.TCPConn).SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		left := -1
		_ = raw.Control(func(fd uintptr) { left, _ = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ) })
		return left == 0
	})
	a.slots.end(t)
	return a
}

// frame is a whole one, whose bytes are all the same.
func frame(grant random, position, length uint64, of byte) []byte {
	return append(frameBytes(header{kind: frameData, key: grant, position: position, length: length}), bytes.Repeat([]byte{of}, int(length))...)
}

// begins waits until so many copies of the transfer have begun, and none has ended.
func (a *aheadOf) begins(n int64) {
	a.t.Helper()
	until(a.t, "copies go on while the next frame is read", func() bool { return a.slots.begun.Load() == 1+n })
	if !bytes.Equal(a.mem[:2*small], make([]byte, 2*small)) {
		a.t.Error("a copy has ended")
	}
}

// TestNextFrameWhileCopying: D reads the next frame of a transfer, and begins its copies, while those of the frame before go on. The bytes of
// both count when their copies have ended.
func TestNextFrameWhileCopying(t *testing.T) {
	a := ahead(t, func(a *aheadOf) [][]byte {
		return [][]byte{frame(a.grant, 0, small, 1), frame(a.grant, small, small, 2), frame(a.grant, 2*small, small, 3)}
	})
	a.begins(3)
	a.c.say(frame(a.grant, 3*small, 2*smallBlock-3*small, 4))
	if told := a.sink.All("received", "t"); len(told) > 0 {
		t.Errorf("told %+v, and copies go on", told)
	}
	a.free()
	if o := a.sink.Wait("received", "t", 1); o.Err != nil || o.Stats.Bytes != 2*smallBlock {
		t.Errorf("received: %+v", o)
	}
	for i, at := range []uint64{0, small, 2 * small, 3 * small, 2*smallBlock - 1} {
		if want := byte(min(i+1, 4)); a.mem[at] != want {
			t.Errorf("byte %d is %d, want %d", at, a.mem[at], want)
		}
	}
	if n := a.slots.early.Load(); n > 0 {
		t.Errorf("%d slots were given back while a copy used them", n)
	}
}

// TestRevokeWhileTheNextFrameIsRead: P stops in the middle of the next frame. Revoke waits for the copies of both frames, and for nothing of P's.
// After it nothing lands.
func TestRevokeWhileTheNextFrameIsRead(t *testing.T) {
	a := ahead(t, func(a *aheadOf) [][]byte {
		return [][]byte{frame(a.grant, 0, small, 1), frame(a.grant, small, small, 2)[:headerSize+small/2]}
	})
	a.begins(2)
	revoked := make(chan error, 1)
	go func() {
		err := a.Revoke("t")
		if a.slots.held.Load() > 0 {
			t.Error("Revoke returned while a copy may land")
		}
		revoked <- err
	}()
	until(t, "the revoke has begun", func() bool {
		a.receiver.mu.Lock()
		defer a.receiver.mu.Unlock()
		return a.receiver.byID["t"] == nil
	})
	a.slots.end(t) // one of the two
	a.slots.awaits(t, 3)
	a.free()
	select {
	case err := <-revoked:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(bound):
		t.Fatal("the copies have ended, and Revoke waits")
	}
	for i := range a.mem {
		a.mem[i] = 9
	}
	_ = a.c.SetReadDeadline(time.Now().Add(bound))
	a.c.say(bytes.Repeat([]byte{2}, small/2), frame(a.grant, 2*small, small, 3), frameBytes(header{kind: frameData, key: random{1}}))
	for h := a.c.next(); h.key != (random{1}); h = a.c.next() {
		if h.kind != frameNack || h.key != a.grant {
			t.Errorf("answered by %+v", h)
		}
	}
	a.full(t, 9)
	if told := a.sink.All("received", "t"); len(told) > 0 {
		t.Errorf("told %+v", told)
	}
}

// TestBadFrameWhileCopying: the next frame is one that no sender sends. The transfer fails when its copies have ended, and not before.
func TestBadFrameWhileCopying(t *testing.T) {
	a := ahead(t, func(a *aheadOf) [][]byte { return [][]byte{frame(a.grant, 0, small, 1), frame(a.grant, 0, small, 2)} })
	a.begins(1)
	a.slots.awaits(t, 2) // by whom fails it
	if told := a.sink.All("received", "t"); len(told) > 0 {
		t.Errorf("told %+v, and a copy goes on", told)
	}
	a.free()
	if o := a.sink.Wait("received", "t", 1); o.Err == nil {
		t.Error("it ended well")
	}
}

// untold looks that nobody was told of an end of the transfer "t".
func (a *aheadOf) untold(why string) {
	a.t.Helper()
	if told := a.sink.All("received", "t"); len(told) > 0 {
		a.t.Errorf("told %+v, and %s", told, why)
	}
}

// hears reads D's next answer.
func (a *aheadOf) hears(kind frameKind, grant random) (text string) {
	a.t.Helper()
	_ = a.c.SetReadDeadline(time.Now().Add(bound))
	h := a.c.next()
	if h.kind != kind || h.key != grant {
		a.t.Fatalf("answered by %+v, want kind %d of %x", h, kind, grant[:4])
	}
	if kind == frameFault {
		b := make([]byte, h.length)
		if _, err := io.ReadFull(a.c, b); err != nil {
			a.t.Fatal(err)
		}
		text = string(b)
	}
	return text
}

// goesOn has the rest of a transfer come by the same stream, from a position on. Nothing else is said before its acknowledgement.
func (a *aheadOf) goesOn(id core.TransferID, grant random, from, total uint64) {
	a.t.Helper()
	a.c.say(frame(grant, from, total-from, 5))
	if o := a.sink.Wait("received", id, 1); o.Err != nil || o.Stats.Bytes != total {
		a.t.Errorf("%s: %+v", id, o)
	}
	a.hears(frameAck, grant)
}

// over waits until D has ended the stream, and the transfers that wait for it.
func (a *aheadOf) over() {
	a.t.Helper()
	a.sink.Wait("down", "", 1)
	if o := a.sink.Wait("received", "before", 1); o.Err == nil {
		a.t.Errorf("the stream has ended: %+v", o)
	}
}

// held looks how many slots were not given back, and that none was given back too early.
func (a *aheadOf) held(want int) {
	a.t.Helper()
	free := a.slots.fewSlots.free
	until(a.t, fmt.Sprint(want, " slots are held"), func() bool { return cap(free)-len(free) == want })
	if n := a.slots.early.Load(); n > 0 {
		a.t.Errorf("%d slots were given back while a copy used them", n)
	}
}

// TestFailedCopyWhileTheNextFrameIsThere: a copy of a frame fails, and the next frame's header has come. The transfer ends when no copy of either
// frame goes on, and P hears why. If the device does not answer, the engine hears of no end, and one slot is lost. The stream goes on, unless the
// next frame is one that no sender sends.
func TestFailedCopyWhileTheNextFrameIsThere(t *testing.T) {
	bad := errors.New("a test: a bad copy")
	for what, next := range map[string]struct {
		says   func(grant random) []byte
		copies int64 // of both frames
		over   bool  // the stream
	}{
		"its bytes have come too":  {func(grant random) []byte { return frame(grant, small, small, 2) }, 2, false},
		"its bytes came before":    {func(grant random) []byte { return frame(grant, 0, small, 2) }, 1, true},
		"it has too many bytes":    {tooLong, 1, true},
		"it lies behind the total": {func(grant random) []byte { return frame(grant, 2*smallBlock, 1, 2) }, 1, true},
	} {
		for how, err := range map[string]error{"a copy fails": bad, "the device does not answer": fmt.Errorf("a test: %w", ErrMayCopy)} {
			t.Run(what+", and "+how, func(t *testing.T) {
				a := ahead(t, func(a *aheadOf) [][]byte {
					a.slots.fails[2] = err
					return [][]byte{frame(a.grant, 0, small, 1), next.says(a.grant)}
				})
				a.begins(next.copies)
				for n := range next.copies {
					a.slots.awaits(t, 2+n)
					a.untold("a copy goes on")
					a.slots.end(t)
				}
				a.free()
				lost, reason := 0, bad.Error()
				if err != bad {
					lost, reason = 1, "does not answer"
				}
				if text := a.hears(frameFault, a.grant); !strings.Contains(text, reason) {
					t.Errorf("P hears %q, want %q", text, reason)
				}
				if next.over {
					a.over()
				} else {
					a.goesOn("before", a.first, small, smallBlock)
				}
				a.held(lost)
				if lost > 0 {
					a.untold("the device may still copy")
				} else if o := a.sink.Wait("received", "t", 1); !errors.Is(o.Err, bad) {
					t.Errorf("received: %+v", o)
				}
				if err := a.Close(); errors.Is(err, core.ErrMayLand) != (lost > 0) {
					t.Errorf("the close: %v", err)
				}
			})
		}
	}
}

// tooLong is the header of a frame that no sender sends.
func tooLong(grant random) []byte {
	return frameBytes(header{kind: frameData, key: grant, position: small, length: maxFrame + 1})
}

// TestBadHeaderWhileCopying: the header that follows a frame is none of the transfer's next frame, or a bad one. D waits for the copies of the
// frame before it waits for P, or ends the stream. The frame's bytes count.
func TestBadHeaderWhileCopying(t *testing.T) {
	for what, next := range map[string]struct {
		says func(grant random) []byte
		then func(a *aheadOf)
	}{
		"too many bytes": {tooLong, func(a *aheadOf) {
			a.over()
			if o := a.sink.Wait("received", "t", 1); o.Err == nil || !strings.Contains(o.Err.Error(), "at most") {
				a.t.Errorf("received: %+v", o)
			}
		}},
		"no data": {func(grant random) []byte {
			return frameBytes(header{kind: frameAgain, key: grant, length: 1<<numberBits | 1})
		}, func(a *aheadOf) {
			a.goesOn("t", a.grant, small, 2*smallBlock)
		}},
		"no such grant": {func(random) []byte { return frame(random{1}, 0, small, 2) }, func(a *aheadOf) {
			a.hears(frameNack, random{1})
			a.goesOn("t", a.grant, small, 2*smallBlock)
		}},
	} {
		t.Run(what, func(t *testing.T) {
			a := ahead(t, func(a *aheadOf) [][]byte { return [][]byte{frame(a.grant, 0, small, 1), next.says(a.grant)} })
			a.begins(1)
			a.slots.awaits(t, 2)
			a.untold("a copy goes on")
			a.free()
			next.then(a)
			a.held(0)
		})
	}
}

// TestOtherFrameWhileCopying: what follows is another transfer's frame. The copies of the first are waited for before it is read.
func TestOtherFrameWhileCopying(t *testing.T) {
	var other random
	a := ahead(t, func(a *aheadOf) [][]byte {
		other = a.expect(a.t, "other", "p", [][]kv.BlockID{{2}})
		return [][]byte{frame(a.grant, 0, small, 1), frame(other, 0, small, 2)}
	})
	a.begins(1)
	a.slots.awaits(t, 2)
	if n := a.slots.begun.Load(); n != 2 {
		t.Errorf("%d copies, want 2: another transfer's frame was read", n)
	}
	a.slots.end(t)
	until(t, "the other's frame is read", func() bool { return a.slots.begun.Load() == 3 })
	a.receiver.mu.Lock()
	defer a.receiver.mu.Unlock()
	if got := a.receiver.byGrant[a.grant].got; got != small {
		t.Errorf("%d bytes count, want %d", got, small)
	}
}

// TestBreakWhileCopying: the connection breaks in the next frame. What has come of both frames counts once, and is not asked for again.
func TestBreakWhileCopying(t *testing.T) {
	a := ahead(t, func(a *aheadOf) [][]byte {
		return [][]byte{frame(a.grant, 0, small, 1), frame(a.grant, small, small, 2)[:headerSize+small/2]}
	})
	a.begins(2)
	_ = a.c.Close()
	a.free()
	c, again := a.p.stream()
	if want := uint64(3*headerSize + 2*small + small/2); again.position != want {
		t.Errorf("%d bytes received, want %d", again.position, want)
	}
	c.say(frame(a.grant, small+small/2, 2*smallBlock-small-small/2, 3))
	if o := a.sink.Wait("received", "t", 1); o.Err != nil || o.Stats.Bytes != 2*smallBlock {
		t.Errorf("received: %+v", o)
	}
	for at, want := range map[int]byte{0: 1, small: 2, small + small/2: 3, 2*smallBlock - 1: 3} {
		if a.mem[at] != want {
			t.Errorf("byte %d is %d, want %d", at, a.mem[at], want)
		}
	}
}

// TestFramesWithoutCopiesHoldNoSlot: frames that bring nothing for the device follow one that does. P may send such frames without an end: its
// slot is given back before the second one of them is read.
func TestFramesWithoutCopiesHoldNoSlot(t *testing.T) {
	t.Run("frames without bytes", func(t *testing.T) {
		a := ahead(t, func(a *aheadOf) [][]byte {
			return [][]byte{frame(a.grant, 0, small, 1), frame(a.grant, small, 0, 0), frame(a.grant, small, small, 2)}
		})
		a.slots.awaits(t, 2)
		if n := a.slots.begun.Load(); n != 2 {
			t.Errorf("%d copies have begun: a frame was read behind one without bytes, and a slot is held", n)
		}
		a.has(2 * small)
	})
	t.Run("frames of host memory", func(t *testing.T) {
		a := ahead(t, func(a *aheadOf) [][]byte {
			on := &a.devices.ranges[0]
			on.to = on.from + small
			return [][]byte{frame(a.grant, 0, small, 1), frame(a.grant, small, small, 2), frame(a.grant, 2*small, small, 3)}
		})
		a.slots.awaits(t, 2)
		if a.mem[2*small] != 0 {
			t.Error("a frame was read behind one of host memory, and a slot is held")
		}
		a.has(3 * small)
	})
}

// has ends all copies, and waits until so many bytes have landed.
func (a *aheadOf) has(n uint64) {
	a.t.Helper()
	a.free()
	until(a.t, "the bytes have landed", func() bool { return a.got("t") == n })
	if free := a.slots.fewSlots.free; len(free) < cap(free) {
		a.t.Errorf("%d slots are held", cap(free)-len(free))
	}
}

// TestRevokeBetweenFrames: a transfer is revoked when its next frame is there and not begun. Revoke waits for the copies of the frame before, and
// the next one is thrown away. Nobody is told of an end, though a copy has failed.
func TestRevokeBetweenFrames(t *testing.T) {
	for what, err := range map[string]error{"all copies end well": nil, "a copy fails": errors.New("a test: a bad copy")} {
		t.Run(what, func(t *testing.T) { revokeBetweenFrames(t, err) })
	}
}

func revokeBetweenFrames(t *testing.T, fails error) {
	leaktest.Check(t)
	slots := newHeldSlots(8, 64<<10)
	slots.fails[1] = fails
	free := sync.OnceFunc(func() { close(slots.ends) })
	d := newSizedAgent(t, Config{Streams: 1, StallTimeout: time.Hour, Mover: slots}, 4, smallBlock)
	t.Cleanup(free)
	newFakeP(t, d, "p")
	grant := d.expect(t, "t", "p", allBlocks(2))
	here, there := tcpPair(t)
	raw, err := here.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	s := &inStream{r: &d.receiver, conn: here, raw: raw, peer: d.receiver.peers["p"], vec: make([]iovec, 0, maxVector)}
	both := append(frame(grant, 0, small, 1), frame(grant, small, small, 2)...)
	if _, err := there.Write(both); err != nil {
		t.Fatal(err)
	}
	until(t, "D's kernel has both frames", func() bool {
		n := 0
		_ = raw.Control(func(fd uintptr) { n, _ = unix.IoctlGetInt(int(fd), unix.TIOCINQ) })
		return n == len(both)
	})
	hung := time.AfterFunc(bound, free) // if the copies do not go on, frame waits for them
	err = s.frame()
	if !hung.Stop() || err != nil || s.owes == nil {
		t.Fatalf("the copies of the first frame do not go on: %v", err)
	}
	revoked := make(chan bool, 1)
	go func() {
		err := d.Revoke("t")
		revoked <- err == nil && slots.held.Load() == 0
	}()
	until(t, "the revoke has begun", func() bool {
		d.receiver.mu.Lock()
		defer d.receiver.mu.Unlock()
		return d.receiver.byID["t"] == nil
	})
	free()
	if err := s.frame(); err != nil {
		t.Error(err)
	}
	select {
	case well := <-revoked:
		if !well {
			t.Error("Revoke returned while a copy may land")
		}
	case <-time.After(bound):
		t.Fatal("the copy has ended, and Revoke waits")
	}
	if d.mem[small] != 0 {
		t.Error("the next frame has landed")
	}
	if told := d.sink.All("received", "t"); len(told) > 0 {
		t.Errorf("told %+v", told)
	}
	if n := slots.early.Load(); n > 0 {
		t.Errorf("%d slots were given back while a copy used them", n)
	}
}
