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
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/wire"
)

// headed is an agent with n regions of some heads, each head a region of its own if apart. Its
// tokens lie so many bytes apart.
func headed(n, heads int, apart bool, stride uint64) *wire.Agent {
	a := &wire.Agent{Version: wire.Version, TPSize: 2}
	for i := range n {
		s := wire.Shape{Name: fmt.Sprintf("layer.%d", i), BlockBytes: uint64(64 * heads), BlockStride: uint64(64*heads) + stride, NumBlocks: 9,
			Tokens: 16, Heads: uint32(heads), TotalHeads: uint32(heads), TokenStride: uint64(4 * heads), HeadStride: 4}
		if !apart {
			a.Shapes = append(a.Shapes, s)
			continue
		}
		s.BlockBytes, s.Heads, s.TokenStride = 64, 1, 4
		for h := range heads {
			s.FirstHead = uint32(h)
			a.Shapes = append(a.Shapes, s)
		}
	}
	return a
}

// connectPeer has a table take a peer with such caches for loads from self.
func connectPeer(table *peerTable, self, other *wire.Agent, id string, d dismisser) error {
	m, err := table.fit(self, other, true)
	if err != nil {
		return err
	}
	return table.add(&peer{id: core.AgentID(id), out: m}, d)
}

// TestMatchesAreShared: decode engines with the same caches, but for the number of blocks, take
// the memory of one, and give it back when the last of them is forgotten.
func TestMatchesAreShared(t *testing.T) {
	table, d := newPeerTable(), &admissions{tickets: map[core.AgentID][]byte{}}
	self := headed(80, 8, false, 0)
	one := 0
	for i := range 1000 {
		other := headed(80, 8, false, 0)
		other.Shapes[3].NumBlocks = uint32(i + 1)
		if err := connectPeer(table, self, other, fmt.Sprint(i), d); err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			one = table.matches.bytes
		}
	}
	if one < 80*100 || table.matches.bytes != one || len(table.matches.by) != 1 {
		t.Errorf("1,000 peers take %d bytes, one %d", table.matches.bytes, one)
	}
	for id := range table.byID { // a hello of the same agent, with other caches than before
		if err := connectPeer(table, self, headed(80, 8, true, 0), string(id), d); err != nil {
			t.Fatal(err)
		}
	}
	if len(table.matches.by) != 1 || table.matches.bytes <= one {
		t.Errorf("with a region of each head they take %d bytes, before %d", table.matches.bytes, one)
	}
	table.mu.Lock()
	for _, p := range table.byID {
		table.drop(p)
	}
	table.mu.Unlock()
	if table.matches.bytes != 0 || len(table.matches.by) != 0 {
		t.Errorf("without peers there are %d bytes of %d matches", table.matches.bytes, len(table.matches.by))
	}
}

// TestMatchesHaveABudget: decode engines that each describe other caches, with a region of each
// head, take so much and no more. An engine whose caches another one has too comes in all the
// same, and is not forgotten for them.
func TestMatchesHaveABudget(t *testing.T) {
	table, d := newPeerTable(), &admissions{tickets: map[core.AgentID][]byte{}}
	self := headed(160, 128, false, 0)
	for i := range 3 {
		if err := connectPeer(table, self, headed(160, 128, false, 0), fmt.Sprint("honest", i), d); err != nil {
			t.Fatal(err)
		}
	}
	used := func(ago time.Duration) { // all peers; on a slow machine this test takes longer than they are kept for
		table.mu.Lock()
		defer table.mu.Unlock()
		for _, p := range table.byID {
			p.used = time.Now().Add(-ago)
			p.works.Store(true)
		}
	}
	shared, n := table.matches.bytes, 0
	for ; ; n++ {
		used(-time.Hour)
		if err := connectPeer(table, self, headed(160, 128, true, uint64(4*n)), fmt.Sprint(n), d); errors.Is(err, errManyMatches) {
			break
		} else if err != nil || n > 40 {
			t.Fatal(n, err)
		}
	}
	used(-time.Hour)
	each := (table.matches.bytes - shared) / n
	if table.matches.bytes > maxMatched || table.matches.bytes+each <= maxMatched || each < 1<<20 || table.byID[core.AgentID(fmt.Sprint(n))] != nil {
		t.Fatalf("%d peers take %d bytes, %d each; the limit is %d", n, table.matches.bytes, each, maxMatched)
	}
	if err := connectPeer(table, self, headed(160, 128, false, 0), "honest3", d); err != nil {
		t.Errorf("an engine whose caches another one has too: %v", err)
	}
	if err := connectPeer(table, self, headed(160, 128, true, uint64(4*n)), "0", d); !errors.Is(err, errManyMatches) || table.byID["0"] != nil {
		t.Errorf("one of them that says hello with other caches: %v; it is there: %t", err, table.byID["0"] != nil)
	}
	if err := connectPeer(table, self, headed(160, 128, true, 0), "0", d); err != nil {
		t.Errorf("and with its own again: %v", err)
	}
	used(keptFor)
	if err := connectPeer(table, self, headed(160, 128, true, uint64(4*n)), "late", d); err != nil {
		t.Errorf("an engine that comes when the others are idle: %v", err)
	}
	gone := 0
	for i := range n {
		if table.byID[core.AgentID(fmt.Sprint(i))] == nil {
			gone++
		}
	}
	if gone != 1 || table.matches.bytes > maxMatched {
		t.Errorf("%d of them were forgotten for it, of %d bytes", gone, table.matches.bytes)
	}
	for i := range 4 {
		if table.byID[core.AgentID(fmt.Sprint("honest", i))] == nil {
			t.Errorf("honest engine %d was forgotten", i)
		}
	}
}

// TestHelloWithOtherCaches: a peer that has only said hello makes room for others, and not for itself. What is counted stays right, and
// nobody is dismissed who was just told that it is admitted.
func TestHelloWithOtherCaches(t *testing.T) {
	table, d := newPeerTable(), &dismissals{}
	self := headed(200, 128, false, 0)
	if err := connectPeer(table, self, headed(200, 128, true, 4000), "0", d); err != nil { // it takes the most, so it would be the first to go
		t.Fatal(err)
	}
	n := 1
	for ; table.matches.bytes+(6<<20) < maxMatched; n++ { // and no more fits
		if err := connectPeer(table, self, headed(160, 128, true, uint64(4*n)), fmt.Sprint(n), d); err != nil {
			t.Fatal(err)
		}
	}
	for i := range n { // for each another one goes
		id := fmt.Sprint(i)
		d.gone = nil
		err := connectPeer(table, self, headed(200, 128, true, uint64(4*(n+i))), id, d)
		if err != nil {
			t.Fatal(err)
		}
		if slices.Contains(d.gone, core.AgentID(id)) || table.byID[core.AgentID(id)] == nil {
			t.Errorf("hello of %s with other caches: %v are dismissed, it is there: %v", id, d.gone, table.byID[core.AgentID(id)] != nil)
		}
		kept := 0
		for of, m := range table.matches.by {
			if kept += m.match.Kept(); m.peers < 1 {
				t.Errorf("caches of %d peers are kept: %v", m.peers, of.sum[:4])
			}
		}
		if kept != table.matches.bytes || kept > maxMatched {
			t.Fatalf("%d bytes are counted, %d are there", table.matches.bytes, kept)
		}
	}
	table.mu.Lock()
	for _, p := range table.byID {
		table.drop(p)
	}
	table.mu.Unlock()
	if table.matches.bytes != 0 || len(table.matches.by) != 0 {
		t.Errorf("without peers there are %d bytes of %d matches", table.matches.bytes, len(table.matches.by))
	}
}

// dismissals are the peers that a table has dismissed.
type dismissals struct{ gone []core.AgentID }

func (d *dismissals) Dismiss(peer core.AgentID) { d.gone = append(d.gone, peer) }

// TestSumOfRegions: the digest of regions tells all apart by which blocks fit in another way. A rank that was restarted with
// another number of blocks, and so with other strides, has the same regions as before.
func TestSumOfRegions(t *testing.T) {
	base := wire.Shape{Name: "k", BlockStride: 64, BlockBytes: 64, NumBlocks: 9, Tokens: 16, Heads: 1, TotalHeads: 1, TokenStride: 4, HeadStride: 4}
	for what, c := range map[string]struct {
		change       func(s *wire.Shape)
		equal, alike bool
	}{
		"nothing":                    {func(*wire.Shape) {}, true, true},
		"blocks":                     {func(s *wire.Shape) { s.NumBlocks++ }, true, true},
		"the stride":                 {func(s *wire.Shape) { s.BlockStride++ }, false, true},
		"the name":                   {func(s *wire.Shape) { s.Name = "v" }, false, false},
		"bytes":                      {func(s *wire.Shape) { s.BlockBytes++ }, false, false},
		"the group":                  {func(s *wire.Shape) { s.Group++ }, false, false},
		"tokens":                     {func(s *wire.Shape) { s.Tokens++ }, false, false},
		"heads":                      {func(s *wire.Shape) { s.Heads++ }, false, false},
		"the first head":             {func(s *wire.Shape) { s.FirstHead++ }, false, false},
		"all heads":                  {func(s *wire.Shape) { s.TotalHeads++ }, false, false},
		"tokens' stride":             {func(s *wire.Shape) { s.TokenStride++ }, false, false},
		"heads' stride":              {func(s *wire.Shape) { s.HeadStride++ }, false, false},
		"the kind of ids":            {func(s *wire.Shape) { s.IndexKind++ }, false, false},
		"a number into the next one": {func(s *wire.Shape) { s.Heads, s.FirstHead = 0, 1 }, false, false},
	} {
		other := base
		c.change(&other)
		x, y := []wire.Shape{base}, []wire.Shape{other}
		if equal, alike := sumOf(x, false) == sumOf(y, false), sumOf(x, true) == sumOf(y, true); equal != c.equal || alike != c.alike {
			t.Errorf("another %s: equal %v, alike %v", what, equal, alike)
		}
	}
	ring := base
	ring.IndexKind, ring.Tokens = uint32(kv.Ring(6)), 0
	other := ring
	other.NumBlocks++
	if sumOf([]wire.Shape{ring}, false) == sumOf([]wire.Shape{other}, false) {
		t.Error("rings with other numbers of entries are equal")
	}
}

// paired is an agent whose regions have two heads each, from an odd or an even head on.
func paired(layers, heads, from int) *wire.Agent {
	a := &wire.Agent{Version: wire.Version, TPSize: 2}
	for i := range layers {
		for h := from; h+2 <= heads; h += 2 {
			a.Shapes = append(a.Shapes, wire.Shape{Name: fmt.Sprint(i), BlockBytes: 128, BlockStride: 128, NumBlocks: 9,
				Tokens: 16, Heads: 2, FirstHead: uint32(h), TotalHeads: uint32(heads), TokenStride: 8, HeadStride: 4})
		}
	}
	return a
}

// TestGreedyMatch: a peer whose caches would take more than one peer may is refused, and nothing
// of it is kept.
func TestGreedyMatch(t *testing.T) {
	table, d := newPeerTable(), &admissions{tickets: map[core.AgentID][]byte{}}
	err := connectPeer(table, paired(1000, 128, 0), paired(1000, 128, 1), "x", d)
	if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("at most %d are kept for one peer", maxMatch)) || len(table.matches.by) != 0 || table.byID["x"] != nil {
		t.Errorf("%v, with %d of them kept", err, len(table.matches.by))
	}
}

// busyP is the way to a prefill agent that looks at another engine with many regions when the
// first hello comes.
type busyP struct {
	answer func(h *wire.Agent) *wire.Reply
	other  chan struct{}
	said   []wire.Again
}

func (b *busyP) Lookup(context.Context, core.Target) (*wire.Agent, core.Via, error) {
	return &wire.Agent{Version: wire.Version, ID: "p"}, "", nil
}

func (b *busyP) Request(_ context.Context, _ core.Via, _ core.AgentID, req *wire.Request) (*wire.Reply, error) {
	rep := b.answer(req.Hello)
	if b.said = append(b.said, rep.Again); len(b.said) == 1 {
		<-b.other // it is done with that
	}
	return rep, nil
}

func (b *busyP) Dismiss(core.AgentID) {}

var errMet = errors.New("it was met")

func (b *busyP) common(context.Context, *wire.Agent, string) ([]commonTransport, map[string]error, error) {
	return nil, nil, errMet
}
func (b *busyP) connect(core.AgentID, string, []commonTransport, map[string]error, *wire.Reply) error {
	return nil
}
func (b *busyP) settle(context.Context, core.AgentID) error { return nil }

// TestManyRegionsWait: engines with many regions are looked at one after the other; who comes
// meanwhile says hello again. Those with few, and with regions that are known, do not wait.
func TestManyRegionsWait(t *testing.T) {
	table, d := newPeerTable(), &admissions{tickets: map[core.AgentID][]byte{}}
	self, big := headed(160, 8, false, 0), headed(160, 8, true, 0)
	cfg := testConfig(RolePrefill)
	all := newTransports("P", &cfg, zap.NewNop(), nil, nil, nil)
	all.add(d)
	s := &server{id: "P", cfg: &cfg, log: zap.NewNop(), peers: table, age: func() time.Duration { return time.Second }, caches: func() (*wire.Agent, *transports) { return self, all }}
	n := 0
	hello := func(h *wire.Agent) *wire.Reply {
		n++
		own := *h
		own.Endpoints = []wire.Endpoint{{Transport: viaTCP}}
		return s.hello("", core.AgentID(fmt.Sprint("d", n)), "", &own)
	}
	table.long <- struct{}{}
	if rep := hello(self); rep.Code != 0 {
		t.Errorf("an engine with few regions meanwhile: %+v", rep)
	}
	p := &busyP{answer: hello, other: table.long}
	to := testConfig(RoleDecode)
	f := &finder{cfg: &to, log: zap.NewNop(), clock: systemClock{}, bus: p, peers: newPeerTable(), self: big, transports: p}
	f.peers.matches.by[cachesKey{big, false, sumOf(nil, false)}] = &matched{match: new(kv.Match)} // of that prefill agent
	if _, _, err := f.find(t.Context(), core.Target{}, nil); !errors.Is(err, errMet) || len(p.said) != 2 || p.said[0] != wire.AgainLater || p.said[1] != 0 {
		t.Errorf("%v, after the answers %v", err, p.said)
	}
	table.long <- struct{}{}
	if rep := hello(big); rep.Code != 0 {
		t.Errorf("an engine whose regions are known: %+v", rep)
	}
}
