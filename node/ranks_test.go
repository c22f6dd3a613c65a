package node

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/kvconn/kvconn/bootstrap"
	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/leaktest"
)

// model is what engines of several ranks hold: of each layer the heads, or a latent
// that every rank has.
type model struct {
	Layers, Heads int // 0 heads: a latent
	HND           bool
}

const (
	modelTokens = 4 // of a block
	modelItem   = 16
	modelBlocks = 16
)

// holds is the range of layers and of heads that a rank has.
func (m model) holds(c *Config) (layers, heads [2]int) {
	layers = [2]int{c.PPRank * m.Layers / c.PPSize, (c.PPRank + 1) * m.Layers / c.PPSize}
	if m.Heads == 0 {
		return layers, [2]int{0, 1}
	}
	heads = [2]int{c.TPRank * m.Heads / c.TPSize, (c.TPRank + 1) * m.Heads / c.TPSize}
	heads[1] = max(heads[1], heads[0]+1)
	return layers, heads
}

// rank is an agent of an engine of several.
type rank struct {
	*side
	m             model
	layers, heads [2]int
}

func (m model) regions(c *Config) (regions []core.Region, cache []byte) {
	layers, heads := m.holds(c)
	n := heads[1] - heads[0]
	block := modelTokens * n * modelItem
	cache = make([]byte, (layers[1]-layers[0])*modelBlocks*block)
	for l := layers[0]; l < layers[1]; l++ {
		r := core.Region{Name: fmt.Sprint("L", l), Base: uint64(uintptr(unsafe.Pointer(&cache[(l-layers[0])*modelBlocks*block]))),
			BlockStride: uint64(block), BlockBytes: uint64(block), NumBlocks: modelBlocks,
			Tokens: modelTokens, Heads: uint32(n), FirstHead: uint32(heads[0]), TotalHeads: uint32(max(1, m.Heads)),
			TokenStride: uint64(n * modelItem), HeadStride: modelItem}
		if m.HND {
			r.TokenStride, r.HeadStride = modelItem, modelTokens*modelItem
		}
		regions = append(regions, r)
	}
	return regions, cache
}

func (m model) open(t testing.TB, cfg Config) *rank {
	t.Helper()
	a, err := Open(cfg, Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = a.Close() })
	regions, cache := m.regions(&cfg)
	r := &rank{side: &side{Agent: a, t: t, cache: cache, seen: map[core.TransferID]core.Report{}}, m: m}
	r.layers, r.heads = m.holds(&cfg)
	if err := a.RegisterKVCaches(regions); err != nil {
		t.Fatal(err)
	}
	return r
}

// item is the bytes of a token and head of a block in a layer.
func (r *rank) item(layer int, block core.BlockID, token, head int) []byte {
	n := r.heads[1] - r.heads[0]
	at := ((layer-r.layers[0])*modelBlocks+int(block))*modelTokens*n*modelItem + (token*n+head-r.heads[0])*modelItem
	if r.m.HND {
		at += ((head-r.heads[0])*modelTokens + token - token*n - (head - r.heads[0])) * modelItem
	}
	return r.cache[at : at+modelItem]
}

// each calls f for all items of blocks, with what a request must have there.
func (r *rank) each(salt int, blocks []core.BlockID, f func(item []byte, want [modelItem]byte, what string)) {
	for l := r.layers[0]; l < r.layers[1]; l++ {
		for i, b := range blocks {
			for t := range modelTokens {
				for h := r.heads[0]; h < r.heads[1]; h++ {
					var want [modelItem]byte
					for k, v := range []int{salt, l, i*modelTokens + t, h} {
						binary.LittleEndian.PutUint32(want[4*k:], uint32(v+1))
					}
					f(r.item(l, b, t, h), want, fmt.Sprintf("layer %d, token %d, head %d", l, i*modelTokens+t, h))
				}
			}
		}
	}
}

func (r *rank) paint(salt int, blocks ...core.BlockID) {
	r.each(salt, blocks, func(item []byte, want [modelItem]byte, _ string) { copy(item, want[:]) })
}

func (r *rank) check(salt int, blocks ...core.BlockID) {
	r.t.Helper()
	r.each(salt, blocks, func(item []byte, want [modelItem]byte, what string) {
		if string(item) != string(want[:]) {
			r.t.Fatalf("rank tp %d pp %d, %s: %x, want %x", r.cfg.TPRank, r.cfg.PPRank, what, item, want)
		}
	})
}

// rankConfig is a rank's of an engine; those of a prefill engine join address, but
// for the first.
func rankConfig(role string, n core.Ranks, r core.Rank, address string) Config {
	c := testConfig(role)
	c.TPSize, c.PPSize, c.TPRank, c.PPRank = n.TP, n.PP, r.TP, r.PP
	c.JoinTimeout = Seconds(bound)
	if role == RolePrefill && r != (core.Rank{}) {
		c.BootstrapJoin = address
	}
	return c
}

// engine opens all ranks of one.
func (m model) engine(t testing.TB, role string, n core.Ranks, change func(c *Config)) (ranks []*rank, address string) {
	t.Helper()
	for pp := range n.PP {
		for tp := range n.TP {
			c := rankConfig(role, n, core.Rank{TP: tp, PP: pp}, address)
			if change != nil {
				change(&c)
			}
			r := m.open(t, c)
			if address == "" {
				address = r.BootstrapAddress()
			}
			ranks = append(ranks, r)
		}
	}
	return ranks, address
}

// from is how D's engine is told of P's.
func from(address, engine string) core.Target {
	return core.Target{Bootstrap: address, EngineID: engine, DPRank: -1}
}

func (r *rank) loadFrom(id core.TransferID, at core.Target, blocks ...core.BlockID) {
	r.t.Helper()
	if _, err := r.StartLoad([]core.LoadRequest{{ID: id, From: at, Blocks: [][]core.BlockID{blocks}}}); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rank) claimFrom(id core.TransferID, at core.Target) {
	r.t.Helper()
	if _, err := r.Claim([]core.ClaimRequest{{ID: id, From: at}}); err != nil {
		r.t.Fatal(err)
	}
}

// carry has one request go from all ranks to all, and looks at every item.
func carry(t testing.TB, id core.TransferID, salt int, ps, ds []*rank, at core.Target) {
	t.Helper()
	src, dst := []core.BlockID{4, 9, 2}, []core.BlockID{7, 3, 11}
	for i, d := range ds {
		if salt%2 == 0 { // else the load comes first
			d.claimFrom(id, at)
		}
		d.loadFrom(id, at, dst...)
		if i == 0 { // the offers are between the loads
			for _, p := range ps {
				p.paint(salt, src...)
				p.offer(id, src...)
			}
		}
	}
	for _, d := range ds {
		d.want(id, core.OK)
		d.check(salt, dst...)
	}
	for _, p := range ps {
		p.want(id, core.OK)
	}
}

func idle(t testing.TB, all ...[]*rank) {
	t.Helper()
	for _, list := range all {
		for _, r := range list {
			until(t, "nothing is left", func() bool {
				left := r.sizes()
				left.Ended = 0
				r.transport.mu.Lock()
				defer r.transport.mu.Unlock()
				return left == core.Sizes{} && len(r.transport.halves) == 0
			})
		}
	}
}

// TestRanks: engines of unequal ranks, each item looked at.
func TestRanks(t *testing.T) {
	for name, c := range map[string]struct {
		p, d core.Ranks
		m    model
	}{
		"tp 1 to 2":             {core.One, core.Ranks{TP: 2, PP: 1}, model{3, 4, false}},
		"tp 2 to 1":             {core.Ranks{TP: 2, PP: 1}, core.One, model{3, 4, false}},
		"tp 2 to 1, HND":        {core.Ranks{TP: 2, PP: 1}, core.One, model{3, 4, true}},
		"tp 2 to 2":             {core.Ranks{TP: 2, PP: 1}, core.Ranks{TP: 2, PP: 1}, model{3, 4, false}},
		"tp 2 to 3":             {core.Ranks{TP: 2, PP: 1}, core.Ranks{TP: 3, PP: 1}, model{2, 6, false}},
		"tp 3 to 2":             {core.Ranks{TP: 3, PP: 1}, core.Ranks{TP: 2, PP: 1}, model{2, 6, true}},
		"tp 4 to 1":             {core.Ranks{TP: 4, PP: 1}, core.One, model{2, 8, false}},
		"tp 4 to 1, two heads":  {core.Ranks{TP: 4, PP: 1}, core.One, model{2, 2, false}},
		"tp 2 to 4, two heads":  {core.Ranks{TP: 2, PP: 1}, core.Ranks{TP: 4, PP: 1}, model{2, 2, false}},
		"latent, tp 2 to 1":     {core.Ranks{TP: 2, PP: 1}, core.One, model{3, 0, false}},
		"latent, tp 1 to 2":     {core.One, core.Ranks{TP: 2, PP: 1}, model{3, 0, false}},
		"latent, tp 2 to 3":     {core.Ranks{TP: 2, PP: 1}, core.Ranks{TP: 3, PP: 1}, model{2, 0, false}},
		"pp 2 to 1":             {core.Ranks{TP: 1, PP: 2}, core.One, model{5, 2, false}},
		"pp 1 to 2":             {core.One, core.Ranks{TP: 1, PP: 2}, model{5, 2, false}},
		"pp 2 to 2":             {core.Ranks{TP: 1, PP: 2}, core.Ranks{TP: 1, PP: 2}, model{4, 2, false}},
		"tp 2 pp 2 to tp 4":     {core.Ranks{TP: 2, PP: 2}, core.Ranks{TP: 4, PP: 1}, model{4, 8, false}},
		"tp 2 to tp 1 pp 3":     {core.Ranks{TP: 2, PP: 1}, core.Ranks{TP: 1, PP: 3}, model{3, 2, false}},
		"one to one, as before": {core.One, core.One, model{2, 2, false}},
	} {
		t.Run(name, func(t *testing.T) {
			leaktest.Check(t)
			ps, address := c.m.engine(t, RolePrefill, c.p, nil)
			ds, _ := c.m.engine(t, RoleDecode, c.d, nil)
			at := from(address, ps[0].cfg.EngineID)
			for i, id := range []core.TransferID{"a", "b", "c"} {
				carry(t, id, i, ps, ds, at)
			}
			// Of one that is aborted everywhere, all P ranks hear.
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
			// Of one of which nothing is needed too.
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

// TestDPRanks: dp ranks are engines of their own behind one port, found by their
// ids; their numbers need not follow each other.
func TestDPRanks(t *testing.T) {
	leaktest.Check(t)
	m, n := model{2, 4, false}, core.Ranks{TP: 2, PP: 1}
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
	ds, _ := m.engine(t, RoleDecode, core.One, nil)
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

// TestRanksThatDoNotBelong: what contradicts the first rank is not registered there.
func TestRanksThatDoNotBelong(t *testing.T) {
	leaktest.Check(t)
	m, two := model{2, 4, false}, core.Ranks{TP: 2, PP: 1}
	first := m.open(t, rankConfig(RolePrefill, two, core.Rank{}, ""))
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
		"the first one's place":        {func(c *Config) { c.TPRank = 0 }, []string{"tp0 pp0", "itself"}},
		"another model":                {func(c *Config) { c.Model = "llama" }, []string{`"llama"`, `"qwen"`}},
		"an address that nobody has":   {func(c *Config) { c.BootstrapJoin = fmt.Sprint("http://127.0.0.1:", freePort(t)) }, []string{"cannot be reached", "refused"}},
		"a port that speaks no kvconn": {func(c *Config) { c.BootstrapJoin = notOurs(t) }, []string{"cannot be reached"}},
	} {
		t.Run(what, func(t *testing.T) {
			cfg := rankConfig(RolePrefill, two, core.Rank{TP: 1}, address)
			cfg.JoinTimeout = Seconds(700 * time.Millisecond)
			first.cfg.Model = "qwen"
			c.change(&cfg)
			a, err := Open(cfg, Options{})
			if err == nil {
				defer a.Close()
				regions, _ := m.regions(&cfg)
				err = a.RegisterKVCaches(regions)
			}
			if err == nil {
				t.Fatal("it is registered")
			}
			for _, part := range c.says {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("%v does not say %q", err, part)
				}
			}
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

// TestRanksComeInAnyOrder: the first rank may be up last, and any other late; claims
// wait for all of them.
func TestRanksComeInAnyOrder(t *testing.T) {
	leaktest.Check(t)
	m, two := model{2, 4, false}, core.Ranks{TP: 2, PP: 1}
	port := freePort(t)
	address := fmt.Sprint("http://127.0.0.1:", port)
	second := make(chan *rank)
	go func() { second <- m.open(t, rankConfig(RolePrefill, two, core.Rank{TP: 1}, address)) }()
	ds, _ := m.engine(t, RoleDecode, core.One, func(c *Config) { c.ConnectTimeout = Seconds(minBound) })
	at := from(address, "engine-prefill")
	ds[0].claimFrom("early", at) // there is nobody
	ds[0].loadFrom("too early", at, 1)
	ds[0].want("too early", core.Unreachable, address)
	cfg := rankConfig(RolePrefill, two, core.Rank{}, "")
	cfg.BootstrapPort = port
	ps := []*rank{m.open(t, cfg), <-second}
	carry(t, "early", 2, ps, ds, at) // claimed again, which is no error

	// A rank that is late: the first one says how many there are.
	if err := ps[1].Close(); err != nil {
		t.Fatal(err)
	}
	until(t, "it is gone", func() bool { return shown(t, address)["0 engine-prefill"] == 1 })
	fresh, _ := m.engine(t, RoleDecode, core.One, func(c *Config) { c.ConnectTimeout = Seconds(bound) })
	fresh[0].loadFrom("late", at, 7, 3)
	ps[0].paint(5, 1, 2)
	ps[0].offer("late", 1, 2)
	ps[1] = m.open(t, rankConfig(RolePrefill, two, core.Rank{TP: 1}, address))
	ps[1].paint(5, 1, 2)
	ps[1].offer("late", 1, 2)
	fresh[0].want("late", core.OK)
	fresh[0].check(5, 7, 3)
	idle(t, ps, fresh)
}

// TestFirstRankRestarted: it comes back at its port, and the others need nothing.
func TestFirstRankRestarted(t *testing.T) {
	leaktest.Check(t)
	m, two := model{2, 4, false}, core.Ranks{TP: 2, PP: 2}
	ps, address := m.engine(t, RolePrefill, two, nil)
	ds, _ := m.engine(t, RoleDecode, core.Ranks{TP: 2, PP: 1}, nil)
	at := from(address, ps[0].cfg.EngineID)
	carry(t, "a", 1, ps, ds, at)
	for _, d := range ds {
		d.loadFrom("lost", at, 1)
	}
	until(t, "all ranks have the loads", func() bool {
		n := 0
		for _, p := range ps {
			n += p.Stats().OffersEarly
		}
		return n == len(ps)
	})
	if err := ps[0].Close(); err != nil {
		t.Fatal(err)
	}
	// Who loads from it, loses the request; the others may go on.
	ds[0].want("lost", core.PeerLost, "prefill")
	if _, err := ds[1].Cancel([]core.TransferID{"lost"}, ""); err != nil {
		t.Fatal(err)
	}
	ds[1].want("lost", core.Cancelled)
	cfg := rankConfig(RolePrefill, two, core.Rank{}, "")
	cfg.BootstrapPort = portOf(t, address)
	ps[0] = m.open(t, cfg)
	until(t, "all ranks are back", func() bool { return shown(t, address)["0 engine-prefill"] == 4 })
	carry(t, "b", 2, ps, ds, at)
	carry(t, "c", 3, ps, ds, at)
}

// TestEngineRestartedWithOtherRanks: at its port there is then another number of
// ranks, and the next request finds them.
func TestEngineRestartedWithOtherRanks(t *testing.T) {
	leaktest.Check(t)
	m := model{2, 4, false}
	ds, _ := m.engine(t, RoleDecode, core.Ranks{TP: 2, PP: 1}, func(c *Config) { c.ConnectTimeout = Seconds(bound) })
	port := freePort(t)
	address := fmt.Sprint("http://127.0.0.1:", port)
	at := from(address, "engine-prefill")
	for i, n := range []core.Ranks{{TP: 2, PP: 1}, {TP: 1, PP: 1}, {TP: 4, PP: 1}, {TP: 1, PP: 2}, {TP: 2, PP: 1}} {
		ps, _ := m.engine(t, RolePrefill, n, func(c *Config) { c.BootstrapPort = port; c.JoinTimeout = Seconds(bound) })
		for _, p := range ps {
			if p.BootstrapAddress() != address {
				t.Fatalf("it is at %s, want %s", p.BootstrapAddress(), address)
			}
		}
		carry(t, core.TransferID(fmt.Sprint("a", i)), 2*i, ps, ds, at)
		carry(t, core.TransferID(fmt.Sprint("b", i)), 2*i+1, ps, ds, at)
		for _, d := range ds { // it knows of one when they go
			d.claimFrom(core.TransferID(fmt.Sprint("c", i)), at)
		}
		for _, p := range ps {
			if err := p.Close(); err != nil {
				t.Fatal(err)
			}
		}
		for _, d := range ds {
			d.loadFrom(core.TransferID(fmt.Sprint("c", i)), at, 1)
			if r := d.report(core.TransferID(fmt.Sprint("c", i))); r.Code != core.PeerLost && r.Code != core.Unreachable {
				t.Fatalf("a request of an engine that has gone ended with %v (%s)", r.Code, r.Reason)
			}
		}
	}
}

// TestRankKilled: all loads of its engine fail, and say which rank it was; what the
// others keep is freed, and GET /query forgets it.
func TestRankKilled(t *testing.T) {
	leaktest.Check(t)
	m, two := model{2, 4, false}, core.Ranks{TP: 2, PP: 1}
	first := m.open(t, rankConfig(RolePrefill, two, core.Rank{}, ""))
	address := first.BootstrapAddress()
	text, err := json.Marshal(rankConfig(RolePrefill, two, core.Rank{TP: 1}, address))
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("KVCONN_TEST_CONFIG", string(text))
	_, second := process(t, "rank", "", "")
	ds, _ := m.engine(t, RoleDecode, core.One, nil)
	at := from(address, "engine-prefill")
	ids := []core.TransferID{"a", "b", "c"}
	for i, id := range ids {
		announce(t, first.side, id)
		ds[0].loadFrom(id, at, core.BlockID(i))
	}
	until(t, "both ranks have them", func() bool { return ds[0].Stats().LoadsWaiting == 2*len(ids) })
	second.kill()
	for _, id := range ids {
		ds[0].want(id, core.PeerLost, `engine "engine-prefill" dp0 tp1 pp0`, "load of")
	}
	for _, id := range ids {
		first.offer(id, 1)
		first.want(id, core.PeerCancelled)
	}
	idle(t, []*rank{first}, ds)
	until(t, "it is forgotten", func() bool { return shown(t, address)["0 engine-prefill"] == 1 })
}

// runRank is a rank in a process of its own.
func runRank() (string, error) {
	cfg, err := ParseConfig([]byte(os.Getenv("KVCONN_TEST_CONFIG")))
	if err != nil {
		return "", err
	}
	a, err := Open(cfg, Options{})
	if err != nil {
		return "", err
	}
	kept, cache := model{2, 4, false}.regions(&cfg)
	rankCache = cache
	if err := a.RegisterKVCaches(kept); err != nil {
		return "", err
	}
	_, err = a.Announce([]core.TransferID{"a", "b", "c"})
	return a.BootstrapAddress(), err
}

var rankCache []byte // stays mapped

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
		`{"bootstrap_join":"http://h:1","role":"decode"}`:         "take it away",
		`{"bootstrap_join":"http://h:1","nats_url":"nats://h:1"}`: "take one away",
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
