package node

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/rig/nettest"
)

// byEach runs a test where auto is set, which means local between two agents of one host, and
// where tcp is forced.
func byEach(t *testing.T, test func(t *testing.T, transport, by string)) {
	for transport, by := range map[string]string{viaAuto: viaLocal, viaTCP: viaTCP} {
		t.Run(transport, func(t *testing.T) {
			leaktest.Check(t)
			test(t, transport, by)
		})
	}
}

func TestTransferInEachOrder(t *testing.T) { byEach(t, eachOrder) }

func eachOrder(t *testing.T, transport, by string) {
	p, d := open(t, forced(RolePrefill, transport)), open(t, forced(RoleDecode, transport))
	src, dst := []kv.BlockID{5, 6, 7, 1, 30}, []kv.BlockID{0, 9, 10, 11, 31}
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
		if want := uint64(layers * len(src) * blockBytes); r.Stats.Bytes != want || r.Blocks != len(src) || r.Transport != by {
			t.Fatalf("%s: %+v, want %d bytes in %d blocks by %s", name, r, want, len(src), by)
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
		id, ids := core.TransferID(fmt.Sprint("t", i)), [][]kv.BlockID{{kv.BlockID(i % numBlocks)}}
		loads = append(loads, core.LoadRequest{ID: id, From: core.Target{Bootstrap: p.BootstrapAddress()}, Selection: kv.Selection{Blocks: ids}})
		offers = append(offers, core.OfferRequest{ID: id, Selection: kv.Selection{Blocks: ids}})
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

// TestBurstFromManyDecoders: an ordinary burst is served, not refused.
func TestBurstFromManyDecoders(t *testing.T) {
	leaktest.Check(t)
	const decoders, each = 8, 200
	patient := func(role string) Config { // a loaded machine is no dead peer, and no engine that never offers
		cfg := testConfig(role)
		cfg.PeerTimeout, cfg.ConnectTimeout, cfg.EarlyLoad = Seconds(bound), Seconds(bound), Seconds(10*bound)
		return cfg
	}
	p := open(t, patient(RolePrefill))
	var ds []*side
	for range decoders {
		ds = append(ds, open(t, patient(RoleDecode)))
	}
	id := func(d, i int) core.TransferID { return core.TransferID(fmt.Sprint("d", d, "-", i)) }
	for n, d := range ds {
		var loads []core.LoadRequest
		for i := range each {
			loads = append(loads, core.LoadRequest{ID: id(n, i), From: core.Target{Bootstrap: p.BootstrapAddress()}, Selection: kv.Selection{Blocks: [][]kv.BlockID{{kv.BlockID(i % numBlocks)}}}})
		}
		if _, err := d.StartLoad(loads); err != nil {
			t.Fatal(err)
		}
	}
	for n := range ds {
		for i := range each {
			p.offer(id(n, i), kv.BlockID(i%numBlocks))
		}
	}
	for n, d := range ds {
		for i := range each {
			d.want(id(n, i), core.OK)
		}
	}
}

func TestConfiguredClusterInsteadOfEmbeddedServer(t *testing.T) {
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
	same(t, p, []kv.BlockID{1, 2}, d, []kv.BlockID{8, 9})
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
