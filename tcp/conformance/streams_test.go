package conformance

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/cuda"
	"github.com/kvconn/kvconn/devices"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/coretest"
	"github.com/kvconn/kvconn/rig/faultnet"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/tcp"
)

const (
	slowStreams = 64 // of one slow peer: more than there are slots
	ringSlots   = 16
	shareSlots  = ringSlots - ringSlots/4 // that copies out of a device may have
	shareSlot   = 64 << 10
	shareBlocks = 64
	shareBlock  = 4 * shareSlot
	slowWrites  = 256 // of all blocks each: more than the kernel holds for slowStreams, and than drips in minutes
	honest      = core.AgentID("honest")
	slow        = core.AgentID("slow")
	slowTimeout = 2 * time.Minute
)

// shares counts who has P's slots. While it is closed, the slow peer's are given back one by one, when the test says so.
type shares struct {
	*devices.Devices
	mu     sync.Mutex
	given  map[core.AgentID]int // slots, in all
	held   map[core.AgentID]int
	waits  map[core.AgentID]int // calls that wait
	passes []chan struct{}      // slots of the slow peer that it wants to give back
	closed bool
}

func (s *shares) Slot(ctx context.Context, device int, to tcp.Direction, peer core.AgentID) (tcp.Slot, error) {
	waits := ctx.Err() == nil
	s.count(func() {
		if waits {
			s.waits[peer]++
		}
	})
	slot, err := s.Devices.Slot(ctx, device, to, peer)
	s.count(func() {
		if waits {
			s.waits[peer]--
		}
		if err == nil {
			s.given[peer]++
			s.held[peer]++
		}
	})
	if err != nil {
		return nil, err
	}
	return shared{slot, s, peer}, nil
}

type shared struct {
	tcp.Slot
	of   *shares
	peer core.AgentID
}

func (s shared) Release() {
	var pass chan struct{}
	s.of.count(func() {
		if s.of.closed && s.peer == slow {
			pass = make(chan struct{})
			s.of.passes = append(s.of.passes, pass)
		}
	})
	if pass != nil {
		<-pass
	}
	s.of.count(func() { s.of.held[s.peer]-- })
	s.Slot.Release()
}

func (s *shares) count(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

// of reads counts.
func (s *shares) of(f func() int) (n int) {
	s.count(func() { n = f() })
	return n
}

// open lets all slots be given back from now on, or none.
func (s *shares) open(open bool) {
	s.count(func() {
		s.closed = !open
		for open && len(s.passes) > 0 {
			s.pass()
		}
	})
}

// pass lets one slot be given back; mu is held.
func (s *shares) pass() {
	close(s.passes[0])
	s.passes = slices.Delete(s.passes, 0, 1)
}

func until(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(slowTimeout); !f(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within %v: %s", slowTimeout, what)
		}
	}
}

// member is a transport over blocks of one region.
type member struct {
	*tcp.Transport
	sink   *coretest.Recorder
	layout *kv.Layout
}

func (m *member) pairs(t *testing.T, blocks [][]kv.BlockID) []kv.Pair {
	t.Helper()
	p, err := m.layout.Plan(blocks, m.layout.Shapes(), blocks)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func newMember(t *testing.T, base uint64, memory kv.Memory, cfg tcp.Config, mover func(l *kv.Layout) tcp.Mover) *member {
	t.Helper()
	l, err := kv.NewLayout([]kv.Region{{Name: "r", Base: base, Memory: memory, BlockStride: shareBlock, BlockBytes: shareBlock, NumBlocks: shareBlocks}})
	if err != nil {
		t.Fatal(err)
	}
	if mover != nil {
		cfg.Mover = mover(l)
	}
	cfg.Listen, cfg.ListenHost, cfg.AdvertiseHost, cfg.StallTimeout = true, "127.0.0.1", "127.0.0.1", stall
	m := &member{sink: coretest.NewRecorder(t, "agent"), layout: l}
	if m.Transport, err = tcp.New(cfg, l, m.sink); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = m.Close() })
	return m
}

// newDecode is a decode agent with host memory, and so many streams that P writes to from the first on.
func newDecode(t *testing.T, p *member, id core.AgentID, endpoint string, streams int) (*member, []byte) {
	t.Helper()
	mem, err := unix.Mmap(-1, 0, shareBlocks*shareBlock, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(mem) })
	d := newMember(t, uint64(uintptr(unsafe.Pointer(&mem[0]))), kv.HostMemory, tcp.Config{Streams: streams, First: streams}, nil)
	ticket, err := p.Admit(id)
	if err == nil {
		err = d.Connect("p", endpoint, ticket)
	}
	if err != nil {
		t.Fatal(err)
	}
	return d, mem
}

// writes begins a transfer of blocks from P.
func writes(t *testing.T, p, d *member, to core.AgentID, id core.TransferID, blocks [][]kv.BlockID) {
	t.Helper()
	grant, err := d.Expect(id, "p", d.layout.Segments(blocks))
	if err != nil {
		t.Fatal(err)
	}
	p.Write(core.WriteOp{ID: id, Peer: to, Grant: grant, Pairs: p.pairs(t, blocks)})
}

// TestOnePeerOfManyStreams: a peer of 64 streams that takes no bytes, or few, has no larger share of the ring's slots than any other peer that
// waits for one, but for those that it had before. One that takes none has none in the end.
func TestOnePeerOfManyStreams(t *testing.T) {
	for name, impairment := range map[string]faultnet.Impairment{
		"stopped":  {Hold: [2]bool{faultnet.Down: true}},
		"dripping": {Rate: 256 << 10}, // of each stream: a slot's bytes take longer than P waits for them
	} {
		t.Run(name, func(t *testing.T) { onePeerOfManyStreams(t, impairment) })
	}
}

func onePeerOfManyStreams(t *testing.T, impairment faultnet.Impairment) {
	leaktest.Check(t)
	gpu := newGPU(t, 0)
	base := gpu.Alloc(shareBlocks * shareBlock)
	gpu.Fill(base, shareBlocks*shareBlock, 1)
	s := &shares{given: map[core.AgentID]int{}, held: map[core.AgentID]int{}, waits: map[core.AgentID]int{}, closed: true}
	p := newMember(t, uint64(base), kv.DeviceMemory(0), tcp.Config{Streams: slowStreams, First: slowStreams}, func(l *kv.Layout) tcp.Mover {
		var err error
		if s.Devices, err = devices.Open(l.Regions, cuda.Options{RingBytes: ringSlots * shareSlot, SlotBytes: shareSlot}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = s.Devices.Close() })
		return s
	})
	t.Cleanup(func() { s.open(true) }) // Close waits for the streams
	way, err := faultnet.Open("127.0.0.1:0", p.Endpoint())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(way.Close)
	sd, _ := newDecode(t, p, slow, way.Addr(), slowStreams)
	until(t, "the slow peer's streams are open", func() bool { return way.Open() == slowStreams })
	way.Set(impairment)
	all := [][]kv.BlockID{sequence(shareBlocks)}
	for i := range slowWrites {
		writes(t, p, sd, slow, core.TransferID(fmt.Sprint("slow", i)), all)
	}
	over := func() bool { return len(p.sink.All("written", core.TransferID(fmt.Sprint("slow", slowWrites-1)))) > 0 }
	until(t, "the slow peer has all slots, and its other streams wait", func() bool {
		return s.of(func() int { return s.held[slow] }) == shareSlots && s.of(func() int { return s.waits[slow] }) >= slowStreams-shareSlots
	})

	// The slow peer has all slots. Of those that it gives back one by one while another peer waits, that one has half, but for as many as the slow peer had before.
	hd, mem := newDecode(t, p, honest, p.Endpoint(), 1)
	few := [][]kv.BlockID{sequence(4)} // 16 slots
	writes(t, p, hd, honest, "first", few)
	back := 0
	until(t, "the honest peer has its bytes", func() bool {
		if len(hd.sink.All("received", "first")) > 0 {
			return true
		}
		time.Sleep(2 * time.Millisecond) // who has called waits by then
		given := 0
		s.count(func() {
			if s.waits[honest] == 0 || len(s.passes) == 0 {
				return
			}
			s.pass()
			back++
			given = s.given[honest] + s.given[slow] + 1
			if share := 2*s.given[honest] + shareSlots; back > share {
				t.Fatalf("%d slots were given back while the honest peer waited, and it was given %d", back, s.given[honest])
			}
		})
		until(t, "a slot that was given back is taken", func() bool {
			return given == 0 || s.of(func() int { return s.given[honest] + s.given[slow] }) >= given
		})
		return false
	})
	t.Logf("%d slots given back for the %d that the honest peer was given", back, s.of(func() int { return s.given[honest] }))
	if o := hd.sink.Wait("received", "first", 1); o.Err != nil {
		t.Fatal(o.Err)
	}

	// A peer that takes nothing has no slot once P has found that out.
	s.open(true)
	stopped := impairment.Hold[faultnet.Down]
	if stopped {
		until(t, "the slow peer's streams have no slot, and wait for none", func() bool {
			return s.of(func() int { return s.held[slow] + s.waits[slow] }) == 0
		})
		last, since := -1, time.Now()
		until(t, "the slow peer is given no slot for a time", func() bool {
			if n := s.of(func() int { return s.given[slow] }); n != last {
				last, since = n, time.Now()
			}
			return time.Since(since) > 5*time.Second
		})
	}
	before := [2]int{s.of(func() int { return s.given[slow] }), s.of(func() int { return s.given[honest] })}
	for i := range 4 {
		id := core.TransferID(fmt.Sprint("later", i))
		writes(t, p, hd, honest, id, all)
		until(t, "the honest peer has its bytes beside the slow one", func() bool { return len(hd.sink.All("received", id)) > 0 })
		if o := hd.sink.Wait("received", id, 1); o.Err != nil {
			t.Fatal(o.Err)
		}
	}
	theirs, ours := s.of(func() int { return s.given[slow] })-before[0], s.of(func() int { return s.given[honest] })-before[1]
	t.Logf("%d slots for the slow peer and %d for the honest one", theirs, ours)
	if stopped && theirs > 0 {
		t.Errorf("the stopped peer was given %d slots beside the %d of the honest one", theirs, ours)
	}
	if over() {
		t.Error("the slow peer has all its bytes: it was not slow")
	}
	if want := gpu.Pattern(shareBlocks*shareBlock, 1); !bytes.Equal(mem, want) {
		t.Error("wrong bytes")
	}
}

func sequence(n int) []kv.BlockID {
	ids := make([]kv.BlockID, n)
	for i := range ids {
		ids[i] = kv.BlockID(i)
	}
	return ids
}
