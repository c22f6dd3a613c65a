package node

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/freeport"
	"github.com/kvconn/kvconn/internal/leaktest"
	"github.com/kvconn/kvconn/internal/nettest"
)

const (
	layers     = 3
	numBlocks  = 32
	blockBytes = 4096
	// bound is how long anything may take on a loaded machine.
	bound = 30 * time.Second
)

// side is an agent over a small cache.
type side struct {
	*Agent
	t     testing.TB
	cache []byte
	seen  map[core.TransferID]core.Report
}

func regions(cache []byte) []core.Region {
	out := make([]core.Region, layers)
	for l := range out {
		out[l] = core.Region{Name: fmt.Sprint("layer.", l), Base: uint64(uintptr(unsafe.Pointer(&cache[l*numBlocks*blockBytes]))),
			BlockStride: blockBytes, BlockBytes: blockBytes, NumBlocks: numBlocks}
	}
	return out
}

func testConfig(role string) Config {
	c := DefaultConfig()
	c.EngineID, c.Role = "engine-"+role, role
	c.BootstrapHost, c.BootstrapPort, c.TCPListenHost = "127.0.0.1", 0, "127.0.0.1"
	c.PeerTimeout = Seconds(1500 * time.Millisecond)
	return c
}

func open(t testing.TB, cfg Config) *side {
	t.Helper()
	a, err := Open(cfg, Options{})
	if err != nil {
		t.Fatal(err)
	}
	s := &side{Agent: a, t: t, cache: make([]byte, layers*numBlocks*blockBytes), seen: map[core.TransferID]core.Report{}}
	t.Cleanup(func() { _ = a.Close() })
	if err := a.RegisterKVCaches(regions(s.cache)); err != nil {
		t.Fatal(err)
	}
	return s
}

// block is one block's bytes in a layer.
func (s *side) block(layer int, id core.BlockID) []byte {
	off := (layer*numBlocks + int(id)) * blockBytes
	return s.cache[off : off+blockBytes]
}

func (s *side) fill(salt byte, ids ...core.BlockID) {
	for l := range layers {
		for pos, id := range ids {
			for i, b := 0, s.block(l, id); i < len(b); i++ {
				b[i] = salt + byte(l*31+pos*7+i*13)
			}
		}
	}
}

func (s *side) offer(id core.TransferID, ids ...core.BlockID) {
	s.t.Helper()
	if _, err := s.Offer([]core.OfferRequest{{ID: id, Selection: core.Selection{Blocks: [][]core.BlockID{ids}}}}); err != nil {
		s.t.Fatal(err)
	}
}

func (s *side) load(id core.TransferID, from string, ids ...core.BlockID) {
	s.t.Helper()
	if _, err := s.StartLoad([]core.LoadRequest{{ID: id, From: core.Target{Bootstrap: from}, Selection: core.Selection{Blocks: [][]core.BlockID{ids}}}}); err != nil {
		s.t.Fatal(err)
	}
}

// report waits for one transfer's report and checks that none comes twice.
func (s *side) report(id core.TransferID) core.Report {
	s.t.Helper()
	timeout := time.NewTimer(bound)
	defer timeout.Stop()
	for {
		for _, r := range s.GetFinished() {
			if old, twice := s.seen[r.ID]; twice {
				s.t.Fatalf("second report of %q: %+v after %+v", r.ID, r, old)
			}
			s.seen[r.ID] = r
		}
		if r, ok := s.seen[id]; ok {
			return r
		}
		select {
		case <-s.Finished():
		case <-timeout.C:
			s.t.Fatalf("no report of %q within %v: %+v", id, bound, s.Stats())
		}
	}
}

func (s *side) want(id core.TransferID, code core.Code, says ...string) core.Report {
	s.t.Helper()
	r := s.report(id)
	if r.Code != code {
		s.t.Fatalf("%s %q ended with %v (%s), want %v", r.Side, id, r.Code, r.Reason, code)
	}
	for _, part := range says {
		if !strings.Contains(r.Reason, part) {
			s.t.Fatalf("%s %q: reason %q does not name %q", r.Side, id, r.Reason, part)
		}
	}
	return r
}

// until polls a condition of another process or goroutine.
func until(t testing.TB, what string, f func() bool) {
	t.Helper()
	deadline := time.Now().Add(bound)
	for !f() {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", bound, what)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

func (s *side) knows(offers int) {
	s.t.Helper()
	until(s.t, fmt.Sprintf("prefill knows %d transfers", offers), func() bool { return s.Stats().OffersUnderWay == offers })
}

func same(t testing.TB, p *side, src []core.BlockID, d *side, dst []core.BlockID) {
	t.Helper()
	for l := range layers {
		for i := range src {
			if !bytes.Equal(p.block(l, src[i]), d.block(l, dst[i])) {
				t.Fatalf("layer %d: block %d of decode differs from block %d of prefill", l, dst[i], src[i])
			}
		}
	}
}

func TestTransferInEachOrder(t *testing.T) {
	leaktest.Check(t)
	p, d := open(t, testConfig(RolePrefill)), open(t, testConfig(RoleDecode))
	src, dst := []core.BlockID{5, 6, 7, 1, 30}, []core.BlockID{0, 9, 10, 11, 31}
	orders := map[string]func(id core.TransferID){
		"prefill first": func(id core.TransferID) { p.offer(id, src...); d.load(id, p.BootstrapAddress(), dst...) },
		"decode first":  func(id core.TransferID) { d.load(id, p.BootstrapAddress(), dst...); p.knows(1); p.offer(id, src...) },
		"announced": func(id core.TransferID) {
			announce(t, p, id)
			d.load(id, p.BootstrapAddress(), dst...)
			p.offer(id, src...)
		},
		"early load, announced": func(id core.TransferID) {
			d.load(id, p.BootstrapAddress(), dst...)
			p.knows(1)
			announce(t, p, id)
			p.offer(id, src...)
		},
	}
	salt := byte(0)
	for name, order := range orders {
		salt += 3
		p.fill(salt, src...)
		id := core.TransferID(name)
		order(id)
		r := d.want(id, core.OK)
		if want := uint64(layers * len(src) * blockBytes); r.Stats.Bytes != want || r.Blocks != len(src) || r.Transport != "tcp" {
			t.Fatalf("%s: %+v, want %d bytes in %d blocks by tcp", name, r, want, len(src))
		}
		p.want(id, core.OK)
		same(t, p, src, d, dst)
	}
	if s := p.Stats(); s.Outstanding != 0 || s.OffersUnderWay != 0 || s.Offers != 4 {
		t.Fatalf("prefill is left with %+v", s)
	}
	if s := d.Stats(); s.Outstanding != 0 || s.LoadsUnderWay != 0 || s.Loads != 4 {
		t.Fatalf("decode is left with %+v", s)
	}
}

func announce(t testing.TB, p *side, ids ...core.TransferID) {
	t.Helper()
	if _, err := p.Announce(ids); err != nil {
		t.Fatal(err)
	}
}

func TestPrefillRestartedOnItsPort(t *testing.T) {
	leaktest.Check(t)
	cfg := testConfig(RolePrefill)
	p, d := open(t, cfg), open(t, testConfig(RoleDecode))
	address := p.BootstrapAddress()
	cfg.BootstrapPort = portOf(t, address)
	for round := range 3 {
		id := core.TransferID(fmt.Sprint("round-", round))
		p.fill(byte(round), 1)
		p.offer(id, 1)
		d.load(id, address, 2)
		d.want(id, core.OK)
		same(t, p, []core.BlockID{1}, d, []core.BlockID{2})
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
		cfg.EngineID = fmt.Sprint("engine-", round%2) // the same one or another
		p = open(t, cfg)
	}
}

func portOf(t testing.TB, address string) int {
	t.Helper()
	_, port, err := net.SplitHostPort(strings.TrimPrefix(address, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	var n int
	fmt.Sscan(port, &n)
	return n
}

func TestPeerThatForgotUsIsMetAgain(t *testing.T) {
	leaktest.Check(t)
	p, d := open(t, testConfig(RolePrefill)), open(t, testConfig(RoleDecode))
	for i := range 2 {
		id := core.TransferID(fmt.Sprint("t", i))
		p.fill(byte(i), 4)
		p.offer(id, 4)
		d.load(id, p.BootstrapAddress(), 3)
		d.want(id, core.OK)
		same(t, p, []core.BlockID{4}, d, []core.BlockID{3})
		p.peers.mu.Lock()
		p.peers.drop(p.peers.byID[d.ID()])
		p.peers.mu.Unlock()
	}
}

func TestCloseInEveryState(t *testing.T) {
	leaktest.Check(t)
	for _, closer := range []string{"prefill", "decode"} {
		p, d := open(t, testConfig(RolePrefill)), open(t, testConfig(RoleDecode))
		p.offer("ready", 1)
		d.load("early", p.BootstrapAddress(), 1)
		p.knows(2)
		d.load("announced", p.BootstrapAddress(), 2)
		p.knows(3)
		announce(t, p, "announced")
		first, second := p, d
		if closer == "decode" {
			first, second = d, p
		}
		if err := first.Close(); err != nil {
			t.Fatal(err)
		}
		if first == p {
			p.want("ready", core.Closed)
			for _, id := range []core.TransferID{"early", "announced"} {
				if r := d.report(id); r.Code != core.Closed && r.Code != core.PeerLost {
					t.Fatalf("%q ended with %v: %s", id, r.Code, r.Reason)
				}
			}
		} else {
			d.want("early", core.Closed)
			d.want("announced", core.Closed)
			p.offer("announced", 2) // D has gone: the blocks come back at once
			p.want("announced", core.PeerLost, "closed")
		}
		if err := second.Close(); err != nil {
			t.Fatal(err)
		}
		for _, err := range []error{first.Close(), second.RegisterKVCaches(nil)} {
			if err == nil {
				t.Fatal("a call on a closed agent went through")
			}
		}
	}
}

func TestThousandsOfLoadsAtOnce(t *testing.T) {
	leaktest.Check(t)
	pc, dc := testConfig(RolePrefill), testConfig(RoleDecode)
	pc.MaxTransfers, dc.MaxTransfers = 2000, 2000
	dc.PeerTimeout = Seconds(20 * time.Second) // a machine with much else to do is no death
	p, d := open(t, pc), open(t, dc)
	var loads []core.LoadRequest
	var offers []core.OfferRequest
	for i := range 2500 {
		id, ids := core.TransferID(fmt.Sprint("t", i)), [][]core.BlockID{{core.BlockID(i % numBlocks)}}
		loads = append(loads, core.LoadRequest{ID: id, From: core.Target{Bootstrap: p.BootstrapAddress()}, Selection: core.Selection{Blocks: ids}})
		offers = append(offers, core.OfferRequest{ID: id, Selection: core.Selection{Blocks: ids}})
	}
	n, err := d.StartLoad(loads)
	if n != 2000 || err == nil || !strings.Contains(err.Error(), "max_transfers") {
		t.Fatalf("accepted %d loads with error %v, want 2000 and one that names max_transfers", n, err)
	}
	if _, err := p.Offer(offers[:2000]); err != nil {
		t.Fatal(err)
	}
	for i := range 2000 {
		d.want(loads[i].ID, core.OK)
		p.want(loads[i].ID, core.OK)
	}
}

func TestPrefillKilledDuringLoads(t *testing.T) {
	leaktest.Check(t)
	address, to := prefillProcess(t, 0, "")
	d := open(t, testConfig(RoleDecode))
	d.load("announced", address, 1)
	d.load("offered", address, 2, 3)
	d.want("offered", core.OK)
	if b := d.block(0, 2); b[0] != 7 || b[blockBytes-1] != 7 {
		t.Fatal("the loaded block has wrong bytes")
	}
	until(t, "the load waits at prefill", func() bool { return d.Stats().LoadsWaiting == 1 })
	to.kill()
	d.want("announced", core.PeerLost, "is gone")

	// The engine comes back on its port: the next request works.
	again, _ := prefillProcess(t, portOf(t, address), "")
	if again != address {
		t.Fatalf("restarted at %s, was at %s", again, address)
	}
	d.seen = map[core.TransferID]core.Report{}
	d.load("offered", address, 4, 5)
	d.want("offered", core.OK)
	if b := d.block(0, 4); b[0] != 7 {
		t.Fatal("the block loaded after the restart has wrong bytes")
	}
}

// TestBlipBesideNewLoads: while the control plane is away for a moment, a load
// that waits for a living P must not end because another one begins.
func TestBlipBesideNewLoads(t *testing.T) {
	leaktest.Check(t)
	pc, dc := testConfig(RolePrefill), testConfig(RoleDecode)
	dc.PeerTimeout, dc.ConnectTimeout = Seconds(6*time.Second), Seconds(bound)
	p, d := open(t, pc), open(t, dc)
	way := nettest.Forward(t, strings.TrimPrefix(p.BootstrapAddress(), "http://"))
	address := "http://" + way.Addr()
	p.fill(3, 1, 2)
	d.load("waits", address, 1)
	until(t, "the load waits at prefill", func() bool { return d.Stats().LoadsWaiting == 1 })
	announce(t, p, "waits")
	way.Shut(true)
	way.Cut()
	d.load("new", address, 2)
	began := time.Now() // longer than the time between two renewals, shorter than the bound
	until(t, "a renewal was due", func() bool { return time.Since(began) > 5*time.Second/2 })
	way.Shut(false)
	p.offer("new", 2)
	d.want("new", core.OK)
	p.offer("waits", 1)
	d.want("waits", core.OK)
	same(t, p, []core.BlockID{1, 2}, d, []core.BlockID{1, 2})
}

// TestBurstFromManyDecoders: an ordinary burst is served, not refused.
func TestBurstFromManyDecoders(t *testing.T) {
	leaktest.Check(t)
	const decoders, each = 8, 200
	p := open(t, testConfig(RolePrefill))
	var ds []*side
	for range decoders {
		cfg := testConfig(RoleDecode)
		cfg.PeerTimeout = Seconds(bound)
		ds = append(ds, open(t, cfg))
	}
	id := func(d, i int) core.TransferID { return core.TransferID(fmt.Sprint("d", d, "-", i)) }
	for n, d := range ds {
		var loads []core.LoadRequest
		for i := range each {
			loads = append(loads, core.LoadRequest{ID: id(n, i), From: core.Target{Bootstrap: p.BootstrapAddress()}, Selection: core.Selection{Blocks: [][]core.BlockID{{core.BlockID(i % numBlocks)}}}})
		}
		if _, err := d.StartLoad(loads); err != nil {
			t.Fatal(err)
		}
	}
	for n := range ds {
		for i := range each {
			p.offer(id(n, i), core.BlockID(i%numBlocks))
		}
	}
	for n, d := range ds {
		for i := range each {
			d.want(id(n, i), core.OK)
		}
	}
}

// TestStoppedPrefillIsNoticedThroughManyLoads: neither the load that waits nor the
// many that are under way find out one after the other that P is silent.
func TestStoppedPrefillIsNoticedThroughManyLoads(t *testing.T) {
	leaktest.Check(t)
	const loads = 200
	cfg := testConfig(RoleDecode)
	cfg.NATSURL = nettest.NewNATS(t).URL() // the bus lives on when P stops
	address, to := prefillProcess(t, 0, cfg.NATSURL)
	d := open(t, cfg)
	d.load("announced", address, 1)
	until(t, "the load waits at prefill", func() bool { return d.Stats().LoadsWaiting == 1 })
	to.stop()
	for i := range loads {
		d.load(core.TransferID(fmt.Sprint("more-", i)), address, 2)
	}
	d.want("announced", core.PeerLost, "gone")
	for i := range loads {
		if r := d.report(core.TransferID(fmt.Sprint("more-", i))); r.Code == core.OK {
			t.Fatalf("%+v", r)
		}
	}
}

func TestGivenClusterInsteadOfEmbeddedServer(t *testing.T) {
	leaktest.Check(t)
	pc, dc := testConfig(RolePrefill), testConfig(RoleDecode)
	pc.NATSURL = nettest.NewNATS(t).URL()
	dc.NATSURL, pc.AdvertiseHost = pc.NATSURL, "127.0.0.1"
	p, d := open(t, pc), open(t, dc)
	p.fill(9, 1, 2)
	p.offer("t", 1, 2)
	d.load("t", p.BootstrapAddress(), 8, 9)
	d.want("t", core.OK)
	p.want("t", core.OK)
	same(t, p, []core.BlockID{1, 2}, d, []core.BlockID{8, 9})
}

func freePort(t testing.TB) int {
	t.Helper()
	ports, err := freeport.Take(1)
	if err != nil {
		t.Fatal(err)
	}
	return ports[0]
}

// TestBootstrapPortSpeaksToRouters: one port serves /query and the control plane.
func TestBootstrapPortSpeaksToRouters(t *testing.T) {
	leaktest.Check(t)
	p := open(t, testConfig(RolePrefill))
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: bound}
	for path, want := range map[string]string{
		"/query":  fmt.Sprintf(`{"0":{"engine_id":"engine-prefill","worker_addr":{"0":{"0":"%s"}}}}`, p.BootstrapAddress()),
		"/health": `{"status":"ok"}`,
	} {
		res, err := client.Get(p.BootstrapAddress() + path)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(res.Body)
		res.Body.Close()
		if got := strings.TrimSpace(string(body)); res.StatusCode != 200 || got != want {
			t.Fatalf("%s: %d %s, want %s", path, res.StatusCode, got, want)
		}
	}
}

func TestRolesAndOrderOfCalls(t *testing.T) {
	leaktest.Check(t)
	a, err := Open(testConfig(RoleDecode), Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	if _, err := a.StartLoad([]core.LoadRequest{{ID: "x", From: core.Target{Bootstrap: "http://h:1"}}}); err == nil || !strings.Contains(err.Error(), "register_kv_caches") {
		t.Fatalf("load before registration: %v", err)
	}
	if err := a.RegisterKVCaches(nil); err == nil {
		t.Fatal("no regions were accepted")
	}
	cache := make([]byte, layers*numBlocks*blockBytes)
	if err := a.RegisterKVCaches(regions(cache)); err != nil {
		t.Fatal(err)
	}
	if err := a.RegisterKVCaches(regions(cache)); err == nil {
		t.Fatal("registered twice")
	}
	if _, err := a.Offer(nil); err == nil || !strings.Contains(err.Error(), RoleDecode) {
		t.Fatalf("offer on a decode agent: %v", err)
	}
}

// BenchmarkLoadToFirstByte is D's load of one small block that P has ready, from
// the call to the report. Compare it with natsbus's BenchmarkRequest.
func BenchmarkLoadToFirstByte(b *testing.B) {
	p, d := open(b, testConfig(RolePrefill)), open(b, testConfig(RoleDecode))
	id := func(i int) core.TransferID { return core.TransferID(fmt.Sprint("t", i)) }
	for i := range b.N {
		if i%1000 == 0 {
			b.StopTimer()
			for k := i; k < min(i+1000, b.N); k++ {
				p.offer(id(k), 1)
			}
			p.GetFinished()
			b.StartTimer()
		}
		d.load(id(i), p.BootstrapAddress(), 2)
		d.want(id(i), core.OK)
	}
}

// setBus puts b in the place of an agent's bus.
func setBus(a *Agent, b core.Bus) {
	a.bus, a.ask.bus, a.caches.Load().performer.finder.bus = b, b, b
}
