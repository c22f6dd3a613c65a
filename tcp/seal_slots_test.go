package tcp

import (
	"errors"
	"io"
	"net"
	"testing"
	"time"
	"unsafe"

	"github.com/kvconn/kvconn/rig/leaktest"
)

// TestSlowPeerOfAnEncryptedStream: P gives its slots back while a slow peer holds a record that is
// sent in part. What is copied again goes on behind that record, and each byte is right.
func TestSlowPeerOfAnEncryptedStream(t *testing.T) {
	leaktest.Check(t)
	const slot = 256 << 10
	slots := newFewSlots(4, slot)
	p := newAgent(t, Config{Encrypt: EncryptMust, StallTimeout: time.Hour, Mover: slots})
	d := newAgent(t, Config{Encrypt: EncryptMust, StallTimeout: time.Hour, Streams: 1})
	p.paintWords()
	slow := between(t, p, nil, func(_ int, from io.Reader, to io.Writer) {
		_ = from.(*net.TCPConn).SetReadBuffer(64 << 10)
		for {
			if _, err := io.CopyN(to, from, 8<<20); err != nil {
				return
			}
			for len(slots.free) < cap(slots.free) { // a slow peer: it takes nothing before P has given all slots back
				time.Sleep(time.Millisecond)
			}
		}
	})
	start(t, p, d, slow.Addr().String(), "t", allBlocks(testBlocks))
	if o := d.sink.Wait("received", "t", 1); o.Err != nil {
		t.Fatal(o.Err)
	}
	if o := p.sink.Wait("written", "t", 1); o.Err != nil {
		t.Fatal(o.Err)
	}
	if n := noWrongByte(t, p, d); n != len(p.mem) {
		t.Errorf("%d bytes of %d", n, len(p.mem))
	}
	if least := int64(len(p.mem)/slot) + 1; slots.taken.Load() <= least {
		t.Errorf("%d slots were taken: none was given back", slots.taken.Load())
	}
}

// TestSealedAndNotSent: when a record is sealed and the peer has taken none of its bytes, the frame
// counts as begun. Another frame's records would have the wrong numbers.
func TestSealedAndNotSent(t *testing.T) {
	here, _ := tcpPair(t)
	raw, err := here.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	b := &box{secret: make([]byte, 32)}
	if err := b.rekey(); err != nil {
		t.Fatal(err)
	}
	st := &outStream{conn: here, raw: raw, sealed: &seals{data: b}, outFrame: newOutFrame(), next: &outFrame{}}
	block := make([]byte, 8)
	for range 1000 { // full buffers take some bytes again when the kernel has put their packets together
		for n := 1 << 20; n > 0; {
			_ = here.SetWriteDeadline(time.Now().Add(50 * time.Millisecond))
			if _, err := here.Write(make([]byte, n)); err != nil {
				n /= 32
			}
		}
		st.vec = []iovec{{uintptr(unsafe.Pointer(&st.hdr[0])), headerSize}, {uintptr(unsafe.Pointer(&block[0])), 8}}
		w := frameWriter{s: &sender{t: &Transport{buffers: recordBuffers{create: newRecordBuffer}}, stop: stopBound}, st: st, idle: stall{bound: time.Hour, each: tenure}}
		if err := w.seal(headerSize + 8); err != nil {
			t.Fatal(err)
		}
		_, err := w.write(st.vec, headerSize+8, time.Now().Add(tenure))
		sent := w.sealed(0)
		if err == nil {
			continue
		}
		if !errors.Is(err, errSlow) {
			t.Fatalf("a peer that takes nothing: %v", err)
		}
		if sent == 0 {
			t.Error("a frame with a sealed record counts as not begun")
		}
		return
	}
	t.Fatal("a peer that reads nothing takes all")
}

// tcpPair is a connection within this process.
func tcpPair(t *testing.T) (here, there *net.TCPConn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	dialed, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	accepted, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { dialed.Close(); accepted.Close() })
	return dialed.(*net.TCPConn), accepted.(*net.TCPConn)
}
