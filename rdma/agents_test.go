package rdma

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"
	"unsafe"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rdma/internal/verbs"
	"github.com/kvconn/kvconn/rig/coretest"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// fault is what becomes of a signal on its way.
type fault int

const (
	passes     fault = iota
	lost             // it never arrives
	unanswered       // it arrives, its answer does not
	doubled          // it arrives twice, the first answer counts
	answered2        // it arrives twice, the second answer counts
	behind           // it arrives after its sender has given up and its next signal has arrived
)

func (f fault) String() string {
	return [...]string{"passes", "lost", "unanswered", "doubled", "doubled, second answer", "behind the next"}[f]
}

// control is the control plane between the transports of one test.
type control struct {
	// decide says what becomes of a signal; it may wait. Nil: all pass.
	decide func(from core.AgentID, s *signal) fault
	// config, unless it is nil, changes the configuration of each transport that is
	// opened on this control plane.
	config func(*Config)

	mu   sync.Mutex
	open map[core.AgentID]*Transport
	sent map[signalKind]int
	late map[core.AgentID][]func() // by sender: signals that arrive after its next one
}

func newControl() *control {
	return &control{open: map[core.AgentID]*Transport{}, sent: map[signalKind]int{}, late: map[core.AgentID][]func(){}}
}

func (c *control) count(k signalKind) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.sent[k]
}

// of is the core.Signal of one transport.
func (c *control) of(from core.AgentID) core.Signal {
	return func(ctx context.Context, to core.AgentID, msg []byte) ([]byte, error) {
		s, err := decodeSignal(msg)
		if err != nil {
			return nil, err
		}
		f := passes
		if c.decide != nil {
			f = c.decide(from, s)
		}
		msg = bytes.Clone(msg)
		c.mu.Lock()
		c.sent[s.Kind]++
		tr := c.open[to]
		if f == behind {
			c.late[from] = append(c.late[from], func() { _, _ = tr.Signalled(from, msg) })
		}
		c.mu.Unlock()
		if tr == nil {
			return nil, core.ErrAbsent
		}
		if f == lost || f == behind {
			<-ctx.Done()
			return nil, ctx.Err()
		}
		answer, err := tr.Signalled(from, msg)
		switch f {
		case doubled:
			_, _ = tr.Signalled(from, msg)
		case answered2:
			answer, err = tr.Signalled(from, msg)
		case unanswered:
			<-ctx.Done()
			return nil, ctx.Err()
		}
		c.mu.Lock()
		late := c.late[from]
		delete(c.late, from)
		c.mu.Unlock()
		for _, deliver := range late {
			deliver()
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return answer, err
	}
}

// agent of these tests: blocks of memory and a transport over them.
type agent struct {
	t    *testing.T
	id   core.AgentID
	tr   *Transport
	sink core.Sink
	rec  *coretest.Recorder
	mem  []byte
}

const (
	blockBytes = 64 << 10
	guard      = 0xA5
)

// start opens a transport over so many blocks. wrap, if not nil, stands before its sink.
func start(t *testing.T, c *control, id core.AgentID, blocks int, wrap func(core.Sink) core.Sink) *agent {
	t.Helper()
	mem, err := unix.Mmap(-1, 0, blocks*blockBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(mem) })
	s := &agent{t: t, id: id, mem: mem, rec: coretest.NewRecorder(t, string(id))}
	s.sink = s.rec
	if wrap != nil {
		s.sink = wrap(s.rec)
	}
	s.fill(0, blocks)
	layout := &kv.Layout{Regions: []kv.Region{{Name: "kv", Base: uint64(uintptr(unsafe.Pointer(&mem[0]))), BlockStride: blockBytes, BlockBytes: blockBytes, NumBlocks: uint32(blocks)}}}
	cfg := DefaultConfig()
	cfg.ConnectTimeout, cfg.StallTimeout, cfg.MaxTransfers = 3*time.Second, 6*time.Second, 64
	if c.config != nil {
		c.config(&cfg)
	}
	if os.Getenv("KVCONN_TEST_LOG") != "" {
		cfg.Logger, _ = zap.NewDevelopment()
		cfg.Logger = cfg.Logger.Named(string(id))
	}
	s.tr, err = New(cfg, id, layout, s.sink, c.of(id))
	if err != nil {
		t.Fatal(err)
	}
	c.mu.Lock()
	c.open[id] = s.tr
	c.mu.Unlock()
	t.Cleanup(func() { s.close(c) })
	return s
}

func (s *agent) close(c *control) {
	s.t.Helper()
	done := make(chan error, 1)
	go func() { done <- s.tr.Close() }()
	select {
	case err := <-done:
		if err != nil {
			s.t.Errorf("%s: Close: %v", s.id, err)
		}
	case <-time.After(patience):
		buf := make([]byte, 1<<20)
		s.t.Errorf("%s: Close has not returned within %v\n%s", s.id, patience, buf[:runtime.Stack(buf, true)])
	}
	s.rec.Shut()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.open[s.id] == s.tr {
		delete(c.open, s.id)
	}
}

func (s *agent) fill(from, n int) {
	b := s.mem[from*blockBytes : (from+n)*blockBytes]
	for i := range b {
		b[i] = guard
	}
}

// paint gives blocks content that is theirs and the transfer's.
func (s *agent) paint(transfer, from, n int) {
	for i := from * blockBytes; i < (from+n)*blockBytes; i += 8 {
		binary.LittleEndian.PutUint64(s.mem[i:], uint64(transfer)<<40|uint64(i-from*blockBytes)|1)
	}
}

// has checks that blocks hold what paint gave to as many elsewhere.
func (s *agent) has(transfer, from, n int) {
	s.t.Helper()
	for i := from * blockBytes; i < (from+n)*blockBytes; i += 8 {
		if got, want := binary.LittleEndian.Uint64(s.mem[i:]), uint64(transfer)<<40|uint64(i-from*blockBytes)|1; got != want {
			s.t.Errorf("%s: transfer %d, byte %d is %#x, want %#x", s.id, transfer, i-from*blockBytes, got, want)
			return
		}
	}
}

// untouched checks that nothing was written to blocks since they were filled.
func (s *agent) untouched(what string, from, n int) {
	s.t.Helper()
	for i, b := range s.mem[from*blockBytes : (from+n)*blockBytes] {
		if b != guard {
			s.t.Errorf("%s: a late write: %s, byte %d is %#x", s.id, what, i, b)
			return
		}
	}
}

// landed waits until the last byte of each of some blocks, or of any, has come.
//
//go:norace
func (s *agent) landed(from, n int, all bool) {
	s.t.Helper()
	for end := time.Now().Add(patience); ; runtime.Gosched() {
		here := 0
		for b := from; b < from+n; b++ {
			if s.mem[(b+1)*blockBytes-1] != guard || s.mem[(b+1)*blockBytes-8] != guard {
				here++
			}
		}
		if here == n || here > 0 && !all {
			return
		}
		if time.Now().After(end) {
			s.t.Fatalf("%s: %d of %d blocks have landed within %v", s.id, here, n, patience)
		}
	}
}

func connect(t *testing.T, d, p *agent) {
	t.Helper()
	ticket, err := p.tr.Admit(d.id)
	if err != nil {
		t.Fatal(err)
	}
	if err := d.tr.Connect(p.id, p.tr.Endpoint(), ticket); err != nil {
		t.Fatal(err)
	}
}

// usable waits until D's transport says that bytes can come from p.
func usable(t *testing.T, d, p *agent) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for {
		err := d.tr.Usable(ctx, p.id)
		if err == nil {
			return
		}
		if ctx.Err() != nil {
			t.Fatalf("%s: bytes from %s: %v", d.id, p.id, err)
		}
		runtime.Gosched()
	}
}

func (s *agent) expect(id core.TransferID, p *agent, from, n int) []byte {
	s.t.Helper()
	grant, err := s.tr.Expect(id, p.id, []kv.Segment{{Offset: uint64(from) * blockBytes, Length: uint64(n) * blockBytes}})
	if err != nil {
		s.t.Fatal(err)
	}
	return grant
}

// write sends blocks, each as a pair that merges with no other.
func (s *agent) write(id core.TransferID, d *agent, grant []byte, src, dst, n int) {
	op := core.WriteOp{ID: id, Peer: d.id, Grant: grant}
	for i := range n {
		op.Pairs = append(op.Pairs, kv.Pair{SrcOffset: uint64(src+i) * blockBytes, DstOffset: uint64(dst+i) * blockBytes, Length: blockBytes})
	}
	s.tr.Write(op)
}

// breakPort has all lanes of a side's first port break, as when its link goes down.
func (s *agent) breakPort() {
	cause := errors.New("broken by the test")
	s.tr.sender.portDown(s.tr.ports[0], cause)
	s.tr.receiver.portDown(s.tr.ports[0], cause)
}

func needsRDMA(t *testing.T) {
	t.Helper()
	lib, err := verbs.Load()
	if err != nil {
		t.Skipf("no RDMA here: %v; make rdma-test runs this in a machine that has it", err)
	}
	if list, err := lib.Devices(); err != nil || len(list) == 0 {
		t.Skip("no RDMA device here; make rdma-test runs this in a machine that has some")
	}
	leaktest.Check(t)
}
