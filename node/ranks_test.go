package node

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"reflect"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/bootstrap"
	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// TestRanks: engines of unequal ranks, each item looked at. Both are on one host and may choose, so all bytes go by local.
func TestRanks(t *testing.T) {
	for name, c := range map[string]struct {
		p, d kv.Ranks
		m    model
	}{
		"tp 1 to 2":             {kv.One, kv.Ranks{TP: 2, PP: 1}, model{3, 4, false}},
		"tp 2 to 1":             {kv.Ranks{TP: 2, PP: 1}, kv.One, model{3, 4, false}},
		"tp 2 to 1, HND":        {kv.Ranks{TP: 2, PP: 1}, kv.One, model{3, 4, true}},
		"tp 2 to 2":             {kv.Ranks{TP: 2, PP: 1}, kv.Ranks{TP: 2, PP: 1}, model{3, 4, false}},
		"tp 2 to 3":             {kv.Ranks{TP: 2, PP: 1}, kv.Ranks{TP: 3, PP: 1}, model{2, 6, false}},
		"tp 3 to 2":             {kv.Ranks{TP: 3, PP: 1}, kv.Ranks{TP: 2, PP: 1}, model{2, 6, true}},
		"tp 4 to 1":             {kv.Ranks{TP: 4, PP: 1}, kv.One, model{2, 8, false}},
		"tp 4 to 1, two heads":  {kv.Ranks{TP: 4, PP: 1}, kv.One, model{2, 2, false}},
		"tp 2 to 4, two heads":  {kv.Ranks{TP: 2, PP: 1}, kv.Ranks{TP: 4, PP: 1}, model{2, 2, false}},
		"latent, tp 2 to 1":     {kv.Ranks{TP: 2, PP: 1}, kv.One, model{3, 0, false}},
		"latent, tp 1 to 2":     {kv.One, kv.Ranks{TP: 2, PP: 1}, model{3, 0, false}},
		"latent, tp 2 to 3":     {kv.Ranks{TP: 2, PP: 1}, kv.Ranks{TP: 3, PP: 1}, model{2, 0, false}},
		"pp 2 to 1":             {kv.Ranks{TP: 1, PP: 2}, kv.One, model{5, 2, false}},
		"pp 1 to 2":             {kv.One, kv.Ranks{TP: 1, PP: 2}, model{5, 2, false}},
		"pp 2 to 2":             {kv.Ranks{TP: 1, PP: 2}, kv.Ranks{TP: 1, PP: 2}, model{4, 2, false}},
		"tp 2 pp 2 to tp 4":     {kv.Ranks{TP: 2, PP: 2}, kv.Ranks{TP: 4, PP: 1}, model{4, 8, false}},
		"tp 2 to tp 1 pp 3":     {kv.Ranks{TP: 2, PP: 1}, kv.Ranks{TP: 1, PP: 3}, model{3, 2, false}},
		"one to one, as before": {kv.One, kv.One, model{2, 2, false}},
	} {
		t.Run(name, func(t *testing.T) {
			leaktest.Check(t)
			ps, address := c.m.engine(t, RolePrefill, c.p, nil)
			ds, _ := c.m.engine(t, RoleDecode, c.d, nil)
			at := from(address, ps[0].cfg.EngineID)
			for i, id := range []core.TransferID{"a", "b", "c"} {
				for _, r := range carry(t, id, i, ps, ds, at) {
					if moved := r.Stats.Bytes > 0; moved != (r.Transport == viaLocal) || r.Side == core.SideLoad && !moved {
						t.Errorf("%s %q has %d bytes by %q", r.Side, id, r.Stats.Bytes, r.Transport)
					}
				}
			}
			// All P ranks hear of a transfer that is aborted everywhere.
			for _, d := range ds {
				d.claimFrom("x", at)
				if _, err := d.Cancel([]core.TransferID{"x"}, "the client has gone"); err != nil {
					t.Fatal(err)
				}
			}
			for _, p := range ps {
				p.offer("x", 1)
				p.want("x", core.PeerCancelled, "the client has gone")
			}
			// They also hear of a transfer of which nothing is needed.
			for _, d := range ds {
				d.loadFrom("y", at)
				d.want("y", core.OK)
			}
			for _, p := range ps {
				p.offer("y", 1)
				p.want("y", core.OK)
			}
			idle(t, ps, ds)
		})
	}
}

func query(t testing.TB, address string) (all map[int]bootstrap.Engine) {
	t.Helper()
	resp, err := http.Get(address + "/query")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	defer http.DefaultClient.CloseIdleConnections()
	b, err := io.ReadAll(resp.Body)
	if err == nil {
		err = json.Unmarshal(b, &all)
	}
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// shown is which ranks /query has, as "tp/pp" of each dp rank's engine.
func shown(t testing.TB, address string) map[string]int {
	out := map[string]int{}
	for dp, e := range query(t, address) {
		for _, pps := range e.WorkerAddr {
			for _, at := range pps {
				if at != address {
					t.Fatalf("a rank is said to be at %q, want %q", at, address)
				}
				out[fmt.Sprintf("%d %s", dp, e.EngineID)]++
			}
		}
	}
	return out
}

// TestDPRanks: dp ranks are engines of their own behind one port, found by their ids.
// Their numbers need not follow each other.
func TestDPRanks(t *testing.T) {
	leaktest.Check(t)
	m, n := model{2, 4, false}, kv.Ranks{TP: 2, PP: 1}
	address := ""
	engines := map[int][]*rank{}
	for _, dp := range []int{6, 2} {
		engines[dp], _ = m.engine(t, RolePrefill, n, func(c *Config) {
			c.DPSize, c.DPRank, c.EngineID = 8, dp, fmt.Sprint("e-dp", dp)
			if address != "" {
				c.BootstrapJoin = address
			}
		})
		if address == "" {
			address = engines[dp][0].BootstrapAddress()
		}
	}
	ds, _ := m.engine(t, RoleDecode, kv.One, nil)
	if got, want := shown(t, address), map[string]int{"2 e-dp2": 2, "6 e-dp6": 2}; !reflect.DeepEqual(got, want) {
		t.Fatalf("/query has %v, want %v", got, want)
	}
	carry(t, "a", 1, engines[2], ds, from(address, "e-dp2"))
	carry(t, "b", 2, engines[6], ds, from(address, "e-dp6"))
	carry(t, "c", 3, engines[2], ds, from(address, "e-dp2"))
	ds[0].loadFrom("d", from(address, "e-dp3"), 1)
	ds[0].want("d", core.Unreachable, `"e-dp3"`, "dp 2", "dp 6")
	ds[0].loadFrom("e", from(address, ""), 1)
	ds[0].want("e", core.Unreachable, "several engines")
	idle(t, engines[2], engines[6], ds)

	// An engine that goes is not shown any more.
	for _, p := range engines[2] {
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if got, want := shown(t, address), map[string]int{"6 e-dp6": 2}; !reflect.DeepEqual(got, want) {
		t.Fatalf("/query has %v, want %v", got, want)
	}
}

// TestRanksThatDoNotBelong: a rank that contradicts the first rank is not registered there.
func TestRanksThatDoNotBelong(t *testing.T) {
	leaktest.Check(t)
	m, two := model{2, 4, false}, kv.Ranks{TP: 2, PP: 1}
	first := m.open(t, rankConfig(RolePrefill, two, kv.Rank{}, ""))
	address := first.BootstrapAddress()
	alone := open(t, testConfig(RolePrefill))
	for what, c := range map[string]struct {
		change func(c *Config)
		says   []string
	}{
		"an engine of one rank":        {func(c *Config) { c.BootstrapJoin = alone.BootstrapAddress() }, []string{"one rank only"}},
		"another engine":               {func(c *Config) { c.EngineID = "other" }, []string{`"other"`, `"engine-prefill"`, "dp rank 0"}},
		"the engine's other dp rank":   {func(c *Config) { c.DPSize, c.DPRank = 2, 1 }, []string{"dp1", "dp_size is 1"}},
		"another size":                 {func(c *Config) { c.TPSize = 4 }, []string{"tp 4 pp 1", "tp 2 pp 1"}},
		"the first one's place":        {func(c *Config) { c.TPRank = 0 }, []string{"tp0 pp0", "has the place of this agent"}},
		"another model":                {func(c *Config) { c.Model = "llama" }, []string{`"llama"`, `"qwen"`}},
		"an address that nobody has":   {func(c *Config) { c.BootstrapJoin = fmt.Sprint("http://127.0.0.1:", freePort(t)) }, []string{"cannot be reached", "refused"}},
		"a port that speaks no kvconn": {func(c *Config) { c.BootstrapJoin = notOurs(t) }, []string{"cannot be reached"}},
	} {
		t.Run(what, func(t *testing.T) {
			first.cfg.Model = "qwen"
			m.refused(t, c.says, func() Config {
				cfg := rankConfig(RolePrefill, two, kv.Rank{TP: 1}, address)
				c.change(&cfg)
				return cfg
			})
		})
	}
	if got, want := shown(t, address), map[string]int{"0 engine-prefill": 1}; !reflect.DeepEqual(got, want) {
		t.Fatalf("/query has %v, want %v", got, want)
	}
}

func notOurs(t *testing.T) string {
	s := &http.Server{Handler: http.NotFoundHandler()}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(l) }()
	t.Cleanup(func() { _ = s.Close(); <-done })
	return "http://" + l.Addr().String()
}

// TestRanksComeInAnyOrder: the first rank may be up last, and any other rank late. Claims
// wait for all of them.
func TestRanksComeInAnyOrder(t *testing.T) {
	leaktest.Check(t)
	m, two := model{2, 4, false}, kv.Ranks{TP: 2, PP: 1}
	port := freePort(t)
	address := fmt.Sprint("http://127.0.0.1:", port)
	second := make(chan *rank)
	go func() { second <- m.open(t, rankConfig(RolePrefill, two, kv.Rank{TP: 1}, address)) }()
	ds, _ := m.engine(t, RoleDecode, kv.One, func(c *Config) { c.ConnectTimeout = Seconds(minBound) })
	at := from(address, "engine-prefill")
	ds[0].claimFrom("early", at) // there is nobody
	ds[0].loadFrom("too early", at, 1)
	ds[0].want("too early", core.Unreachable, address)
	cfg := rankConfig(RolePrefill, two, kv.Rank{}, "")
	cfg.BootstrapPort = port
	ps := []*rank{m.open(t, cfg), <-second}
	carry(t, "early", 2, ps, ds, at) // claimed again, which is no error

	// A rank that is late: the first one says how many there are.
	if err := ps[1].Close(); err != nil {
		t.Fatal(err)
	}
	until(t, "it is gone", func() bool { return shown(t, address)["0 engine-prefill"] == 1 })
	fresh, _ := m.engine(t, RoleDecode, kv.One, func(c *Config) { c.ConnectTimeout = Seconds(bound) })
	fresh[0].loadFrom("late", at, 7, 3)
	ps[0].paint(5, 1, 2)
	ps[0].offer("late", 1, 2)
	ps[1] = m.open(t, rankConfig(RolePrefill, two, kv.Rank{TP: 1}, address))
	ps[1].paint(5, 1, 2)
	ps[1].offer("late", 1, 2)
	fresh[0].want("late", core.OK)
	fresh[0].check(5, 7, 3)
	idle(t, ps, fresh)
}

func TestRanksConfig(t *testing.T) {
	for text, says := range map[string]string{
		`{"tp_size":0}`:                                           `"tp_rank", "tp_size"`,
		`{"tp_size":2,"tp_rank":2}`:                               "rank tp 2",
		`{"pp_size":2000}`:                                        "pp_size 2000",
		`{"dp_size":4,"dp_rank":4}`:                               "dp_rank",
		`{"dp_rank":-1}`:                                          "dp_rank",
		`{"dp_size":0}`:                                           "dp_size",
		`{"tp_size":2,"tp_rank":1}`:                               "bootstrap_join",
		`{"pp_size":2,"pp_rank":1}`:                               "bootstrap_join",
		`{"tp_size":2,"bootstrap_join":"host:1"}`:                 "http://host:port",
		`{"bootstrap_join":"http://h:1","role":"decode"}`:         "remove the key",
		`{"bootstrap_join":"http://h:1","nats_url":"nats://h:1"}`: "remove one of the two keys",
		`{"bootstrap_join":"http://h:1","nats_nkeys":["x"]}`:      "embedded server",
		`{"join_timeout_s":0}`:                                    "join_timeout_s",
	} {
		var keys map[string]any
		if err := json.Unmarshal([]byte(text), &keys); err != nil {
			t.Fatal(err)
		}
		keys["engine_id"] = "e"
		if keys["role"] == nil {
			keys["role"] = RolePrefill
		}
		b, _ := json.Marshal(keys)
		if _, err := ParseConfig(b); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %q", text, err, says)
		}
	}
	for _, text := range []string{`"tp_size":2,"tp_rank":1,"bootstrap_join":"http://h:1"`, `"tp_size":2,"tp_rank":1,"nats_url":"nats://h:1"`, `"dp_size":4,"dp_rank":3`} {
		if _, err := ParseConfig([]byte(`{"engine_id":"e","role":"prefill",` + text + `}`)); err != nil {
			t.Errorf("%s: %v", text, err)
		}
	}
	if _, err := ParseConfig([]byte(`{"engine_id":"e","role":"decode","tp_size":2,"tp_rank":1}`)); err != nil {
		t.Error(err)
	}
}
