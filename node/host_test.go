package node

import (
	"encoding/json"
	"fmt"
	"net/http"
	"reflect"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// hostConfig is of a process that has an engine's bootstrap port and none of its
// ranks.
func hostConfig(port int) Config {
	c := testConfig(RoleBootstrap)
	c.EngineID, c.BootstrapPort = "", port
	return c
}

func openHost(t *testing.T, port int) *Agent {
	t.Helper()
	h, err := Open(hostConfig(port), Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = h.Close() })
	return h
}

// joins makes all ranks of an engine join, the first too.
func joins(address string, change func(c *Config)) func(c *Config) {
	return func(c *Config) {
		if c.Role == RolePrefill {
			c.BootstrapJoin = address
		}
		if change != nil {
			change(c)
		}
	}
}

// TestHostWithoutCaches: engines whose ranks are all other processes than the port's.
func TestHostWithoutCaches(t *testing.T) {
	for name, c := range map[string]struct{ p, d kv.Ranks }{
		"one rank":        {kv.One, kv.One},
		"tp 2 to 1":       {kv.Ranks{TP: 2, PP: 1}, kv.One},
		"tp 1 to 2":       {kv.One, kv.Ranks{TP: 2, PP: 1}},
		"tp 2 pp 2 to 2":  {kv.Ranks{TP: 2, PP: 2}, kv.Ranks{TP: 2, PP: 1}},
		"pp 2 to tp 1 pp": {kv.Ranks{TP: 1, PP: 2}, kv.Ranks{TP: 1, PP: 2}},
	} {
		t.Run(name, func(t *testing.T) {
			leaktest.Check(t)
			m := model{4, 4, false}
			h := openHost(t, 0)
			address := h.BootstrapAddress()
			if got := query(t, address); len(got) != 0 {
				t.Fatalf("before any rank /query has %v", got)
			}
			ps, joined := m.engine(t, RolePrefill, c.p, joins(address, nil))
			if joined != address {
				t.Fatalf("a rank that joined %s says that it is at %s", address, joined)
			}
			if got, want := shown(t, address), map[string]int{"0 engine-prefill": c.p.TP * c.p.PP}; !reflect.DeepEqual(got, want) {
				t.Fatalf("/query has %v, want %v", got, want)
			}
			ds, _ := m.engine(t, RoleDecode, c.d, nil)
			for i, id := range []core.TransferID{"a", "b"} {
				carry(t, id, i, ps, ds, from(address, "engine-prefill"))
				carry(t, id+"2", i, ps, ds, from(address, "")) // the only engine there
			}
			idle(t, ps, ds)
		})
	}
}

// TestHostHasNoHalf: it offers, claims and loads nothing, and says so.
func TestHostHasNoHalf(t *testing.T) {
	leaktest.Check(t)
	h := openHost(t, 0)
	cache := make([]byte, layers*numBlocks*blockBytes)
	for what, f := range map[string]func() error{
		"register_kv_caches": func() error { return h.RegisterKVCaches(regions(cache)) },
		"announce":           func() error { _, err := h.Announce([]core.TransferID{"a"}); return err },
		"offer":              func() error { _, err := h.Offer([]core.OfferRequest{{ID: "a"}}); return err },
		"claim":              func() error { _, err := h.Claim([]core.ClaimRequest{{ID: "a"}}); return err },
		"start_load":         func() error { _, err := h.StartLoad([]core.LoadRequest{{ID: "a"}}); return err },
	} {
		if err := f(); err == nil || !strings.Contains(err.Error(), what) || !strings.Contains(err.Error(), `"bootstrap"`) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if got := h.Stats().Bootstrap; got != h.BootstrapAddress() {
		t.Errorf("Stats name %q, want %q", got, h.BootstrapAddress())
	}
	resp, err := http.Get(h.BootstrapAddress() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer http.DefaultClient.CloseIdleConnections()
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Errorf("/metrics answers %s", resp.Status)
	}
	// Nobody is its peer: it is not found as an engine.
	d := open(t, testConfig(RoleDecode))
	d.load("a", h.BootstrapAddress(), 1)
	d.want("a", core.Unreachable, "nothing is")
}

// TestHostOfDPRanks: the dp ranks of one port say how many they are.
func TestHostOfDPRanks(t *testing.T) {
	leaktest.Check(t)
	m, two := model{2, 4, false}, kv.Ranks{TP: 2, PP: 1}
	address := openHost(t, 0).BootstrapAddress()
	engines := map[int][]*rank{}
	for _, dp := range []int{1, 0} {
		engines[dp], _ = m.engine(t, RolePrefill, two, joins(address, func(c *Config) {
			c.DPSize, c.DPRank, c.EngineID = 2, dp, fmt.Sprint("dp", dp)
		}))
	}
	ds, _ := m.engine(t, RoleDecode, kv.One, nil)
	carry(t, "a", 1, engines[0], ds, from(address, "dp0"))
	carry(t, "b", 2, engines[1], ds, from(address, "dp1"))
	third := core.Target{Bootstrap: address, DPRank: 1} // by its number
	carry(t, "c", 3, engines[1], ds, third)
	idle(t, engines[0], engines[1], ds)

	for what, c := range map[string]struct {
		change func(c *Config)
		says   []string
	}{
		"another dp_size":        {func(c *Config) { c.DPSize, c.DPRank, c.EngineID = 3, 2, "dp2" }, []string{"dp_size 3", "has 2"}},
		"another's dp rank":      {func(c *Config) { c.DPSize, c.DPRank, c.EngineID = 2, 1, "new" }, []string{`"new"`, `"dp1"`}},
		"another's engine_id":    {func(c *Config) { c.DPSize, c.DPRank, c.EngineID = 2, 0, "dp1" }, []string{`"dp1" dp0`, "engine_id of its own"}},
		"other sizes in one":     {func(c *Config) { c.DPSize, c.DPRank, c.EngineID, c.TPSize = 2, 0, "dp0", 4 }, []string{"tp 4 pp 1", "tp 2 pp 1"}},
		"another number of them": {func(c *Config) { c.EngineID = "dp0" }, []string{"dp_size 1", "has 2"}},
	} {
		t.Run(what, func(t *testing.T) {
			m.refused(t, c.says, func() Config {
				cfg := rankConfig(RolePrefill, two, kv.Rank{TP: 1}, address)
				c.change(&cfg)
				return cfg
			})
		})
	}
	if got, want := shown(t, address), map[string]int{"0 dp0": 2, "1 dp1": 2}; !reflect.DeepEqual(got, want) {
		t.Fatalf("/query has %v, want %v", got, want)
	}
}

// TestHostComesLastAndAgain: ranks wait for the port, and are known again when it
// was restarted.
func TestHostComesLastAndAgain(t *testing.T) {
	leaktest.Check(t)
	m, two := model{2, 4, false}, kv.Ranks{TP: 2, PP: 1}
	port := freePort(t)
	address := fmt.Sprint("http://127.0.0.1:", port)
	opened := make(chan *rank)
	for tp := range two.TP {
		go func() {
			var r *rank
			defer func() { opened <- r }() // also when it fails
			cfg := rankConfig(RolePrefill, two, kv.Rank{TP: tp}, address)
			cfg.BootstrapJoin = address
			r = m.open(t, cfg)
		}()
	}
	h := openHost(t, port)
	ps := []*rank{<-opened, <-opened}
	if ps[0] == nil || ps[1] == nil {
		t.FailNow()
	}
	ds, _ := m.engine(t, RoleDecode, kv.One, nil)
	at := from(address, "engine-prefill")
	carry(t, "a", 1, ps, ds, at)
	all := map[string]int{"0 engine-prefill": 2}
	for i := range 2 {
		if err := h.Close(); err != nil {
			t.Fatal(err)
		}
		h = openHost(t, port)
		until(t, "both ranks are back", func() bool { return reflect.DeepEqual(shown(t, address), all) })
		carry(t, core.TransferID(fmt.Sprint("b", i)), 2+i, ps, ds, at)
		fresh, _ := m.engine(t, RoleDecode, kv.One, nil)
		carry(t, core.TransferID(fmt.Sprint("c", i)), 4+i, ps, fresh, at)
	}
}

// TestHostLosesARank: its engine's loads fail with the rank's name, the port forgets
// it, and another in its place is found, also one of another size.
func TestHostLosesARank(t *testing.T) {
	leaktest.Check(t)
	m, two := model{2, 4, false}, kv.Ranks{TP: 2, PP: 1}
	address := openHost(t, 0).BootstrapAddress()
	cfg := rankConfig(RolePrefill, two, kv.Rank{}, "")
	cfg.BootstrapJoin = address
	soon(&cfg)
	text, err := json.Marshal(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("KVCONN_TEST_CONFIG", string(text))
	_, first := process(t, "rank", "", "")
	second := m.open(t, rankConfig(RolePrefill, two, kv.Rank{TP: 1}, address))
	ds, _ := m.engine(t, RoleDecode, kv.One, soon)
	at := from(address, "engine-prefill")
	announce(t, second.side, "a")
	ds[0].loadFrom("a", at, 1)
	until(t, "both ranks have it", func() bool { return ds[0].Stats().LoadsWaiting == 2 })
	first.kill()
	ds[0].want("a", core.PeerLost, `engine "engine-prefill" dp0 tp0 pp0`)
	second.offer("a", 1)
	second.want("a", core.PeerCancelled)
	until(t, "the port has forgotten it", func() bool { return shown(t, address)["0 engine-prefill"] == 1 })

	again := m.open(t, cfg)
	ps := []*rank{again, second}
	carry(t, "b", 2, ps, ds, at)
	for _, p := range ps {
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
	}
	until(t, "none is there", func() bool { return len(query(t, address)) == 0 })
	ps, _ = m.engine(t, RolePrefill, kv.One, joins(address, func(c *Config) { c.EngineID = "next" }))
	carry(t, "c", 3, ps, ds, from(address, "next"))
	carry(t, "d", 4, ps, ds, from(address, ""))
}

func TestHostConfig(t *testing.T) {
	for text, says := range map[string]string{
		`{"tp_size":2}`:                   `"tp_size"`,
		`{"dp_size":2}`:                   `"dp_size"`,
		`{"tp_rank":1}`:                   "rank tp 1",
		`{"nats_url":"nats://h:1"}`:       "cluster",
		`{"bootstrap_join":"http://h:1"}`: "remove the key",
	} {
		if _, err := ParseConfig([]byte(`{"role":"bootstrap",` + text[1:])); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %q", text, err, says)
		}
	}
	for _, text := range []string{`{"role":"bootstrap"}`, `{"role":"bootstrap","engine_id":"e","bootstrap_port":1}`} {
		if _, err := ParseConfig([]byte(text)); err != nil {
			t.Errorf("%s: %v", text, err)
		}
	}
}
