package rdma_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/core/coretest"
	"github.com/kvconn/kvconn/rdma"
)

// patience bounds every wait: generous, because a bound that is hit is a failure.
const patience = 60 * time.Second

// needsMachine skips what takes links down: only the machine of make rdma-test
// has some to spare.
func needsMachine(t *testing.T) {
	t.Helper()
	needsDevice(t)
	if os.Getenv("RXE_VM") == "" {
		t.Skip("this takes links down; make rdma-test runs it in a machine that has some to spare")
	}
}

// paths are the machine's: device rxeN on the interface railN.
func paths() int {
	n, _ := strconv.Atoi(os.Getenv("RXE_RAILS"))
	return n
}

// setLink takes a path's interface up or down.
func setLink(t *testing.T, path int, up bool) {
	t.Helper()
	name := fmt.Sprintf("rail%d", path)
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	ifr, err := unix.NewIfreq(name)
	if err == nil {
		err = unix.IoctlIfreq(fd, unix.SIOCGIFFLAGS, ifr)
	}
	if err == nil {
		flags := ifr.Uint16() &^ unix.IFF_UP
		if up {
			flags |= unix.IFF_UP
		}
		ifr.SetUint16(flags)
		err = unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, ifr)
	}
	if err != nil {
		t.Fatalf("interface %s: %v", name, err)
	}
}

// cutLink takes a path down, until the test ends at the latest.
func cutLink(t *testing.T, path int) {
	t.Helper()
	setLink(t, path, false)
	t.Cleanup(func() { setLink(t, path, true) })
}

// packets says how many a path has sent so far.
func packets(t *testing.T, path int) uint64 {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/sys/class/infiniband/rxe%d/ports/1/hw_counters/sent_pkts", path))
	if err != nil {
		t.Fatal(err)
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// board carries signals within the test. Who is dead neither answers nor is heard.
type board struct {
	mu     sync.Mutex
	agents map[core.AgentID]*rdma.Transport
	dead   map[core.AgentID]bool
}

func newBoard() *board {
	return &board{agents: map[core.AgentID]*rdma.Transport{}, dead: map[core.AgentID]bool{}}
}

func (b *board) signal(from core.AgentID) core.Signal {
	return func(ctx context.Context, to core.AgentID, msg []byte) ([]byte, error) {
		b.mu.Lock()
		tr := b.agents[to]
		deaf := b.dead[from] || b.dead[to]
		b.mu.Unlock()
		switch {
		case tr == nil || deaf:
			return nil, fmt.Errorf("%w: %s", core.ErrAbsent, to)
		case ctx.Err() != nil:
			return nil, ctx.Err()
		}
		return tr.Signalled(from, bytes.Clone(msg))
	}
}

const (
	blockBytes = 64 << 10
	poolBlocks = 1024
)

// agent is a transport with a pool of blocks.
type agent struct {
	t      *testing.T
	id     core.AgentID
	board  *board
	mem    []byte
	layout *core.Layout
	sink   *coretest.Recorder
	tr     *rdma.Transport
	closed bool
}

// text is where every block's content is taken from, at an offset that names it.
var text = sync.OnceValue(func() []byte {
	b := make([]byte, blockBytes+8*poolBlocks*8)
	r := rand.New(rand.NewPCG(1, 2))
	for i := 0; i < len(b); i += 8 {
		binary.NativeEndian.PutUint64(b[i:], r.Uint64())
	}
	return b
})

// content of a transfer's block at a position; transfer 0 is nobody's.
func content(transfer, position int) []byte {
	if transfer > 0 {
		transfer = 1 + (transfer-1)%7
	}
	at := (transfer*poolBlocks + position) * 8
	return text()[at : at+blockBytes]
}

func newMemory(t *testing.T) []byte {
	t.Helper()
	mem, err := unix.Mmap(-1, 0, poolBlocks*blockBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(mem) })
	return mem
}

// openOn opens an agent on memory, which it paints as nobody's.
func (b *board) openOn(t *testing.T, id core.AgentID, mem []byte, cfg rdma.Config) *agent {
	t.Helper()
	a := &agent{t: t, id: id, board: b, mem: mem, sink: coretest.NewRecorder(t, string(id))}
	var err error
	a.layout, err = core.NewLayout([]core.Region{{Name: "layer.0", Base: uint64(uintptr(unsafe.Pointer(&mem[0]))),
		BlockStride: blockBytes, BlockBytes: blockBytes, NumBlocks: poolBlocks}})
	if err != nil {
		t.Fatal(err)
	}
	a.paint(0, every())
	if os.Getenv("KVCONN_TEST_LOG") != "" {
		cfg.Logger, _ = zap.NewDevelopment()
		cfg.Logger = cfg.Logger.Named(string(id))
	}
	if a.tr, err = rdma.New(cfg, id, a.layout, a.sink, b.signal(id)); err != nil {
		t.Fatal(err)
	}
	b.mu.Lock()
	b.agents[id] = a.tr
	delete(b.dead, id)
	b.mu.Unlock()
	t.Cleanup(a.close)
	return a
}

func (a *agent) close() {
	if a.closed {
		return
	}
	a.closed = true
	if err := a.tr.Close(); err != nil {
		a.t.Errorf("%s: close: %v", a.id, err)
	}
	a.sink.Shut()
	a.board.mu.Lock()
	if a.board.agents[a.id] == a.tr {
		delete(a.board.agents, a.id)
	}
	a.board.mu.Unlock()
}

// die is an end without a word to anybody.
func (a *agent) die() {
	a.board.mu.Lock()
	a.board.dead[a.id] = true
	a.board.mu.Unlock()
	a.close()
}

// pair opens P and D, with D connected and usable.
func pair(t *testing.T, cfg rdma.Config) (p, d *agent) {
	t.Helper()
	b := newBoard()
	p, d = b.openOn(t, "prefill", newMemory(t), cfg), b.openOn(t, "decode", newMemory(t), cfg)
	d.connect(p)
	return p, d
}

func (a *agent) connect(p *agent) {
	a.t.Helper()
	ticket, err := p.tr.Admit(a.id)
	if err == nil {
		err = a.tr.Connect(p.id, p.tr.Endpoint(), ticket)
	}
	if err == nil {
		err = a.usable(p)
	}
	if err != nil {
		a.t.Fatal(err)
	}
}

// usable asks once, and waits while the answer is not known.
func (a *agent) usable(p *agent) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return a.tr.Usable(ctx, p.id)
}

// again waits until the way from p is usable again, as the agents do: by asking.
func (a *agent) again(p *agent) time.Duration {
	a.t.Helper()
	start := time.Now()
	for {
		err := a.usable(p)
		if err == nil {
			return time.Since(start)
		}
		if time.Since(start) > patience {
			a.t.Fatalf("%s is not usable again after %v: %v", p.id, patience, err)
		}
		pause(20 * time.Millisecond)
	}
}

// pause lies between two looks at something that nobody tells of.
func pause(d time.Duration) { <-time.After(d) }

func every() []core.BlockID {
	out := make([]core.BlockID, poolBlocks)
	for i := range out {
		out[i] = core.BlockID(i)
	}
	return out
}

func scattered(seed uint64, n int) []core.BlockID {
	out := every()
	rand.New(rand.NewPCG(seed, 3)).Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
	return out[:n]
}

func (a *agent) block(id core.BlockID) []byte {
	return a.mem[int(id)*blockBytes:][:blockBytes]
}

func (a *agent) paint(transfer int, ids []core.BlockID) {
	for i, id := range ids {
		copy(a.block(id), content(transfer, i))
	}
}

// moving is a transfer that was begun.
type moving struct {
	p, d     *agent
	id       core.TransferID
	n        int // names its content
	src, dst []core.BlockID
	began    time.Time
}

// begin has p write to d: so many blocks, scattered on both sides.
func begin(p, d *agent, n, blocks int) *moving {
	p.t.Helper()
	m, grant := prepare(p, d, n, blocks)
	m.write(grant)
	return m
}

// grow is begin with the first of the blocks; extend gives others.
func grow(p, d *agent, n, blocks, first int) (m *moving, extend func(from, to int)) {
	p.t.Helper()
	m, grant := prepare(p, d, n, blocks)
	op := core.WriteOp{ID: m.id, Peer: d.id, Grant: grant, Bytes: uint64(blocks) * blockBytes}
	of := func(from, to int) core.WriteOp {
		op.Pairs = m.pairs(from, to)
		op.At = []core.Extent{{Position: uint64(from) * blockBytes, Pairs: len(op.Pairs)}}
		return op
	}
	p.tr.Write(of(0, first))
	return m, func(from, to int) { p.tr.Extend(of(from, to)) }
}

func prepare(p, d *agent, n, blocks int) (m *moving, grant []byte) {
	p.t.Helper()
	m = &moving{p: p, d: d, id: core.TransferID(fmt.Sprint("transfer-", n)), n: n, src: scattered(uint64(n), blocks), dst: scattered(uint64(n)+1000, blocks)}
	p.paint(n, m.src)
	d.paint(0, every())
	grant, err := d.tr.Expect(m.id, p.id, d.layout.Segments([][]core.BlockID{m.dst}))
	if err != nil {
		p.t.Fatal(err)
	}
	m.began = time.Now()
	return m, grant
}

func (m *moving) write(grant []byte) {
	m.p.t.Helper()
	m.p.tr.Write(core.WriteOp{ID: m.id, Peer: m.d.id, Grant: grant, Pairs: m.pairs(0, len(m.src))})
}

func (m *moving) pairs(from, to int) []core.Pair {
	m.p.t.Helper()
	pairs, err := m.p.layout.Plan([][]core.BlockID{m.src[from:to]}, m.d.layout.Shapes(), [][]core.BlockID{m.dst[from:to]})
	if err != nil {
		m.p.t.Fatal(err)
	}
	return pairs
}

// arrivals counts the blocks of which bytes have landed.
func (m *moving) arrivals() (n int) {
	for _, id := range m.dst {
		word := (*uint64)(unsafe.Pointer(&m.d.block(id)[0]))
		if atomic.LoadUint64(word) != binary.NativeEndian.Uint64(content(0, int(id))) {
			n++
		}
	}
	return n
}

// part waits until about so many parts of a hundred have landed; false when the
// transfer has ended already.
func (m *moving) part(percent int) bool {
	m.p.t.Helper()
	for deadline := time.Now().Add(patience); m.arrivals()*100 < percent*len(m.dst); pause(time.Millisecond) {
		if time.Now().After(deadline) {
			m.p.t.Fatalf("%d of %d blocks have begun to land after %v", m.arrivals(), len(m.dst), patience)
		}
	}
	return !m.over()
}

func (m *moving) over() bool {
	return len(m.d.sink.All("received", m.id)) > 0 || len(m.p.sink.All("written", m.id)) > 0
}

// endedWell says whether a side has been told so.
func (m *moving) endedWell() bool {
	for _, o := range append(m.d.sink.All("received", m.id), m.p.sink.All("written", m.id)...) {
		if o.Err == nil {
			return true
		}
	}
	return false
}

// ends waits for both outcomes and checks every byte of d's pool: a transfer that
// ended well is there, and nothing else was touched.
func (m *moving) ends() (took time.Duration, received, written error) {
	m.p.t.Helper()
	written = m.p.sink.Wait("written", m.id, 1).Err
	received = m.d.sink.Wait("received", m.id, 1).Err
	took = time.Since(m.began)
	if received == nil {
		m.check()
	}
	return took, received, written
}

func (m *moving) check() {
	m.p.t.Helper()
	m.d.check(m.n, m.dst)
	position := map[core.BlockID]int{}
	for i, id := range m.src {
		position[id] = i
	}
	for _, id := range m.src {
		if !bytes.Equal(m.p.block(id), content(m.n, position[id])) {
			m.p.t.Fatalf("%s: block %d of the source has changed", m.id, id)
		}
	}
}

// check compares the whole pool: a transfer's blocks, and nobody's.
func (a *agent) check(transfer int, dst []core.BlockID) {
	a.t.Helper()
	position := map[core.BlockID]int{}
	for i, id := range dst {
		position[id] = i
	}
	for _, id := range every() {
		i, carried := position[id]
		want := content(0, int(id))
		if carried {
			want = content(transfer, i)
		}
		if got := a.block(id); !bytes.Equal(got, want) {
			at := 0
			for got[at] == want[at] {
				at++
			}
			a.t.Fatalf("%s: byte %d of block %d is wrong (carried: %v)", a.id, at, id, carried)
		}
	}
}

// well requires that a transfer ended well on both sides.
func (m *moving) well() time.Duration {
	m.p.t.Helper()
	took, received, written := m.ends()
	if received != nil || written != nil {
		m.p.t.Fatalf("%s: received: %v; written: %v", m.id, received, written)
	}
	return took
}

// failed requires that it did not, with a lost connection as the cause.
func (m *moving) failed() time.Duration {
	m.p.t.Helper()
	written := m.p.sink.Wait("written", m.id, 1).Err
	received := m.d.sink.Wait("received", m.id, 1).Err
	for side, err := range map[string]error{"received": received, "written": written} {
		if !errors.Is(err, core.ErrConnectionLost) {
			m.p.t.Errorf("%s: %s: %v, want a lost connection", m.id, side, err)
		}
	}
	return time.Since(m.began)
}
