package node

import (
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
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

// rank is an agent of an engine of several ranks.
type rank struct {
	*side
	m             model
	layers, heads [2]int
}

func (m model) regions(c *Config) (regions []kv.Region, cache []byte) {
	layers, heads := m.holds(c)
	n := heads[1] - heads[0]
	block := modelTokens * n * modelItem
	cache = make([]byte, (layers[1]-layers[0])*modelBlocks*block)
	for l := layers[0]; l < layers[1]; l++ {
		r := kv.Region{Name: fmt.Sprint("L", l), Base: uint64(uintptr(unsafe.Pointer(&cache[(l-layers[0])*modelBlocks*block]))),
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
	a, err := Open(cfg, Options{firstWait: bound, bus: busFor(cfg)})
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
func (r *rank) item(layer int, block kv.BlockID, token, head int) []byte {
	n := r.heads[1] - r.heads[0]
	at := ((layer-r.layers[0])*modelBlocks+int(block))*modelTokens*n*modelItem + (token*n+head-r.heads[0])*modelItem
	if r.m.HND {
		at += ((head-r.heads[0])*modelTokens + token - token*n - (head - r.heads[0])) * modelItem
	}
	return r.cache[at : at+modelItem]
}

// each calls f for all items of blocks, with what a request must have there.
func (r *rank) each(salt int, blocks []kv.BlockID, f func(item []byte, want [modelItem]byte, what string)) {
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

func (r *rank) paint(salt int, blocks ...kv.BlockID) {
	r.each(salt, blocks, func(item []byte, want [modelItem]byte, _ string) { copy(item, want[:]) })
}

func (r *rank) check(salt int, blocks ...kv.BlockID) {
	r.t.Helper()
	r.each(salt, blocks, func(item []byte, want [modelItem]byte, what string) {
		if string(item) != string(want[:]) {
			r.t.Fatalf("rank tp %d pp %d, %s: %x, want %x", r.cfg.TPRank, r.cfg.PPRank, what, item, want)
		}
	})
}

// rankConfig is the configuration of one rank of an engine. All ranks of a prefill engine
// but the first join address.
func rankConfig(role string, n kv.Ranks, r kv.Rank, address string) Config {
	c := testConfig(role)
	c.TPSize, c.PPSize, c.TPRank, c.PPRank = n.TP, n.PP, r.TP, r.PP
	c.JoinTimeout = Seconds(bound)
	if role == RolePrefill && r != (kv.Rank{}) {
		c.BootstrapJoin = address
	}
	return c
}

// engine opens all ranks of one engine.
func (m model) engine(t testing.TB, role string, n kv.Ranks, change func(c *Config)) (ranks []*rank, address string) {
	t.Helper()
	for pp := range n.PP {
		for tp := range n.TP {
			c := rankConfig(role, n, kv.Rank{TP: tp, PP: pp}, address)
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

// refused opens an agent whose registration must end with an error that says these parts. It asks until JoinTimeout, which
// is longer again where a slow machine gave no answer within it, more than a minute in the end.
func (m model) refused(t *testing.T, says []string, config func() Config) {
	t.Helper()
	for wait := 700 * time.Millisecond; ; wait *= 10 {
		cfg := config()
		cfg.JoinTimeout = Seconds(wait)
		a, err := Open(cfg, Options{})
		if err == nil {
			regions, _ := m.regions(&cfg)
			err = a.RegisterKVCaches(regions)
			_ = a.Close()
		}
		if err == nil {
			t.Fatal("it is registered")
		}
		lacks := slices.DeleteFunc(slices.Clone(says), func(part string) bool { return strings.Contains(err.Error(), part) })
		if len(lacks) == 0 {
			return
		}
		if wait > time.Minute {
			t.Fatalf("%v does not say %q", err, lacks)
		}
	}
}

// from is how D's engine is told of P's.
func from(address, engine string) core.Target {
	return core.Target{Bootstrap: address, EngineID: engine, DPRank: -1}
}

func (r *rank) loadFrom(id core.TransferID, at core.Target, blocks ...kv.BlockID) {
	r.t.Helper()
	if _, err := r.StartLoad([]core.LoadRequest{{ID: id, From: at, Selection: kv.Selection{Blocks: [][]kv.BlockID{blocks}}}}); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rank) claimFrom(id core.TransferID, at core.Target) {
	r.t.Helper()
	if _, err := r.Claim([]core.ClaimRequest{{ID: id, From: at}}); err != nil {
		r.t.Fatal(err)
	}
}

// carry has one request go from all ranks to all, and looks at every item. It returns decode's reports, then prefill's.
func carry(t testing.TB, id core.TransferID, salt int, ps, ds []*rank, at core.Target) (reports []core.Report) {
	t.Helper()
	src, dst := []kv.BlockID{4, 9, 2}, []kv.BlockID{7, 3, 11}
	for _, p := range ps {
		if p.paint(salt, src...); salt == 1 { // a part is there before any load
			p.partial(id, 1, nil, src[:2]...)
		}
	}
	for i, d := range ds {
		if salt%2 == 0 { // else the load comes first
			d.claimFrom(id, at)
		}
		d.loadFrom(id, at, dst...)
		if i == 0 { // the offers are between the loads
			for _, p := range ps {
				if salt == 1 {
					p.partial(id, 2, nil)
				}
				p.offer(id, src...)
			}
		}
	}
	for _, d := range ds {
		reports = append(reports, d.want(id, core.OK))
		d.check(salt, dst...)
	}
	for _, p := range ps {
		reports = append(reports, p.want(id, core.OK))
	}
	return reports
}

func idle(t testing.TB, all ...[]*rank) {
	t.Helper()
	for _, list := range all {
		for _, r := range list {
			until(t, "nothing is left", func() bool {
				left := r.sizes()
				left.Ended = 0
				r.caches.Load().transports.mu.Lock()
				defer r.caches.Load().transports.mu.Unlock()
				return left == core.Sizes{} && len(r.caches.Load().transports.active) == 0
			})
		}
	}
}
