package rdma

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"
	"unsafe"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/core/coretest"
	"github.com/kvconn/kvconn/internal/leaktest"
	"github.com/kvconn/kvconn/rdma/internal/verbs"
)

// patience bounds every wait of these tests.
const patience = 30 * time.Second

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
	// config changes that of who is opened on it, unless it is nil.
	config func(*Config)

	mu   sync.Mutex
	open map[core.AgentID]*Transport
	sent map[signalKind]int
	late map[core.AgentID][]func() // by sender: what arrives after its next signal
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
	layout := &core.Layout{Regions: []core.Region{{Name: "kv", Base: uint64(uintptr(unsafe.Pointer(&mem[0]))), BlockStride: blockBytes, BlockBytes: blockBytes, NumBlocks: uint32(blocks)}}}
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
	grant, err := s.tr.Expect(id, p.id, []core.Segment{{Offset: uint64(from) * blockBytes, Length: uint64(n) * blockBytes}})
	if err != nil {
		s.t.Fatal(err)
	}
	return grant
}

// write sends blocks, each as a pair that merges with no other.
func (s *agent) write(id core.TransferID, d *agent, grant []byte, src, dst, n int) {
	op := core.WriteOp{ID: id, Peer: d.id, Grant: grant}
	for i := range n {
		op.Pairs = append(op.Pairs, core.Pair{SrcOffset: uint64(src+i) * blockBytes, DstOffset: uint64(dst+i) * blockBytes, Length: blockBytes})
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

// TestSignalFaults: whatever becomes of one signal, each transfer ends, no byte
// lands after its end, and the two agents find back to each other.
func TestSignalFaults(t *testing.T) {
	needsRDMA(t)
	names := map[signalKind]string{signalGreet: "greet", signalPorts: "ports", signalConnect: "connect", signalConnected: "connected", signalLost: "lost",
		signalDrain: "drain", signalDrained: "drained", signalBye: "bye", signalDismissed: "dismissed"}
	for kind := signalGreet; kind <= signalDismissed; kind++ {
		for f := lost; f <= behind; f++ {
			// Order matters most to what the two ends count.
			counts := kind == signalConnect || kind == signalLost || kind == signalDrain
			if testing.Short() && f != lost && (f != behind || !counts) {
				continue
			}
			// The second of a kind meets agents that have lanes and transfers already; of
			// three kinds it shows nothing new.
			for nth := 1; nth <= 2; nth++ {
				if nth == 2 && (testing.Short() || kind == signalGreet || kind == signalBye || kind == signalDismissed) {
					continue
				}
				t.Run(fmt.Sprintf("%s %d %v", names[kind], nth, f), func(t *testing.T) { signalFault(t, kind, nth, f) })
			}
		}
	}
}

// signalFault does a fault to the nth signal of a kind of a workload.
func signalFault(t *testing.T, kind signalKind, nth int, f fault) {
	leaktest.Check(t)
	c := newControl()
	var mu sync.Mutex
	seen := 0
	c.decide = func(from core.AgentID, s *signal) fault {
		mu.Lock()
		defer mu.Unlock()
		if s.Kind == kind {
			if seen++; seen == nth {
				return f
			}
		}
		return passes
	}
	const each, many = 12, 6
	w := &workload{t: t, p: start(t, c, "p", each*many, nil), d: start(t, c, "d", each*many, nil), each: each}
	connect(t, w.d, w.p)
	w.round(many, func() { w.d.breakPort() })
	w.round(many, func() { w.p.breakPort() })
	w.d.tr.Dismiss(w.p.id)
	connect(t, w.d, w.p)
	w.round(many, nil)
	w.p.tr.Dismiss(w.d.id)
	connect(t, w.d, w.p)
	w.round(many, nil)
	// However the fault came out, it does not last.
	for try := 0; !w.one(try); try++ {
		if try == 20 {
			t.Errorf("no transfer has ended well after the fault")
			break
		}
	}
	usable(t, w.d, w.p)
	w.p.close(c)
	for i := range many {
		w.d.untouched(fmt.Sprint("blocks of place ", i, " at the end"), i*each, each)
	}
	mu.Lock()
	defer mu.Unlock()
	if seen < nth {
		t.Logf("only %d signals of this kind", seen)
	}
}

type workload struct {
	t    *testing.T
	p, d *agent
	each int // blocks of a transfer
	next int
}

// round has n transfers under way, every third of which is revoked; amid does
// something when bytes have begun to land.
func (w *workload) round(n int, amid func()) {
	t := w.t
	t.Helper()
	ids := make([]core.TransferID, n)
	first := w.next
	for i := range n {
		w.next++
		ids[i] = core.TransferID(fmt.Sprint("t", w.next))
		w.p.paint(w.next, i*w.each, w.each)
		grant := w.d.expect(ids[i], w.p, i*w.each, w.each)
		w.p.write(ids[i], w.d, grant, i*w.each, i*w.each, w.each)
	}
	if amid != nil {
		w.begun(ids)
		amid()
	}
	var wait sync.WaitGroup
	for i := 2; i < n; i += 3 {
		wait.Go(func() {
			w.d.tr.Revoke(ids[i])
			if len(w.d.rec.All("received", ids[i])) == 1 {
				return // checked below
			}
			w.d.fill(i*w.each, w.each)
		})
	}
	wait.Wait()
	for i, id := range ids {
		revoked := i%3 == 2
		if o := w.p.rec.Wait("written", id, 1); !revoked && o.Err != nil {
			w.d.tr.Revoke(id) // as the agents do
		}
		if (revoked || w.p.rec.All("written", id)[0].Err != nil) && len(w.d.rec.All("received", id)) == 0 {
			w.d.fill(i*w.each, w.each)
			continue
		}
		if o := w.d.rec.Wait("received", id, 1); o.Err == nil {
			w.d.has(first+i+1, i*w.each, w.each)
		}
		w.d.fill(i*w.each, w.each)
	}
	for i, id := range ids {
		w.d.untouched(fmt.Sprintf("transfer %q after its end", id), i*w.each, w.each)
		if n := len(w.d.rec.All("received", id)); n > 1 {
			t.Errorf("received of %q was told %d times", id, n)
		}
		if n := len(w.p.rec.All("written", id)); n != 1 {
			t.Errorf("written of %q was told %d times", id, n)
		}
	}
}

// begun waits until a byte of one of the transfers has landed, or one has failed.
func (w *workload) begun(ids []core.TransferID) {
	for end := time.Now().Add(patience); time.Now().Before(end); runtime.Gosched() {
		for i, id := range ids {
			if w.d.mem[i*w.each*blockBytes] != guard || w.d.mem[i*w.each*blockBytes+7] != guard || len(w.p.rec.All("written", id)) > 0 {
				return
			}
		}
	}
	w.t.Fatalf("no byte has landed within %v", patience)
}

// one moves a transfer, and says whether it ended well.
func (w *workload) one(try int) bool {
	w.t.Helper()
	usable(w.t, w.d, w.p)
	id := core.TransferID(fmt.Sprint("again", try))
	w.next++
	w.p.paint(w.next, 0, w.each)
	w.p.write(id, w.d, w.d.expect(id, w.p, 0, w.each), 0, 0, w.each)
	if o := w.p.rec.Wait("written", id, 1); o.Err != nil {
		w.t.Logf("%q: %v", id, o.Err)
		w.d.tr.Revoke(id)
		w.d.fill(0, w.each)
		return false
	}
	if o := w.d.rec.Wait("received", id, 1); o.Err != nil {
		w.t.Logf("%q: %v", id, o.Err)
		w.d.fill(0, w.each)
		return false
	}
	w.d.has(w.next, 0, w.each)
	w.d.fill(0, w.each)
	return true
}
