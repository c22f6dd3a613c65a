package tcp

import (
	"fmt"
	"io"
	"net"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
)

// noRoom is a socket that never has room.
type noRoom struct {
	syscall.RawConn
	never int
}

func (r noRoom) Control(f func(fd uintptr)) error {
	f(uintptr(r.never))
	return nil
}

// answers is a stream of D's that is not read, and P's end of it.
func (a *agent) answers(t *testing.T) (s *inStream, there *net.TCPConn) {
	t.Helper()
	here, there := tcpPair(t)
	raw, err := here.SyscallConn()
	mustBe(t, err)
	a.receiver.mu.Lock()
	defer a.receiver.mu.Unlock()
	return &inStream{r: &a.receiver, conn: here, raw: raw, peer: a.receiver.peers["p"], vec: make([]iovec, 0, maxVector)}, there
}

// hasNoRoom has a stream take its socket for one without room.
func (s *inStream) hasNoRoom(t *testing.T) {
	t.Helper()
	var pipe [2]int
	mustBe(t, unix.Pipe2(pipe[:], unix.O_CLOEXEC))
	t.Cleanup(func() { closeAll(pipe[:]) })
	s.raw = noRoom{s.raw, pipe[0]} // nobody can write to this end
}

// copies has a stream copy a whole frame of small bytes.
func (s *inStream) copies(t *testing.T, m *gates, in *inbound) {
	t.Helper()
	slot, err := m.Slot(noWait, 0, ToDevice, "p")
	mustBe(t, err)
	in.copies.add()
	slot.Copy(nil)
	f := &arrival{in: in, length: small, got: small, slots: 1, over: true}
	s.landing.slots = append(s.landing.slots, landed{Slot: slot, in: in, frame: f})
}

func (a *agent) inbound(id core.TransferID) *inbound {
	a.receiver.mu.Lock()
	defer a.receiver.mu.Unlock()
	return a.receiver.byID[id]
}

func newBox(t *testing.T) *box {
	t.Helper()
	b := &box{secret: make([]byte, 32)}
	mustBe(t, b.rekey())
	return b
}

// TestAnswersHoldNoCopies: P reads no answers. D ends the copies that are under way before it waits for that, since a revoke waits for
// them.
func TestAnswersHoldNoCopies(t *testing.T) {
	m := newGates(4, small)
	d, _ := lands(t, m, 1)
	m.allow(0, all)
	s, _ := d.answers(t)
	s.hasNoRoom(t)
	in := &inbound{copies: copies{all: new(atomic.Int64)}}
	s.copies(t, m, in)
	s.landing.slots[0].frame.in, s.landing.slots[0].frame.over = nil, false
	mustBe(t, s.say(reply{header: header{kind: frameNack}}))
	if in.copies.n > 0 {
		t.Error("an answer is written while something is copied")
	}
}

// TestAnswersInTheirOrder: the copies that end before an answer have answers of their own. P can open all of them.
func TestAnswersInTheirOrder(t *testing.T) {
	m := newGates(4, small)
	d, _ := lands(t, m, 1)
	m.allow(0, all)
	grant := d.lands(t, "t", [2]int{0, 0})
	s, there := d.answers(t)
	s.hasNoRoom(t)
	s.sealed = &unsealer{seals: &seals{answers: newBox(t)}}
	s.copies(t, m, d.inbound("t"))
	mustBe(t, s.say(reply{header: header{kind: frameNack}}))
	box := newBox(t)
	for _, want := range []header{{kind: frameAck, key: grant, length: small}, {kind: frameNack}} {
		if h, err := box.readHeader(there); err != nil || h != want {
			t.Fatalf("P reads %+v, %v, want %+v", h, err, want)
		}
	}
}

// TestNothingBehindPartOfAnAnswer: when an answer was not written whole, D writes nothing behind it.
func TestNothingBehindPartOfAnAnswer(t *testing.T) {
	here, there := tcpPair(t)
	raw, err := here.SyscallConn()
	mustBe(t, err)
	late := &Transport{cfg: Config{StallTimeout: -time.Second}} // each write ends before it begins
	s := &inStream{r: &receiver{t: late}, conn: here, raw: raw}
	if err := s.say(reply{header: header{kind: frameNack}}); err == nil {
		t.Error("the answer was written")
	}
	late.cfg.StallTimeout = bound
	if err := s.say(reply{header: header{kind: frameNack}}); err == nil {
		t.Error("another answer was written")
	}
	mustBe(t, here.CloseWrite())
	if b, err := io.ReadAll(there); err != nil || len(b) > 0 {
		t.Errorf("P has %d bytes, %v", len(b), err)
	}
}

// TestAllIsToldBeforeAnAnswer: copies of two transfers have ended, and P reads no answer. Both are told.
func TestAllIsToldBeforeAnAnswer(t *testing.T) {
	m := newGates(4, small)
	d, _ := lands(t, m, 1)
	m.allow(0, all)
	s, _ := d.answers(t)
	for i := range 2 {
		id := core.TransferID(fmt.Sprint("t", i))
		d.lands(t, id, [2]int{0, i})
		s.copies(t, m, d.inbound(id))
	}
	for rounds := 0; rounds < 3; rounds++ { // full buffers take some bytes again when the kernel has put their packets together
		for n := 1 << 20; n > 0; {
			_ = s.conn.SetWriteDeadline(time.Now().Add(50 * time.Millisecond))
			if _, err := s.conn.Write(make([]byte, n)); err != nil {
				n /= 32
			} else {
				rounds = 0
			}
		}
	}
	ended := make(chan error, 1)
	go func() { ended <- s.landStarted(0) }()
	for i := range 2 {
		if o := d.sink.Wait("received", core.TransferID(fmt.Sprint("t", i)), 1); o.Err != nil {
			t.Error(o.Err)
		}
	}
	s.conn.Close()
	<-ended
}

// TestSealedFramesAreReadWhileCopiesPass: an encrypted stream goes on with the next frames too, while copies of one have not ended. Its
// answers are in their order.
func TestSealedFramesAreReadWhileCopiesPass(t *testing.T) {
	m := newGates(8, small)
	d, _ := lands(t, m, 1)
	s, there := d.answers(t)
	s.sealed = &unsealer{seals: &seals{data: newBox(t), answers: newBox(t)}}
	var grants []random
	var sealed []byte
	data, answers := newBox(t), newBox(t)
	for i := range window + 1 {
		grants = append(grants, d.lands(t, core.TransferID(fmt.Sprint("t", i)), [2]int{0, i % 4}))
		frame := smallFrame(grants[i], 0)
		b, err := data.sealFrame(frame[:headerSize], frame[headerSize:])
		mustBe(t, err)
		sealed = append(sealed, b...)
	}
	_, err := there.Write(sealed)
	mustBe(t, err)
	ended := make(chan error, 1)
	go func() {
		defer s.rest()
		var err error
		for err == nil {
			err = s.frame()
		}
		ended <- err
	}()
	m.isWaitedFor(t, 0, 1)
	if n := m.copies(0); n != window {
		t.Errorf("%d copies have begun, want %d", n, window)
	}
	for i, grant := range grants {
		m.allow(0, i+1)
		if h, err := answers.readHeader(there); err != nil || h.kind != frameAck || h.key != grant {
			t.Errorf("answered by %+v, %v", h, err)
		}
	}
	there.Close()
	<-ended
}
