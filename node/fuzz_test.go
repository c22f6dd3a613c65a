package node

import (
	"context"
	"encoding/json"
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvconn/kvconn/bootstrap"
	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/alloctest"
	"github.com/kvconn/kvconn/wire"
)

// FuzzConfig: any text is either refused with ErrInvalid, or a Config that
// passes its own check, that is the same after it was written and read again,
// and whose numbers are within their documented ranges.
func FuzzConfig(f *testing.F) {
	full, err := json.Marshal(testConfig(RoleBoth))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(full)
	f.Add(full[:len(full)/2])
	for _, s := range []string{
		`{"engine_id":"e","role":"prefill"}`, `{"engine_id":"e","role":"decode","lease_s":0.5,"peer_timeout_s":3600,"tcp_streams":64}`,
		`{"engine_id":"e","role":"decode","lease_s":3601}`, `{"engine_id":"e","role":"decode","lease_s":1e300}`, `{"engine_id":"e","role":"decode","lease_s":-1e300}`, `{"engine_id":"e","role":"decode","lease_s":1.0000000001}`,
		`{"ENGINE_ID":"e","Role":"both","nats_url":"nats://h:1,h:2","nats_replicas":3}`, `{"engine_id":"e","role":"prefill","bootstrap_port":-1}`,
		`{"engine_id":"e","role":"prefill","bootstrap_port":99999999999999999999}`, `{"engine_id":"e","role":"prefill","max_transfers":65536,"nats_token":"a b"}`,
		`{"engine_id":"e","role":"decode","bootstrap_allow":["10.0.0.0/8","*.cluster.local","h"],"advertise_host":"::1"}`, `{"engine_id":"e","role":"both","advertise_host":"h:1"}`,
		`{"engine_id":"e","role":"both","nats_nkeys":["UA"]}`, `{"engine_id":"e","role":"both","tls_cert_file":"c","tls_key_file":"k"}`, `{"engine_id":"\ud800","role":"both"}`,
		`{"engine_id":"e","role":"both","transport":"rdma","rdma_devices":["mlx5_0","mlx5_1:2"],"rdma_deny":[],"rdma_gid_index":3,"rdma_qps":16,"rdma_idle_s":1.5}`,
		`{"engine_id":"e","role":"both","transport":"shm"}`, `{"engine_id":"e","role":"both","rdma_mtu":1500}`, `{"engine_id":"e","role":"both","rdma_timeout":0}`, `{"engine_id":"e","role":"both","rdma_idle_s":0.9}`,
		`{"engine_id":"e","role":"both","rdma_relaxed_ordering":"on","rdma_traffic_class":256}`, `{"engine_id":"e","role":"both","rdma_devices":["mlx5_0:0"]}`, `{"engine_id":"e","role":"both","rdma_deny":["\u0000"]}`,
		`{"engine_id":"e","role":"both"} x`, `{"engine_id":"e","role":"both","engine_id":"","x":1}`, `null`, `[]`, ``, `{"a":`, strings.Repeat(`[`, 20000),
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		c, err := ParseConfig(text)
		if err != nil {
			if !errors.Is(err, core.ErrInvalid) {
				t.Errorf("%q: %v is no ErrInvalid", text, err)
			}
			return
		}
		if err := c.Check(); err != nil {
			t.Fatalf("%q is accepted, but %v", text, err)
		}
		for _, s := range []Seconds{c.Lease, c.PeerTimeout, c.EarlyLoad, c.ConnectTimeout, c.StallTimeout, c.CloseTimeout} {
			if d := time.Duration(s); d < 500*time.Millisecond || d > time.Hour {
				t.Errorf("%q has a duration of %v", text, d)
			}
		}
		if c.MaxTransfers < 1 || c.MaxTransfers > 65536 || c.TCPStreams < 1 || c.TCPStreams > 64 || c.EngineID == "" || len(c.EngineID) > 256 {
			t.Errorf("%q is accepted: %+v", text, c)
		}
		for key, v := range map[string][3]int{"rdma_gid_index": {c.RDMAGIDIndex, -1, 255}, "rdma_qps": {c.RDMAQPs, 1, 16}, "rdma_send_depth": {c.RDMASendDepth, 16, 16384},
			"rdma_mtu": {c.RDMAMTU, 0, 4096}, "rdma_timeout": {c.RDMATimeout, 1, 21}, "rdma_retry": {c.RDMARetry, 0, 7}, "rdma_rnr_retry": {c.RDMARNRRetry, 0, 7},
			"rdma_min_rnr_timer": {c.RDMAMinRNRTimer, 0, 31}, "rdma_traffic_class": {c.RDMATrafficClass, 0, 255}, "rdma_service_level": {c.RDMAServiceLevel, 0, 15},
			"rdma_pkey_index": {c.RDMAPKeyIndex, 0, 65535}} {
			if v[0] < v[1] || v[0] > v[2] {
				t.Errorf("%q has %s %d, want %d to %d", text, key, v[0], v[1], v[2])
			}
		}
		if d := time.Duration(c.RDMAIdle); d < time.Second || d > time.Hour {
			t.Errorf("%q has rdma_idle_s %v", text, d)
		}
		again, err := json.Marshal(c)
		if err != nil {
			t.Fatalf("%+v is not written: %v", c, err)
		}
		c2, err := ParseConfig(again)
		if err != nil {
			t.Fatalf("%q becomes %s: %v", text, again, err)
		}
		for _, list := range []*[]string{&c.NATSNKeys, &c.BootstrapAllow, &c.RDMADevices, &c.RDMADeny, &c2.NATSNKeys, &c2.BootstrapAllow, &c2.RDMADevices, &c2.RDMADeny} {
			if len(*list) == 0 { // [] and null are alike
				*list = nil
			}
		}
		if !reflect.DeepEqual(c, c2) {
			t.Errorf("%q is %+v, and then %+v", text, c, c2)
		}
	})
}

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

// deafAgent is a registered prefill agent without a bus and without goroutines:
// its machine's actions stay in its queue.
func deafAgent(t *testing.T) (*Agent, *fakeTransport) {
	l, err := core.NewLayout(fuzzRegions)
	if err != nil {
		t.Fatal(err)
	}
	tr := &fakeTransport{admitted: map[core.AgentID]bool{}}
	cfg := testConfig(RoleBoth)
	cfg.MaxTransfers = 8
	a := newAgent(cfg, Options{Reports: newReportQueue(64)})
	t.Cleanup(a.cancel)
	a.plane = &controlPlane{sec: &security{}}
	all := a.newTransports(nil)
	all.add(&fakeSignaller{of: tr, t: t})
	all.add(tr)
	a.halves.state = stateRegistering
	if err := errors.Join(a.use(l, all), a.halves.move(stateRegistering, stateRegistered, nil)); err != nil {
		t.Fatal(err)
	}
	return a, tr
}

var fuzzRegions = []core.Region{
	{Name: "k", Base: 1 << 20, BlockStride: 64, BlockBytes: 64, NumBlocks: 16, Tokens: 4, Heads: 2, FirstHead: 2, TotalHeads: 4, TokenStride: 16, HeadStride: 8},
	{Name: "s", Base: 2 << 20, BlockStride: 16, BlockBytes: 8, NumBlocks: 16, Group: 1},
}

// FuzzServe gives a prefill agent two messages of a stranger, between them the
// engine's offer of transfer "t-1". Each answer can be sent and read; statuses
// are as many as were asked for. Nobody gets bytes before a hello that fits. Writes
// read from the offered blocks only. A message of a few bytes makes the agent allocate
// little, whatever it claims.
func FuzzServe(f *testing.F) {
	hello := func(from string, change func(*wire.Agent)) *wire.Request {
		h := &wire.Agent{Version: wire.Version, ID: from, EngineID: "d", Endpoints: []wire.Endpoint{{Transport: "tcp"}}, Shapes: []wire.Shape{
			{Name: "k", BlockStride: 64, BlockBytes: 64, NumBlocks: 99, Tokens: 4, Heads: 2, FirstHead: 2, TotalHeads: 4, TokenStride: 16, HeadStride: 8},
			{Name: "s", BlockStride: 1 << 60, BlockBytes: 8, Group: 1}}}
		if change != nil {
			change(h)
		}
		return &wire.Request{Kind: wire.KindHello, From: from, Hello: h}
	}
	load := func(from string, groups ...wire.Blocks) *wire.Request {
		return &wire.Request{Kind: wire.KindLoad, From: from, Load: &wire.Load{TransferID: "t-1", Transport: "tcp", Grant: []byte{1}, Groups: groups, LeaseMS: 30000}}
	}
	renew := func(from string, loads, claims []string) *wire.Request {
		return &wire.Request{Kind: wire.KindRenew, From: from, Renew: &wire.Renew{Loads: loads, Claims: claims}}
	}
	finish := func(from string, list ...wire.Finish) *wire.Request {
		return &wire.Request{Kind: wire.KindFinish, From: from, Finishes: list}
	}
	signal := func(from, transport string) *wire.Request {
		return &wire.Request{Kind: wire.KindSignal, From: from, Signal: &wire.Signal{Transport: transport, Data: []byte("join")}}
	}
	ids := wire.Blocks{IDs: []uint32{7, 8}}
	for _, seed := range [][3]*wire.Request{
		{hello("d", nil), load("d", ids), renew("d", []string{"t-1"}, []string{"t-2", ""})},
		{hello("d", nil), load("d", wire.Blocks{First: 1<<32 - 1, IDs: []uint32{1<<32 - 1}}, ids), finish("d", wire.Finish{TransferID: "t-1", Code: -1})},
		{hello("d", nil), load("d", ids, ids, ids), finish("d", wire.Finish{TransferID: "t-1"}, wire.Finish{TransferID: "t-2", Code: 1 << 40, Reason: "x"})},
		{hello("d", func(h *wire.Agent) { // larger blocks, heads before tokens
			h.Shapes[0] = wire.Shape{Name: "k", BlockStride: 256, BlockBytes: 256, NumBlocks: 99, Tokens: 16, Heads: 2, FirstHead: 2, TotalHeads: 4, TokenStride: 8, HeadStride: 128}
		}), &wire.Request{Kind: wire.KindLoad, From: "d", Load: &wire.Load{TransferID: "t-1", Transport: "tcp", Grant: []byte{1}, Groups: []wire.Blocks{{IDs: []uint32{3}}}, Tokens: []uint32{9}, LeaseMS: 30000}}, renew("d", nil, nil)},
		{hello("d", func(h *wire.Agent) {
			s := &h.Shapes[0]
			s.Tokens, s.Heads, s.FirstHead, s.TotalHeads, s.TokenStride, s.HeadStride = 1<<31, 1<<31, 1<<31, 1<<32-1, 1<<63, 1<<63
		}), load("d", ids), renew("d", nil, nil)},
		{hello("d", func(h *wire.Agent) { h.Shapes[0].BlockBytes = 0 }), load("d", ids), renew("d", nil, nil)},
		{hello("d", func(h *wire.Agent) { h.ID = "other" }), load("other", ids), renew("e", []string{"t-1"}, []string{"t-1"})},
		{hello("", nil), load("", ids), renew("", nil, []string{"t-1"})},
		{hello("d", func(h *wire.Agent) { h.Endpoints = []wire.Endpoint{{Transport: "rdma"}} }), load("d", ids), signal("d", "sig")},
		{hello("d", func(h *wire.Agent) { h.TPSize, h.TPRank, h.Shapes = 2, 1, nil }), load("d", ids), renew("d", []string{"t-1\x001/2@0"}, nil)},
		{signal("d", "sig"), hello("d", nil), signal("d", "tcp")},
		{hello("d", nil), signal("d", "sig"), signal("e", "sig")},
	} {
		var enc [3][]byte
		for i, m := range seed {
			b, err := m.MarshalMsg(nil)
			if err != nil {
				f.Fatal(err)
			}
			enc[i] = b
		}
		f.Add(enc[0], enc[1], enc[2])
		f.Add(enc[0], enc[2], enc[1])
		f.Add(enc[0], enc[1][:len(enc[1])-3], append(enc[2], 0xc0))
	}
	// Arrays of 65536 elements in a few bytes.
	f.Add(msgp.AppendArrayHeader([]byte("\x83\xa1k\x03\xa1f\xa1d\xa1r\x81\xa1t"), 65536), msgp.AppendArrayHeader([]byte("\x83\xa1k\x01\xa1f\xa1d\xa1h\x81\xa1s"), 65536),
		msgp.AppendArrayHeader([]byte("\x83\xa1k\x02\xa1f\xa1d\xa1l\x81\xa1b\x91\x92\x00"), 65536))
	f.Fuzz(func(t *testing.T, first, second, third []byte) {
		a, tr := deafAgent(t)
		for i, b := range [][]byte{first, second, third} {
			if i == 2 {
				if _, err := a.Offer([]core.OfferRequest{{ID: "t-1", Selection: core.Selection{Blocks: [][]core.BlockID{{1, 2, 3}, {4}}}}}); err != nil && !errors.Is(err, core.ErrDuplicate) {
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
					checkServed(t, a, tr, req)
				}
			})
		}
	})
}

// fits: h's shapes are those of fuzzRegions, in any order, with the same items of the
// same model.
func fits(h *wire.Agent) bool {
	if h.Version != wire.Version {
		return false
	}
	if n := ranksOf(h); n != core.One { // one rank of several has some of it, or nothing
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

func checkServed(t *testing.T, a *Agent, tr *fakeTransport, req *wire.Request) {
	t.Helper()
	from := core.AgentID(req.From)
	rep := a.server.serve("via", req)
	if rep == nil {
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
		t.Errorf("a load of a stranger is answered with %+v", rep)
	}
	if (a.peers.get(from) != nil) != tr.admitted[from] {
		t.Errorf("%q is known %v, admitted %v", from, a.peers.get(from) != nil, tr.admitted[from])
	}
	if s := a.halves.machine.Sizes(); s.Offers > 16 || s.Early > 8 || s.Ended > 8 {
		t.Errorf("over the limits: %+v", s)
	}
	queue, _ := a.halves.take()
	for _, act := range queue {
		if w, ok := act.(core.Write); ok {
			a.caches.Load().performer.write(w)
		}
	}
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
	tr.writes = nil
}

// fakeHost registers whatever it is given.
type fakeHost struct{ fails bool }

func (*fakeHost) Listens(context.Context, core.AgentID) bool { return false }

func (h *fakeHost) Host(_ context.Context, _ *wire.Agent, _ bool, since int64) (int64, error) {
	if h.fails {
		return 0, errors.New("the newer agent has taken it over")
	}
	return since, nil
}
func (*fakeHost) Unhost(context.Context, *wire.Agent) error { return nil }
func (*fakeHost) TTL() time.Duration                        { return time.Hour }

// FuzzJoin gives a first rank three joins of strangers: the answer to GET /query then
// contradicts neither this agent nor itself, and a refused join has left nothing.
func FuzzJoin(f *testing.F) {
	join := func(id, engine string, dp, tp, pp int, change func(*wire.Join)) []byte {
		j := &wire.Join{Agent: &wire.Agent{Version: wire.Version, ID: id, EngineID: engine, DPRank: dp, TPRank: tp, PPRank: pp, TPSize: 2, PPSize: 2, Joined: true}, New: true}
		if change != nil {
			change(j)
		}
		b, err := (&wire.Request{Kind: wire.KindJoin, From: id, Join: j}).MarshalMsg(nil)
		if err != nil {
			f.Fatal(err)
		}
		return b
	}
	leave := func(j *wire.Join) { j.Leave = true }
	f.Add(join("a", "e", 1, 1, 0, nil), join("b", "e", 1, 1, 0, nil), join("a", "e", 1, 1, 0, leave))
	f.Add(join("a", "x", 0, 0, 0, nil), join("b", "y", 0, 1, 0, nil), join("c", "x", 0, 1, 1, leave))
	f.Add(join("a", "x", 3, 0, 0, nil), join("b", "x", 2, 1, 0, nil), join("a", "x", 3, 0, 0, leave))
	f.Add(join("a", "e", 1, 0, 0, nil), join("b", "e", 0, 1, 0, nil), join("", "e", 1, 1, 0, nil))
	f.Add(join("a", "e\n", 2, 1, 0, nil), join("a", "x", -1, 1<<40, -1, nil), join("a", "x", 4, 1, 1, func(j *wire.Join) { j.Agent.TPSize = 1 << 40 }))
	f.Fuzz(func(t *testing.T, first, second, third []byte) {
		a, _ := deafAgent(t)
		a.cfg.EngineID, a.cfg.DPSize, a.cfg.DPRank, a.cfg.TPSize, a.cfg.PPSize = "e", 4, 1, 2, 2
		shows := &board{&bootstrap.Table{}, func() string { return "" }}
		g := newGuests(&a.cfg, a.log, shows, &fakeHost{fails: len(first)%7 == 3})
		a.server.guests = g
		defer g.close()
		for _, b := range [][]byte{first, second, third} {
			req := new(wire.Request)
			if wire.Decode(b, req) != nil || req.Kind != wire.KindJoin {
				continue
			}
			before := len(g.ranks)
			rep := a.server.serve("via", req)
			if rep.Code != 0 && len(g.ranks) != before {
				t.Errorf("%+v is refused (%s), and %d ranks are there, not %d", req.Join.Agent, rep.Reason, len(g.ranks), before)
			}
		}
		shown, engines := 0, map[string]int{"e": 1}
		for dp, e := range shows.table.Query() {
			if other, twice := engines[e.EngineID]; twice && other != dp || dp < 0 || dp >= 4 || (dp == 1) != (e.EngineID == "e") {
				t.Errorf("dp rank %d is engine %q", dp, e.EngineID)
			}
			engines[e.EngineID] = dp
			for tp, pps := range e.WorkerAddr {
				for pp := range pps {
					if shown++; g.ranks[guestRank{dp, tp, pp}] == nil || dp == 1 && (tp > 1 || pp > 1 || tp+pp == 0) {
						t.Errorf("dp %d tp %d pp %d is shown", dp, tp, pp)
					}
				}
			}
		}
		if shown != len(g.ranks) {
			t.Errorf("%d ranks are shown of %d", shown, len(g.ranks))
		}
	})
}
