package tcp

import (
	"errors"
	"fmt"
	"io"
	"net"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/freeport"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/coretest"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/rig/lowmem"
	"github.com/kvconn/kvconn/rig/nettest"
)

const bound = 30 * time.Second

// agent is a transport over one region of memory that Go does not manage.
type agent struct {
	*Transport
	sink *coretest.Recorder
	mem  []byte
}

const (
	testBlocks = 64
	testBlock  = 1 << 20
)

func newAgent(t *testing.T, cfg Config) *agent {
	t.Helper()
	return newSizedAgent(t, cfg, testBlocks, testBlock)
}

func newSizedAgent(t testing.TB, cfg Config, blocks uint32, block uint64) *agent {
	t.Helper()
	mem := lowmem.Map(t, int(uint64(blocks)*block)) // some tests unmap a part of it
	layout, err := kv.NewLayout([]kv.Region{{Name: "r", Base: uint64(uintptr(unsafe.Pointer(&mem[0]))),
		BlockStride: block, BlockBytes: block, NumBlocks: blocks}})
	if err != nil {
		t.Fatal(err)
	}
	cfg.Listen, cfg.ListenHost, cfg.AdvertiseHost = true, "127.0.0.1", "127.0.0.1"
	a := &agent{sink: coretest.NewRecorder(t, "agent"), mem: mem}
	if a.Transport, err = New(cfg, layout, a.sink); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = a.Close() })
	return a
}

func allBlocks(n int) [][]kv.BlockID {
	ids := make([]kv.BlockID, n)
	for i := range ids {
		ids[i] = kv.BlockID(i)
	}
	return [][]kv.BlockID{ids}
}

func (a *agent) pairs(t *testing.T, blocks [][]kv.BlockID) []kv.Pair {
	t.Helper()
	p, err := a.layout.Plan(blocks, a.layout.Shapes(), blocks)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func (a *agent) admit(t testing.TB, peer core.AgentID) []byte {
	t.Helper()
	ticket, err := a.Admit(peer)
	if err != nil {
		t.Fatal(err)
	}
	return ticket
}

func until(t testing.TB, what string, f func() bool) {
	t.Helper()
	deadline := time.Now().Add(bound)
	for !f() {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", bound, what)
		}
		time.Sleep(time.Millisecond)
	}
}

// TestTransferWithoutAByteSurvivesACut: P still works on the request when the
// connections break; D dials again and the transfer goes on.
func TestTransferWithoutAByteSurvivesACut(t *testing.T) {
	leaktest.Check(t)
	p, d := newAgent(t, Config{}), newAgent(t, Config{})
	f := nettest.Forward(t, p.Endpoint())
	if err := d.Connect("p", f.Addr(), p.admit(t, "d")); err != nil {
		t.Fatal(err)
	}
	blocks := allBlocks(4)
	grant, err := d.Expect("t", "p", d.layout.Segments(blocks))
	if err != nil {
		t.Fatal(err)
	}
	until(t, "both streams are open", func() bool { return f.Open() == 2 })
	began := time.Now()
	until(t, "the streams have lived long enough", func() bool { return time.Since(began) > redialAfter+100*time.Millisecond })
	f.Cut()
	until(t, "both streams are open again", func() bool { return f.Open() == 2 })
	for i := range p.mem[:4*testBlock] {
		p.mem[i] = byte(i*7 + i>>12)
	}
	p.Write(core.WriteOp{ID: "t", Peer: "d", Grant: grant, Pairs: p.pairs(t, blocks)})
	until(t, "the transfer has ended on both sides", func() bool {
		return len(d.sink.All("received", "t")) == 1 && len(p.sink.All("written", "t")) == 1
	})
	if err := d.sink.All("received", "t")[0].Err; err != nil {
		t.Fatal(err)
	}
	if string(d.mem[:4*testBlock]) != string(p.mem[:4*testBlock]) {
		t.Fatal("wrong bytes")
	}
}

// TestEarlyAcknowledgement: a receiver that says "done" while bytes are still on
// their way must not free blocks that a stream reads.
func TestEarlyAcknowledgement(t *testing.T) {
	leaktest.Check(t)
	p := newAgent(t, Config{FrameBytes: testBlocks * testBlock})
	c := dial(t, p)
	grant := newRandom()
	c.say(p.hello(t, "d", 0, 1, 0))
	p.Write(core.WriteOp{ID: "t", Peer: "d", Grant: grant[:], Pairs: p.pairs(t, allBlocks(testBlocks))})
	c.next()
	c.say(frameBytes(header{kind: frameAck, key: grant, length: testBlocks * testBlock}))
	until(t, "the acknowledgement has arrived", func() bool {
		p.sender.mu.Lock()
		defer p.sender.mu.Unlock()
		out := p.sender.byID["t"]
		return out == nil || out.acked
	})
	if told := p.sink.All("written", "t"); len(told) != 0 {
		t.Fatalf("told %+v while its frame is being sent", told)
	}
	if _, err := io.CopyN(io.Discard, c, testBlocks*testBlock); err != nil {
		t.Fatal(err)
	}
	until(t, "the write is told", func() bool { return len(p.sink.All("written", "t")) == 1 })
}

// TestRevokeWaitsForTheCopy has a readv that takes as long as the test needs: a pipe's
// descriptor waits, a stream's does not.
func TestRevokeWaitsForTheCopy(t *testing.T) {
	leaktest.Check(t)
	d := newAgent(t, Config{})
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pipe[0])
	defer unix.Close(pipe[1])
	in := &inbound{id: "t", destination: listed(runsOf(d.layout, d.layout.Segments(allBlocks(1))))}
	s := &inStream{r: &d.receiver, vec: make([]iovec, 0, maxVector)}
	cur := cursor{runs: in.runs}
	copied, revoked := make(chan struct{}), make(chan struct{})
	defer func() { _, _ = unix.Write(pipe[1], []byte{1}) }() // whatever fails below
	go func() {
		defer close(copied)
		s.read(uintptr(pipe[0]), in, &cur, testBlock)
	}()
	until(t, "the copy holds the fence", func() bool {
		free := in.fence.TryLock()
		if free {
			in.fence.Unlock()
		}
		return !free
	})
	go func() {
		defer close(revoked)
		in.revoke()
	}()
	until(t, "the revoke waits", func() bool {
		free := in.fence.TryRLock()
		if free {
			in.fence.RUnlock()
		}
		return !free
	})
	select {
	case <-revoked:
		t.Fatal("revoke has returned while a copy was under way")
	default:
	}
	if _, err := unix.Write(pipe[1], []byte{1}); err != nil {
		t.Fatal(err)
	}
	<-copied
	<-revoked
	if _, err := unix.Write(pipe[1], []byte{2}); err != nil {
		t.Fatal(err)
	}
	if n, errno := s.read(uintptr(pipe[0]), in, &cur, testBlock); n != 1 || errno != 0 {
		t.Fatalf("%d bytes, %v", n, errno)
	}
	if d.mem[0] != 1 || d.mem[1] != 0 {
		t.Fatalf("memory begins with %v, want what came before the revoke", d.mem[:2])
	}
}

// move checks that a transfer of one block ends well.
func move(t *testing.T, p, d *agent, id core.TransferID) {
	t.Helper()
	if err := d.Connect("p", p.Endpoint(), p.admit(t, "d")); err != nil {
		t.Fatal(err)
	}
	blocks := allBlocks(1)
	grant, err := d.Expect(id, "p", d.layout.Segments(blocks))
	if err != nil {
		t.Fatal(err)
	}
	p.Write(core.WriteOp{ID: id, Peer: "d", Grant: grant, Pairs: p.pairs(t, blocks)})
	for _, o := range []coretest.Outcome{d.sink.Wait("received", id, 1), p.sink.Wait("written", id, 1)} {
		if o.Err != nil {
			t.Fatalf("%s: %v", o.Kind, o.Err)
		}
	}
}

func TestDescribeNamesTheBound(t *testing.T) {
	a := newAgent(t, Config{StallTimeout: 3 * time.Second})
	err := a.describe(&net.OpError{Op: "read", Err: timeoutError{}})
	if !errors.Is(err, error(timeoutError{})) || err.Error()[:18] != "no progress for 3s" {
		t.Fatal(err)
	}
}

type timeoutError struct{}

func (timeoutError) Error() string   { return "i/o timeout" }
func (timeoutError) Timeout() bool   { return true }
func (timeoutError) Temporary() bool { return true }

// TestDismissedBetweenTwoDials: no stream is opened for a dismissed peer, and Close waits
// for none.
func TestDismissedBetweenTwoDials(t *testing.T) {
	leaktest.Check(t)
	ports, err := freeport.Take(1)
	if err != nil {
		t.Fatal(err)
	}
	addr := fmt.Sprint("127.0.0.1:", ports[0])
	d := newAgent(t, Config{Streams: 1})
	if err := d.Connect("p", addr, make([]byte, len(random{}))); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Expect("t", "p", d.layout.Segments(allBlocks(2))); err != nil {
		t.Fatal(err)
	}
	until(t, "one dial failed", func() bool {
		d.receiver.mu.Lock()
		defer d.receiver.mu.Unlock()
		return d.receiver.peers["p"].tries >= 1
	})
	d.Dismiss("p")
	l, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if o := d.sink.Wait("received", "t", 1); o.Err == nil {
		t.Error("a transfer with a dismissed peer ended well")
	}
	_ = l.(*net.TCPListener).SetDeadline(time.Now().Add(50 * time.Millisecond))
	if c, err := l.Accept(); err == nil {
		c.Close()
		t.Error("a dismissed peer is dialled")
	}
}
