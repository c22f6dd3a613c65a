package tcp

import (
	"bytes"
	"net"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/rig/leaktest"
)

// lowMark is how many bytes make a connection readable.
func lowMark(t *testing.T, c syscall.Conn) (n int) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if e := raw.Control(func(fd uintptr) { n, err = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVLOWAT) }); e != nil || err != nil {
		t.Fatal(e, err)
	}
	return n
}

// TestBatch: within a frame D waits for a batch, or for the frame's rest. Between frames it waits for
// any byte, also behind a frame in which it has waited.
func TestBatch(t *testing.T) {
	leaktest.Check(t)
	d := newAgent(t, Config{Streams: 1, StallTimeout: time.Hour})
	p := fakeSender(t, d, "p")
	grant := d.expect(t, "t", "p", allBlocks(2))
	d.receiver.mu.Lock()
	conn := d.receiver.peers["p"].slots[0].conn.(*net.TCPConn)
	d.receiver.mu.Unlock()
	waits := func(n int) {
		t.Helper()
		n = min(n, int(batch()))
		until(t, "D waits for its bytes", func() bool { return lowMark(t, conn) == n })
	}
	waits(1)
	ones := bytes.Repeat([]byte{1}, testBlock)
	p.say(frameBytes(header{kind: frameData, key: grant, length: testBlock}), ones[:10])
	waits(testBlock - 10)
	p.say(ones[10:])
	waits(1)
	p.say(frameBytes(header{kind: frameData, length: 4 << 20})) // of nobody
	p.next()
	waits(int(batch()))
	p.say(make([]byte, 4<<20-100))
	waits(100)
	p.say(make([]byte, 100), frameBytes(header{kind: frameData, key: grant, position: testBlock, length: testBlock}), ones)
	if h := p.next(); h.kind != frameAck || h.key != grant || h.length != 2*testBlock {
		t.Fatalf("answered by %+v", h)
	}
	waits(1)
}

// TestDripIsProgress: bytes that are fewer than a batch count as progress. Each of them lands within a step, and
// the peer says the next one then.
func TestDripIsProgress(t *testing.T) {
	leaktest.Check(t)
	bound := 3 * time.Second
	d := newAgent(t, Config{Streams: 1, StallTimeout: bound})
	p := fakeSender(t, d, "p")
	grant := d.expect(t, "t", "p", allBlocks(1))
	ones := bytes.Repeat([]byte{1}, testBlock)
	p.say(frameBytes(header{kind: frameData, key: grant, length: testBlock}))
	said := 0
	for begun := time.Now(); time.Since(begun) < bound+step; said++ {
		p.say(ones[said : said+1])
		until(t, "the byte has landed", func() bool { return d.mem[said] == 1 })
	}
	p.say(ones[said:])
	if o := d.sink.Wait("received", "t", 1); o.Err != nil {
		t.Fatal(o.Err)
	}
	if !bytes.Equal(d.mem[:testBlock], ones) {
		t.Error("wrong bytes")
	}
}

// TestLastStepWaitsForAnyByte: in the last step before a stream counts as stalled, one byte ends the wait.
func TestLastStepWaitsForAnyByte(t *testing.T) {
	leaktest.Check(t)
	d := newAgent(t, Config{})
	for _, c := range []struct {
		idle stall
		mark int
	}{
		{stall{bound: time.Hour}, int(batch())},
		{stall{bound: time.Hour, since: time.Hour - 2*step}, int(batch())},
		{stall{bound: time.Hour, since: time.Hour - step}, 1},
		{stall{bound: step}, 1},
	} {
		here, there := tcpPair(t)
		raw, err := here.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		s := &inStream{r: &d.receiver, conn: here, raw: raw}
		_ = raw.Control(func(fd uintptr) { _ = s.waitsFor(fd, 7) }) // as an earlier wait left it
		read := make(chan uintptr)
		go func() {
			n, _, _ := s.some(nil, &cursor{}, 4*batch(), &c.idle)
			read <- n
		}()
		until(t, "it waits", func() bool { return lowMark(t, here) == c.mark })
		if _, err := there.Write(make([]byte, c.mark)); err != nil {
			t.Fatal(err)
		}
		if n := <-read; n == 0 {
			t.Error("nothing was read")
		}
	}
}
