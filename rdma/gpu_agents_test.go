package rdma_test

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/node"
	"github.com/kvconn/kvconn/rig/testdouble/engine"
)

// gpuAgent is a whole agent, of an engine that sleeps and wakes.
type gpuAgent struct {
	*engine.Engine
	*engine.Mapping
	*node.Agent
	t    *testing.T
	seen map[core.TransferID]core.Report
}

const (
	agentBlocks = 8
	agentBytes  = 64 << 10 // of a block
)

func openGPUAgent(t *testing.T, role, transport string, device int) *gpuAgent {
	t.Helper()
	e := engine.New(t, device)
	a := &gpuAgent{Engine: e, Mapping: e.Map(agentBlocks * agentBytes), t: t, seen: map[core.TransferID]core.Report{}}
	c := node.DefaultConfig()
	c.EngineID, c.Role, c.Transport = "engine-"+role, role, transport
	c.BootstrapHost, c.BootstrapPort, c.TCPListenHost = "127.0.0.1", 0, "127.0.0.1"
	c.DeviceRing, c.DeviceSlot = 1<<20, 32<<10
	o := node.Options{}
	if os.Getenv("KVCONN_TEST_LOG") != "" {
		o.Logger, _ = zap.NewDevelopment()
		o.Logger = o.Logger.Named(role)
	}
	var err error
	if a.Agent, err = node.Open(c, o); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = a.Agent.Close() })
	if err := a.RegisterKVCaches([]kv.Region{{Name: "layer.0", Base: uint64(a.At), Memory: kv.DeviceMemory(0), BlockStride: agentBytes, BlockBytes: agentBytes, NumBlocks: agentBlocks}}); err != nil {
		t.Fatal(err)
	}
	return a
}

func agentBlocksOf(first, n int) kv.Selection {
	ids := make([]kv.BlockID, n)
	for i := range ids {
		ids[i] = kv.BlockID(first + i)
	}
	return kv.Selection{Blocks: [][]kv.BlockID{ids}}
}

// insists makes a call until the agent has ended what was begun before a sleep.
func (a *gpuAgent) insists(call func() (int, error)) {
	a.t.Helper()
	soon(a.t, "the call is taken", func() bool {
		_, err := call()
		if err != nil && !strings.Contains(err.Error(), "have not ended yet") {
			a.t.Fatal(err)
		}
		return err == nil
	})
}

func (a *gpuAgent) offer(id core.TransferID) {
	a.t.Helper()
	a.insists(func() (int, error) {
		return a.Offer([]core.OfferRequest{{ID: id, Selection: agentBlocksOf(0, agentBlocks)}})
	})
}

func (a *gpuAgent) load(id core.TransferID, p *gpuAgent) {
	a.t.Helper()
	a.insists(func() (int, error) {
		return a.StartLoad([]core.LoadRequest{{ID: id, From: core.Target{Bootstrap: p.BootstrapAddress()}, Selection: agentBlocksOf(0, agentBlocks)}})
	})
}

// ended waits for a transfer's report.
func (a *gpuAgent) ended(id core.TransferID) core.Report {
	a.t.Helper()
	late := time.NewTimer(patience)
	defer late.Stop()
	for {
		for _, r := range a.GetFinished() {
			a.seen[r.ID] = r
		}
		if r, ok := a.seen[id]; ok {
			a.t.Logf("%s %q: %v by %q: %s", r.Side, id, r.Code, r.Transport, r.Reason)
			return r
		}
		select {
		case <-a.Finished():
		case <-late.C:
			a.t.Fatalf("no report of %q within %v", id, patience)
		}
	}
}

// failed wants a transfer to have failed since its memory became another.
func (a *gpuAgent) failed(id core.TransferID) {
	a.t.Helper()
	if r := a.ended(id); r.Code != core.Failed || !strings.Contains(r.Reason, "region layer.0") {
		a.t.Errorf("%s %q ended with %v: %s", r.Side, id, r.Code, r.Reason)
	}
}

func (a *gpuAgent) sleepAndWake(pattern uint64) {
	a.Sleep()
	a.Wake()
	a.Fill(a.At, agentBlocks*agentBytes, pattern)
}

// gpuAgents are a pair. Each transfer carries a pattern of its own.
type gpuAgents struct {
	t       *testing.T
	p, d    *gpuAgent
	pattern uint64
}

// carried wants a transfer to have gone well, with its bytes, and gives what carried them.
func (s *gpuAgents) carried(id core.TransferID) (by string) {
	s.t.Helper()
	r := s.d.ended(id)
	if r.Code != core.OK {
		s.t.Fatalf("load %q ended with %v: %s", id, r.Code, r.Reason)
	}
	if r := s.p.ended(id); r.Code != core.OK {
		s.t.Errorf("offer %q ended with %v: %s", id, r.Code, r.Reason)
	}
	if n := s.d.Wrong(s.d.At, agentBlocks*agentBytes, s.pattern); n > 0 {
		s.t.Fatalf("%q: %d bytes are wrong", id, n)
	}
	return r.Transport
}

func (s *gpuAgents) fill() {
	s.pattern++
	s.p.Fill(s.p.At, agentBlocks*agentBytes, s.pattern)
}

// goesBy wants transfers to go well, and to go by a transport in the end.
func (s *gpuAgents) goesBy(id core.TransferID, transport string) {
	s.t.Helper()
	for try, end := 0, time.Now().Add(patience); ; try++ {
		id := core.TransferID(fmt.Sprint(id, " ", try))
		s.fill()
		s.p.offer(id)
		s.d.load(id, s.p)
		if s.carried(id) == transport {
			return
		}
		if time.Now().After(end) {
			s.t.Fatalf("no transfer goes by %s; %+v, %+v", transport, s.p.Stats().Transports, s.d.Stats().Pairs)
		}
		pause(20 * time.Millisecond)
	}
}

// TestGPUSleep: engines sleep and wake, at either side, with transfers before, in the middle and after. What had blocks before
// fails by name, at both sides. All others go well, by rdma when the cards have the new memory, and by tcp until then; also one for
// which D had chosen rdma before P slept. If the cards do not take the new memory, transfers go by tcp, with the reason.
func TestGPUSleep(t *testing.T) {
	needsGPU(t)
	s := &gpuAgents{t: t, p: openGPUAgent(t, node.RolePrefill, "rdma,tcp", 0), d: openGPUAgent(t, node.RoleDecode, "rdma,tcp", 1), pattern: 10}
	p, d := s.p, s.d
	s.goesBy("before", "rdma")

	early := func(id core.TransferID) (by string) {
		t.Helper()
		if _, err := p.Announce([]core.TransferID{id}); err != nil {
			t.Fatal(err)
		}
		d.load(id, p)
		soon(t, "P has the load", func() bool { return d.Stats().LoadsWaiting > 0 })
		s.pattern++
		p.sleepAndWake(s.pattern)
		p.offer(id)
		return s.carried(id)
	}
	p.offer("old")
	early("early")
	p.failed("old")
	d.load("old", p)
	d.failed("old")
	s.goesBy("P has woken", "rdma")

	d.load("t", p)
	d.sleepAndWake(5)
	d.load("next", p)
	d.failed("t")
	if n := d.Wrong(d.At, agentBlocks*agentBytes, 5); n > 0 {
		t.Errorf("%d bytes have come into the new memory", n)
	}
	s.fill()
	p.offer("next")
	s.carried("next")
	s.goesBy("D has woken", "rdma")

	setVerbs(t, "nodmabuf")
	if by := early("cards without memory"); by != "tcp" {
		t.Errorf("it went by %q", by)
	}
	s.goesBy("still without memory", "tcp")
	const says = "cannot be registered"
	if r := p.Stats().Transports["rdma"]; r.Available || !strings.Contains(r.Reason, says) || !strings.Contains(r.Reason, `"layer.0"`) {
		t.Errorf("P says of rdma: %+v", r)
	}
	if why := fmt.Sprint(d.Stats().Transports["rdma"].Fallbacks); !strings.Contains(why, says) {
		t.Errorf("D says of transfers that did not go by rdma: %s", why)
	}
	setVerbs(t, "")
	s.goesBy("registered in the end", "rdma")
	if r := p.Stats().Transports["rdma"]; !r.Available || r.Reason != "" {
		t.Errorf("P says of rdma: %+v", r)
	}
}

// TestGPUSleepForced: where rdma is forced, a transfer that begins after a sleep waits for the registration, at either side.
func TestGPUSleepForced(t *testing.T) {
	needsGPU(t)
	s := &gpuAgents{t: t, p: openGPUAgent(t, node.RolePrefill, "rdma", 0), d: openGPUAgent(t, node.RoleDecode, "rdma", 1), pattern: 10}
	s.goesBy("before", "rdma")
	for _, side := range []*gpuAgent{s.d, s.p, s.d} {
		side.sleepAndWake(5)
		id := core.TransferID("after the sleep of " + side.ID())
		if _, again := s.d.seen[id]; again {
			id += " again"
		}
		s.fill()
		s.p.offer(id)
		s.d.load(id, s.p)
		s.carried(id)
	}
}
