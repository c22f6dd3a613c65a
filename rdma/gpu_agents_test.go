package rdma_test

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
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

// standing is a stream of the engine's that has work and does nothing, and the moment behind it.
func (a *gpuAgent) standing(block int, pattern uint64) (goOn func(), moment core.Moment) {
	a.t.Helper()
	stream := a.Stream()
	a.Hold(stream)
	goOn = sync.OnceFunc(func() {
		a.Release(stream)
		a.Sync(stream)
	})
	a.t.Cleanup(goOn) // before the stream is destroyed
	a.Kernel(stream, a.At+uintptr(block*agentBytes), agentBytes, pattern)
	moment, err := a.Moment(0, stream)
	if err != nil {
		a.t.Fatal(err)
	}
	return goOn, moment
}

// TestGPUMoments: a stream of P's engine stands still, then one of D's. No card reads the blocks of an offer, or writes those of a load, before the moment
// behind the stream has passed. Other transfers of the same agents go by rdma meanwhile. Agents whose moments do not pass can be closed: their
// transfers end, no byte may land, and the close says what the driver still has.
func TestGPUMoments(t *testing.T) {
	needsGPU(t)
	s := &gpuAgents{t: t, p: openGPUAgent(t, node.RolePrefill, "rdma", 0), d: openGPUAgent(t, node.RoleDecode, "rdma", 1), pattern: 10}
	p, d := s.p, s.d
	s.goesBy("before", "rdma")
	begin := func(id core.TransferID, block int, offered, loaded core.Moment) {
		t.Helper()
		if _, err := p.Offer([]core.OfferRequest{{ID: id, Selection: agentBlocksOf(block, 1), After: offered}}); err != nil {
			t.Fatal(err)
		}
		request := core.LoadRequest{ID: id, From: core.Target{Bootstrap: p.BootstrapAddress()}, Selection: agentBlocksOf(block, 1), After: loaded}
		if _, err := d.StartLoad([]core.LoadRequest{request}); err != nil {
			t.Fatal(err)
		}
	}
	has := func(block int, pattern uint64) bool {
		return d.Wrong(d.At+uintptr(block*agentBytes), agentBytes, pattern) == 0
	}
	well := func(id core.TransferID, block int, pattern uint64) {
		t.Helper()
		for _, r := range []core.Report{d.ended(id), p.ended(id)} {
			if r.Code != core.OK {
				t.Errorf("%s %q: %v: %s", r.Side, id, r.Code, r.Reason)
			}
		}
		if !has(block, pattern) {
			t.Errorf("%q: bytes are wrong", id)
		}
	}
	const standing, other = 0, 4
	p.Fill(p.At+standing*agentBytes, agentBytes, 99)
	goOn, moment := p.standing(standing, 100)
	begin("offered", standing, moment, 0)
	p.Fill(p.At+other*agentBytes, agentBytes, 101)
	begin("beside the offer", other, 0, 0)
	well("beside the offer", other, 101)
	pause(tooSoon)
	if !has(standing, s.pattern) || len(d.GetFinished()) > 0 {
		t.Fatal("the offer's block was read before its moment")
	}
	goOn()
	well("offered", standing, 100)

	p.Fill(p.At+standing*agentBytes, agentBytes, 102)
	goOn, moment = d.standing(standing, 103)
	begin("loaded", standing, 0, moment)
	p.Fill(p.At+other*agentBytes, agentBytes, 104)
	begin("beside the load", other, 0, 0)
	well("beside the load", other, 104)
	pause(tooSoon)
	if !has(standing, 100) || len(d.GetFinished()) > 0 {
		t.Fatal("the load's block was written before its moment")
	}
	goOn()
	well("loaded", standing, 102)

	_, offered := p.standing(standing, 105)
	_, loaded := d.standing(other, 106)
	begin("closed with its offer", standing, offered, 0)
	begin("closed with its load", other, 0, loaded)
	for _, a := range []*gpuAgent{d, p} {
		if err := a.Agent.Close(); errors.Is(err, core.ErrMayLand) || err != nil && !strings.Contains(err.Error(), "a wait in the driver") {
			t.Error(err)
		}
	}
	for _, id := range []core.TransferID{"closed with its offer", "closed with its load"} {
		for _, a := range []*gpuAgent{d, p} {
			if r := a.ended(id); r.Code == core.OK {
				t.Errorf("%s %q ended well", r.Side, id)
			}
		}
	}
}
