package node

import (
	"errors"
	"testing"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/natsbus"
	"github.com/kvconn/kvconn/rig/alloctest"
	"github.com/kvconn/kvconn/wire"
)

// fakeTransport admits everyone and keeps what is to be written.
type fakeTransport struct {
	core.Transport
	admitted map[core.AgentID]bool
	writes   []core.WriteOp
}

func (*fakeTransport) Name() string     { return "tcp" }
func (*fakeTransport) Endpoint() string { return ":1" }
func (f *fakeTransport) Admit(id core.AgentID) ([]byte, error) {
	f.admitted[id] = true
	return make([]byte, 16), nil
}
func (f *fakeTransport) Dismiss(id core.AgentID) { delete(f.admitted, id) }
func (f *fakeTransport) Write(op core.WriteOp)   { f.writes = append(f.writes, op) }
func (f *fakeTransport) Extend(op core.WriteOp)  { f.writes = append(f.writes, op) }

// fakeSignaller takes signals only from peers that tcp beside it has admitted.
type fakeSignaller struct {
	core.Signaller
	of *fakeTransport
	t  *testing.T
}

func (*fakeSignaller) Name() string     { return "sig" }
func (*fakeSignaller) Endpoint() string { return "" }
func (f *fakeSignaller) Admit(id core.AgentID) ([]byte, error) {
	f.of.admitted[id] = true
	return make([]byte, 16), nil
}
func (*fakeSignaller) Dismiss(core.AgentID) {}
func (f *fakeSignaller) Signalled(from core.AgentID, msg []byte) ([]byte, error) {
	if !f.of.admitted[from] {
		f.t.Errorf("a signal of %q, which was not met", from)
	}
	return msg, nil
}
func (f *fakeSignaller) Write(op core.WriteOp) { f.of.Write(op) }

// agentWithoutBus is a registered prefill agent without a bus and without goroutines:
// its machine's actions stay in its queue.
func agentWithoutBus(t *testing.T) (*Agent, *fakeTransport) {
	l, err := kv.NewLayout(fuzzRegions)
	if err != nil {
		t.Fatal(err)
	}
	tr := &fakeTransport{admitted: map[core.AgentID]bool{}}
	cfg := testConfig(RoleBoth)
	cfg.MaxTransfers = 8
	a := newAgent(cfg, Options{Reports: newReportQueue(64)}, natsbus.NewIdentity())
	t.Cleanup(a.cancel)
	a.plane = &controlPlane{sec: &security{}}
	all := a.newTransports(nil)
	all.add(&fakeSignaller{of: tr, t: t})
	all.add(tr)
	a.machine.state = stateRegistering
	if err := errors.Join(a.use(l, all), a.machine.setState(stateRegistering, stateRegistered, nil)); err != nil {
		t.Fatal(err)
	}
	return a, tr
}

var fuzzRegions = []kv.Region{
	{Name: "k", Base: 1 << 20, BlockStride: 64, BlockBytes: 64, NumBlocks: 16, Tokens: 4, Heads: 2, FirstHead: 2, TotalHeads: 4, TokenStride: 16, HeadStride: 8},
	{Name: "s", Base: 2 << 20, BlockStride: 16, BlockBytes: 8, NumBlocks: 16, Group: 1},
}

// serveSeed is a seed of FuzzServe: who sends each of three messages, and the messages.
type serveSeed struct {
	senders  string
	messages [3]*wire.Request
}

// helloOf is a hello that fits fuzzRegions, unless change spoils it.
func helloOf(change func(*wire.Agent)) *wire.Request {
	h := &wire.Agent{Version: wire.Version, ID: "what it says of itself", EngineID: "d", Endpoints: []wire.Endpoint{{Transport: "tcp"}}, Shapes: []wire.Shape{
		{Name: "k", BlockStride: 64, BlockBytes: 64, NumBlocks: 99, Tokens: 4, Heads: 2, FirstHead: 2, TotalHeads: 4, TokenStride: 16, HeadStride: 8},
		{Name: "s", BlockStride: 1 << 60, BlockBytes: 8, Group: 1}}}
	if change != nil {
		change(h)
	}
	return &wire.Request{Kind: wire.KindHello, Hello: h}
}

// serveSeeds has every kind of message of a peer that was met ("m"), of peers that say
// hello first ("d") or not ("e"), and of nobody.
func serveSeeds() []serveSeed {
	load := func(groups ...wire.Blocks) *wire.Request {
		return &wire.Request{Kind: wire.KindLoad, Load: &wire.Load{TransferID: "t-1", Transport: "tcp", Grant: []byte{1}, Groups: groups, LeaseMS: 30000}}
	}
	renew := func(loads, claims []string) *wire.Request {
		return &wire.Request{Kind: wire.KindRenew, Renew: &wire.Renew{Loads: loads, Claims: claims}}
	}
	finish := func(list ...wire.Finish) *wire.Request {
		return &wire.Request{Kind: wire.KindFinish, Finishes: list}
	}
	signal := func(transport string) *wire.Request {
		return &wire.Request{Kind: wire.KindSignal, Signal: &wire.Signal{Transport: transport, Data: []byte("join")}}
	}
	hello := helloOf(nil)
	ids, t1 := wire.Blocks{IDs: []uint32{7, 8}}, []string{"t-1"}
	return []serveSeed{
		{"ddd", [3]*wire.Request{hello, load(ids), renew(t1, []string{"t-2", ""})}},
		{"ddd", [3]*wire.Request{hello, load(wire.Blocks{First: 1<<32 - 1, IDs: []uint32{1<<32 - 1}}, ids), finish(wire.Finish{TransferID: "t-1", Code: -1})}},
		{"ddd", [3]*wire.Request{hello, load(ids, ids, ids), finish(wire.Finish{TransferID: "t-1"}, wire.Finish{TransferID: "t-2", Code: 1 << 40, Reason: "x"})}},
		{"ddd", [3]*wire.Request{helloOf(func(h *wire.Agent) { // larger blocks, heads before tokens
			h.Shapes[0] = wire.Shape{Name: "k", BlockStride: 256, BlockBytes: 256, NumBlocks: 99, Tokens: 16, Heads: 2, FirstHead: 2, TotalHeads: 4, TokenStride: 8, HeadStride: 128}
		}), {Kind: wire.KindLoad, Load: &wire.Load{TransferID: "t-1", Transport: "tcp", Grant: []byte{1}, Groups: []wire.Blocks{{IDs: []uint32{3}}}, Tokens: []uint32{9}, LeaseMS: 30000}}, renew(nil, nil)}},
		{"ddd", [3]*wire.Request{helloOf(func(h *wire.Agent) {
			s := &h.Shapes[0]
			s.Tokens, s.Heads, s.FirstHead, s.TotalHeads, s.TokenStride, s.HeadStride = 1<<31, 1<<31, 1<<31, 1<<32-1, 1<<63, 1<<63
		}), load(ids), renew(nil, nil)}},
		{"ddd", [3]*wire.Request{helloOf(func(h *wire.Agent) { h.Shapes[0].BlockBytes = 0 }), load(ids), renew(nil, nil)}},
		{"dde", [3]*wire.Request{hello, load(ids), renew(t1, t1)}},
		{"dee", [3]*wire.Request{hello, load(ids), finish(wire.Finish{TransferID: "t-1"})}},
		{"d", [3]*wire.Request{hello, load(ids), renew(nil, t1)}}, // and then nobody
		{"", [3]*wire.Request{hello, load(ids), renew(nil, t1)}},
		{"mmm", [3]*wire.Request{renew(nil, t1), load(ids), renew(t1, nil)}},
		{"mmm", [3]*wire.Request{load(ids), finish(wire.Finish{TransferID: "t-1"}), renew(t1, nil)}},
		{"mme", [3]*wire.Request{hello, load(ids, wire.Blocks{IDs: []uint32{4}}), load(ids)}},
		{"ddd", [3]*wire.Request{helloOf(func(h *wire.Agent) { h.Endpoints = []wire.Endpoint{{Transport: "rdma"}} }), load(ids), signal("sig")}},
		{"ddd", [3]*wire.Request{helloOf(func(h *wire.Agent) { h.TPSize, h.TPRank, h.Shapes = 2, 1, nil }), load(ids), renew([]string{"t-1\x001/2@0"}, nil)}},
		{"ddd", [3]*wire.Request{signal("sig"), hello, signal("tcp")}},
		{"dde", [3]*wire.Request{hello, signal("sig"), signal("sig")}},
	}
}

// FuzzServe gives a prefill agent three messages, before the third of them the engine's
// offer of transfer "t-1". Each sender is what its connection has proved: a byte of senders
// names it, and beyond their end nobody sends. Agent "m" was met before. Each answer can be
// sent and read; statuses are as many as were asked for. Nobody gets bytes before a hello
// that fits. Writes read from the offered blocks only. A message of a few bytes makes the
// agent allocate little, whatever it claims.
func FuzzServe(f *testing.F) {
	for _, seed := range serveSeeds() {
		enc := seed.encode(f)
		f.Add(seed.senders, enc[0], enc[1], enc[2])
		f.Add(seed.senders, enc[0], enc[2], enc[1])
		f.Add(seed.senders, enc[0], enc[1][:len(enc[1])-3], append(enc[2], 0xc0))
	}
	// Arrays of 65536 elements in a few bytes.
	f.Add("mdm", msgp.AppendArrayHeader([]byte("\x83\xa1k\x03\xa1f\xa1d\xa1r\x81\xa1t"), 65536), msgp.AppendArrayHeader([]byte("\x83\xa1k\x01\xa1f\xa1d\xa1h\x81\xa1s"), 65536),
		msgp.AppendArrayHeader([]byte("\x83\xa1k\x02\xa1f\xa1d\xa1l\x81\xa1b\x91\x92\x00"), 65536))
	f.Fuzz(func(t *testing.T, senders string, first, second, third []byte) {
		serveMessages(t, senders, [3][]byte{first, second, third}, func(*wire.Request, *wire.Reply, int) {})
	})
}

// TestSeedsOfFuzzServe: the seeds' messages reach the handlers. Among each kind of a known
// sender are messages that are accepted, a load is written, and nobody's message is.
func TestSeedsOfFuzzServe(t *testing.T) {
	accepted, written := map[wire.Kind]int{}, 0
	for _, seed := range serveSeeds() {
		serveMessages(t, seed.senders, seed.encode(t), func(req *wire.Request, rep *wire.Reply, writes int) {
			if nobody := req.From == ""; nobody != (rep.Reason == "request without the id of its sender") {
				t.Errorf("a message of kind %d by %q is answered with %+v", req.Kind, req.From, rep)
			}
			if rep.Code == 0 {
				accepted[req.Kind]++
			}
			written += writes
		})
	}
	for _, kind := range []wire.Kind{wire.KindHello, wire.KindLoad, wire.KindRenew, wire.KindFinish, wire.KindSignal} {
		if accepted[kind] == 0 {
			t.Errorf("no message of kind %d is accepted", kind)
		}
	}
	if written == 0 {
		t.Error("no load is written")
	}
}

func (s *serveSeed) encode(t testing.TB) (enc [3][]byte) {
	for i, m := range s.messages {
		b, err := m.MarshalMsg(nil)
		if err != nil {
			t.Fatal(err)
		}
		enc[i] = b
	}
	return enc
}

// senderOf is the agent that the connection of message number i has proved.
func senderOf(senders string, i int) string {
	if i >= len(senders) {
		return ""
	}
	return senders[i : i+1]
}

// serveMessages tells served of each message that can be read, of its answer, and of how many
// writes came of it.
func serveMessages(t *testing.T, senders string, messages [3][]byte, served func(req *wire.Request, rep *wire.Reply, writes int)) {
	a, tr := agentWithoutBus(t)
	met := helloOf(nil)
	met.From = "m"
	if rep := a.server.serve("via", met); rep.Code != 0 {
		t.Fatalf("a hello that fits is refused: %+v", rep)
	}
	for i, b := range messages {
		if i == 2 {
			if _, err := a.Offer([]core.OfferRequest{{ID: "t-1", Selection: kv.Selection{Blocks: [][]kv.BlockID{{1, 2, 3}, {4}}}}}); err != nil && !errors.Is(err, core.ErrDuplicate) {
				t.Fatal(err)
			}
		}
		bound := uint64(64 << 20)
		if len(b) < 1024 {
			bound = 10 << 20 // package wire's own, and a little
		}
		alloctest.Bound(t, bound, func() {
			req := new(wire.Request)
			if wire.Decode(b, req) == nil {
				req.From = senderOf(senders, i)
				rep, writes := checkServed(t, a, tr, req)
				served(req, rep, writes)
			}
		})
	}
}

// fits: h's shapes are those of fuzzRegions, in any order, with the same items of the
// same model.
func fits(h *wire.Agent) bool {
	if h.Version != wire.Version {
		return false
	}
	if n := ranksOf(h); n != kv.One { // one rank of several has some of it, or nothing
		return n.Check(rankOf(h)) == nil
	}
	k, s := h.TPRank == 0 && h.PPRank == 0, false
	if !k {
		return false
	}
	for _, shape := range h.Shapes {
		switch {
		case shape.Name == "k" && shape.Group == 0:
			k = k && shape.TotalHeads == 4 && shape.BlockBytes == 8*uint64(shape.Tokens)*uint64(shape.Heads)
		case shape.Name == "s" && shape.Group == 1:
			s = shape.BlockBytes == 8 && shape.Tokens == 0 && shape.Heads == 0 && shape.FirstHead == 0 && shape.TotalHeads == 0 && shape.TokenStride == 0 && shape.HeadStride == 0
		}
	}
	return k && s
}

// checkServed returns the answer, and how many writes came of the request.
func checkServed(t *testing.T, a *Agent, tr *fakeTransport, req *wire.Request) (rep *wire.Reply, writes int) {
	t.Helper()
	from := core.AgentID(req.From)
	if rep = a.server.serve("via", req); rep == nil {
		t.Fatalf("no answer to %+v", req)
	}
	sent := *rep
	sent.Reason = shorten(sent.Reason) // as natsbus does, later
	b, err := sent.MarshalMsg(nil)
	if err == nil {
		err = wire.Decode(b, new(wire.Reply))
	}
	if err != nil {
		t.Fatalf("the answer %+v to %+v: %v", rep, req, err)
	}
	if req.From == "" && rep.Code == 0 {
		t.Errorf("a request without a sender is served: %+v", req)
	}
	if r := req.Renew; req.Kind == wire.KindRenew && rep.Code == 0 && len(rep.Statuses) != len(r.Loads)+len(r.Claims) {
		t.Errorf("%d statuses for %+v", len(rep.Statuses), r)
	}
	if len(rep.Tickets) > 0 && (req.Kind != wire.KindHello || !fits(req.Hello)) {
		t.Errorf("a ticket for %+v", req)
	}
	if req.Kind == wire.KindLoad && !tr.admitted[from] && rep.Code == 0 {
		t.Errorf("a load of an unknown peer is answered with %+v", rep)
	}
	if (a.peers.get(from) != nil) != tr.admitted[from] {
		t.Errorf("%q is known %v, admitted %v", from, a.peers.get(from) != nil, tr.admitted[from])
	}
	if s := a.machine.inner.Sizes(); s.Offers > 16 || s.Early > 8 || s.Ended > 8 {
		t.Errorf("over the limits: %+v", s)
	}
	memory, _ := a.machine.take(&a.machine.memory)
	a.performOfMemory(memory)
	for _, w := range tr.writes {
		if !tr.admitted[w.Peer] || w.Peer == "" || w.ID != "t-1" {
			t.Errorf("%q is written to %q", w.ID, w.Peer)
		}
		for _, p := range w.Pairs {
			r := a.caches.Load().performer.finder.layout.Regions[p.SrcRegion]
			low, high := 1*r.BlockStride, 3*r.BlockStride+r.BlockBytes // offered are 1 to 3, and 4 of group 1
			if r.Group == 1 {
				low, high = 4*r.BlockStride, 4*r.BlockStride+r.BlockBytes
			}
			if p.SrcOffset < low || p.SrcOffset+p.Length > high {
				t.Errorf("%+v is outside of the offered blocks", p)
			}
		}
	}
	writes, tr.writes = len(tr.writes), nil
	return rep, writes
}
