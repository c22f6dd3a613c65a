package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/coretest"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/wire"
)

func TestBestTransportIsTaken(t *testing.T) {
	leaktest.Check(t)
	n := coretest.NewNetwork()
	p, d := openFakeAgent(t, n, testConfig(RolePrefill), nil), openFakeAgent(t, n, testConfig(RoleDecode), nil)
	for i := range 3 {
		goesBy(t, p, d, core.TransferID(fmt.Sprint("t", i)), viaRDMA)
	}
	size := uint64(3 * layers * 2 * blockBytes)
	ps, ds := p.Stats(), d.Stats()
	if s := ds.Transports[viaRDMA]; s.Loads != 3 || s.BytesIn != size || len(s.Fallbacks) != 0 || !s.Available || ds.Transport != "rdma,tcp" {
		t.Errorf("decode counts %+v", ds)
	}
	if s := ps.Transports[viaRDMA]; s.Offers != 3 || s.BytesOut != size || ps.Transports[viaTCP].Offers != 0 {
		t.Errorf("prefill counts %+v", ps)
	}
	if len(ds.Pairs) != 1 || ds.Pairs[0].Agent != string(p.ID()) || ds.Pairs[0].EngineID != "engine-prefill" || ds.Pairs[0].Transport != viaRDMA || ds.Pairs[0].Transfers[viaRDMA] != 3 {
		t.Errorf("decode's pairs: %+v", ds.Pairs)
	}
	if d.said("pair goes over rdma") != 1 || p.said("pair goes over rdma") != 1 || d.said("pair") != 1 {
		t.Errorf("decode said %v", d.logs.All())
	}
}

// TestChoice: by the transports that each side has. With auto a pair falls back and says
// why. A transport that is forced fails with both sides' names.
func TestChoice(t *testing.T) {
	noDevice, noPower := errors.New("no device"), errors.New("port is down")
	for what, c := range map[string]struct {
		p, d         string // configured transports
		pLack, dLack error
		cut          error
		by           string    // the transport that is taken, or
		code         core.Code // how the load ends, and
		says         []string  // of its reason
	}{
		"both":                           {p: "auto", d: "auto", by: viaRDMA},
		"prefill has none":               {p: "auto", d: "auto", pLack: noDevice, by: viaTCP},
		"decode has none":                {p: "auto", d: "auto", dLack: noDevice, by: viaTCP},
		"neither":                        {p: "auto", d: "auto", pLack: noDevice, dLack: noPower, by: viaTCP},
		"tcp at decode":                  {p: "auto", d: "tcp", by: viaTCP},
		"tcp at prefill":                 {p: "tcp", d: "auto", by: viaTCP},
		"they do not reach each other":   {p: "auto", d: "auto", cut: noPower, by: viaTCP},
		"rdma at both":                   {p: "rdma", d: "rdma", by: viaRDMA},
		"rdma at decode":                 {p: "auto", d: "rdma", by: viaRDMA},
		"rdma at prefill":                {p: "rdma", d: "auto", by: viaRDMA},
		"forced, prefill has none":       {p: "auto", d: "rdma", pLack: noDevice, code: core.Refused, says: []string{"no transport in common", "engine-decode", "engine-prefill", "no device"}},
		"forced, prefill may not":        {p: "tcp", d: "rdma", code: core.Refused, says: []string{"no transport in common", "engine-prefill", `"tcp"`}},
		"forced at prefill, none here":   {p: "rdma", d: "auto", dLack: noDevice, code: core.Refused, says: []string{"no transport in common", "engine-decode", "no device"}},
		"forced, not reached":            {p: "auto", d: "rdma", cut: noPower, code: core.Unreachable, says: []string{"engine-prefill", "engine-decode", "port is down", `transport is "rdma"`}},
		"forced at prefill, not reached": {p: "rdma", d: "auto", cut: noPower, code: core.Unreachable, says: []string{"port is down", "tcp: prefill agent", "has none"}},
	} {
		t.Run(what, func(t *testing.T) {
			leaktest.Check(t)
			n := coretest.NewNetwork()
			p, d := openFakeAgent(t, n, forced(RolePrefill, c.p), c.pLack), openFakeAgent(t, n, forced(RoleDecode, c.d), c.dLack)
			if c.cut != nil {
				n.Cut(p.ID(), d.ID(), c.cut)
			}
			if c.by != "" {
				goesBy(t, p, d, "t", c.by)
				why := c.cut
				if c.pLack != nil && c.dLack == nil {
					why = c.pLack
				}
				if why == nil || c.by == viaRDMA {
					return
				}
				s := d.Stats()
				if len(s.Pairs) != 1 || len(s.Pairs[0].Fallbacks) != 1 || len(s.Transports[viaRDMA].Fallbacks) != 1 || !strings.Contains(s.Pairs[0].Reason, why.Error()) {
					t.Errorf("decode counts %+v", s)
				}
				if d.said("pair goes over tcp: rdma: ") != 1 {
					t.Errorf("decode said %v", d.logs.All())
				}
				return
			}
			p.offer("t", 1)
			d.load("t", p.BootstrapAddress(), 1)
			if r := d.want("t", c.code, c.says...); r.Transport != "" {
				t.Errorf("%+v names a transport", r)
			}
		})
	}
}

// A transport that is forced and missing fails the registration. When the reason is gone,
// the registration can be tried again. A wrong configuration fails it always.
func TestForcedTransportThatIsNotThere(t *testing.T) {
	leaktest.Check(t)
	n := coretest.NewNetwork()
	for _, role := range []string{RolePrefill, RoleDecode} {
		lack := errors.New("RLIMIT_MEMLOCK is 64 KiB")
		_, err := tryFakeAgent(t, n, forced(role, viaRDMA), lack)
		if !errors.Is(err, ErrTransport) || !errors.Is(err, lack) || !strings.Contains(err.Error(), `transport is "rdma"`) {
			t.Errorf("%s: %v", role, err)
		}
		if _, err := tryFakeAgent(t, n, testConfig(role), fmt.Errorf("%w: rdma_devices has mlx5_9", core.ErrInvalid)); !errors.Is(err, core.ErrInvalid) {
			t.Errorf("%s with a device that is not there: %v", role, err)
		}
		d := openFakeAgent(t, n, testConfig(role), lack)
		if s := d.Stats().Transports[viaRDMA]; s.Available || s.Reason != lack.Error() || d.said("going on without rdma: RLIMIT_MEMLOCK") != 1 {
			t.Errorf("%s: %+v, said %v", role, s, d.logs.All())
		}
	}
}

// A pair that loses all its paths goes on over tcp at once, and comes back.
func TestFallbackAndReturn(t *testing.T) {
	for _, better := range []string{viaLocal, viaRDMA} {
		t.Run(better, func(t *testing.T) { fallbackAndReturn(t, better) })
	}
}

func fallbackAndReturn(t *testing.T, better string) {
	leaktest.Check(t)
	n, both := coretest.NewNetwork(), better+","+viaTCP
	p, d := openFakeAgent(t, n, forced(RolePrefill, both), nil), openFakeAgent(t, n, forced(RoleDecode, both), nil)
	var hellos atomic.Int32
	setBus(d.Agent, &lossy{Bus: d.bus, lose: func(_ core.AgentID, req *wire.Request) bool {
		if req.Kind == wire.KindHello {
			hellos.Add(1)
		}
		return false
	}})
	goesBy(t, p, d, "first", better)
	why := errors.New("both paths are down")
	var once sync.Once
	n.OnChunk(func(id core.TransferID, _ int) {
		if id == "under way" {
			once.Do(func() { n.Cut(p.ID(), d.ID(), why) })
		}
	})
	announce(t, p.side, "waits")
	d.load("waits", p.BootstrapAddress(), 7)
	until(t, "the load waits at prefill", func() bool { return d.Stats().LoadsWaiting == 1 })
	p.offer("under way", 3)
	d.load("under way", p.BootstrapAddress(), 3)
	if r := d.want("under way", core.PeerLost, "both paths are down"); r.Transport != better {
		t.Errorf("%+v", r)
	}
	goesBy(t, p, d, "second", viaTCP)
	goesBy(t, p, d, "third", viaTCP)
	p.offer("waits", 8) // it was armed for rdma
	if r := d.report("waits"); r.Code == core.OK || !strings.Contains(r.Reason, "both paths are down") {
		t.Errorf("%+v", r)
	}
	n.Mend(p.ID(), d.ID())
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	defer cancel()
	if err := d.fake.Signaller.Usable(ctx, p.ID()); err != nil {
		t.Fatal(err)
	}
	goesBy(t, p, d, "fourth", better)
	for line, want := range map[string]int{"pair goes over " + better: 1, "pair goes on over tcp: " + better + ": both paths are down": 1, "pair is back on " + better: 1} {
		if got := d.said(line); got != want {
			t.Errorf("%q was said %d times, want %d: %v", line, got, want, d.logs.All())
		}
	}
	s := d.Stats()
	if s.Pairs[0].Fallbacks[better+": both paths are down"] != 2 || s.Transports[better].Fallbacks["both paths are down"] != 2 || s.Pairs[0].Transfers[viaTCP] != 2 || s.Pairs[0].Transfers[better] != 2 || s.Transports[better].LoadsFailed != 2 {
		t.Errorf("decode counts %+v %+v", s.Pairs, s.Transports)
	}
	// A transport that breaks beside another that stands is no reason to look P up.
	if got := hellos.Load(); got != 1 {
		t.Errorf("hello was said %d times: decode said %v", got, d.logs.All())
	}
	if got := d.fake.waits.Load(); got != 1 {
		t.Errorf("%s was waited for %d times", better, got)
	}
}

// The first contact waits for rdma within its bound, no later transfer does.
func TestFirstContactWaits(t *testing.T) {
	leaktest.Check(t)
	n := coretest.NewNetwork()
	hold := make(chan struct{})
	n.Hold(hold)
	cfg := testConfig(RoleDecode)
	cfg.ConnectTimeout-- // as long as everywhere
	p, d := openFakeAgent(t, n, testConfig(RolePrefill), nil), openFakeAgent(t, n, cfg, nil)
	goesBy(t, p, d, "first", viaTCP)
	d.peers.suspect(p.ID()) // it is met again
	goesBy(t, p, d, "second", viaTCP)
	if got := d.fake.waits.Load(); got != 1 {
		t.Errorf("rdma was waited for %d times", got)
	}
	if s := d.Stats().Pairs[0]; s.Fallbacks["rdma: "+errPending.Error()] != 2 {
		t.Errorf("decode counts %+v", s)
	}
	close(hold)
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	defer cancel()
	if err := d.fake.Signaller.Usable(ctx, p.ID()); err != nil {
		t.Fatal(err)
	}
	goesBy(t, p, d, "third", viaRDMA)
	if d.said("pair is back on rdma") != 1 {
		t.Errorf("decode said %v", d.logs.All())
	}
}

// If rdma is forced, each look-up waits for rdma to work for the pair. When the paths are back,
// the pair works again.
func TestForcedPairComesBack(t *testing.T) {
	leaktest.Check(t)
	n := coretest.NewNetwork()
	p, d := openFakeAgent(t, n, forced(RolePrefill, viaRDMA), nil), openFakeAgent(t, n, forced(RoleDecode, viaRDMA), nil)
	goesBy(t, p, d, "first", viaRDMA)
	n.Cut(p.ID(), d.ID(), errors.New("link down"))
	p.offer("cut", 1)
	d.load("cut", p.BootstrapAddress(), 1)
	d.want("cut", core.Unreachable, "link down", string(p.ID()), string(d.ID()))
	n.Mend(p.ID(), d.ID())
	goesBy(t, p, d, "second", viaRDMA)
}

func TestRestartedPeersConnectAgain(t *testing.T) {
	leaktest.Check(t)
	n := coretest.NewNetwork()
	cfg := testConfig(RolePrefill)
	cfg.BootstrapPort = freePort(t)
	p, d := openFakeAgent(t, n, cfg, nil), openFakeAgent(t, n, testConfig(RoleDecode), nil)
	goesBy(t, p, d, "first", viaRDMA)
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	p = openFakeAgent(t, n, cfg, nil)
	goesBy(t, p, d, "second", viaRDMA)
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	d = openFakeAgent(t, n, testConfig(RoleDecode), nil)
	goesBy(t, p, d, "third", viaRDMA)
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	p = openFakeAgent(t, n, cfg, errors.New("the device is gone")) // without rdma now
	goesBy(t, p, d, "fourth", viaTCP)
}

// unanswered is a bus on which the peer of one load is gone before its answer comes.
type unanswered struct {
	core.Bus
	id  string
	now chan struct{}
}

func (b *unanswered) Request(ctx context.Context, via core.Via, to core.AgentID, req *wire.Request) (*wire.Reply, error) {
	rep, err := b.Bus.Request(ctx, via, to, req)
	if req.Kind == wire.KindLoad && req.Load.TransferID == b.id {
		<-b.now
		return nil, core.ErrAbsent
	}
	return rep, err
}

// TestGoneAfterTheBytes: prefill is found gone by the answer to a load that has ended well. The next load looks for who is there now.
func TestGoneAfterTheBytes(t *testing.T) {
	leaktest.Check(t)
	n := coretest.NewNetwork()
	p, d := openFakeAgent(t, n, testConfig(RolePrefill), nil), openFakeAgent(t, n, testConfig(RoleDecode), nil)
	late := &unanswered{Bus: d.bus, id: "first", now: make(chan struct{})}
	setBus(d.Agent, late)
	goesBy(t, p, d, "first", viaRDMA)
	close(late.now)
	d.caches.Load().queue.wait(t.Context())
	goesBy(t, p, d, "second", viaRDMA)
}

// A prefill agent that gives a ticket for tcp only.
func TestTicketForOneTransport(t *testing.T) {
	leaktest.Check(t)
	n := coretest.NewNetwork()
	p, d := openFakeAgent(t, n, testConfig(RolePrefill), nil), openFakeAgent(t, n, testConfig(RoleDecode), nil)
	setBus(d.Agent, &changed{Bus: d.bus, reply: func(rep *wire.Reply) {
		if n := len(rep.Tickets); n > 0 && (n != 2 || rep.Tickets[0].Transport != viaRDMA || rep.Tickets[1].Transport != viaTCP || len(rep.Tickets[1].Ticket) < 16) {
			t.Errorf("tickets %v", rep.Tickets)
		}
		rep.Tickets = slices.DeleteFunc(rep.Tickets, func(t wire.Ticket) bool { return t.Transport == viaRDMA })
	}})
	goesBy(t, p, d, "t", viaTCP)
	if why := d.Stats().Pairs[0].Reason; !strings.Contains(why, "gives no ticket for rdma") {
		t.Errorf("the reason is %q", why)
	}
}

// TestIdAgainOnAnotherTransport: an id that was revoked on one transport is expected on another.
func TestIdAgainOnAnotherTransport(t *testing.T) {
	leaktest.Check(t)
	n := coretest.NewNetwork()
	p, d := openFakeAgent(t, n, testConfig(RolePrefill), nil), openFakeAgent(t, n, testConfig(RoleDecode), nil)
	var drop atomic.Bool
	setBus(d.Agent, &lossy{Bus: d.bus, lose: func(_ core.AgentID, req *wire.Request) bool {
		if req.Kind == wire.KindLoad && drop.CompareAndSwap(true, false) {
			n.Cut(p.ID(), d.ID(), errors.New("link down"))
			p.peers.mu.Lock()
			p.peers.drop(p.peers.byID[p.nameOf(d.side)]) // P asks for a hello: the load starts over
			p.peers.mu.Unlock()
		}
		return false
	}})
	goesBy(t, p, d, "first", viaRDMA)
	drop.Store(true)
	p.fill(1, 5)
	p.offer("again", 5)
	d.load("again", p.BootstrapAddress(), 9)
	if r := d.want("again", core.OK); r.Transport != viaTCP {
		t.Errorf("%+v", r)
	}
	p.want("again", core.OK)
	same(t, p.side, []kv.BlockID{5}, d.side, []kv.BlockID{9})
}
