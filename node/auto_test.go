package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/local"
	"github.com/kvconn/kvconn/rig/coretest"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/wire"
)

// TestAuto: auto takes local between two agents of one host, and says that it does. A list takes what
// it names.
func TestAuto(t *testing.T) {
	for _, c := range []struct{ p, d, by string }{
		{"auto", "auto", viaLocal},
		{"auto", "local", viaLocal},
		{"tcp,local", "auto", viaLocal}, // the decode engine's order counts
		{"auto", "tcp,local", viaTCP},
		{"auto", "rdma,tcp", viaTCP},
		{"rdma,tcp", "auto", viaTCP},
	} {
		t.Run(c.p+" "+c.d, func(t *testing.T) {
			leaktest.Check(t)
			p, _ := openLogged(t, forced(RolePrefill, c.p))
			d, logs := openLogged(t, forced(RoleDecode, c.d))
			for i := range 3 {
				id := core.TransferID(fmt.Sprint("t", i))
				transfer(t, p, d, id, p.BootstrapAddress())
			}
			s := d.Stats()
			if len(s.Pairs) != 1 || s.Pairs[0].Transport != c.by || s.Pairs[0].Transfers[c.by] != 3 || s.Transports[c.by].Loads != 3 || p.Stats().Transports[c.by].Offers != 3 {
				t.Fatalf("decode counts %+v", s)
			}
			said := ""
			for _, e := range logs.All() {
				if strings.HasPrefix(e.Message, "pair ") {
					said += e.Message + "\n"
				}
			}
			want := "pair goes over " + c.by + "\n"
			if c.p == "rdma,tcp" { // on this host, and without local
				why := "local: prefill agent " + string(p.ID()) + " of engine \"engine-prefill\" has none"
				want = "pair goes over tcp: " + why + "\n"
				if s.Pairs[0].Reason != why || s.Pairs[0].Fallbacks[why] != 3 || len(s.Transports[viaLocal].Fallbacks) != 1 {
					t.Errorf("decode counts %+v", s)
				}
			}
			if said != want {
				t.Errorf("decode said %q, want %q", said, want)
			}
		})
	}
}

// TestOrderOfAuto: where a pair can use all transports, auto takes local; rdma while local is broken; tcp while both are. Each is taken
// again when it is back. A list takes its own order.
func TestOrderOfAuto(t *testing.T) {
	leaktest.Check(t)
	on := map[string]*coretest.Network{viaLocal: coretest.NewNetwork(), viaRDMA: coretest.NewNetwork()}
	begins := func(role, transport string) *fakeAgent {
		cache := make([]byte, layers*numBlocks*blockBytes)
		r := fakeAgentOn(t, on, forced(role, transport), nil, cache)
		if err := r.RegisterKVCaches(regions(cache)); err != nil {
			t.Fatal(err)
		}
		return r
	}
	p, d := begins(RolePrefill, viaAuto), begins(RoleDecode, viaAuto)
	goesBy(t, p, d, "all", viaLocal)
	on[viaLocal].Cut(p.ID(), d.ID(), errors.New("no memory"))
	goesBy(t, p, d, "no local", viaRDMA)
	on[viaRDMA].Cut(p.ID(), d.ID(), errors.New("no port"))
	goesBy(t, p, d, "neither", viaTCP)
	for _, name := range []string{viaRDMA, viaLocal} {
		on[name].Mend(p.ID(), d.ID())
		ctx, cancel := context.WithTimeout(t.Context(), bound)
		err := d.fakes[name].Signaller.Usable(ctx, p.ID())
		cancel()
		if err != nil {
			t.Fatal(err)
		}
		goesBy(t, p, d, core.TransferID("back on "+name), name)
	}
	for _, line := range []string{"pair goes over local", "pair goes on over rdma: local: no memory", "pair goes on over tcp: local: no memory; rdma: no port",
		"pair is back on rdma: local: no memory", "pair is back on local"} {
		if d.said(line) != 1 {
			t.Errorf("%q was said %d times: %v", line, d.said(line), d.logs.All())
		}
	}
	goesBy(t, p, begins(RoleDecode, "rdma,local,tcp"), "a list", viaRDMA)
}

// TestListOfTransports: each name once, and no auto within.
func TestListOfTransports(t *testing.T) {
	for value, want := range map[string]string{"auto": "local rdma tcp", "local": "local", "rdma,tcp": "rdma tcp", "tcp,local,rdma": "tcp local rdma",
		"": "", "tcp,tcp": "", "auto,tcp": "", "tcp,": "", "tcp, rdma": "", "pigeon": ""} {
		names, err := Transports(value)
		if got := strings.Join(names, " "); got != want || (err != nil) != (want == "") {
			t.Errorf("%q stands for %q, %v, want %q", value, got, err, want)
		}
		cfg := forced(RoleDecode, value)
		if err := cfg.Check(); (err != nil) != (want == "") || err != nil && (!errors.Is(err, core.ErrInvalid) || !strings.Contains(err.Error(), `"transport"`)) {
			t.Errorf("the check of %q says %v", value, err)
		}
	}
}

// older is a bus on which prefill agents describe themselves in other words.
type older struct {
	core.Bus
	change func(*wire.Agent)
}

func (b *older) Lookup(ctx context.Context, t core.Target) (*wire.Agent, core.Via, error) {
	info, via, err := b.Bus.Lookup(ctx, t)
	if err == nil {
		other := *info
		info = &other
		b.change(info)
	}
	return info, via, err
}

// TestOlderPrefill: an agent that does not know of local, or that says it is on another host, is
// gone to by tcp, and nobody calls that a fallback. One on this host which lacks it gives its reason.
func TestOlderPrefill(t *testing.T) {
	for what, c := range map[string]struct {
		host  string
		lacks []wire.Lack
		why   string // that counts as a fallback
	}{
		"older":         {},
		"elsewhere":     {host: "another boot id", lacks: []wire.Lack{{Transport: viaLocal, Reason: "seccomp"}}},
		"cannot":        {host: local.Host(), lacks: []wire.Lack{{Transport: viaLocal, Reason: "seccomp"}}, why: "has none: seccomp"},
		"does not want": {host: local.Host(), why: "has none"},
	} {
		t.Run(what, func(t *testing.T) {
			leaktest.Check(t)
			n := coretest.NewNetwork()
			p := openFakeAgent(t, n, forced(RolePrefill, viaTCP), nil)
			d := openFakeAgent(t, n, forced(RoleDecode, viaLocal+","+viaTCP), nil)
			setBus(d.Agent, &older{d.bus, func(a *wire.Agent) { a.Host, a.Lacks = c.host, c.lacks }})
			goesBy(t, p, d, "t", viaTCP)
			s := d.Stats()
			if len(s.Pairs[0].Fallbacks) != len(s.Transports[viaLocal].Fallbacks) || len(s.Pairs[0].Fallbacks) != min(1, len(c.why)) || !strings.HasSuffix(s.Pairs[0].Reason, c.why) || (s.Pairs[0].Reason == "") != (c.why == "") {
				t.Errorf("decode counts %+v", s)
			}
			if got := d.said("pair goes over tcp: local: "); got != min(1, len(c.why)) {
				t.Errorf("decode said %v", d.logs.All())
			}
		})
	}
}

// TestLackOfLocal: what keeps an agent from local is a reason to do without it, and an error where no
// other is left.
func TestLackOfLocal(t *testing.T) {
	leaktest.Check(t)
	n, lack := coretest.NewNetwork(), errors.New("a region lies in device memory, which this transport does not reach")
	cfg := forced(RoleDecode, viaLocal+","+viaTCP)
	cfg.RDMADevices = []string{"mlx5_0"} // somebody wants rdma, not local
	d := openFakeAgent(t, n, cfg, lack)
	if s := d.Stats(); s.Transport != viaTCP || s.Transports[viaLocal].Available || s.Transports[viaLocal].Reason != lack.Error() {
		t.Errorf("decode counts %+v", s)
	}
	if d.said("going on without local: a region lies in device memory") != 1 || d.logs.FilterLevelExact(1).Len() != 0 {
		t.Errorf("decode said %v", d.logs.All())
	}
	if _, err := tryFakeAgent(t, n, forced(RoleDecode, viaLocal), lack); !errors.Is(err, ErrTransport) || !errors.Is(err, lack) {
		t.Error(err)
	}
	if _, err := tryFakeAgent(t, n, forced(RoleDecode, viaLocal+","+viaRDMA), lack); !errors.Is(err, ErrTransport) || !strings.Contains(err.Error(), "no local: "+lack.Error()) {
		t.Error(err)
	}
}

// slow is a transport that comes to no end of its setup.
type slow struct {
	fakeTransport
	name  string
	until *[]time.Time // how long each was waited for
}

func (s *slow) Name() string { return s.name }

func (s *slow) Usable(ctx context.Context, _ core.AgentID) error {
	end, _ := ctx.Deadline()
	*s.until = append(*s.until, end)
	<-ctx.Done()
	return ctx.Err()
}

// TestOneWaitForAll: the first transfer waits for better transports together as long as it would for one.
func TestOneWaitForAll(t *testing.T) {
	cfg := testConfig(RoleDecode)
	cfg.ConnectTimeout = Seconds(30 * time.Millisecond)
	tr := newTransports("d", &cfg, zap.NewNop(), nil, nil, nil)
	var until []time.Time
	tr.add(&slow{name: viaLocal, until: &until})
	tr.add(&slow{name: viaRDMA, until: &until})
	tr.add(&fakeTransport{})
	tr.pair("p").connected = map[string]bool{viaLocal: true, viaRDMA: true, viaTCP: true}
	if err := tr.settle(t.Context(), "p"); err != nil {
		t.Fatal(err)
	}
	if len(until) == 0 || slices.ContainsFunc(until, func(end time.Time) bool { return !end.Equal(until[0]) }) {
		t.Errorf("the transports were waited for until %v", until)
	}
	if p := tr.pairs["p"]; p.now[core.SideLoad] != viaTCP || !strings.HasPrefix(p.why, "local: ") || !strings.Contains(p.why, "; rdma: ") {
		t.Errorf("the pair's transport is %q: %s", p.now[core.SideLoad], p.why)
	}
}

// TestPendingTransportStands: if one transport of a pair breaks while another is being set up, the agent does not look the peer up.
func TestPendingTransportStands(t *testing.T) {
	cfg := testConfig(RoleDecode)
	tr := newTransports("d", &cfg, zap.NewNop(), nil, nil, nil)
	var until []time.Time
	tr.add(&fakeTransport{})
	tr.add(&slow{name: viaRDMA, until: &until})
	tr.pair("p").connected = map[string]bool{viaRDMA: true, viaTCP: true}
	if tr.connectionLost("p", viaTCP) {
		t.Error("the peer is looked up while rdma is set up")
	}
}
