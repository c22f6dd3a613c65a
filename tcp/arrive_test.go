package tcp

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// small is a frame that is one packet with others: D has all of it, or nothing.
const small = 64

// lands is a D on gates, and the P of so many of its streams.
func lands(t *testing.T, m *gates, streams int) (d *agent, p []*rawConn) {
	t.Helper()
	d, p, _ = landsFrom(t, m, streams)
	return d, p
}

// landsFrom is lands, with the P that takes more streams.
func landsFrom(t *testing.T, m *gates, streams int) (d *agent, p []*rawConn, from *fakeP) {
	t.Helper()
	leaktest.Check(t)
	cfg := patient
	cfg.First, cfg.CloseGrace = streams, 100*time.Millisecond
	d = onGates(t, cfg, m)
	clear(d.mem)
	from = newFakeP(t, d, "p")
	p = make([]*rawConn, streams)
	for range streams {
		c, h := from.stream()
		n, _ := h.stream()
		p[n] = c
	}
	return d, p, from
}

// lands expects a transfer of frames of small bytes, each at the begin of its block.
func (a *agent) lands(t *testing.T, id core.TransferID, blocks ...[2]int) (grant random) {
	t.Helper()
	var to []kv.Segment
	for _, b := range blocks {
		to = append(to, kv.Segment{Region: uint32(b[0]), Offset: uint64(b[1]) * gateBytes, Length: small})
	}
	g, err := a.Expect(id, "p", to)
	if err != nil {
		t.Fatal(err)
	}
	return random(g)
}

// smallFrame is a transfer's frame of a number.
func smallFrame(grant random, number int) []byte {
	return append(frameBytes(header{kind: frameData, key: grant, position: uint64(number) * small, length: small}), bytes.Repeat([]byte{byte(number + 1)}, small)...)
}

func (m *gates) begins(t *testing.T, device, copies int) {
	t.Helper()
	until(t, fmt.Sprint(copies, " copies have begun"), func() bool { return m.sees(func() bool { return m.begun[device] == copies }) })
}

func (m *gates) copies(device int) (begun int) {
	m.sees(func() bool { begun = m.begun[device]; return true })
	return begun
}

// endsAfter waits until D ends a transfer. The copies up to a number must have been waited for then.
func (m *gates) endsAfter(t *testing.T, d *agent, id core.TransferID, number int) {
	t.Helper()
	var waited int
	until(t, "D ends the transfer, or waits for its copies", func() bool {
		d.receiver.mu.Lock()
		ends := d.receiver.telling[id] != nil
		d.receiver.mu.Unlock()
		return m.sees(func() bool { waited = m.waited[0]; return waited >= number }) || ends
	})
	if waited < number {
		t.Fatalf("D ends %q when %d copies were waited for, want %d", id, waited, number)
	}
}

func (m *gates) isWaitedFor(t *testing.T, device, number int) {
	t.Helper()
	until(t, fmt.Sprint("copy ", number, " is waited for"), func() bool { return m.sees(func() bool { return m.waited[device] >= number }) })
}

// TestNextFramesAreReadWhileCopiesPass: while the copies of a frame have not ended, D reads the next frames, as many as it has slots
// for. A transfer ends when its own copies have ended, and not before.
func TestNextFramesAreReadWhileCopiesPass(t *testing.T) {
	m := newGates(8, small)
	d, p := lands(t, m, 1)
	var all []byte
	var grants []random
	for i := range window + 1 {
		grants = append(grants, d.lands(t, core.TransferID(fmt.Sprint("t", i)), [2]int{0, i % 4}))
		all = append(all, smallFrame(grants[i], 0)...)
	}
	p[0].say(all)
	m.isWaitedFor(t, 0, 1)
	if n := m.copies(0); n != window {
		t.Fatalf("%d copies have begun, want %d, and D waits for the end of one", n, window)
	}
	for i, grant := range grants {
		if told := d.sink.All("received", ""); len(told) != i {
			t.Fatalf("%d copies have ended, and %+v", i, told)
		}
		m.allow(0, i+1)
		if o := d.sink.Wait("received", core.TransferID(fmt.Sprint("t", i)), 1); o.Err != nil || o.Stats.Bytes != small {
			t.Errorf("%+v", o)
		}
		if h := p[0].next(); h.kind != frameAck || h.key != grant {
			t.Errorf("answered by %+v", h)
		}
	}
	if binary.LittleEndian.Uint64(d.mem) != 0x0101010101010101 {
		t.Error("wrong bytes")
	}
}

// TestPartOfAHeader: D ends copies before it waits for the rest of a header, which may not come.
func TestPartOfAHeader(t *testing.T) {
	m := newGates(4, small)
	d, p := lands(t, m, 1)
	m.allow(0, all)
	grant := d.lands(t, "t", [2]int{0, 0})
	p[0].say(smallFrame(grant, 0), smallFrame(grant, 0)[:headerSize-1])
	if o := d.sink.Wait("received", "t", 1); o.Err != nil {
		t.Error(o.Err)
	}
}

// TestFramesWithoutASlotLetCopiesEnd: frames without bytes follow each other. They do not put off the end of a copy before them.
func TestFramesWithoutASlotLetCopiesEnd(t *testing.T) {
	m := newGates(4, small)
	d, p := lands(t, m, 1)
	m.allow(0, all)
	unknown := frameBytes(header{kind: frameData, key: newRandom()})
	p[0].say(smallFrame(d.lands(t, "t", [2]int{0, 0}), 0), unknown, unknown)
	for i, kind := range []frameKind{frameNack, frameAck, frameNack} {
		if h := p[0].next(); h.kind != kind {
			t.Errorf("answer %d is %+v, want kind %d", i, h, kind)
		}
	}
}

// TestNothingLandsBehindAnotherDevice: bytes for a device are not copied behind copies of another one, whose end the stream waits for
// first. So a device that does not answer does not hold up the revoke of a transfer to another one.
func TestNothingLandsBehindAnotherDevice(t *testing.T) {
	m := newGates(4, small)
	d, p := lands(t, m, 1)
	m.allow(1, all)
	stands, other := d.lands(t, "stands", [2]int{0, 0}), d.lands(t, "other", [2]int{1, 0})
	p[0].say(smallFrame(stands, 0), smallFrame(other, 0))
	m.isWaitedFor(t, 0, 1)
	if m.copies(1) > 0 {
		t.Fatal("bytes for a device are copied behind another device's")
	}
	revoked := make(chan error, 1)
	go func() { revoked <- d.Revoke("other") }()
	select {
	case err := <-revoked:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(bound):
		t.Fatal("the revoke waits for another device")
	}
}

// TestBadFrameBehindCopies: a frame that D does not admit ends its transfer, when the copies of the frame before it have ended.
func TestBadFrameBehindCopies(t *testing.T) {
	m := newGates(4, small)
	d, p := lands(t, m, 1)
	grant := d.lands(t, "t", [2]int{0, 0}, [2]int{0, 1})
	p[0].say(smallFrame(grant, 0), smallFrame(grant, 0))
	m.endsAfter(t, d, "t", 1)
	if told := d.sink.All("received", "t"); len(told) > 0 {
		t.Errorf("its copy has not ended, and %+v", told)
	}
	m.allow(0, all)
	if o := d.sink.Wait("received", "t", 1); o.Err == nil {
		t.Error("it ended well")
	}
}

// TestBadHeaderBehindCopies: a stream that ends for its P's fault counts what has come before.
func TestBadHeaderBehindCopies(t *testing.T) {
	m := newGates(4, small)
	d, p := lands(t, m, 1)
	grant := d.lands(t, "t", [2]int{0, 0})
	p[0].say(smallFrame(grant, 0), frameBytes(header{kind: frameAck}))
	m.endsAfter(t, d, "t", 1)
	m.allow(0, all)
	if o := d.sink.Wait("received", "t", 1); o.Err != nil {
		t.Error(o.Err)
	}
}

// TestCopyFailsBesideOthers: a copy fails while others of the same transfer, and of another one, are under way on the stream. The
// transfer ends by that, the other one ends well, and the stream goes on.
func TestCopyFailsBesideOthers(t *testing.T) {
	m := newGates(4, small)
	m.fails[0] = 1
	d, p := lands(t, m, 1)
	fails, other := d.lands(t, "fails", [2]int{0, 0}, [2]int{0, 1}, [2]int{0, 2}), d.lands(t, "other", [2]int{0, 3})
	p[0].say(smallFrame(fails, 0), smallFrame(fails, 1), smallFrame(other, 0))
	m.begins(t, 0, 3)
	m.allow(0, all)
	m.endsAfter(t, d, "fails", 3)
	wantNamed(t, d.sink.Wait("received", "fails", 1).Err, "a copy of a test fails")
	if o := d.sink.Wait("received", "other", 1); o.Err != nil {
		t.Error(o.Err)
	}
	p[0].say(smallFrame(fails, 2), smallFrame(d.lands(t, "next", [2]int{0, 0}), 0))
	if o := d.sink.Wait("received", "next", 1); o.Err != nil {
		t.Error(o.Err)
	}
}

// TestFailureBesideAStuckCopy: a transfer fails on one stream, and its copy on another one may never end. Nobody hears of an end, a
// revoke waits for Close, and both streams go on.
func TestFailureBesideAStuckCopy(t *testing.T) {
	for _, stuckFirst := range []bool{false, true} {
		t.Run(fmt.Sprint("the stuck copy is the first to be seen: ", stuckFirst), func(t *testing.T) {
			m := newGates(4, small)
			m.lost, m.fails[1] = 1, 1
			d, p := lands(t, m, 2)
			grant := d.lands(t, "t", [2]int{0, 0}, [2]int{1, 0})
			p[0].say(smallFrame(grant, 0))
			p[1].say(smallFrame(grant, 1))
			m.begins(t, 0, 1)
			m.begins(t, 1, 1)
			r := &d.receiver
			seen := map[bool]func() bool{
				true:  func() bool { return r.byGrant[grant] == nil && r.byID["t"] != nil && r.byID["t"].stuck },
				false: func() bool { return r.telling["t"] != nil },
			}
			order := []int{1, 0}
			if stuckFirst {
				order = []int{0, 1}
			}
			m.allow(order[0], all)
			until(t, "D has seen it", func() bool {
				r.mu.Lock()
				defer r.mu.Unlock()
				return seen[stuckFirst]()
			})
			m.allow(order[1], all)
			for i, c := range p {
				id := core.TransferID(fmt.Sprint("other", i))
				c.say(smallFrame(d.lands(t, id, [2]int{i, 1}), 0))
				if o := d.sink.Wait("received", id, 1); o.Err != nil {
					t.Error(o.Err)
				}
			}
			revoked := make(chan error, 1)
			go func() { revoked <- d.Revoke("t") }()
			if err := d.Close(); !errors.Is(err, core.ErrMayLand) {
				t.Errorf("the close: %v", err)
			}
			if err := <-revoked; !errors.Is(err, core.ErrMayLand) {
				t.Errorf("the revoke: %v", err)
			}
			if told := d.sink.All("received", "t"); len(told) > 0 {
				t.Errorf("its bytes may land, and %+v", told)
			}
		})
	}
}
