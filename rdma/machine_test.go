package rdma_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rdma"
	"github.com/kvconn/kvconn/rig/coretest"
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

// paths are the machine's: device rxeN on the interface pathN.
func paths() int {
	n, _ := strconv.Atoi(os.Getenv("RXE_PATHS"))
	return n
}

// setLink takes a path's interface up or down.
func setLink(t *testing.T, path int, up bool) {
	t.Helper()
	name := fmt.Sprintf("path%d", path)
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

// signalBus carries signals within the test. A dead agent neither answers nor is heard.
type signalBus struct {
	mu     sync.Mutex
	agents map[core.AgentID]*rdma.Transport
	dead   map[core.AgentID]bool
}

func newSignalBus() *signalBus {
	return &signalBus{agents: map[core.AgentID]*rdma.Transport{}, dead: map[core.AgentID]bool{}}
}

func (b *signalBus) signal(from core.AgentID) core.Signal {
	return func(ctx context.Context, to core.AgentID, msg []byte) ([]byte, error) {
		b.mu.Lock()
		tr := b.agents[to]
		silent := b.dead[from] || b.dead[to]
		b.mu.Unlock()
		switch {
		case tr == nil || silent:
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
	t         *testing.T
	id        core.AgentID
	signalBus *signalBus
	mem       []byte
	layout    *kv.Layout
	sink      *coretest.Recorder
	tr        *rdma.Transport
	closed    bool
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

// content of a transfer's block at a position. Transfer 0 has no owner.
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
func (b *signalBus) openOn(t *testing.T, id core.AgentID, mem []byte, cfg rdma.Config) *agent {
	t.Helper()
	a := &agent{t: t, id: id, signalBus: b, mem: mem, sink: coretest.NewRecorder(t, string(id))}
	var err error
	a.layout, err = kv.NewLayout([]kv.Region{{Name: "layer.0", Base: uint64(uintptr(unsafe.Pointer(&mem[0]))),
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
	a.signalBus.mu.Lock()
	if a.signalBus.agents[a.id] == a.tr {
		delete(a.signalBus.agents, a.id)
	}
	a.signalBus.mu.Unlock()
}

// die is an end without a word to anybody.
func (a *agent) die() {
	a.signalBus.mu.Lock()
	a.signalBus.dead[a.id] = true
	a.signalBus.mu.Unlock()
	a.close()
}

// pair opens P and D, with D connected and usable.
func pair(t *testing.T, cfg rdma.Config) (p, d *agent) {
	t.Helper()
	b := newSignalBus()
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

func every() []kv.BlockID {
	out := make([]kv.BlockID, poolBlocks)
	for i := range out {
		out[i] = kv.BlockID(i)
	}
	return out
}

func scattered(seed uint64, n int) []kv.BlockID {
	out := every()
	rand.New(rand.NewPCG(seed, 3)).Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
	return out[:n]
}

func (a *agent) block(id kv.BlockID) []byte {
	return a.mem[int(id)*blockBytes:][:blockBytes]
}

func (a *agent) paint(transfer int, ids []kv.BlockID) {
	for i, id := range ids {
		copy(a.block(id), content(transfer, i))
	}
}
