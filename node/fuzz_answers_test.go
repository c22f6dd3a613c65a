package node

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/safe"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/natsbus"
	"github.com/kvconn/kvconn/rig/alloctest"
	"github.com/kvconn/kvconn/rig/coretest"
	"github.com/kvconn/kvconn/wire"
)

// hostileP is the registry and the prefill engine that a decode agent meets. It gives the same
// answers to the first request of each kind, and others to all later ones.
type hostileP struct {
	core.Bus
	t       *testing.T
	answers [2][3][]byte // to hello, load and renew
	arrives bool         // the bytes of a load that P has accepted land
	looks   sync.Mutex   // held while actions are performed: those that look for one engine share one look-up then

	mu     sync.Mutex
	asked  map[wire.Kind]int
	read   map[wire.Kind]int // answers that could be read
	ticket map[string]bool   // that hellos' answers gave
	landed func(core.TransferID)
}

const hostileID = "HOSTILE"

func (p *hostileP) Lookup(context.Context, core.Target) (*wire.Agent, core.Via, error) {
	p.looks.Lock()
	defer p.looks.Unlock()
	h := helloOf(func(h *wire.Agent) { h.ID, h.EngineID, h.Endpoints[0].Address = hostileID, "p", "127.0.0.1:1" }).Hello
	h.Shapes[1].BlockStride, h.Shapes[1].NumBlocks = 8, 99
	return h, "via", nil
}

// Request answers, as natsbus.Bus does.
func (p *hostileP) Request(_ context.Context, via core.Via, to core.AgentID, req *wire.Request) (*wire.Reply, error) {
	if via != "via" || to != hostileID {
		p.t.Errorf("%q is asked by %q: %+v", to, via, req)
	}
	i := slices.Index([]wire.Kind{wire.KindHello, wire.KindLoad, wire.KindRenew}, req.Kind)
	if i < 0 { // how a transfer has ended
		return &wire.Reply{}, nil
	}
	p.mu.Lock()
	p.asked[req.Kind]++
	b := p.answers[min(p.asked[req.Kind]-1, 1)][i]
	p.mu.Unlock()
	rep, bound := new(wire.Reply), uint64(64<<20)
	if len(b) < 1024 {
		bound = 10 << 20 // package wire's own, and a little
	}
	err := error(nil)
	alloctest.Bound(p.t, bound, func() { err = wire.Decode(b, rep) })
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	p.read[req.Kind]++
	for _, ticket := range rep.Tickets {
		p.ticket[string(ticket.Ticket)] = true
	}
	p.mu.Unlock()
	if p.arrives && req.Kind == wire.KindLoad && rep.Code == 0 {
		p.landed(core.TransferID(req.Load.TransferID))
	}
	return rep, nil
}

// receivingTransport is the transport of a decode agent.
type receivingTransport struct {
	core.Transport
	p     *hostileP
	armed map[core.TransferID]bool
	count map[core.TransferID]int // of the times that it was armed
}

func (*receivingTransport) Name() string         { return viaTCP }
func (*receivingTransport) Endpoint() string     { return "" }
func (*receivingTransport) Dismiss(core.AgentID) {}
func (*receivingTransport) Stop(core.TransferID) {}
func (l *receivingTransport) Connect(peer core.AgentID, endpoint string, ticket []byte) error {
	l.p.mu.Lock()
	defer l.p.mu.Unlock()
	if peer != hostileID || endpoint != "127.0.0.1:1" || len(ticket) == 0 || len(ticket) > 64 || !l.p.ticket[string(ticket)] {
		l.p.t.Errorf("connect to %q at %q with ticket %q", peer, endpoint, ticket)
	}
	return nil
}

func (l *receivingTransport) Expect(id core.TransferID, peer core.AgentID, dst []kv.Segment) ([]byte, error) {
	l.p.mu.Lock()
	defer l.p.mu.Unlock()
	if l.armed[id] || peer != hostileID || len(l.p.ticket) == 0 {
		l.p.t.Errorf("%q of %q is expected: armed %v, tickets %v", id, peer, l.armed[id], l.p.ticket)
	}
	l.armed[id] = true
	l.count[id]++
	return grantOf(id, l.count[id]), nil
}

func grantOf(id core.TransferID, n int) []byte { return fmt.Appendf(nil, "%s-%d", id, n) }

func (l *receivingTransport) Revoke(id core.TransferID) error {
	l.disarm(id)
	return nil
}

func (l *receivingTransport) disarm(id core.TransferID) bool {
	l.p.mu.Lock()
	defer l.p.mu.Unlock()
	was := l.armed[id]
	delete(l.armed, id)
	return was
}

// contained counts the panics that did not end the process, as they would not end an engine's.
var contained = sync.OnceValue(func() *atomic.Int64 {
	n := new(atomic.Int64)
	safe.SetHandler(func(where string, cause any, stack []byte) {
		n.Add(1)
		fmt.Fprintf(os.Stderr, "panic in %s: %v\n%s", where, cause, stack)
	})
	return n
})

// heldReports holds each report of a load to a transport that is armed no more.
type heldReports struct {
	*reportQueue
	l *receivingTransport
}

func (r heldReports) Push(v core.Report) {
	r.l.p.mu.Lock()
	armed := r.l.armed[v.ID]
	r.l.p.mu.Unlock()
	if v.Side == core.SideLoad && armed {
		r.l.p.t.Errorf("%q is reported while bytes may land: %+v", v.ID, v)
	}
	r.reportQueue.Push(v)
}

// answered is what came of an engine's load "load", and of its claim "claim", which it loads later.
type answered struct {
	asked, read map[wire.Kind]int
	armed       map[core.TransferID]int // how often
	landed      map[core.TransferID]bool
	reports     map[core.TransferID][]core.Report
}

// answerMessages has a decode engine load from a prefill engine that gives these answers.
func answerMessages(t *testing.T, arrives bool, answers [2][3][]byte) answered {
	panics := contained().Load()
	p := &hostileP{t: t, answers: answers, arrives: arrives, asked: map[wire.Kind]int{}, read: map[wire.Kind]int{}, ticket: map[string]bool{}}
	l := &receivingTransport{p: p, armed: map[core.TransferID]bool{}, count: map[core.TransferID]int{}}
	layout, err := kv.NewLayout(fuzzRegions)
	if err != nil {
		t.Fatal(err)
	}
	cfg := testConfig(RoleDecode)
	cfg.MaxTransfers, cfg.ReportClaims = 8, true
	cfg.ConnectTimeout = Seconds(time.Millisecond) // no try to meet P waits for another in real time
	cfg.PeerTimeout, cfg.Load, cfg.Claim = Seconds(1500*time.Millisecond), Seconds(3*time.Second), Seconds(5*time.Second)
	clock := coretest.NewClock()
	a := newAgent(cfg, Options{Clock: clock, Reports: heldReports{newReportQueue(64), l}}, natsbus.NewIdentity())
	t.Cleanup(a.cancel)
	allow, err := parseAllow(nil)
	if err != nil {
		t.Fatal(err)
	}
	a.plane = &controlPlane{sec: &security{allow: allow}}
	a.bus, a.client.bus, a.client.peerTimeout = p, p, 2*core.TickInterval // a request is made once
	all := a.newTransports(nil)
	all.add(l)
	landed := map[core.TransferID]bool{}
	p.landed = func(id core.TransferID) {
		if l.disarm(id) {
			p.mu.Lock()
			landed[id] = true
			p.mu.Unlock()
			all.sink(viaTCP).Received(id, core.TransferStats{Bytes: 1}, nil)
		}
	}
	a.machine.state = stateRegistering
	if err := errors.Join(a.use(layout, all), a.machine.setState(stateRegistering, stateRegistered, nil)); err != nil {
		t.Fatal(err)
	}
	perform := func() {
		for range 1000 {
			control, _ := a.machine.take(&a.machine.control)
			memory, _ := a.machine.take(&a.machine.memory)
			p.looks.Lock()
			for _, act := range control {
				a.perform(act)
			}
			a.performOfMemory(memory)
			p.looks.Unlock()
			a.machine.performed(&a.machine.control)
			a.machine.performed(&a.machine.memory)
			a.wg.Wait()
			if len(control)+len(memory) == 0 {
				return
			}
		}
		t.Fatal("an answer leads to the next request without end")
	}
	from := core.Target{Bootstrap: "http://127.0.0.1:1"}
	load := func(id core.TransferID, block kv.BlockID) {
		_, err := a.StartLoad([]core.LoadRequest{{ID: id, From: from, Selection: kv.Selection{Blocks: [][]kv.BlockID{{block}, {block}}}}})
		if err != nil {
			t.Fatal(err)
		}
	}
	if _, err := a.Claim([]core.ClaimRequest{{ID: "claim", From: from}}); err != nil {
		t.Fatal(err)
	}
	load("load", 1)
	out := answered{asked: p.asked, read: p.read, armed: l.count, landed: landed, reports: map[core.TransferID][]core.Report{}}
	const steps = 90
	for i := range steps {
		perform()
		if i == 40 { // the first load is over: a renewal names one transfer
			load("claim", 2)
			perform()
		}
		clock.Advance(core.TickInterval)
		a.machine.Tick()
	}
	perform()
	for _, r := range a.machine.reports.(heldReports).take() {
		out.reports[r.ID] = append(out.reports[r.ID], r)
	}
	if !a.machine.idle() || len(l.armed) > 0 {
		t.Errorf("after %v something is held: %+v, armed %v", steps*core.TickInterval, a.machine.inner.Sizes(), l.armed)
	}
	for _, id := range []core.TransferID{"load", "claim"} {
		loads := 0
		for _, r := range out.reports[id] {
			if r.Side == core.SideLoad {
				loads++
			}
			if r.Code == core.OK && (r.Side != core.SideLoad || !landed[id]) {
				t.Errorf("%q ended well, and its bytes have landed %v: %+v", id, landed[id], r)
			}
			if len(r.Reason) > 2048 {
				t.Errorf("%q ended with a reason of %d bytes", id, len(r.Reason))
			}
		}
		if loads != 1 || len(out.reports[id]) > 2 {
			t.Errorf("%q has the reports %+v, want one of its load", id, out.reports[id])
		}
	}
	if n := contained().Load() - panics; n > 0 {
		t.Errorf("%d panics, see above", n)
	}
	for kind, n := range p.asked {
		if n > 4*steps {
			t.Errorf("P is asked %d times with kind %d in %d ticks", n, kind, steps)
		}
	}
	return out
}

// answerSeed is a seed of FuzzAnswers: the answers to the first hello, load and renewal, and to
// all later ones. Without later ones the first ones are given again.
type answerSeed struct {
	arrives      bool
	first, later []*wire.Reply
	reaches      func(v answered) bool
}

func (s *answerSeed) encode(t testing.TB) (enc [2][3][]byte) {
	if s.later == nil {
		s.later = s.first
	}
	for i, list := range [][]*wire.Reply{s.first, s.later} {
		for j, m := range list {
			b, err := m.MarshalMsg(nil)
			if err != nil {
				t.Fatal(err)
			}
			enc[i][j] = b
		}
	}
	return enc
}

// ends says how a load ended.
func (v answered) ends(id core.TransferID, code core.Code, says string) bool {
	return slices.ContainsFunc(v.reports[id], func(r core.Report) bool {
		return r.Side == core.SideLoad && r.Code == code && strings.Contains(r.Reason, says)
	})
}

// answerSeeds has each kind of answer, honest and not, and what each leads to.
func answerSeeds() []answerSeed {
	ok := &wire.Reply{}
	hello := &wire.Reply{Tickets: []wire.Ticket{{Transport: viaTCP, Ticket: []byte("ticket of P's 12")}}, AgeMS: 5}
	no := func(code core.Code, reason string) *wire.Reply { return &wire.Reply{Code: int(code), Reason: reason} }
	is := func(s core.Status) *wire.Reply { return &wire.Reply{Statuses: []uint8{uint8(s)}} }
	ended := func(s core.Status, code int, reason string) *wire.Reply {
		return &wire.Reply{Statuses: []uint8{uint8(s)}, Ends: []wire.End{{Code: code, Reason: reason}}}
	}
	restart := func(of []byte) *wire.Reply {
		sum := sha256.Sum256(addTransportName(viaTCP, of))
		return ended(core.StatusRestart, 0, fmt.Sprintf("%x", sum[:8]))
	}
	list := func(m ...*wire.Reply) []*wire.Reply { return m }
	sending := is(core.StatusSending)
	return []answerSeed{
		{true, list(hello, ok, sending), nil, func(v answered) bool { return v.ends("load", core.OK, "") && v.ends("claim", core.OK, "") }},
		{false, list(hello, ok, sending), nil, func(v answered) bool { return v.ends("load", core.Failed, "") && v.read[wire.KindRenew] > 3 }},
		{true, list(hello, ok, is(core.StatusEarly)), list(no(core.Refused, "later"), ok, is(core.StatusUnknown)), func(v answered) bool { return v.landed["load"] }},
		// to a hello
		{false, list(no(core.Refused, "evil"), ok, ok), nil, func(v answered) bool { return v.ends("load", core.Refused, "evil") }},
		{false, list(no(core.Closed, "evil"), ok, ok), list(hello, ok, sending), func(v answered) bool { return v.ends("load", core.Unreachable, "evil") && v.asked[wire.KindHello] > 1 }},
		{false, list(no(-1<<62, strings.Repeat("e", 1024)), ok, ok), nil, func(v answered) bool { return v.ends("load", core.Refused, "eee") }},
		{false, list(ok, ok, ok), nil, func(v answered) bool { return v.ends("load", core.Unreachable, "gives no ticket") }},
		{false, list(&wire.Reply{Tickets: []wire.Ticket{{Transport: "rdma", Ticket: make([]byte, 64)}, {Transport: viaTCP}}, AgeMS: -1 << 63}, ok, ok), nil, func(v answered) bool { return v.asked[wire.KindLoad] == 0 }},
		{false, list(&wire.Reply{Tickets: []wire.Ticket{{Transport: viaTCP, Ticket: make([]byte, 64)}, {Transport: viaTCP, Ticket: []byte{1}}}, AgeMS: 1<<63 - 1}, ok, sending), nil, func(v answered) bool { return v.read[wire.KindLoad] == 2 }},
		// to a load
		{false, list(hello, no(core.Refused, "evil"), sending), nil, func(v answered) bool { return v.ends("load", core.Refused, "evil") }},
		{false, list(hello, no(core.OK+1, "evil"), sending), nil, func(v answered) bool { return len(v.reports["load"]) == 1 }},
		{false, list(hello, &wire.Reply{Code: int(core.Failed), Again: wire.AgainAfterHello, Reason: "evil"}, sending), nil, func(v answered) bool { return v.asked[wire.KindHello] > 1 && v.asked[wire.KindLoad] > 2 }},
		{true, list(hello, &wire.Reply{Code: int(core.Failed), Again: wire.AgainAfterHello, Reason: "evil"}, sending), list(hello, ok, sending), func(v answered) bool { return v.ends("load", core.OK, "") }},
		{false, list(hello, no(core.Closed, "evil"), sending), nil, func(v answered) bool { return v.asked[wire.KindHello] > 1 }},
		{false, list(hello, &wire.Reply{Code: int(core.Refused), Again: wire.AgainLater, Tickets: hello.Tickets, Signal: []byte("x")}, sending), nil, func(v answered) bool { return v.read[wire.KindLoad] > 0 }},
		// to a renewal
		{false, list(hello, ok, ended(core.StatusEnded, int(core.Expired), "evil")), nil, func(v answered) bool { return v.ends("load", core.Expired, "evil") }},
		{false, list(hello, ok, ended(core.StatusEnded, -1, strings.Repeat("e", 1024))), nil, func(v answered) bool { return v.ends("load", core.Failed, "eee") }},
		{false, list(hello, ok, ended(core.StatusEnded, 0, "evil")), nil, func(v answered) bool { return len(v.reports["load"]) == 1 }},
		{false, list(hello, ok, sending), list(hello, ok, restart(grantOf("load", 1))), func(v answered) bool { return v.armed["load"] == 2 }},
		{false, list(hello, ok, sending), list(hello, ok, restart([]byte("guessed"))), func(v answered) bool { return v.armed["load"] == 1 }},
		{false, list(hello, ok, is(core.StatusSent)), nil, func(v answered) bool { return len(v.reports["load"]) == 1 }},
		{false, list(hello, ok, is(core.StatusUnknown)), nil, func(v answered) bool { return len(v.reports["load"]) == 1 }},
		{false, list(hello, ok, is(255)), nil, func(v answered) bool { return v.read[wire.KindRenew] > 0 }},
		{false, list(hello, ok, ok), nil, func(v answered) bool { return v.ends("load", core.PeerLost, "") }}, // no status
		{false, list(hello, ok, &wire.Reply{Statuses: make([]uint8, 2048), Ends: []wire.End{{Index: 2047}, {Index: 2047}}}), nil, func(v answered) bool { return v.ends("load", core.PeerLost, "") }},
		{false, list(hello, ok, &wire.Reply{Statuses: []uint8{6}, Ends: []wire.End{{Index: 0, Code: 22}, {Index: 0, Code: 27, Reason: "twice"}}}), nil, func(v answered) bool { return len(v.reports["load"]) == 1 }},
		{false, list(hello, ok, no(core.Refused, "evil")), nil, func(v answered) bool { return v.ends("load", core.PeerLost, "") }},
	}
}

// FuzzAnswers has a decode engine load a transfer, and claim and then load another, from a prefill
// engine that gives any answers. Each load ends once, within its time, when no byte can land any
// more; well, if its bytes have landed only. No answer leads to requests without end, and one of a
// few bytes makes the agent allocate little, whatever it claims. The transport is given no ticket
// but the answer's.
func FuzzAnswers(f *testing.F) {
	for _, seed := range answerSeeds() {
		enc := seed.encode(f)
		f.Add(seed.arrives, enc[0][0], enc[0][1], enc[0][2], enc[1][0], enc[1][1], enc[1][2])
		f.Add(seed.arrives, enc[0][0], enc[0][2], enc[0][1], enc[1][0], enc[1][1], append(enc[1][2], 0xc0))
	}
	// Arrays of 2048 elements in a few bytes.
	many := msgp.AppendArrayHeader([]byte("\x84\xa1c\x00\xa1r\xa0\xa1s\x90\xa1e"), 2048)
	f.Add(true, many, many, many, many, many, many)
	f.Fuzz(func(t *testing.T, arrives bool, hello, load, renew, hello2, load2, renew2 []byte) {
		answerMessages(t, arrives, [2][3][]byte{{hello, load, renew}, {hello2, load2, renew2}})
	})
}

// TestSeedsOfFuzzAnswers: the seeds' answers are read, and lead to what they are there for.
func TestSeedsOfFuzzAnswers(t *testing.T) {
	for i, seed := range answerSeeds() {
		v := answerMessages(t, seed.arrives, seed.encode(t))
		if !seed.reaches(v) {
			t.Errorf("seed %d, of the answers %+v: asked %v, read %v, armed %v, landed %v, reports %+v", i, seed.first, v.asked, v.read, v.armed, v.landed, v.reports)
		}
		for kind, n := range v.asked {
			if v.read[kind] != n {
				t.Errorf("seed %d: of %d answers to kind %d %d can be read", i, n, kind, v.read[kind])
			}
		}
	}
}
