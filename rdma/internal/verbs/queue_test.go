package verbs

import (
	"bytes"
	"errors"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvconn/kvconn/rig/leaktest"
)

func TestWriteGathered(t *testing.T) {
	leaktest.Check(t)
	w := newWire(t, Caps{SendDepth: 16, ReceiveDepth: 16, Pieces: 4})
	for i := range 4096 {
		w.mem[i] = byte(i * 7)
	}
	const to = 512 << 10
	n, err := w.a.Post([]Write{{ID: 41, RemoteAddr: address(w.mem) + to, RemoteKey: w.mr.RKey, First: 1, Pieces: 3, Flags: Signaled}},
		[]SGE{{}, w.sge(100, 1000), w.sge(3000, 5), w.sge(0, 64)})
	if n != 1 || err != nil {
		t.Fatal(n, err)
	}
	c := await(t, w.cqA, 1)[0]
	if c.ID != 41 || c.Status != Success || c.Opcode != OpWrite || c.QueuePair != w.a.Number() {
		t.Errorf("completion %+v", c)
	}
	want := bytes.Join([][]byte{w.mem[100:1100], w.mem[3000:3005], w.mem[0:64]}, nil)
	if got := w.mem[to : to+1069]; !bytes.Equal(got, want) {
		t.Error("other bytes have arrived")
	}
	if w.mem[to+1069] != 0 || w.mem[to-1] != 0 {
		t.Error("bytes beside the range have changed")
	}
}

// A chain behind one doorbell: only what asks for it completes, the immediate
// arrives last.
func TestWriteChainWithImmediate(t *testing.T) {
	leaktest.Check(t)
	w := newWire(t, Caps{SendDepth: 32, ReceiveDepth: 8, Pieces: 1})
	if n, err := w.b.PostReceives(900, 8); n != 8 || err != nil {
		t.Fatal(n, err)
	}
	copy(w.mem, "a chain of writes that has sixteen links, and an end with an immediate")
	const to = 1 << 19
	var writes []Write
	var pieces []SGE
	for i := range 16 {
		writes = append(writes, Write{ID: uint64(i), RemoteAddr: address(w.mem) + to + uint64(i)*4, RemoteKey: w.mr.RKey, First: uint32(i), Pieces: 1})
		pieces = append(pieces, w.sge(i*4, 4))
	}
	writes = append(writes, Write{ID: 16, RemoteAddr: address(w.mem), RemoteKey: w.mr.RKey, Imm: 0xdecade01, Flags: WithImm | Signaled})
	if n, err := w.a.Post(writes[:3], pieces); n != 3 || err != nil { // a shorter chain leaves no end in a longer one
		t.Fatal(n, err)
	}
	if n, err := w.a.Post(writes, pieces); n != 17 || err != nil {
		t.Fatal(n, err)
	}
	if c := await(t, w.cqB, 1)[0]; c.ID != 900 || c.Status != Success || c.Opcode != OpReceiveImm || c.Imm != 0xdecade01 || c.QueuePair != w.b.Number() {
		t.Errorf("received %+v", c)
	}
	if c := await(t, w.cqA, 1)[0]; c.ID != 16 || c.Status != Success {
		t.Errorf("sent %+v", c)
	}
	if !bytes.Equal(w.mem[to:to+64], w.mem[:64]) {
		t.Errorf("%q has arrived", w.mem[to:to+64])
	}
}

func TestWrongKeyThenFlush(t *testing.T) {
	leaktest.Check(t)
	w := newWire(t, Caps{SendDepth: 8, ReceiveDepth: 4, Pieces: 1})
	if _, err := w.b.PostReceives(7, 4); err != nil {
		t.Fatal(err)
	}
	bad := Write{ID: 1, RemoteAddr: address(w.mem), RemoteKey: w.mr.RKey ^ 0x5a00, Pieces: 1, Flags: Signaled}
	good := Write{ID: 2, RemoteAddr: address(w.mem), RemoteKey: w.mr.RKey, Pieces: 1} // not signalled: failed ones complete anyway
	if _, err := w.a.Post([]Write{bad, good}, []SGE{w.sge(64, 8)}); err != nil {
		t.Fatal(err)
	}
	c := await(t, w.cqA, 2)
	if c[0].ID != 1 || c[0].Status != RemoteAccess || c[1].ID != 2 || c[1].Status != Flushed {
		t.Errorf("completions %+v", c)
	}
	if s, err := w.a.State(); err != nil || s != Failed {
		t.Errorf("the queue pair is in %v, %v", s, err)
	}
	if err := w.b.ToError(); err != nil {
		t.Fatal(err)
	}
	for _, c := range await(t, w.cqB, 4) {
		if c.ID != 7 || c.Status != Flushed || c.QueuePair != w.b.Number() {
			t.Errorf("flushed %+v", c)
		}
	}
	// Reset forgets, and the same two work again.
	if err := errors.Join(w.a.Reset(), w.b.Reset()); err != nil {
		t.Fatal(err)
	}
	w.connect(t, w.a, w.b)
	good.Flags = Signaled
	if _, err := w.a.Post([]Write{good}, []SGE{w.sge(64, 8)}); err != nil {
		t.Fatal(err)
	}
	if c := await(t, w.cqA, 1)[0]; c.ID != 2 || c.Status != Success {
		t.Errorf("after the reset: %+v", c)
	}
}

// Without RemoteWrite on the path the peer's keys are worth nothing.
func TestPeerMayNotWrite(t *testing.T) {
	leaktest.Check(t)
	w := newWire(t, Caps{SendDepth: 8, ReceiveDepth: 4, Pieces: 1})
	if err := errors.Join(w.a.Reset(), w.b.Reset()); err != nil {
		t.Fatal(err)
	}
	p, back := w.routeA, w.routeA
	back.RemoteQP, back.RemotePSN, back.LocalPSN, back.RemoteWrite = w.a.Number(), p.LocalPSN, p.RemotePSN, false
	if err := errors.Join(w.a.Init(&p), w.a.ReadyToReceive(&p), w.a.ReadyToSend(&p), w.b.Init(&back), w.b.ReadyToReceive(&back), w.b.ReadyToSend(&back)); err != nil {
		t.Fatal(err)
	}
	w.mem[0] = 1
	if _, err := w.a.Post([]Write{{ID: 1, RemoteAddr: address(w.mem) + 100, RemoteKey: w.mr.RKey, Pieces: 1}}, []SGE{w.sge(0, 8)}); err != nil {
		t.Fatal(err)
	}
	if c := await(t, w.cqA, 1)[0]; c.Status == Success || w.mem[100] != 0 {
		t.Errorf("completion %+v, the byte is %d", c, w.mem[100])
	}
}

// A full queue refuses the rest, and says how many it took.
func TestPostTooMany(t *testing.T) {
	leaktest.Check(t)
	w := newWire(t, Caps{SendDepth: 4, ReceiveDepth: 4, Pieces: 2})
	write := Write{RemoteAddr: address(w.mem), RemoteKey: w.mr.RKey}
	five := []Write{write, write, write, write, write}
	if n, err := w.a.Post(five, nil); n != 0 || !errors.Is(err, syscall.EINVAL) || !strings.Contains(err.Error(), "post 5 writes on a queue pair of 4") {
		t.Errorf("more than the depth: %d, %v", n, err)
	}
	if n, err := w.a.Post(nil, nil); n != 0 || err != nil {
		t.Errorf("nothing: %d, %v", n, err)
	}
	for name, x := range map[string]Write{
		"pieces beyond the list":  {First: 1, Pieces: 1},
		"first beyond the list":   {First: 1 << 31, Pieces: 0},
		"first + pieces overflow": {First: 1<<32 - 1, Pieces: 2},
		"too many pieces":         {Pieces: 60000},
	} {
		if n, err := w.a.Post([]Write{write, x}, []SGE{w.sge(0, 1)}); n != 0 || !errors.Is(err, syscall.EINVAL) {
			t.Errorf("%s: %d, %v", name, n, err)
		}
	}
	// Unanswered writes stay in the queue: the peer is gone.
	if err := w.b.Reset(); err != nil {
		t.Fatal(err)
	}
	posted := 0
	for range 1000 {
		n, err := w.a.Post([]Write{write, write, write}, nil)
		posted += n
		if err != nil {
			if !errors.Is(err, syscall.ENOMEM) || !strings.Contains(err.Error(), "the queue is full") {
				t.Errorf("a full queue: %v", err)
			}
			break
		}
	}
	if posted < 4 || posted > 999 {
		t.Errorf("%d writes are posted", posted)
	}
	for _, c := range await(t, w.cqA, posted) { // as many as Post said
		if c.Status != RetryExceeded && c.Status != Flushed {
			t.Errorf("completion %+v", c)
		}
	}
}

func TestPostAllocatesNothing(t *testing.T) {
	w := newWire(t, Caps{SendDepth: 64, ReceiveDepth: 64, Pieces: 2})
	writes := make([]Write, 16)
	pieces := []SGE{w.sge(0, 8), w.sge(64, 8)}
	for i := range writes {
		writes[i] = Write{RemoteAddr: address(w.mem) + 4096, RemoteKey: w.mr.RKey, Pieces: 2}
	}
	writes[15].Flags = Signaled
	buf := make([]Completion, 16)
	if n := testing.AllocsPerRun(50, func() {
		if _, err := w.a.Post(writes, pieces); err != nil {
			t.Fatal(err)
		}
		for n := 0; n == 0; {
			if err := w.cqA.Arm(); err != nil {
				t.Fatal(err)
			}
			var err error
			if n, err = w.cqA.Poll(buf); err != nil {
				t.Fatal(err)
			}
			if n == 0 {
				if err := w.cqA.Wait(time.Time{}); err != nil {
					t.Fatal(err)
				}
			}
		}
	}); n != 0 {
		t.Errorf("%v allocations for a post, a poll and a wait", n)
	}
}

func TestWaitEnds(t *testing.T) {
	leaktest.Check(t)
	d := openFirst(t)
	q, err := d.NewCQ(16, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := q.Wait(time.Now().Add(-time.Second)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("after the deadline: %v", err)
	}
	ended := make(chan error)
	go func() { ended <- q.Wait(time.Time{}) }()
	if err := q.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; !errors.Is(err, ErrClosed) {
		t.Errorf("closed while it waits: %v", err)
	}
	if _, err := q.Poll(make([]Completion, 1)); !errors.Is(err, ErrClosed) {
		t.Errorf("poll after close: %v", err)
	}
	if err := q.Arm(); !errors.Is(err, ErrClosed) {
		t.Errorf("arm after close: %v", err)
	}
	if err := q.Close(); err != nil {
		t.Error(err)
	}
}

func TestQueueOverrun(t *testing.T) {
	leaktest.Check(t)
	w := newWire(t, Caps{SendDepth: 1, Pieces: 1})
	small, err := w.dev.NewCQ(2, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer small.Close()
	writes := make([]Write, small.Depth()+2)
	for i := range writes {
		writes[i] = Write{RemoteAddr: address(w.mem), RemoteKey: w.mr.RKey, Flags: Signaled}
	}
	a, err := NewQP(w.pd, small, Caps{SendDepth: len(writes), Pieces: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Destroy()
	if err := w.b.Reset(); err != nil {
		t.Fatal(err)
	}
	w.connect(t, a, w.b)
	if _, err := a.Post(writes, nil); err != nil {
		t.Fatal(err)
	}
	for { // bounded by -timeout
		e, err := w.dev.NextEvent()
		if err != nil {
			t.Fatal(err)
		}
		if e.Type == EventQueueError {
			return
		}
	}
}

// An order that is wrong is refused, and a right one leaves nothing open.
func TestCloseInOrder(t *testing.T) {
	leaktest.Check(t)
	w := newWire(t, Caps{SendDepth: 4, ReceiveDepth: 4, Pieces: 1})
	if c := w.dev.Counts(); c != (Counts{PDs: 1, MRs: 1, CQs: 2, QPs: 2}) {
		t.Errorf("open: %+v", c)
	}
	if err := w.dev.Close(); !errors.Is(err, syscall.EBUSY) || !strings.Contains(err.Error(), "2 queue pairs, 2 completion queues, 1 memory regions, 1 protection domains") {
		t.Errorf("close the device first: %v", err)
	}
	if err := w.pd.Close(); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("close the domain first: %v", err)
	}
	if err := w.cqA.Close(); err == nil {
		t.Error("a completion queue in use was closed")
	}
	for _, f := range []func() error{w.a.Destroy, w.b.Destroy, w.a.Destroy, w.cqA.Close, w.cqB.Close, w.mr.Close, w.mr.Close, w.pd.Close, w.pd.Close} {
		if err := f(); err != nil {
			t.Error(err)
		}
	}
	if c := w.dev.Counts(); c != (Counts{}) {
		t.Errorf("left open: %+v", c)
	}
	if _, err := w.a.Post([]Write{{}}, nil); !errors.Is(err, ErrClosed) {
		t.Errorf("post after destroy: %v", err)
	}
	if _, err := w.a.State(); !errors.Is(err, ErrClosed) {
		t.Errorf("state after destroy: %v", err)
	}
	if _, err := w.pd.Register(uintptr(address(w.mem)), 4096, 0); !errors.Is(err, ErrClosed) {
		t.Errorf("register after close: %v", err)
	}
	if err := w.dev.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := w.dev.NewPD(); !errors.Is(err, ErrClosed) {
		t.Errorf("a domain of a closed device: %v", err)
	}
}
