package tcp

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// fewSlots is a Mover whose device is host memory, with so few slots that streams starve each
// other if they may.
type fewSlots struct {
	free  chan []byte
	taken atomic.Int64 // in all
	early atomic.Int64 // given back before their copies were waited for
}

func newFewSlots(slots, bytes int) *fewSlots {
	m := &fewSlots{free: make(chan []byte, slots)}
	for range slots {
		m.free <- make([]byte, bytes)
	}
	return m
}

func (m *fewSlots) Of(uint32) int { return 0 }

func (m *fewSlots) Slot(ctx context.Context, _ int, to Direction, _ core.AgentID) (Slot, error) {
	select {
	case b := <-m.free:
		m.taken.Add(1)
		return &fewSlot{m: m, b: b, to: to}, nil
	default:
	}
	select {
	case b := <-m.free:
		m.taken.Add(1)
		return &fewSlot{m: m, b: b, to: to}, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

type fewSlot struct {
	m       *fewSlots
	b       []byte
	to      Direction
	copying bool // for all that its user knows
}

func (s *fewSlot) Memory() []byte { return s.b }

func (s *fewSlot) Copy(runs []Run) {
	s.copying = true
	at := 0
	for _, r := range runs {
		device := unsafe.Slice(*(**byte)(unsafe.Pointer(&r.Addr)), r.Len)
		if slot := s.b[at : at+int(r.Len)]; s.to == FromDevice {
			copy(slot, device)
		} else {
			copy(device, slot)
		}
		at += int(r.Len)
	}
}

func (s *fewSlot) Wait() error {
	s.copying = false
	return nil
}

func (s *fewSlot) Release() {
	if s.copying {
		s.m.early.Add(1)
	}
	s.m.free <- s.b
}

// stuckSlots is a Mover whose device does not end a copy.
type stuckSlots struct{ *fewSlots }

type stuckSlot struct{ Slot }

func (m stuckSlots) Slot(ctx context.Context, device int, to Direction, peer core.AgentID) (Slot, error) {
	s, err := m.fewSlots.Slot(ctx, device, to, peer)
	if err != nil {
		return nil, err
	}
	return stuckSlot{s}, nil
}

func (stuckSlot) Wait() error { return fmt.Errorf("a test: %w", ErrMayCopy) }

// TestCloseFreesARevoke: Close ends the wait of a Revoke for a copy that never ends, also where
// the transport's last stream ends before CloseGrace is over. Both say that the copy may land, and so does a revoke that
// comes beside Close, or later.
func TestCloseFreesARevoke(t *testing.T) {
	leaktest.Check(t)
	for _, before := range []bool{true, false} {
		t.Run(fmt.Sprint("the revoke begins before Close: ", before), func(t *testing.T) { closeFreesARevoke(t, before) })
	}
}

func closeFreesARevoke(t *testing.T, before bool) {
	p, d := newAgent(t, Config{}), newAgent(t, Config{Mover: stuckSlots{newFewSlots(4, 64<<10)}, CloseGrace: time.Hour})
	if err := d.Connect("p", p.Endpoint(), p.admit(t, "d")); err != nil {
		t.Fatal(err)
	}
	grant := d.expect(t, "t", "p", allBlocks(testBlocks))
	p.Write(core.WriteOp{ID: "t", Peer: "d", Grant: grant[:], Pairs: p.pairs(t, allBlocks(testBlocks))})
	until(t, "D has given the transfer up", func() bool {
		d.receiver.mu.Lock()
		defer d.receiver.mu.Unlock()
		return d.receiver.byGrant[grant] == nil
	})
	revoked := make(chan error, 1)
	if before {
		go func() { revoked <- d.Revoke("t") }()
		until(t, "the revoke has begun", func() bool {
			d.receiver.mu.Lock()
			defer d.receiver.mu.Unlock()
			return d.receiver.byID["t"] == nil
		})
		select {
		case <-revoked:
			t.Fatal("Revoke returned while a copy may land")
		default:
		}
	}
	if err := d.Close(); !errors.Is(err, core.ErrMayLand) || !strings.Contains(err.Error(), d.layout.Regions[0].Name) {
		t.Errorf("the close: %v", err)
	}
	if !before {
		go func() { revoked <- d.Revoke("t") }()
	}
	select {
	case err := <-revoked:
		if !errors.Is(err, core.ErrMayLand) {
			t.Errorf("the revoke: %v", err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("the revoke still waits after Close")
	}
}

// TestNoStreamWaitsForALostCopy: a stream that ends a transfer, while the device does not end a copy of another stream's, goes on. Nobody
// hears of an end, and a revoke waits until Close. Close has no stream to wait for.
func TestNoStreamWaitsForALostCopy(t *testing.T) {
	leaktest.Check(t)
	for _, before := range []bool{true, false} {
		t.Run(fmt.Sprint("the copy is lost before the other stream fails: ", before), func(t *testing.T) {
			p, d := newAgent(t, Config{}), newAgent(t, Config{CloseGrace: time.Hour})
			if err := d.Connect("p", p.Endpoint(), p.admit(t, "d")); err != nil {
				t.Fatal(err)
			}
			d.expect(t, "t", "p", allBlocks(testBlocks))
			d.receiver.mu.Lock()
			in := d.receiver.byID["t"]
			d.receiver.mu.Unlock()
			in.copies.add()
			if before {
				in.copies.lose()
			}
			failed, revoked := make(chan struct{}), make(chan error, 1)
			go func() {
				d.receiver.fail(in, errors.New("a test"))
				close(failed)
			}()
			until(t, "the transfer is forgotten", func() bool {
				d.receiver.mu.Lock()
				defer d.receiver.mu.Unlock()
				return d.receiver.byID["t"] == nil
			})
			if !before {
				until(t, "the stream waits", func() bool {
					in.copies.mu.Lock()
					defer in.copies.mu.Unlock()
					return in.copies.idle != nil
				})
				in.copies.lose()
			}
			select {
			case <-failed:
			case <-time.After(30 * time.Second):
				t.Fatal("a stream waits for a copy that never ends")
			}
			if told := d.sink.All("received", "t"); len(told) > 0 {
				t.Errorf("the engine has heard of an end: %v", told)
			}
			go func() { revoked <- d.Revoke("t") }()
			if err := d.Close(); !errors.Is(err, core.ErrMayLand) {
				t.Errorf("the close: %v", err)
			}
			if err := <-revoked; !errors.Is(err, core.ErrMayLand) {
				t.Errorf("the revoke: %v", err)
			}
		})
	}
}

// TestRevokesBesideClose: copies go on when a transport is closed. The revokes that come beside the close return when the copies have ended, and
// not before, whoever runs first.
func TestRevokesBesideClose(t *testing.T) {
	leaktest.Check(t)
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	for i := range 20 {
		slots := &lateSlots{fewSlots: newFewSlots(4, 64<<10), began: make(chan struct{}, 1), ends: make(chan struct{})}
		p, d := newAgent(t, Config{}), newAgent(t, Config{Mover: slots, CloseGrace: time.Hour})
		if err := d.Connect("p", p.Endpoint(), p.admit(t, "d")); err != nil {
			t.Fatal(err)
		}
		grant := d.expect(t, "t", "p", allBlocks(testBlocks))
		p.Write(core.WriteOp{ID: "t", Peer: "d", Grant: grant[:], Pairs: p.pairs(t, allBlocks(testBlocks))})
		select {
		case <-slots.began:
		case <-time.After(time.Minute):
			t.Fatal("no copy has begun")
		}
		ended := make(chan error, 2)
		both := []func(){func() {
			err := d.Revoke("t")
			if !slots.over.Load() {
				t.Error("Revoke returned while a copy may land")
			}
			ended <- err
		}, func() { ended <- d.Close() }}
		if i%2 == 1 {
			slices.Reverse(both)
		}
		for _, f := range both {
			go f()
			for range i {
				runtime.Gosched()
			}
		}
		until(t, "the close has begun", func() bool {
			d.receiver.mu.Lock()
			defer d.receiver.mu.Unlock()
			return d.receiver.closed
		})
		slots.over.Store(true)
		close(slots.ends)
		for range 2 {
			select {
			case err := <-ended:
				if err != nil {
					t.Error(err)
				}
			case <-time.After(time.Minute):
				t.Fatal("the copies have ended, and the revoke or the close has not")
			}
		}
	}
}

// lateSlots is a Mover whose device ends copies when it is told to.
type lateSlots struct {
	*fewSlots
	began chan struct{}
	ends  chan struct{}
	over  atomic.Bool
}

type lateSlot struct {
	Slot
	m *lateSlots
}

func (m *lateSlots) Slot(ctx context.Context, device int, to Direction, peer core.AgentID) (Slot, error) {
	s, err := m.fewSlots.Slot(ctx, device, to, peer)
	if err != nil {
		return nil, err
	}
	return lateSlot{s, m}, nil
}

func (s lateSlot) Wait() error {
	select {
	case s.m.began <- struct{}{}:
	default:
	}
	<-s.m.ends
	return s.Slot.Wait()
}

// TestEndOfAFrameWaits: a frame that breaks off gives its slots back when their copies have ended, and
// the write is told after that: the blocks are free then.
func TestEndOfAFrameWaits(t *testing.T) {
	leaktest.Check(t)
	slots := newFewSlots(8, 64<<10)
	p := newAgent(t, Config{FrameBytes: testBlocks * testBlock, StallTimeout: time.Hour, Mover: slots})
	c := dial(t, p)
	_ = c.Conn.(*net.TCPConn).SetReadBuffer(64 << 10)
	c.say(p.hello(t, "d", 0, 1, 0))
	grant := newRandom()
	p.Write(core.WriteOp{ID: "t", Peer: "d", Grant: grant[:], Pairs: p.pairs(t, allBlocks(testBlocks))})
	c.next()
	c.Close()
	p.Stop("t")
	if o := p.sink.Wait("written", "t", 1); o.Err == nil {
		t.Error("it ended well")
	}
	if n := slots.early.Load(); n > 0 {
		t.Errorf("%d slots were given back while a copy used them", n)
	}
	if len(slots.free) < cap(slots.free) {
		t.Error("the write was told while a slot was held")
	}
}

// paintWords has each word of the memory name its place.
func (a *agent) paintWords() {
	for i := 0; i < len(a.mem); i += 8 {
		binary.LittleEndian.PutUint64(a.mem[i:], uint64(i)*0x9E3779B97F4A7C15)
	}
}

// TestSlowPeersStarveNobody: peers that take no bytes hold all slots for a moment only, and then
// none. Whoever takes bytes gets them.
func TestSlowPeersStarveNobody(t *testing.T) {
	leaktest.Check(t)
	slots := newFewSlots(8, 64<<10)
	p := newAgent(t, Config{StallTimeout: time.Hour, Mover: slots})
	p.paintWords()
	var stalled []*rawConn
	for i := range 6 { // two of them have all slots
		id := core.AgentID(fmt.Sprint("stalled", i))
		c := dial(t, p)
		_ = c.Conn.(*net.TCPConn).SetReadBuffer(64 << 10)
		c.say(p.hello(t, id, 0, 1, 0))
		grant := newRandom()
		p.Write(core.WriteOp{ID: core.TransferID(id), Peer: id, Grant: grant[:], Pairs: p.pairs(t, allBlocks(testBlocks))})
		stalled = append(stalled, c)
	}
	until(t, "slots were taken", func() bool { return slots.taken.Load() > 8 })
	d := newAgent(t, Config{})
	for i := range 8 {
		move(t, p, d, core.TransferID(fmt.Sprint("t", i)))
	}
	until(t, "nobody holds a slot", func() bool { return len(slots.free) == cap(slots.free) })
	// One of these peers takes its bytes at last, with pauses. P has copied some of the bytes again, and they must be right.
	c := stalled[0]
	for read := uint64(0); read < 8<<20; {
		h := c.next()
		b := make([]byte, h.length)
		if _, err := io.ReadFull(c, b); err != nil {
			t.Fatal(err)
		}
		time.Sleep(tenure * 3 / 2) // a slow peer
		for i := 0; i < len(b); i += 8 {
			if got, want := binary.LittleEndian.Uint64(b[i:]), (h.position+uint64(i))*0x9E3779B97F4A7C15; got != want {
				t.Fatalf("byte %d is %#x, want %#x", h.position+uint64(i), got, want)
			}
		}
		read += h.length
	}
}

// TestStuckTransferHoldsUpNobody: a device does not end the copies of some transfers, and P is dismissed. The transfers beside them are
// told all the same, though the stuck ones never will be.
func TestStuckTransferHoldsUpNobody(t *testing.T) {
	leaktest.Check(t)
	p, d := newAgent(t, Config{}), newAgent(t, Config{})
	if err := d.Connect("p", p.Endpoint(), p.admit(t, "d")); err != nil {
		t.Fatal(err)
	}
	r := &d.receiver
	for i := range 8 {
		id := core.TransferID(fmt.Sprint("stuck", i))
		d.expect(t, id, "p", allBlocks(1))
		r.mu.Lock()
		in := r.byID[id]
		r.mu.Unlock()
		in.copies.add()
		r.copyFailed(in, ErrMayCopy)
		defer in.copies.done()
	}
	d.expect(t, "t", "p", allBlocks(1))
	d.Dismiss("p")
	if o := d.sink.Wait("received", "t", 1); o.Err == nil {
		t.Error("it ended well")
	}
}
