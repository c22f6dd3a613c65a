package devices_test

import (
	"bytes"
	"fmt"
	"testing"
	"time"
	"unsafe"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/node"
	"github.com/kvconn/kvconn/rig/testdouble/engine"
)

const (
	blocks     = 8
	blockBytes = 256 << 10
	patience   = 30 * time.Second
)

// side is an agent whose cache lies on a device of the driver double.
type side struct {
	*engine.Engine
	*node.Agent
	t      *testing.T
	stream uintptr
	base   uintptr
	seen   map[core.TransferID]core.Report
}

func config(role string) node.Config {
	c := node.DefaultConfig()
	c.EngineID, c.Role, c.Transport = "engine-"+role, role, "tcp"
	c.BootstrapHost, c.BootstrapPort, c.TCPListenHost = "127.0.0.1", 0, "127.0.0.1"
	c.DeviceRing, c.DeviceSlot = 1<<20, 32<<10 // a block is copied in eight parts
	return c
}

// open gives an agent over memory at a device's address; 0: it is allocated.
func open(t *testing.T, cfg node.Config, device int, base uintptr) *side {
	t.Helper()
	s := &side{Engine: engine.New(t, device), t: t, base: base, seen: map[core.TransferID]core.Report{}}
	s.Delay(300)
	s.stream = s.Stream()
	if base == 0 {
		s.base = s.Alloc(blocks * blockBytes)
	}
	var err error
	if s.Agent, err = node.Open(cfg, node.Options{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Agent.Close() })
	if err := s.RegisterKVCaches(regions(s.base, kv.DeviceMemory(0))); err != nil {
		t.Fatal(err)
	}
	return s
}

func regions(base uintptr, memory kv.Memory) []kv.Region {
	return []kv.Region{{Name: "layer.0", Base: uint64(base), Memory: memory, BlockStride: blockBytes, BlockBytes: blockBytes, NumBlocks: blocks}}
}

// pair are agents on two devices.
func pair(t *testing.T) (p, d *side) {
	t.Helper()
	return open(t, config(node.RolePrefill), 0, 0), open(t, config(node.RoleDecode), 1, 0)
}

func (s *side) at(block int) uintptr { return s.base + uintptr(block)*blockBytes }

func (s *side) moment() core.Moment {
	s.t.Helper()
	m, err := s.Moment(0, s.stream)
	if err != nil {
		s.t.Fatal(err)
	}
	return m
}

func sequence(first, n int) kv.Selection {
	ids := make([]kv.BlockID, n)
	for i := range ids {
		ids[i] = kv.BlockID(first + i)
	}
	return kv.Selection{Blocks: [][]kv.BlockID{ids}}
}

func (s *side) offer(id core.TransferID, first, n int, after core.Moment) {
	s.t.Helper()
	if _, err := s.Offer([]core.OfferRequest{{ID: id, Selection: sequence(first, n), After: after}}); err != nil {
		s.t.Fatal(err)
	}
}

func (s *side) load(id core.TransferID, p *side, first, n int, after core.Moment) {
	s.t.Helper()
	if _, err := s.StartLoad([]core.LoadRequest{{ID: id, From: core.Target{Bootstrap: p.BootstrapAddress()}, Selection: sequence(first, n), After: after}}); err != nil {
		s.t.Fatal(err)
	}
}

// ended waits for a transfer's report.
func (s *side) ended(id core.TransferID) core.Report {
	s.t.Helper()
	late := time.NewTimer(patience)
	defer late.Stop()
	for {
		for _, r := range s.GetFinished() {
			if _, twice := s.seen[r.ID]; twice {
				s.t.Fatalf("%q was reported twice", r.ID)
			}
			s.seen[r.ID] = r
		}
		if r, ok := s.seen[id]; ok {
			return r
		}
		select {
		case <-s.Finished():
		case <-late.C:
			s.t.Fatalf("no report of %q within %v", id, patience)
		}
	}
}

// well wants a transfer's good end.
func (s *side) well(id core.TransferID) {
	s.t.Helper()
	if r := s.ended(id); r.Code != core.OK {
		s.t.Fatalf("%s %q: %v: %s", r.Side, id, r.Code, r.Reason)
	}
}

// settled waits until the double has nothing to do.
func (s *side) settled() {
	s.t.Helper()
	for end := time.Now().Add(patience); s.Count("queued") > 0; time.Sleep(100 * time.Microsecond) {
		if time.Now().After(end) {
			s.t.Fatal("the double does not come to an end")
		}
	}
}

// hostTransfer checks that agents of this process that have host memory still work.
func hostTransfer(t *testing.T) {
	t.Helper()
	var sides [2]*side
	var caches [2][]byte
	for i, role := range []string{node.RolePrefill, node.RoleDecode} {
		c := config(role)
		c.EngineID = fmt.Sprint("host-", role)
		caches[i] = make([]byte, blocks*blockBytes)
		a, err := node.Open(c, node.Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer a.Close()
		if err := a.RegisterKVCaches(regions(uintptr(unsafe.Pointer(&caches[i][0])), kv.HostMemory)); err != nil {
			t.Fatal(err)
		}
		sides[i] = &side{Agent: a, t: t, seen: map[core.TransferID]core.Report{}}
	}
	for i := range caches[0] {
		caches[0][i] = byte(i*7 + i>>12)
	}
	p, d := sides[0], sides[1]
	p.offer("host", 0, blocks, 0)
	d.load("host", p, 0, blocks, 0)
	d.well("host")
	p.well("host")
	if !bytes.Equal(caches[0], caches[1]) {
		t.Error("wrong bytes")
	}
}
