package tcp

import (
	"bytes"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/coretest"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// stallStream drops all bytes that come to a connection, as a dead path does.
func stallStream(t *testing.T, c net.Conn) {
	t.Helper()
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	drop := unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K}
	control := raw.Control(func(fd uintptr) {
		err = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: 1, Filter: &drop})
	})
	if errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.ENOPROTOOPT) {
		t.Skip("NOT RUN: this kernel takes no filter of a socket: ", err)
	}
	if control != nil || err != nil {
		t.Fatal(control, err)
	}
}

// TestOneDeadPath: a transfer does not wait for a stream whose path is dead, also
// when there is nothing left to send on the others.
func TestOneDeadPath(t *testing.T) {
	leaktest.Check(t)
	p, d := newAgent(t, Config{StallTimeout: time.Hour}), newAgent(t, Config{Streams: 2, StallTimeout: time.Hour})
	for i := range p.mem {
		p.mem[i] = byte(i*7 + i>>12)
	}
	if err := d.Connect("p", p.Endpoint(), p.admit(t, "d")); err != nil {
		t.Fatal(err)
	}
	until(t, "both streams are open", func() bool {
		p.sender.mu.Lock()
		defer p.sender.mu.Unlock()
		return p.sender.streams == 2
	})
	d.receiver.mu.Lock()
	dead := d.receiver.peers["p"].slots[1].conn
	d.receiver.mu.Unlock()
	stallStream(t, dead)
	grant := d.expect(t, "t", "p", allBlocks(testBlocks))
	p.Write(core.WriteOp{ID: "t", Peer: "d", Grant: grant[:], Pairs: p.pairs(t, allBlocks(testBlocks))})
	for _, o := range []coretest.Outcome{d.sink.Wait("received", "t", 1), p.sink.Wait("written", "t", 1)} {
		if o.Err != nil || o.Stats.Bytes != testBlocks*testBlock {
			t.Errorf("%s: %+v", o.Kind, o)
		}
	}
	if !bytes.Equal(p.mem, d.mem) {
		t.Error("wrong bytes")
	}
}

// TestOneStreamThatIsNotRead: a transfer does not wait for a stream that takes no bytes
// while another does.
func TestOneStreamThatIsNotRead(t *testing.T) {
	leaktest.Check(t)
	p := newAgent(t, Config{FrameBytes: 16 << 20, StallTimeout: time.Hour})
	stalled, good := dial(t, p), dial(t, p)
	stalled.say(p.hello(t, "d", 4, 7, 0))
	grant := newRandom()
	p.Write(core.WriteOp{ID: "t", Peer: "d", Grant: grant[:], Pairs: p.pairs(t, allBlocks(testBlocks))})
	if h := stalled.next(); h.kind != frameData || h.key != grant {
		t.Fatalf("begins with %+v", h)
	}
	good.say(p.hello(t, "d", 5, 8, 0))
	received := uint64(0)
	for {
		h := good.next()
		received += headerSize
		if h.kind == frameAgain {
			if number, attempt := h.stream(); number != 4 || attempt != 7 {
				t.Errorf("stream %d, attempt %d is to be opened anew", number, attempt)
			}
			break
		}
		received += h.length
		// Another transfer keeps the good stream moving for as long as that takes.
		b := make([]byte, 64<<10)
		for left := h.length; left > 0; time.Sleep(time.Millisecond) {
			n, err := good.Read(b[:min(left, uint64(len(b)))])
			if err != nil {
				t.Fatal(err)
			}
			left -= uint64(n)
		}
		good.say(frameBytes(header{kind: frameAck, key: h.key, length: testBlock}))
		more := newRandom()
		p.Write(core.WriteOp{ID: core.TransferID(more[:]), Peer: "d", Grant: more[:], Pairs: p.pairs(t, allBlocks(1))})
	}
	if told := p.sink.All("down", ""); len(told) != 0 {
		t.Errorf("told %+v", told)
	}
	// When the stream breaks, that frame counts as any other.
	cut := good.next()
	for ; cut.kind == frameAgain; cut = good.next() { // the watchdog may have looked once more
		received += headerSize
	}
	good = dial(t, p)
	good.say(p.hello(t, "d", 5, 9, received+headerSize+100))
	h := good.next()
	for ; h.key != cut.key; h = good.next() {
		if h.kind != frameData {
			continue
		}
		if _, err := io.CopyN(io.Discard, good, int64(h.length)); err != nil {
			t.Fatal(err)
		}
	}
	if h.position != cut.position+100 {
		t.Errorf("%+v was cut after 100 bytes, and goes on with %+v", cut, h)
	}
}

// TestAskedToOpenAgain: D opens the stream that P names anew, whether transfers
// wait or not, and no other.
func TestAskedToOpenAgain(t *testing.T) {
	leaktest.Check(t)
	d := newAgent(t, Config{Streams: 2, StallTimeout: time.Hour})
	p := newFakeP(t, d, "p")
	one, first := p.stream()
	two, _ := p.stream()
	number, attempt := first.stream()
	for _, h := range []header{again(number, attempt-1), again(number+2, attempt), again(maxPeerStreams-1, attempt), {kind: frameData}} {
		two.say(frameBytes(h))
	}
	if h := two.next(); h.kind != frameNack { // the others were read too
		t.Fatalf("answered by %+v", h)
	}
	d.receiver.mu.Lock()
	for n, slot := range d.receiver.peers["p"].slots {
		if slot.wanted || slot.conn == nil {
			t.Errorf("stream %d is opened anew", n)
		}
	}
	d.receiver.mu.Unlock()
	h := again(number, attempt)
	two.say(frameBytes(h))
	one.ends()
	_, anew := p.stream()
	if n, next := anew.stream(); n != number || next <= attempt {
		t.Errorf("stream %d, attempt %d was opened, want a newer one of %d", n, next, number)
	}
}

// inUse has P write a transfer by two frames to a D of two streams, of which one is in use and takes no more than its buffers hold, and
// the other rests. What D says and reads is up to the test.
func inUse(t *testing.T, before func(used *rawConn)) (p *agent, used, rests *rawConn) {
	t.Helper()
	p = newAgent(t, Config{First: 1, FrameBytes: testBlocks * testBlock / 2, StallTimeout: time.Hour, DialTimeout: time.Hour})
	used, rests = dial(t, p), dial(t, p)
	used.say(p.hello(t, "d", 0, 7, 0))
	rests.say(p.hello(t, "d", 1, 8, 0))
	until(t, "both streams are open", func() bool { return p.streams() == 2 })
	before(used)
	grant := newRandom()
	p.Write(core.WriteOp{ID: "t", Peer: "d", Grant: grant[:], Pairs: p.pairs(t, allBlocks(testBlocks))})
	return p, used, rests
}

// goesOn checks that D is told to open the stream in use anew, and gets the second half by the one that has rested.
func goesOn(t *testing.T, rests *rawConn) {
	t.Helper()
	h := rests.next()
	if number, attempt := h.stream(); h.kind != frameAgain || number != 0 || attempt != 7 {
		t.Fatalf("told %+v", h)
	}
	for h = rests.next(); h.kind == frameAgain; h = rests.next() { // the watchdog may have looked once more
	}
	if h.kind != frameData || h.position != testBlocks*testBlock/2 {
		t.Errorf("told %+v", h)
	}
}

// TestDeadPathInUse: if the path of the one stream in use dies, and D cannot open that stream anew, a stream that rests is used.
func TestDeadPathInUse(t *testing.T) {
	leaktest.Check(t)
	_, _, rests := inUse(t, func(used *rawConn) { stallStream(t, used.Conn) })
	goesOn(t, rests)
}

// TestDeadPathAtAClosedWindow: so it is if the path dies when D's buffers are full. P has nothing to send again, and its probes bring
// nothing.
func TestDeadPathAtAClosedWindow(t *testing.T) {
	leaktest.Check(t)
	p, used, rests := inUse(t, func(*rawConn) {})
	if h := used.next(); h.kind != frameData {
		t.Fatalf("told %+v", h)
	}
	st := p.stream(t, "d")
	until(t, "D's buffers are full", func() bool {
		info := st.info()
		return info != nil && info.Unacked == 0 && info.Notsent_bytes > 0 && info.Backoff > 0 // P has probed
	})
	stallStream(t, used.Conn)
	goesOn(t, rests)
}

// TestStalledStreamReceives: a stream that moves again takes frames again, also if it is the only one by then.
func TestStalledStreamReceives(t *testing.T) {
	leaktest.Check(t)
	p, used, rests := inUse(t, func(used *rawConn) { stallStream(t, used.Conn) })
	goesOn(t, rests)
	rests.Close()
	until(t, "one stream is left", func() bool { return p.streams() == 1 })
	hearing(t, used.Conn)
	h := used.next()
	if h.kind != frameData {
		t.Fatalf("told %+v", h)
	}
	if _, err := io.CopyN(io.Discard, used, int64(h.length)); err != nil {
		t.Fatal(err)
	}
	until(t, "it takes frames", func() bool {
		p.sender.mu.Lock()
		defer p.sender.mu.Unlock()
		d := p.sender.peers["d"]
		return d.uses(d.slots[0].stream)
	})
}

// hearing ends what stallStream has done.
func hearing(t *testing.T, c net.Conn) {
	t.Helper()
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	control := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0) })
	if control != nil || err != nil {
		t.Fatal(control, err)
	}
}
